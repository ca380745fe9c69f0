"""How integer programs are solved: which solver, and when it stops.

Solvers run in one thread and are limited by nodes first, so that the same program gives the same
answer everywhere; the limit in seconds is a safety net. `mip` is imported when it is needed: that
takes as long as many plans.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ds_hydra.errors import HydraConfigError

if TYPE_CHECKING:
    import mip


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverLimits:
    """When and how long an integer program is solved.

    `gap_tolerance`: a heuristic result that is proven this close to the optimum is kept as it is.
    """

    solver: Literal["cbc", "highs"] = "cbc"
    gap_tolerance: float = 0.01
    max_nodes: int = 2000
    deadline_s: float = 10.0


def make_model(limits: SolverLimits) -> mip.Model:
    """An empty minimisation with the limits set; raises HydraConfigError for a missing HiGHS."""
    import mip

    try:
        model = mip.Model(
            sense=mip.MINIMIZE, solver_name=mip.HIGHS if limits.solver == "highs" else mip.CBC
        )
    except FileNotFoundError as error:
        raise HydraConfigError(
            "the solver 'highs' is not installed; pip install 'ds_hydra[highs]' or choose the solver 'cbc'"
        ) from error
    model.verbose = 0
    model.threads = 1
    model.seed = 1
    model.max_mip_gap = 1e-6
    return model

"""The systems of a comparison: what they are called, and how each is run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from typing import Literal, NamedTuple

from ds_hydra.errors import HydraConfigError
from ds_hydra.lab.simulator.baselines import (
    balanced,
    fixed_length,
    heterogeneous_static,
    hotspa,
    two_stage,
)
from ds_hydra.lab.simulator.cases import Workload, draw_batches
from ds_hydra.lab.simulator.mixed_groups import dynamic_cp, fcp, flexsp
from ds_hydra.lab.simulator.rival_pipelines import chunked, wlb
from ds_hydra.lab.simulator.scenario import Noise, Scenario, SystemResult, best_of
from ds_hydra.lab.simulator.ulysses import balanced_ulysses, deepspeed_ulysses, odc, packed_zero3

DS_HYDRA, GRADIENTS_32_BIT, PLAIN, PAPER = "ds_hydra", "32_bit", "plain", "paper"
OUR_SYSTEMS = {
    DS_HYDRA: "ds_hydra",
    GRADIENTS_32_BIT: "ds_hydra, 32-bit gradients",
    PLAIN: "ds_hydra, <TP,PP> alone",
    PAPER: "the same, memory of the paper",
}
"""Systems whose plans a comparison keeps, with what users see."""
FULL_STATIC = "full_static"
"""The best single strategy of ds_hydra's own space."""
STATIC = ("static", FULL_STATIC)
"""Systems that choose among ds_hydra's candidates."""


def _on_zero3(
    run: Callable[..., SystemResult | None], scenario: Scenario, *, name: str, **options: bool
) -> SystemResult | None:
    """`run` of a system on ZeRO-3, on several nodes with hpZ of ZeRO++ where that is faster."""
    scenarios, cluster = [scenario], scenario.cluster
    if cluster is not None and cluster.num_devices > cluster.hardware.devices_per_node:
        scenarios.append(replace(scenario, hpz=True))
    found = [run(own, name=name, **options) for own in scenarios]
    return best_of([own for own in found if own is not None]) if any(found) else None


class System(NamedTuple):
    """`label`: what users see. `run` is given a scenario, where it does not tune itself the
    strategies it may choose among, and the name of the result, which is None where nothing fits.
    """

    label: str
    run: Callable[..., SystemResult | None]


SYSTEMS = {
    "given": System("Megatron-LM, given strategy", fixed_length),
    "megatron": System("Megatron-LM, tuned", fixed_length),
    "megatron_lengths": System(
        "Megatron-LM, length tuned too", partial(fixed_length, tunes_micro_batches=True)
    ),
    "zero3": System("ZeRO-3 / FSDP, packed", partial(_on_zero3, packed_zero3)),
    "deepspeed": System(
        "DeepSpeed ZeRO-3 + Ulysses", partial(_on_zero3, deepspeed_ulysses, is_checkpointed=False)
    ),
    "deepspeed_ac": System(
        "DeepSpeed ZeRO-3 + Ulysses + AC",
        partial(_on_zero3, deepspeed_ulysses, is_checkpointed=True),
    ),
    "deepspeed_balanced": System(
        "DeepSpeed + Ulysses, by time", partial(_on_zero3, balanced_ulysses)
    ),
    "deepspeed_degrees": System(
        "DeepSpeed + Ulysses, degree too", partial(_on_zero3, balanced_ulysses, chooses_degree=True)
    ),
    "odc": System("ODC", partial(_on_zero3, odc)),
    "flexsp": System("FlexSP", partial(_on_zero3, flexsp)),
    "fcp": System("FCP", partial(_on_zero3, fcp)),
    "dynamic_cp": System("Megatron-Core, dynamic CP", dynamic_cp),
    "wlb": System("WLB-LLM, no delay", partial(wlb, delays=False)),
    "wlb_delay": System("WLB-LLM, outliers delayed", partial(wlb, delays=True)),
    "chunks": System("InfiniPipe / ChunkFlow", chunked),
    "hotspa": System("HotSPa", hotspa),
    "balanced": System("balanced DP (Karmarkar-Karp)", balanced),
    "two_stage": System("homogeneous, two-stage", two_stage),
    "static": System("heterogeneous static", heterogeneous_static),
    FULL_STATIC: System("heterogeneous static, full space", heterogeneous_static),
}
"""All that ds_hydra is compared with, in the order they are shown."""

LABELS = {**OUR_SYSTEMS, **{name: system.label for name, system in SYSTEMS.items()}}
"""Systems in the order they are shown, with what users see."""


TOKENS_PER_POINT = 20_000_000
"""Tokens of all mini-batches of one workload then: large ones get fewer, two at least."""
PROPOSAL_TOKENS_PER_POINT = 6_400_000
"""Tokens of all mini-batches that decide about candidates: 32 of 200K, one at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a comparison is simulated.

    `systems` other than ds_hydra; `num_proposal_batches` mini-batches, drawn apart from those of
    the comparison, decide about ds_hydra's candidates. `overlap` of pull and push with propagation;
    `seen`, `noise`: see `Scenario`. `num_proposal_rounds`: see `CandidateSettings`.
    `max_communicators`: process groups that there may be, as in the engine's configuration. `space`
    of ds_hydra, where the workload has no strategies: that of the engine's default ("full"), or
    <TP,PP> ("plain").
    """

    iterations: int = 100
    systems: tuple[str, ...] = tuple(name for name in LABELS if name != DS_HYDRA)
    overlap: bool = True
    seen: float | None = None
    noise: Noise | None = None
    seed: int = 1
    num_proposal_batches: int = 32
    num_proposal_rounds: int = 1
    max_communicators: int | None = None
    space: Literal["full", "plain"] = "full"

    def sized(self, tokens_per_iteration: int) -> Settings:
        """With fewer mini-batches where they are large: means over as many tokens are about as
        good.

        >>> [Settings().sized(tokens).iterations for tokens in (200_000, 2_000_000)]
        [100, 10]
        """
        most = max(2, TOKENS_PER_POINT // tokens_per_iteration)
        most_proposal = max(1, PROPOSAL_TOKENS_PER_POINT // tokens_per_iteration)
        return replace(
            self,
            iterations=min(self.iterations, most),
            num_proposal_batches=min(self.num_proposal_batches, most_proposal),
        )

    def scenario(self, workload: Workload) -> Scenario:
        """What all systems run: mini-batches of `workload`, the memory of its profile."""
        return Scenario(
            costs=workload.costs,
            num_devices=workload.num_devices,
            context_length=workload.context_length,
            batches=draw_batches(
                workload.histogram.limit(workload.context_length),
                workload.tokens_per_iteration,
                self.iterations,
                self.seed,
            ),
            overlap=self.overlap,
            seen=self.seen,
            noise=self.noise,
        )

    def __post_init__(self) -> None:
        others = [name for name in LABELS if name != DS_HYDRA]
        unknown = [name for name in self.systems if name not in others]
        if unknown:
            nearest = get_close_matches(unknown[0], others, n=1)
            hint = f"did you mean {nearest[0]!r}? " if nearest else ""
            raise HydraConfigError(
                f"system {unknown[0]!r} is not known; {hint}choose among {', '.join(others)}"
            )

"""What is simulated: a model and the lengths of its data on so many devices."""

from __future__ import annotations

from dataclasses import dataclass

from ds_hydra.errors import HydraConfigError
from ds_hydra.sampler.plan import GlobalBatch
from ds_hydra.strategy.cost_models.costs import World
from ds_hydra.strategy.profiles.profile import Profile
from ds_hydra.strategy.proposal.histogram import LengthHistogram
from ds_hydra.strategy.proposal.program import check_context
from ds_hydra.strategy.schemes.scheme import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload(World):
    """What is simulated: a model on so many devices, and the lengths of its data."""

    name: str
    histogram: LengthHistogram
    tokens_per_iteration: int
    given: Strategy | None = None
    """A homogeneous strategy that Megatron-LM is simulated with besides its best."""
    strategies: tuple[Strategy, ...] = ()
    """Candidates of ds_hydra, proposed from the histogram where empty."""
    plain_strategies: tuple[Strategy, ...] = ()
    """Those that a paper names, of <TP,PP>, for the rows of <TP,PP> alone."""
    own_profile: Profile | None = None
    """What ds_hydra has in place of `profile`, if not the same with the engine's states."""


def check_workload(workload: Workload, *, is_plain: bool = True) -> None:
    """Raise HydraConfigError for a context that nothing fits, or a strategy that has no place in
    the cluster.
    """
    if is_plain:
        check_context(workload)
    if workload.tokens_per_iteration < workload.context_length:
        raise HydraConfigError(
            f"{workload.tokens_per_iteration} tokens per iteration are fewer than one sequence of the context, "
            f"{workload.context_length}; raise --tokens to {workload.context_length} or more"
        )
    given = (workload.given,) if workload.given else ()
    for strategy in (*given, *workload.strategies, *workload.plain_strategies):
        if strategy.num_devices > workload.num_devices:
            raise HydraConfigError(
                f"strategy {strategy} needs {strategy.num_devices} devices, there are {workload.num_devices}"
            )
    if workload.given is not None and workload.given.is_heterogeneous:
        raise HydraConfigError(
            f"baseline {workload.given} has several schemes; Megatron-LM runs one"
        )


def draw_batches(
    histogram: LengthHistogram, tokens_per_iteration: int, count: int, seed: int
) -> tuple[GlobalBatch, ...]:
    """`count` mini-batches drawn from `histogram`, the same for the same arguments."""
    return tuple(
        GlobalBatch(
            iteration=iteration,
            sample_indices=tuple(range(lengths.size)),
            lengths=tuple(lengths.tolist()),
            num_label_tokens=int((lengths - 1).sum()),
        )
        for iteration, lengths in enumerate(
            histogram.draw_batches(tokens_per_iteration, count, seed)
        )
    )

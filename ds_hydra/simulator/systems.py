"""The systems of a comparison: what they are called, what each may use, and how it is run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from typing import Literal

from ds_hydra.errors import HydraConfigError
from ds_hydra.simulator.baselines import (
    balanced,
    fixed_length,
    heterogeneous_static,
    hotspa,
    two_stage,
)
from ds_hydra.simulator.chunks import chunked
from ds_hydra.simulator.mixed_groups import dynamic_cp, flexsp
from ds_hydra.simulator.scenario import Scenario, SystemResult
from ds_hydra.simulator.ulysses import balanced_ulysses, deepspeed_ulysses, odc
from ds_hydra.simulator.wlb import wlb
from ds_hydra.strategy.schemes.scheme import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """What systems other than ds_hydra may use.

    `scenario`: with <TP,PP> and the memory of the profile as it is published. `full`, `candidates`:
    ds_hydra's own schemes, memory and strategies. `strategies`: its candidates of <TP,PP>, with
    those of the whole program of Eq. (4). `given`: a strategy for Megatron-LM.
    """

    scenario: Scenario
    full: Scenario
    strategies: Sequence[Strategy]
    candidates: Sequence[Strategy]
    given: Strategy | None


Run = Callable[[Contest, str], SystemResult | None]

DS_HYDRA, WHOLE, PLAIN, PAPER = "ds_hydra", "32_bit", "plain", "paper"
PLANNED = {
    DS_HYDRA: "ds_hydra",
    WHOLE: "ds_hydra, 32-bit gradients",
    PLAIN: "ds_hydra, <TP,PP> alone",
    PAPER: "the same, memory of the paper",
}
"""Systems whose plans a comparison keeps, with what users see."""
FULL_STATIC = "full_static"
"""The best single strategy of ds_hydra's own space."""


def _given(contest: Contest, name: str) -> SystemResult | None:
    given = contest.given
    return fixed_length(contest.scenario, [given], name=name) if given else None


def _megatron(contest: Contest, name: str, *, tunes_micro_batches: bool) -> SystemResult | None:
    if not contest.scenario.statics():
        return None
    return fixed_length(contest.scenario, tunes_micro_batches=tunes_micro_batches, name=name)


def _with_statics(
    contest: Contest, name: str, *, run: Callable[..., SystemResult]
) -> SystemResult | None:
    return run(contest.scenario, name=name) if contest.scenario.statics() else None


def _two_stage(contest: Contest, name: str) -> SystemResult | None:
    statics = contest.scenario.statics()
    return two_stage(contest.scenario, statics, name=name) if statics else None


def _static(contest: Contest, name: str) -> SystemResult | None:
    return heterogeneous_static(contest.scenario, contest.strategies, name=name)


def _full_static(contest: Contest, name: str) -> SystemResult | None:
    return heterogeneous_static(contest.full, contest.candidates, name=name)


def _on_scenario(
    contest: Contest, name: str, *, run: Callable[..., SystemResult | None]
) -> SystemResult | None:
    return run(contest.scenario, name=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """`label`: what users see."""

    label: str
    run: Run


SYSTEMS = {
    "given": System(label="Megatron-LM, given strategy", run=_given),
    "megatron": System(
        label="Megatron-LM, tuned", run=partial(_megatron, tunes_micro_batches=False)
    ),
    "megatron_lengths": System(
        label="Megatron-LM, length tuned too", run=partial(_megatron, tunes_micro_batches=True)
    ),
    "deepspeed": System(
        label="DeepSpeed ZeRO-3 + Ulysses",
        run=partial(_on_scenario, run=partial(deepspeed_ulysses, is_checkpointed=False)),
    ),
    "deepspeed_ac": System(
        label="DeepSpeed ZeRO-3 + Ulysses + AC",
        run=partial(_on_scenario, run=partial(deepspeed_ulysses, is_checkpointed=True)),
    ),
    "deepspeed_balanced": System(
        label="DeepSpeed + Ulysses, by time", run=partial(_on_scenario, run=balanced_ulysses)
    ),
    "odc": System(label="ODC", run=partial(_on_scenario, run=odc)),
    "flexsp": System(label="FlexSP", run=partial(_on_scenario, run=flexsp)),
    "dynamic_cp": System(
        label="Megatron-Core, dynamic CP", run=partial(_on_scenario, run=dynamic_cp)
    ),
    "wlb": System(
        label="WLB-LLM, no delay", run=partial(_on_scenario, run=partial(wlb, delays=False))
    ),
    "wlb_delay": System(
        label="WLB-LLM, outliers delayed", run=partial(_on_scenario, run=partial(wlb, delays=True))
    ),
    "chunks": System(label="InfiniPipe / ChunkFlow", run=partial(_on_scenario, run=chunked)),
    "hotspa": System(label="HotSPa", run=partial(_with_statics, run=hotspa)),
    "balanced": System(
        label="balanced DP (Karmarkar-Karp)", run=partial(_with_statics, run=balanced)
    ),
    "two_stage": System(label="homogeneous, two-stage", run=_two_stage),
    "static": System(label="heterogeneous static", run=_static),
    FULL_STATIC: System(label="heterogeneous static, full space", run=_full_static),
}
"""All that ds_hydra is compared with, in the order they are shown."""

LABELS = {**PLANNED, **{name: system.label for name, system in SYSTEMS.items()}}
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
    `seen`: see `Scenario`. `num_proposal_rounds`: see `PruningSettings`.
    `max_communicators`: process groups that the candidates may need together, four for each device
    if None. `space` of ds_hydra, where the workload has no strategies: <TP,PP>, SP, streamed and
    checkpointed layers ("full"), or <TP,PP> ("plain").
    """

    iterations: int = 100
    systems: tuple[str, ...] = tuple(name for name in LABELS if name != DS_HYDRA)
    overlap: bool = True
    seen: float | None = None
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

    def __post_init__(self) -> None:
        others = [name for name in LABELS if name != DS_HYDRA]
        unknown = [name for name in self.systems if name not in others]
        if unknown:
            nearest = get_close_matches(unknown[0], others, n=1)
            hint = f"did you mean {nearest[0]!r}? " if nearest else ""
            raise HydraConfigError(
                f"system {unknown[0]!r} is not known; {hint}choose among {', '.join(others)}"
            )

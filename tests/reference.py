"""Small builders that several tests of the planner share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hypothesis import strategies as st

from ds_hydra.sampler.plan import GlobalBatch, IterationPlan
from ds_hydra.sampler.planner.iteration import plan_iteration
from ds_hydra.sampler.planner.planner_settings import PlannerSettings
from ds_hydra.strategy.profiles.learned import NO_CORRECTIONS
from ds_hydra.strategy.profiles.profile import Profile
from ds_hydra.strategy.schemes.scheme import Scheme, Strategy, parse_strategies

STRATEGIES_32B_64 = parse_strategies(
    [
        "4x<16,1>",
        "1x<16,1> + 2x<8,3>",
        "1x<16,1> + 6x<8,1>",
        "1x<16,1> + 12x<4,1>",
        "1x<8,3> + 10x<4,1>",
        "1x<8,1> + 14x<4,1>",
        "8x<4,2>",
    ]
)
"""Candidates of the paper's case study: LLaMA 32B on 64 A800, context 32K."""


def make_profile(
    schemes: dict[str, tuple[float, float, float]],
    *,
    max_len: int = 100,
    num_layers: int = 1,
    input_bytes: float = 0,
) -> Profile:
    """A profile of small numbers: T of each scheme, e.g. {"<2,1>": (a, b, c)}, and one MaxLen for
    all.
    """
    texts = {text: Strategy.parse(text).schemes[0] for text in schemes}
    return Profile.from_json(
        {
            "schema": "ds_hydra.profile/1",
            "hardware": {
                "name": "test",
                "memory_bytes": max_len,
                "reserved_bytes": 0,
                "safety_margin_bytes": 0,
            },
            "model": {"name": "test", "num_layers": num_layers, "hidden_size": 1, "vocab_size": 0},
            "memory": {
                "activation_bytes_per_token_per_layer_per_hidden": {
                    str(scheme.tp): scheme.tp for scheme in texts.values()
                },
                "state_bytes_per_layer_per_hidden2": 0,
                "sharded_fraction": 1,
                "input_bytes_per_token_per_layer_per_hidden": input_bytes,
            },
            "schemes": [
                {**s.to_json(), "quadratic_ms": a, "linear_ms": b, "constant_ms": c}
                for s, (a, b, c) in zip(texts.values(), schemes.values())
            ],
        }
    )


@st.composite
def wide_schemes(draw, max_tp: int = 16, max_pp: int = 8) -> Scheme:
    """Schemes of which most have options besides <TP,PP>."""
    pp = draw(st.integers(1, max_pp))
    sizes = st.lists(st.integers(1, 9), min_size=pp, max_size=pp).map(tuple)
    return Scheme(
        draw(st.integers(1, max_tp)),
        pp,
        stages=draw(st.just(()) | sizes),
        ckpt=draw(st.sampled_from([0, 0, 1, 12])),
        sp=draw(st.sampled_from([1, 1, 2, 4])),
        cp=draw(st.sampled_from([1, 1, 2, 3])),
        context_first=draw(st.booleans()),
    )


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    """All ways to divide `items` into non-empty groups."""
    if not items:
        yield []
        return
    for smaller in partitions(items[1:]):
        yield [[items[0]], *smaller]
        for i, group in enumerate(smaller):
            yield [*smaller[:i], [items[0], *group], *smaller[i + 1 :]]


def make_batch(lengths: list[int], iteration: int = 0) -> GlobalBatch:
    """A global batch of `lengths`; sequence i is dataset row 10 + i."""
    return GlobalBatch(
        iteration=iteration,
        sample_indices=tuple(range(10, 10 + len(lengths))),
        lengths=tuple(lengths),
        num_label_tokens=max(0, sum(lengths) - len(lengths)),
    )


def make_plan(
    lengths: list[int],
    strategies: Sequence[str | Strategy],
    profile: Profile,
    num_devices: int,
    *,
    iteration: int = 0,
    **known: Any,
) -> IterationPlan:
    """The plan of `make_batch`; `known` are fields of `PlannerSettings`, or corrections."""
    corrections = known.pop("corrections", NO_CORRECTIONS)
    return plan_iteration(
        make_batch(lengths, iteration),
        strategies=[s if isinstance(s, Strategy) else Strategy.parse(s) for s in strategies],
        profile=profile,
        num_devices=num_devices,
        settings=PlannerSettings(**known),
        corrections=corrections,
    )

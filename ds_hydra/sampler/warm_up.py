"""Compile the planner's loops into their cache: `python -m ds_hydra.sampler.warm_up`, once per installation."""

from __future__ import annotations

from ds_hydra.sampler.plan import GlobalBatch
from ds_hydra.sampler.planner import plan_iteration
from ds_hydra.strategy.profile import LatencyModel, MemoryModel, Profile
from ds_hydra.strategy.scheme import Scheme, Strategy


def warm_up() -> None:
    """Plan one small mini-batch, which reaches every compiled function of the default settings."""
    schemes = (Scheme(1, 1), Scheme(1, 2), Scheme(2, 1))
    profile = Profile(
        name="warm-up",
        latency={s: LatencyModel(quadratic_ms=1e-4, linear_ms=0.1 / s.tp, constant_ms=5.0) for s in schemes},
        memory=MemoryModel(
            num_layers=2,
            hidden_size=16,
            vocab_size=32,
            activation_bytes={1: 10.0, 2: 10.0},
            state_bytes=1.0,
            sharded_fraction=0.5,
            memory_bytes=500_000,
            reserved_bytes=0,
            safety_margin_bytes=0,
        ),
        saturation_tokens={},
        document={},
    )
    lengths = tuple(7 * i % 191 + 2 for i in range(40))
    batch = GlobalBatch(
        iteration=0, sample_indices=tuple(range(40)), lengths=lengths, num_label_tokens=sum(lengths) - 40
    )
    strategies = [
        Strategy.parse("4x<1,1>"),
        Strategy.parse("1x<1,2> + 1x<2,1>"),
        Strategy.parse("1x<2,1> + 2x<1,1>"),
    ]
    plan_iteration(batch, strategies=strategies, profile=profile, num_devices=4)


if __name__ == "__main__":
    warm_up()

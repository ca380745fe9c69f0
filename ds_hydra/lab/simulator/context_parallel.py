"""Pipelines of <TP,PP> whose micro-batches several ranks share by context parallelism (CP), with
keys and values passed around a ring.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ds_hydra.lab.simulator.scenario import Scenario
from ds_hydra.sampler.schedule import FloatArray, IntArray
from ds_hydra.strategy.cost_models.analytic import key_values_ms
from ds_hydra.strategy.profiles.profile import LatencyModel
from ds_hydra.strategy.proposal.program import usable_schemes
from ds_hydra.strategy.schemes.scheme import Scheme, Strategy


@dataclass(frozen=True, kw_only=True)
class ContextParallel:
    """Pipelines of `scheme`, <TP,PP>, whose stages are `cp` times as wide.

    A document is cut so that all CP ranks have the same attention. T of a sequence is b l / CP and
    a l^2 / CP, or what the ring takes, whichever is longer: keys and values travel behind
    attention. A micro-batch holds CP times MaxLen.
    """

    scenario: Scenario
    scheme: Scheme
    cp: int

    @property
    def latency(self) -> LatencyModel:
        """T of a stage without CP."""
        return self.scenario.profile.get_latency(self.scheme)

    @property
    def max_len(self) -> int:
        """Tokens of one micro-batch."""
        return self.cp * self.scenario.max_len_tokens(self.scheme)

    @cached_property
    def strategy(self) -> Strategy:
        """As many pipelines as there are devices for; CP ranks hold the same slices."""
        number = self.scenario.num_devices // self._wide.num_devices
        return Strategy((self._wide,) * number)

    @property
    def _wide(self) -> Scheme:
        return replace(self.scheme, cp=self.cp)

    def __str__(self) -> str:
        number = len(self.strategy.schemes)
        return f"{number}x{self.scheme}" + (f" CP{self.cp}" if self.cp > 1 else "")

    def sequences_ms(self, lengths: IntArray) -> FloatArray:
        """What each sequence adds to the time of its micro-batch in one stage."""
        tokens = lengths.astype(np.float64)
        attention = self.latency.quadratic_ms * tokens**2 / self.cp
        cluster = self.scenario.cluster
        ring = (
            0.0 if cluster is None else key_values_ms(cluster.shape, cluster.hardware, self._wide)
        )
        attention = np.maximum(attention, ring * tokens)
        return attention + self.latency.linear_ms * tokens / self.cp


def context_parallel(scenario: Scenario) -> Iterator[ContextParallel]:
    """Every <TP,PP> and power of two for CP that fits the devices and holds the context."""
    for scheme in usable_schemes(scenario):
        cp = 1
        while cp * scheme.num_devices <= scenario.num_devices:
            found = ContextParallel(scenario=scenario, scheme=scheme, cp=cp)
            if found.max_len >= scenario.context_length:
                yield found
            cp *= 2

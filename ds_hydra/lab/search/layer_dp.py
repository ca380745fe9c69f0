"""The cheapest strategy of every layer of one stage within a memory budget: Galvatron-BMW, Eqs. 2-4
and Alg. 3.

Strategies are numbered, and grouped into layouts: a transformation costs by layout only, so that a
state of the dynamic programming is (memory, layout) and a layer takes O(E (S + G^2)) for S
strategies in G layouts. Memory is counted in whole MB, every layer rounded up.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ds_hydra.sampler.schedule import FloatArray, IntArray
from ds_hydra.strategy.compiled import compiled


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageTables:
    """Costs of L layers under S strategies in G layouts; infinite time where a strategy cannot
    run.
    """

    time_ms: FloatArray
    """[L, S]."""
    forward_mb: FloatArray
    """[L, S]: O_f of one micro-batch."""
    backward_mb: FloatArray
    """[L, S]: O_b."""
    states_mb: FloatArray
    """[L, S]: O_ms."""
    layout: IntArray
    """[S] of 0..G-1."""
    transfer_ms: FloatArray
    """[L, G, G]: R from the layout of layer l - 1 to that of layer l."""
    in_flight: int = 1
    """Micro-batches whose activations the stage holds at once (1F1B: PP - stage, at most all of
    them).
    """

    def peak_mb(self, choice: IntArray) -> float:
        """E_all of Eq. 2 for the strategy numbers `choice` [L], with all but one micro-batch kept
        whole.
        """
        layers = np.arange(len(choice))
        forward = self.forward_mb[layers, choice]
        peak = np.max(np.cumsum(forward) + self.backward_mb[layers, choice], initial=0.0)
        waiting = (self.in_flight - 1) * forward.sum()
        return float(waiting + peak + self.states_mb[layers, choice].sum())

    def total_ms(self, choice: IntArray) -> float:
        """Sum of layers and transformations for the strategy numbers `choice` [L]."""
        total = float(self.time_ms[np.arange(len(choice)), choice].sum())
        for index in range(1, len(choice)):
            before, after = self.layout[choice[index - 1]], self.layout[choice[index]]
            total += float(self.transfer_ms[index, before, after])
        return total


def search_layers(tables: StageTables, budget_mb: float) -> IntArray | None:
    """Strategy numbers [L] of the cheapest stage that fits `budget_mb`, or None where none fits.

    Alg. 3: the forward budget E_fwd is chosen as the largest whose strategies keep the whole peak
    within the budget. The search stops at the first that does, from the top, because a larger one
    is never slower.
    """
    fastest = _fastest(tables)
    if fastest is not None and tables.peak_mb(fastest) <= budget_mb:
        return fastest
    num_steps = int(budget_mb)
    kept = tables.states_mb + tables.in_flight * tables.forward_mb
    steps = np.ceil(kept - 1e-9).astype(np.int64)
    num_layouts = int(tables.layout.max()) + 1
    feasible = np.isfinite(tables.time_ms)
    if num_steps < 1 or fastest is None:
        return None
    if np.where(feasible, steps, num_steps + 1).min(axis=1).sum() > num_steps:
        return None
    cost, choice, origin = _fill(
        tables.time_ms, steps, tables.layout, tables.transfer_ms, num_steps, num_layouts
    )
    found = _largest_valid(
        cost,
        choice,
        origin,
        steps,
        tables.forward_mb,
        tables.backward_mb,
        tables.states_mb,
        tables.in_flight,
        budget_mb,
    )
    return found if found[0] >= 0 else None


def _fastest(tables: StageTables) -> IntArray | None:
    """The cheapest strategies without regard to memory; None where some layer has none."""
    num_layers, num_strategies = tables.time_ms.shape
    come_from = np.zeros((num_layers, num_strategies), dtype=np.int64)
    total = tables.time_ms[0]
    between = tables.transfer_ms[:, tables.layout][:, :, tables.layout]
    for index in range(1, num_layers):
        through = total[:, None] + between[index]
        come_from[index] = through.argmin(axis=0)
        total = through.min(axis=0) + tables.time_ms[index]
    if not np.isfinite(total).any():
        return None
    choice = np.empty(num_layers, dtype=np.int64)
    choice[-1] = total.argmin()
    for index in range(num_layers - 1, 0, -1):
        choice[index - 1] = come_from[index, choice[index]]
    return choice


@compiled
def _fill(
    time_ms: FloatArray,
    steps: IntArray,
    layout: IntArray,
    transfer_ms: FloatArray,
    num_steps: int,
    num_layouts: int,
) -> tuple[FloatArray, npt.NDArray[np.int16], npt.NDArray[np.int16]]:
    """Eq. 4 for all budgets: C of the last layer [E + 1, G], and for each layer the strategy and
    where it came from.
    """
    num_layers, num_strategies = time_ms.shape
    choice = np.full((num_layers, num_steps + 1, num_layouts), -1, dtype=np.int16)
    origin = np.full((num_layers, num_steps + 1, num_layouts), -1, dtype=np.int16)
    entry = np.zeros((num_steps + 1, num_layouts))  # C(l - 1, E) plus R into the layout
    cost = np.full((num_steps + 1, num_layouts), np.inf)
    for layer in range(num_layers):
        if layer > 0:
            for used in range(num_steps + 1):
                for after in range(num_layouts):
                    best, source = np.inf, -1
                    for before in range(num_layouts):
                        through = cost[used, before] + transfer_ms[layer, before, after]
                        if through < best:
                            best, source = through, before
                    entry[used, after] = best
                    origin[layer, used, after] = source
        cost[:, :] = np.inf
        for strategy in range(num_strategies):
            own, group, needs = time_ms[layer, strategy], layout[strategy], steps[layer, strategy]
            if not np.isfinite(own):
                continue
            for used in range(needs, num_steps + 1):
                total = entry[used - needs, group] + own
                if total < cost[used, group]:
                    cost[used, group] = total
                    choice[layer, used, group] = strategy
    return cost, choice, origin


@compiled
def _largest_valid(
    cost: FloatArray,
    choice: npt.NDArray[np.int16],
    origin: npt.NDArray[np.int16],
    steps: IntArray,
    forward_mb: FloatArray,
    backward_mb: FloatArray,
    states_mb: FloatArray,
    in_flight: int,
    budget_mb: float,
) -> IntArray:
    """Strategies of the largest forward budget whose peak (Eq. 2) fits; -1 everywhere where none
    does.
    """
    # Budgets bound what forward keeps; the peak is in a backward pass and known only of a whole
    # choice, so the largest budget need not be valid where a smaller one is.
    num_layers = choice.shape[0]
    found = np.full(num_layers, -1, dtype=np.int64)
    for budget in range(cost.shape[0] - 1, -1, -1):
        last = np.argmin(cost[budget])
        if not np.isfinite(cost[budget, last]):
            return np.full(num_layers, -1, dtype=np.int64)
        used, group = budget, last
        for layer in range(num_layers - 1, -1, -1):
            strategy = choice[layer, used, group]
            found[layer] = strategy
            used -= steps[layer, strategy]
            group = origin[layer, used, group] if layer > 0 else group
        kept, peak, states = 0.0, 0.0, 0.0
        for layer in range(num_layers):
            kept += forward_mb[layer, found[layer]]
            peak = max(peak, kept + backward_mb[layer, found[layer]])
            states += states_mb[layer, found[layer]]
        if (in_flight - 1) * kept + peak + states <= budget_mb:
            return found
    return np.full(num_layers, -1, dtype=np.int64)

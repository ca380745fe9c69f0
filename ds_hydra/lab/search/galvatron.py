"""The whole search: batch size, PP degree, micro-batches, stage partition, strategy of every layer.

Galvatron-Base is Alg. 1 (even partition), Galvatron-BMW is Alg. 2 (partition balanced in memory
first, then moved towards balance in time). The pipeline costs what Eq. 9 says.

Which layers each pipeline stage gets is §IV-B. A partition is the number of layers of each stage,
in order; every stage has at least one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from ds_hydra.errors import InfeasiblePlanError
from ds_hydra.lab.search.layer_dp import StageTables, search_layers
from ds_hydra.lab.search.layers import (
    CostEstimator,
    LayerCost,
    LayerStrategy,
    SearchInput,
    layer_strategies,
)
from ds_hydra.sampler.schedule import FloatArray, IntArray

Partition = tuple[int, ...]


def even_partition(num_layers: int, num_stages: int) -> Partition:
    """Partition into equal stages as far as possible; the first stages take the rest."""
    share, rest = divmod(num_layers, num_stages)
    return tuple(share + (stage < rest) for stage in range(num_stages))


def balanced_partition(weight: FloatArray, extra: FloatArray) -> Partition:
    """The contiguous partition whose heaviest stage is lightest.

    `weight[P, L]` is what layer l adds to stage p, `extra[P]` what the stage has of its own. Exact,
    O(P L^2).
    """
    num_stages, num_layers = weight.shape
    below = np.concatenate([np.zeros((num_stages, 1)), np.cumsum(weight, axis=1)], axis=1)
    heaviest = np.full((num_stages + 1, num_layers + 1), np.inf)
    begin = np.zeros((num_stages + 1, num_layers + 1), dtype=np.int64)
    heaviest[0, 0] = 0.0
    for stage in range(1, num_stages + 1):
        for end in range(stage, num_layers - (num_stages - stage) + 1):
            starts = np.arange(stage - 1, end)
            own = below[stage - 1, end] - below[stage - 1, starts] + extra[stage - 1]
            worst = np.maximum(heaviest[stage - 1, starts], own)
            best = int(np.argmin(worst))
            heaviest[stage, end], begin[stage, end] = worst[best], starts[best]
    sizes, end = [], num_layers
    for stage in range(num_stages, 0, -1):
        sizes.append(end - int(begin[stage, end]))
        end = int(begin[stage, end])
    return tuple(reversed(sizes))


def lighter_partitions(partition: Partition, slowest: int) -> list[Partition]:
    """`partition` with one boundary layer of stage `slowest` moved to a neighbour
    (PP_Partition_Adjust).
    """
    moved = []
    for neighbour in (slowest - 1, slowest + 1):
        if 0 <= neighbour < len(partition) and partition[slowest] > 1:
            sizes = list(partition)
            sizes[slowest] -= 1
            sizes[neighbour] += 1
            moved.append(tuple(sizes))
    return moved


def balance_degree(loads: Sequence[float]) -> float:
    """alpha of Eq. 6: 1 - max / sum; 1 - 1 / P is perfect balance."""
    return 1.0 - max(loads) / sum(loads) if sum(loads) > 0 else 0.0


def layer_ranges(partition: Partition) -> list[tuple[int, int]]:
    """(first layer, end) of every stage."""
    ends = np.cumsum(partition).tolist()
    return [(end - size, end) for size, end in zip(partition, ends, strict=True)]


_SEARCH_SCHEMA = "ds_hydra.search/1"
_MAX_MICRO_BATCHES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSettings:
    """Settings of a search."""

    memory_mb: float
    """Budget of one device."""
    max_batch: int | None = None
    """Largest batch size in samples; 16 for each device if not given."""
    batch_step: int | None = None
    """Batch sizes are its multiples; the number of devices if not given."""
    balances_stages: bool = True
    """Alg. 2; without it Alg. 1 with an even partition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """One pipeline stage of a plan."""

    strategies: tuple[LayerStrategy, ...]
    compute_ms: float
    """One micro-batch without gradient synchronisation."""
    slowdown_ms: float
    """Added to the last micro-batch, whose gradients are synchronised beside it."""
    tail_ms: float
    """Milliseconds of the synchronisation after the last micro-batch."""
    peak_mb: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchPlan:
    """A strategy for every layer."""

    batch_size: int
    pp: int
    num_micro_batches: int
    stages: tuple[StagePlan, ...]
    time_ms: float

    @property
    def samples_per_s(self) -> float:
        """Predicted throughput."""
        return 1e3 * self.batch_size / self.time_ms

    @property
    def partition(self) -> Partition:
        """Layers of each stage."""
        return tuple(len(stage.strategies) for stage in self.stages)

    @property
    def time_balance(self) -> float:
        """alpha_t of Eq. 6."""
        return balance_degree([stage.compute_ms for stage in self.stages])

    @property
    def memory_balance(self) -> float:
        """alpha_m of Eq. 6."""
        return balance_degree([stage.peak_mb for stage in self.stages])

    def to_json(self) -> dict[str, Any]:
        """Plain values; runs of layers with one strategy as [strategy, count]."""
        return {
            "schema": _SEARCH_SCHEMA,
            "batch_size": self.batch_size,
            "pp": self.pp,
            "micro_batches": self.num_micro_batches,
            "partition": list(self.partition),
            "time_ms": self.time_ms,
            "samples_per_s": self.samples_per_s,
            "time_balance": self.time_balance,
            "memory_balance": self.memory_balance,
            "stages": [
                {
                    "layers": [[name, count] for name, count in run_lengths(stage.strategies)],
                    **{name: getattr(stage, name) for name in StagePlan.__slots__[1:]},
                }
                for stage in self.stages
            ],
        }


def run_lengths(strategies: Sequence[LayerStrategy]) -> list[tuple[str, int]]:
    """Neighbouring layers of one strategy as (strategy, count)."""
    return [(name, len(list(run))) for name, run in groupby(str(s) for s in strategies)]


def pipeline_ms(stages: Sequence[StagePlan], num_micro_batches: int) -> float:
    """Eq. 9: (m - 1) slowest stage without gradient synchronisation, plus every stage once with it.

    One difference, in what of the synchronisation outlasts the last backward pass. Gradients of
    several micro-batches are held back and reduced after the last pass, in all stages at once, so
    the longest counts. A single micro-batch has nothing to add up: its backward pass reduces, ends
    when that has (the final callback of FSDP and of DDP waits), and only then does the message to
    the stage before leave. So it is the sum, as Eq. 9 has it for all.
    """
    slowest = max(stage.compute_ms for stage in stages)
    once = sum(stage.compute_ms + stage.slowdown_ms for stage in stages)
    tails = [stage.tail_ms for stage in stages]
    tail_ms = max(tails) if num_micro_batches > 1 else sum(tails)
    return (num_micro_batches - 1) * slowest + once + tail_ms


class _Shape(NamedTuple):
    """Stages of a pipeline, and micro-batches of an iteration of `batch` samples."""

    pp: int
    batch: int
    num_micro_batches: int

    @property
    def samples(self) -> float:
        """Samples of a micro-batch."""
        return self.batch / self.num_micro_batches

    def in_flight(self, stage: int) -> int:
        """Micro-batches whose activations the stage keeps at a time: 1F1B."""
        return min(self.pp - stage, self.num_micro_batches)


class GalvatronSearch:
    """Searches one model on one cluster; keeps costs and stages it has computed."""

    def __init__(
        self,
        given: SearchInput,
        settings: SearchSettings,
        strategies: Collection[LayerStrategy] | None = None,
    ):
        self._given = given
        self._settings = settings
        self._costs = CostEstimator(given)
        every = list(layer_strategies(given.num_devices) if strategies is None else strategies)
        self._by_pp: dict[int, list[LayerStrategy]] = {}
        for strategy in every:
            self._by_pp.setdefault(strategy.pp, []).append(strategy)
        self._types = np.array(given.layer_types)
        self._costs_of: dict[tuple[int, float], _TypeCosts] = {}
        self._stages: dict[tuple[Any, ...], StagePlan | None] = {}

    def best(self, progress: Callable[[int, float], None] | None = None) -> SearchPlan:
        """The plan of highest throughput over all batch sizes until memory is exceeded (Algs. 1 and
        2). `progress` is told each batch size, and the best samples per second so far.

        Raises InfeasiblePlanError, naming the layer that binds, where not even the smallest batch
        fits.
        """
        step = self._settings.batch_step or self._given.num_devices
        largest = self._settings.max_batch or 16 * self._given.num_devices
        best: SearchPlan | None = None
        for batch in range(step, largest + 1, step):
            if self._leanest(batch)[0] > self._settings.memory_mb:
                break
            slowest_ms = 1e3 * batch / best.samples_per_s if best else np.inf
            best = self.best_of_batch(batch, slowest_ms) or best
            if best is None:
                break
            if progress is not None:
                progress(batch, best.samples_per_s)
        if best is None:
            raise InfeasiblePlanError(self._why_infeasible(step))
        return best

    def best_of_batch(self, batch: int, slowest_ms: float = np.inf) -> SearchPlan | None:
        """The fastest plan for `batch` samples in an iteration, or None where none fits and beats
        `slowest_ms`.
        """
        best: SearchPlan | None = None
        tries = [
            (self._bound_ms(shape), shape)
            for pp in self._by_pp
            if pp <= self._given.num_layers
            for shape in self._shapes(pp, batch)
        ]
        for bound_ms, shape in sorted(tries):
            if bound_ms >= slowest_ms:
                break
            for plan in self._plans(shape):
                if plan.time_ms < slowest_ms:
                    best, slowest_ms = plan, plan.time_ms
        return best

    def _search_partition(self, shape: _Shape, partition: Partition) -> SearchPlan | None:
        """Galvatron_Search of Alg. 1 for one partition."""
        stages = []
        for stage, (begin, end) in enumerate(layer_ranges(partition)):
            found = self._stage(shape, stage, begin, end)
            if found is None:
                return None
            stages.append(found)
        return SearchPlan(
            batch_size=shape.batch,
            pp=shape.pp,
            num_micro_batches=shape.num_micro_batches,
            stages=tuple(stages),
            time_ms=pipeline_ms(stages, shape.num_micro_batches),
        )

    def _plans(self, shape: _Shape) -> Iterator[SearchPlan]:
        """Feasible plans of one shape: the even partition, and Alg. 2's walk from memory to
        time balance.
        """
        even = even_partition(self._given.num_layers, shape.pp)
        first = self._search_partition(shape, even)
        if first is not None:
            yield first
        if shape.pp == 1 or not self._settings.balances_stages:
            return
        time_balanced = self._search_partition(shape, self._time_balanced(shape))
        memory_bound = self._settings.memory_mb
        if time_balanced is not None:
            yield time_balanced
            memory_bound = min(memory_bound, max(stage.peak_mb for stage in time_balanced.stages))
        queue = [self._memory_balanced(shape)]
        seen = set(queue)
        while queue:
            plan = self._search_partition(shape, queue.pop())
            if plan is None:
                continue
            yield plan
            times = [stage.compute_ms for stage in plan.stages]
            slowest = int(np.argmax(times))
            for moved in lighter_partitions(plan.partition, slowest):
                if moved in seen:
                    continue
                seen.add(moved)
                adjusted = self._search_partition(shape, moved)
                if adjusted is not None and self._is_valid(adjusted, max(times), memory_bound):
                    queue.append(moved)

    def _is_valid(self, plan: SearchPlan, slowest_ms: float, memory_bound: float) -> bool:
        """The three conditions on an adjusted partition (§IV-B2); the memory budget holds for every
        plan.
        """
        is_faster = max(stage.compute_ms for stage in plan.stages) <= slowest_ms
        return is_faster and max(stage.peak_mb for stage in plan.stages) <= memory_bound

    def _bound_ms(self, shape: _Shape) -> float:
        """Lower bound of any plan of this shape: every layer at its best, stages in perfect
        balance.
        """
        fastest = self._type_costs(shape).compute_ms.min(axis=1)
        return float(fastest[self._types].sum()) * (1 + (shape.num_micro_batches - 1) / shape.pp)

    def _stage(self, shape: _Shape, stage: int, begin: int, end: int) -> StagePlan | None:
        in_flight, types = shape.in_flight(stage), self._types[begin:end]
        is_last = stage == shape.pp - 1
        key = (shape, in_flight, types.tobytes(), stage == 0, is_last)
        if key in self._stages:
            return self._stages[key]
        costs, strategies = self._type_costs(shape), self._by_pp[shape.pp]
        tables = costs.tables(types, in_flight, shape.num_micro_batches)
        ends_mb = self._ends_mb(shape, stage)
        choice = search_layers(tables, self._settings.memory_mb - ends_mb)
        found = None
        if choice is not None:
            last = strategies[choice[-1]]
            hop_ms = self._costs.hop_ms(
                self._given.layers[types[-1]], 1 if is_last else shape.pp, shape.samples / last.dp
            )
            moving_ms = tables.total_ms(choice) - float(
                tables.time_ms[np.arange(end - begin), choice].sum()
            )
            found = StagePlan(
                strategies=tuple(strategies[index] for index in choice),
                compute_ms=float(costs.compute_ms[types, choice].sum()) + moving_ms + hop_ms,
                slowdown_ms=float(costs.slowdown_ms[types, choice].sum()),
                tail_ms=float(costs.tail_ms[types, choice].sum()),
                peak_mb=tables.peak_mb(choice) + ends_mb,
            )
        self._stages[key] = found
        return found

    def _shapes(self, pp: int, batch: int) -> list[_Shape]:
        """Shapes to try: one micro-batch without a pipeline, else powers of two that divide it."""
        most = 1 if pp == 1 else min(_MAX_MICRO_BATCHES, batch)
        powers = (1 << k for k in range(most.bit_length()))
        return [_Shape(pp, batch, m) for m in powers if batch % m == 0]

    def _type_costs(self, shape: _Shape) -> _TypeCosts:
        key = (shape.pp, shape.samples)
        if key not in self._costs_of:
            self._costs_of[key] = _TypeCosts(
                self._given, self._costs, self._by_pp[shape.pp], shape.samples
            )
        return self._costs_of[key]

    def _ends_mb(self, shape: _Shape, stage: int) -> float:
        """Context, embedding and head of one rank, divided by TP or SDP over the whole stage."""
        share = shape.pp / self._given.num_devices
        total = self._given.context_mb
        for its_stage, end in ((0, self._given.embedding), (shape.pp - 1, self._given.head)):
            total += (
                (stage == its_stage) * (end.states_mb + end.activation_mb * shape.samples) * share
            )
        return total

    def _time_balanced(self, shape: _Shape) -> Partition:
        """p_t: every layer at its fastest strategy."""
        fastest = self._type_costs(shape).compute_ms.min(axis=1)
        weight = np.tile(np.nan_to_num(fastest, posinf=1.0)[self._types], (shape.pp, 1))
        return balanced_partition(weight, np.zeros(shape.pp))

    def _memory_balanced(self, shape: _Shape) -> Partition:
        """p_m: every layer at the strategy that needs least memory (Strategy_Init)."""
        stages = range(shape.pp)
        weight = np.array([self._least_mb(shape, stage) for stage in stages])
        extra = np.array([self._ends_mb(shape, stage) for stage in stages])
        return balanced_partition(np.nan_to_num(weight, posinf=1.0), extra)

    def _least_mb(self, shape: _Shape, stage: int) -> FloatArray:
        """Least MB of every layer [L], at its leanest strategy, if it is in `stage`."""
        costs = self._type_costs(shape)
        needs = costs.states_mb + shape.in_flight(stage) * costs.forward_mb
        least: FloatArray = needs.min(axis=1)[self._types]
        return least

    def _why_infeasible(self, batch: int) -> str:
        """Describe the least memory of any plan, and the layer that binds."""
        least, pp, type_index = self._leanest(batch)
        layer = self._given.layers[type_index]
        return (
            f"no plan fits {self._settings.memory_mb:.0f} MB a device for {batch} samples on "
            f"{self._given.num_devices} devices: the smallest (PP {pp}) needs {least:.0f} MB, "
            f"{max(least - self._settings.memory_mb, 1):.0f} MB more, of which layer {layer.name!r} takes most; give "
            "more memory or devices, a smaller batch_step, or shorter sequences"
        )

    def _leanest(self, batch: int) -> tuple[float, int, int]:
        return min(self._least_memory(pp, batch) for pp in self._by_pp)

    def _least_memory(self, pp: int, batch: int) -> tuple[float, int, int]:
        """(MB of the fullest stage at its leanest, PP, layer type that takes most of it)."""
        if pp > self._given.num_layers:
            return np.inf, pp, 0
        leanest = (np.inf, pp, 0)
        for shape in self._shapes(pp, batch):
            fullest = (0.0, pp, 0)
            partition = self._memory_balanced(shape)
            for stage, (begin, end) in enumerate(layer_ranges(partition)):
                needs = self._least_mb(shape, stage)[begin:end]
                total = float(needs.sum()) + self._ends_mb(shape, stage)
                fullest = max(fullest, (total, pp, int(self._types[begin:end][np.argmax(needs)])))
            leanest = min(leanest, fullest)
        return leanest


class _TypeCosts:
    """Costs [T, S] of every layer type under every strategy of one PP degree and micro-batch."""

    def __init__(
        self,
        given: SearchInput,
        estimator: CostEstimator,
        strategies: Sequence[LayerStrategy],
        samples: float,
    ):
        def costs(name: str) -> FloatArray:
            return np.array([[getattr(cost, name) for cost in row] for row in of_layers])

        of_layers = [
            [
                # A rank would get less than a sample
                _IMPOSSIBLE if s.dp > samples else estimator.layer_cost(layer, s, samples)
                for s in strategies
            ]
            for layer in given.layers
        ]
        self.compute_ms, self.slowdown_ms = costs("compute_ms"), costs("slowdown_ms")
        self.tail_ms, self.states_mb = costs("tail_ms"), costs("states_mb")
        self.forward_mb, self.backward_mb = costs("forward_mb"), costs("backward_mb")
        layouts = sorted({strategy.layout for strategy in strategies})
        self._layout = np.array([layouts.index(strategy.layout) for strategy in strategies])
        examples = [next(s for s in strategies if s.layout == layout) for layout in layouts]
        self._transfer_ms = np.array(
            [
                [
                    [estimator.transformation_ms(layer, a, b, samples) for b in examples]
                    for a in examples
                ]
                for layer in given.layers
            ]
        )

    def tables(self, types: IntArray, in_flight: int, num_micro_batches: int) -> StageTables:
        """Tables for layers of `types` [L]; gradient synchronisation spread over the micro-batches,
        as Eq. 9 weighs it.
        """
        return StageTables(
            time_ms=(self.compute_ms + (self.slowdown_ms + self.tail_ms) / num_micro_batches)[
                types
            ],
            forward_mb=np.nan_to_num(self.forward_mb, posinf=0.0)[types],
            backward_mb=self.backward_mb[types],
            states_mb=np.nan_to_num(self.states_mb, posinf=0.0)[types],
            layout=self._layout,
            transfer_ms=self._transfer_ms[types],
            in_flight=in_flight,
        )


_IMPOSSIBLE = LayerCost(
    compute_ms=np.inf, slowdown_ms=0.0, tail_ms=0.0, forward_mb=np.inf, backward_mb=0.0, states_mb=np.inf
)  # fmt: skip

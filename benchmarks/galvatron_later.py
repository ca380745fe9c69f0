"""The cost models of Galvatron's later releases (v2.4.0 of 2025, main of 2026), to compare searches under them.

New against v2.0: DeepSpeed-Ulysses beside TP in every layer, times by sequence length, an embedding and head with a TP
or Ulysses degree and sharding of their own, a buffer in which TP gathers sequences, micro-batches to search. The rules
follow public versions of the code near these releases and are checked against all published estimates
(`benchmarks/galvatron_later_cases.py`). Those do not reach several stages, Ulysses in layers, strided TP and changes
of layout: no published plan has them. Nothing of the package uses this.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

import numpy as np

from ds_hydra.strategy.search.layer_dp import FloatArray

NUM_DEVICES = 8
CONTEXT_MB = 1024.0
RESERVED_SHARE = 0.2
"""Of memories above 20 GB this is left to the allocator."""
BYTES = 2
"""Of one activation or gradient: all cases are bf16."""
MODEL_STATES = 4
"""Model states over weights."""
CHANGE_MS = 1e-4
"""Their R takes this many ms for each byte, times the link's ms/MB: about a hundred times what moving it takes."""
DEGREES = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Strategy:
    """How one layer runs on its NUM_DEVICES / PP devices; `degree` is that of TP, or of Ulysses with `ulysses`."""

    pp: int
    degree: int
    dp: int
    ulysses: bool = False
    consecutive: bool = True
    sharded: bool = False
    checkpoints: bool = False

    @property
    def tp(self) -> int:
        """By what the weights are divided."""
        return 1 if self.ulysses else self.degree

    @property
    def shards(self) -> int:
        """Ranks that share one copy of the model states."""
        return self.dp * self.degree // self.tp

    @property
    def layout(self) -> tuple[int, bool, bool]:
        """What decides where the layer's activations lie."""
        return self.degree, self.ulysses, self.consecutive


def layer_space(*, ulysses: bool, strided: bool) -> list[Strategy]:
    """Every strategy of one layer on 8 devices: 74 with both, 50 without strided TP, 32 with neither."""
    return [
        Strategy(pp, degree, dp, is_ulysses, is_consecutive, is_sharded, checkpoints)
        for pp in DEGREES
        for degree in DEGREES
        if (dp := NUM_DEVICES // (pp * degree)) >= 1
        for is_ulysses in (False, True)[: 1 + (ulysses and degree > 1)]
        for is_consecutive in (True, False)[: 1 + (strided and degree > 1 and dp > 1)]
        for is_sharded in (False, True)[: 1 + (dp > 1)]
        for checkpoints in (False, True)
    ]


@dataclass(frozen=True, slots=True)
class Head:
    """How the embedding and the head run, in the first and the last stage."""

    degree: int
    ulysses: bool
    sharded: bool


@dataclass(frozen=True, slots=True)
class Frame:
    """What one of their searches over layers holds fixed."""

    pp: int
    micro_batches: int
    min_degree: int
    """The smallest degree that layers may have; v2.4.0 counts the samples of a micro-batch for it."""
    max_degree: int
    """The largest; it sizes the buffer in which TP gathers sequences."""
    without_tp: bool = False
    """Whether all degrees are Ulysses', which needs no buffer."""

    def admits(self, strategy: Strategy) -> bool:
        """Whether a layer may have this strategy here."""
        return (
            strategy.pp == self.pp
            and self.min_degree <= strategy.degree <= self.max_degree
            and (strategy.tp == 1 or not self.without_tp)
        )


@dataclass(frozen=True)
class Hardware:
    """Measured links of one node of 8 devices."""

    document: Mapping[str, Mapping[str, float]]

    @property
    def overlap(self) -> float:
        """By what communication and computation at the same time slow each other."""
        return self.document["overlap"]["overlap_coe"]

    def link(self, size: int, *, consecutive: bool = True) -> float:
        """Milliseconds for each MB of an all-reduce's ring volume in a group of `size`."""
        flag = int(consecutive or size == NUM_DEVICES)
        return 0.0 if size == 1 else 1 / self.document["allreduce"][f"allreduce_size_{size}_consec_{flag}"]

    def p2p(self, pp: int) -> float:
        """Milliseconds for each MB from stage to stage."""
        return 1 / self.document["p2p"][f"pp_size_{pp}"]

    def collective_ms(
        self, kind: str, size: int, message: float, measured: Literal["no", "exact", "above"]
    ) -> float:
        """Time of a gather (half an all-reduce) or an all-to-all of `message` bytes.

        As measured for exactly that size, or for the next one above; on the line through all of them otherwise.
        """
        if size == 1:
            return 0.0
        times, line = self._collectives[kind, size]
        megabytes = message / 2**20
        if measured == "above":
            megabytes = min((known for known in times if known >= megabytes), default=megabytes)
        if measured != "no" and megabytes in times:
            return times[megabytes]
        return float(np.polyval(line, megabytes))

    @cached_property
    def _collectives(self) -> dict[tuple[str, int], tuple[dict[float, float], FloatArray]]:
        """By kind and size of the group: milliseconds by MB, and the line through them."""
        sizes = [float(1 << power) for power in range(11)]
        found = {}
        for kind, share in (("allreduce", 0.5), ("all2all", 1.0)):
            for size in DEGREES[1:]:
                times = [share * self.document["sp"][f"{kind}_size_{size}_{mb:.0f}MB_time"] for mb in sizes]
                found[kind, size] = dict(zip(sizes, times, strict=True)), np.polyfit(sizes, times, 1)
        return found


@dataclass(frozen=True)
class LaterModel:
    """A model, its profile and the options of one run."""

    release: Literal["v2.4.0", "main"]
    hardware: Hardware
    num_layers: int
    hidden: int
    sequence: int
    layer_ms: FloatArray
    """Forward time of n samples through one layer, a polynomial in n (numpy's order)."""
    head_ms: FloatArray
    """The same of embedding and head together."""
    parameter_mb: float
    activation_mb: Mapping[str, float]
    """Of one sample, by degree or for "checkpoint"."""
    head_memory: Mapping[str, Mapping[str, Mapping[str, float]]]
    """By "only", "first" or "last" stage, "model_states" or "activation", and degree."""
    batch: int
    memory_gb: int
    micro_batches: int | None
    """Number of micro-batches, None to search it."""
    fine: bool = True
    """Whether each layer has a strategy of its own."""
    async_gradients: bool = True
    """Whether gradients are reduced only after the last micro-batch."""
    ulysses: bool = True
    """Whether the space has Ulysses; messages of TP are then costed by measured time, not by bandwidth."""
    strided: bool = False
    """Whether the space has strided TP groups."""

    @property
    def is_main(self) -> bool:
        """Whether the rules are those of main."""
        return self.release == "main"

    @property
    def budget_mb(self) -> int:
        """What a stage may use."""
        memory = 1024 * self.memory_gb
        return memory - int(RESERVED_SHARE * memory) * (self.memory_gb > 20)

    # Samples

    def group_samples(self, frame: Frame) -> int:
        """v2.4.0: samples of an iteration for each group of `min_degree` devices of a stage."""
        return self.batch * frame.pp * frame.min_degree // NUM_DEVICES

    def micro_batch(self, frame: Frame) -> int:
        """v2.4.0: samples of a (full) micro-batch for each group of `min_degree` devices."""
        return -(-self.group_samples(frame) // frame.micro_batches)

    def samples(self, frame: Frame, dp: int) -> float:
        """Samples of a micro-batch on each of `dp` replicas; v2.4.0 takes the mean, fractional where uneven."""
        if self.is_main:
            return self.batch // frame.micro_batches // dp
        return self.batch / frame.micro_batches / dp

    def samples_in_flight(self, frame: Frame, strategy: Strategy, stage: int) -> float:
        """Samples whose activations a replica of 1F1B's `stage` keeps."""
        waiting = frame.pp - stage
        if self.is_main:
            return self.samples(frame, strategy.dp) * waiting
        kept = min(self.micro_batch(frame) * min(waiting, frame.micro_batches), self.group_samples(frame))
        return kept * strategy.degree / frame.min_degree

    # One layer

    def layer_times(self, frame: Frame, strategy: Strategy) -> tuple[float, float]:
        """Milliseconds of one micro-batch (with, without) the synchronisation of gradients."""
        degree, dp = strategy.degree, strategy.dp
        samples = self.samples(frame, dp)
        forward = float(np.polyval(self.layer_ms, samples / degree))
        backward = (3 if strategy.checkpoints else 2) * forward
        total = forward + backward + self._tensor_ms(samples, strategy)
        group = strategy.shards if self.is_main else dp
        link = self.hardware.link(
            strategy.shards,
            consecutive=strategy.ulysses or degree == 1 or not strategy.consecutive,
        )
        volume = 2 * (group - 1) / group * self.parameter_mb / strategy.tp / 2
        gather = link * volume / 2 if strategy.sharded else 0.0
        transfer = 0.0
        if frame.pp > 1:
            megabytes = 2 * frame.pp * samples * self.sequence * self.hidden * BYTES / 2**20
            transfer = megabytes * self.hardware.p2p(frame.pp)
        without = total + gather + transfer
        if dp == 1:
            return without, without
        half = not self.is_main and degree > 1 and degree >= degree * dp // 2
        hidden_under = backward / 2 if half else backward
        reduce = link * volume
        slower = max(hidden_under, reduce) + (self.hardware.overlap - 1) * min(hidden_under, reduce)
        return without - hidden_under + slower, without

    def _tensor_ms(self, samples: float, strategy: Strategy) -> float:
        """TP's or Ulysses' messages of one layer: half as many again where the forward pass runs twice."""
        degree = strategy.degree
        number = 6.0 if self.is_main and not strategy.ulysses else 4.0
        number *= 1.5 if strategy.checkpoints else 1.0
        message = samples * self.sequence * self.hidden * BYTES
        if self.ulysses:
            kind = "all2all" if strategy.ulysses else "allreduce"
            measured: Literal["above", "exact"] = "above" if self.is_main else "exact"
            return number * self.hardware.collective_ms(kind, degree, message, measured)
        ring = 2 * (degree - 1) / degree * message / 2**20
        consecutive = strategy.consecutive or strategy.dp == 1
        return number * ring * self.hardware.link(degree, consecutive=consecutive)

    def layer_mb(self, frame: Frame, strategy: Strategy, stage: int) -> float:
        """Memory of one layer in a stage."""
        samples = self.samples_in_flight(frame, strategy, stage)
        if strategy.checkpoints:
            activations = self.activation_mb["checkpoint"] * samples / strategy.degree
        else:
            activations = self.activation_mb[str(strategy.degree)] * samples
        states = MODEL_STATES * self.parameter_mb / strategy.tp
        if strategy.dp > 1:
            states *= self._sharded(frame, strategy.shards, strategy.sharded)
        return states + activations

    def _sharded(self, frame: Frame, ranks: int, everything: bool) -> float:
        """Share of the model states that a rank keeps under ZeRO-3 (`everything`) or ZeRO-2."""
        part = 1 / ranks + 0.003
        whole = 0 if everything else 1
        if frame.micro_batches == 1:
            return part + whole / 8 * (1 - part)
        if self.async_gradients:
            return part + (whole + 1) / 8 * (1 - part)
        return 5 / 4 * (part + whole / 8 * (1 - part))

    # Embedding and head

    def head_times(self, frame: Frame, head: Head) -> list[float]:
        """Milliseconds of one micro-batch in each stage, without synchronising gradients."""
        stage_devices = NUM_DEVICES // frame.pp
        dp = stage_devices // head.degree
        if self.is_main:
            message_samples = self.samples(frame, dp)
            samples = message_samples / head.degree
        else:
            message_samples = self.micro_batch(frame)
            samples = message_samples / frame.min_degree
        forward = float(np.polyval(self.head_ms, samples))
        group = stage_devices if head.ulysses else dp
        link = self.hardware.link(group, consecutive=head.ulysses or head.degree == 1)
        share = head.sharded * (group - 1) / group / (4 if self.is_main else 2)
        gather = [link * share * weights for weights in self._head_weights(frame, head)]
        message = self._head_message_ms(message_samples, dp, head)
        if frame.pp == 1:
            return [self._head_stage_ms(forward, gather[0]) + 2 * message]
        first, last = (self._head_stage_ms(forward / 2, part) + message for part in gather)
        return [first, *[0.0] * (frame.pp - 2), last]

    def _head_stage_ms(self, forward: float, gather: float) -> float:
        """Forward and backward pass, each beside a gathering of weights that slows it."""
        slowdown = 1 - 1 / self.hardware.overlap
        return sum(max(gather, work + slowdown * gather) for work in (forward, 2 * forward))

    def _head_weights(self, frame: Frame, head: Head) -> list[float]:
        """MB of weights of the stages that have some; v2.4.0 takes one of both stages twice."""
        tp = "1" if head.ulysses else str(head.degree)
        if frame.pp == 1:
            ends = ["only"]
        else:
            ends = ["first", "last"] if self.is_main else [("first", "last")[head.ulysses]] * 2
        return [self.head_memory[end]["model_states"][tp] / MODEL_STATES for end in ends]

    def _head_message_ms(self, samples: float, dp: int, head: Head) -> float:
        """What TP adds at either end."""
        if head.ulysses:
            return 0.0
        degree, message = head.degree, samples * self.sequence * self.hidden * BYTES
        if self.ulysses:
            measured: Literal["above", "no"] = "above" if self.is_main else "no"
            return self.hardware.collective_ms("allreduce", degree, message, measured)
        link = self.hardware.link(degree, consecutive=dp == 1)
        return (degree - 1) / degree * message / 2**20 * link

    def other_mb(self, frame: Frame, head: Head) -> list[int]:
        """All that is not in the layers, of each stage: embedding, head, context and the gather buffer."""
        stage_devices = NUM_DEVICES // frame.pp
        dp = stage_devices // head.degree
        samples, ratio = self.samples(frame, dp), 1.0
        if dp > 1 or not self.is_main:
            ratio = self._sharded(frame, stage_devices if head.ulysses else dp, head.sharded)
        tp = "1" if head.ulysses else str(head.degree)
        ends = [("only", 0, 1)] if frame.pp == 1 else [("first", 0, frame.pp), ("last", -1, 1)]
        stages = [CONTEXT_MB] * frame.pp
        for end, stage, in_flight in ends:
            memory = self.head_memory[end]
            stages[stage] += memory["model_states"][tp] * ratio
            stages[stage] += memory["activation"][str(head.degree)] * samples * in_flight
        return [math.ceil(used) + self._buffer_mb(frame) for used in stages]

    def _buffer_mb(self, frame: Frame) -> int:
        """Where TP gathers the sequences of a micro-batch."""
        if frame.without_tp and (self.fine or self.is_main):
            return 0
        if self.is_main:
            samples = self.batch / frame.micro_batches * frame.pp * frame.max_degree / NUM_DEVICES
        else:
            samples = self.micro_batch(frame) / frame.min_degree * frame.max_degree
        used = samples * self.hidden * self.sequence * BYTES / 2**20
        return math.ceil(used) if self.is_main and not self.fine else int(used)

    # Plans

    def change_ms(self, frame: Frame, before: Strategy, after: Strategy) -> float:
        """R of a micro-batch: their searches add it up, their estimates of a plan leave it out."""
        degree = after.degree
        sample = self.sequence * self.hidden * BYTES
        if self.is_main:
            if before.degree == degree:
                return 0.0
            degree = max(before.degree, degree)
            samples = self.batch / frame.micro_batches / (NUM_DEVICES // frame.pp // degree)
            return (degree - 1) / degree * samples * sample * self.hardware.link(degree) * CHANGE_MS
        regroups = before.consecutive != after.consecutive
        halves = regroups and (NUM_DEVICES // frame.pp, before.degree, degree) == (8, 4, 2)
        parts = 0.0
        if degree > before.degree or (degree == before.degree and regroups) or halves:
            parts += 0.5
        if degree != before.degree:
            parts += 0.5 / degree
        moved = parts * (degree - 1) / degree * self.micro_batch(frame) * sample
        return moved * self.hardware.link(degree, consecutive=after.consecutive or after.dp == 1) * CHANGE_MS

    def stage_layers(self, pp: int) -> list[int]:
        """Number of layers of each stage."""
        share = self.num_layers // pp
        return [share] * (pp - 1) + [self.num_layers - share * (pp - 1)]

    def pipeline_ms(self, frame: Frame, full: Sequence[float], compute: Sequence[float]) -> float:
        """Their time of an iteration from the stages' times of one micro-batch, with and without synchronisation."""
        count, first = frame.micro_batches, compute[0]
        last_bound = sum(compute) + compute[-1] * (count - 1)
        warm_up = max(min(frame.pp, count) * first - first, sum(compute[1:]))
        first_bound = warm_up + first * max(0, count + 1 - frame.pp)
        rest = max(stage - sum(compute[: index + 1]) for index, stage in enumerate(full))
        return max(last_bound, first_bound) + max(0.0, rest)

    def plan_ms(self, frame: Frame, head: Head, stages: Sequence[Sequence[Strategy]]) -> float:
        """Their time of a plan, and on top R for each micro-batch: nothing where all layers have one layout."""
        full, compute, changes = [], self.head_times(frame, head), 0.0
        for stage, layers in enumerate(stages):
            times = np.array([self.layer_times(frame, strategy) for strategy in layers])
            full.append(float(times[:, 0].sum()))
            compute[stage] += float(times[:, 1].sum())
            changes += sum(self.change_ms(frame, *pair) for pair in pairwise(layers))
        return self.pipeline_ms(frame, full, compute) + frame.micro_batches * changes

    def fits(self, frame: Frame, head: Head, stages: Sequence[Sequence[Strategy]]) -> bool:
        """Whether every stage stays within the budget, each layer rounded up to a whole MB."""
        other = self.other_mb(frame, head)
        return all(
            other[stage] + sum(math.ceil(self.layer_mb(frame, strategy, stage)) for strategy in layers)
            <= self.budget_mb
            for stage, layers in enumerate(stages)
        )

    # Space

    def frames(self) -> Iterator[Frame]:
        """What their searches over layers hold fixed, without those that are part of another (TP alone)."""
        for count in [self.micro_batches] if self.micro_batches else range(1, self.batch + 1):
            for pp in DEGREES:
                for low in DEGREES[:1] if self.is_main else DEGREES:
                    for high in DEGREES:
                        if low <= high <= NUM_DEVICES // pp and self._is_legal(pp, count, low, high):
                            yield Frame(pp, count, low, high)
                            if self.ulysses and high * pp == NUM_DEVICES:
                                yield Frame(pp, count, low, high, without_tp=True)

    def _is_legal(self, pp: int, count: int, low: int, high: int) -> bool:
        """Whether each stage gets a layer, and each replica a sample of all `count` micro-batches."""
        if pp > self.num_layers:
            return False
        if self.is_main:
            if self.batch % count or pp > count:
                return False
            return NUM_DEVICES // pp // high <= self.batch // count
        groups = NUM_DEVICES // pp // low
        if self.batch % groups or count > self.batch // groups:
            return False
        samples = self.batch // groups
        return count == -(-samples // -(-samples // count))

    def heads(self, frame: Frame) -> list[Head]:
        """Embeddings and heads that go with a frame."""
        return [
            Head(degree, ulysses, sharded)
            for degree in DEGREES
            if frame.min_degree <= degree <= frame.max_degree
            and not (self.is_main and self.samples(frame, dp := NUM_DEVICES // frame.pp // degree) < 1)
            for ulysses in self._head_kinds(frame, degree)
            for sharded in (False, True)[: 1 + (not self.is_main or dp > 1)]
        ]

    def _head_kinds(self, frame: Frame, degree: int) -> list[bool]:
        """Whether a head of this degree may use TP (False) or Ulysses (True); v2.4.0 knows Ulysses of degree 1."""
        if not self.ulysses or (self.is_main and degree == 1):
            return [False]
        return [True] if frame.without_tp else [False, True]

    def layers(self, frame: Frame) -> list[Strategy]:
        """Strategies that a layer may have in a frame."""
        return [
            strategy
            for strategy in layer_space(ulysses=self.ulysses, strided=self.strided)
            if frame.admits(strategy) and not (self.is_main and self.samples(frame, strategy.dp) < 1)
        ]

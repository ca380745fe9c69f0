"""An iteration plan as one flat int64 array, the form in which rank 0 broadcasts it, and back.

Layout (every count before what it counts):

    magic, iteration, num_devices, num_label_tokens, makespan, lower bound,
    number of sequences n, n sample indices, n lengths,
    number of pipelines, then for each pipeline
        tp, pp, makespan, lower bound, number of rows, then for each row its size and its sequences

Where a scheme has parts the version in the magic number is 2, and for every pipeline ckpt, repull, sp, number of
stage sizes and the stage sizes come after pp.

Times are the bit patterns of their doubles, so that the digest of a decoded plan is that of the original.
Ranks are not sent: they follow from the strategy.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import islice

import numpy as np

from ds_hydra.errors import PlanMismatchError
from ds_hydra.sampler.plan import IterationPlan, PipelinePlan
from ds_hydra.sampler.schedule import IntArray
from ds_hydra.strategy.scheme import Scheme, Strategy

_MAGIC, _MAGIC_WITH_PARTS = 0x44534859_00000001, 0x44534859_00000002
"""'DSHY' and the version of the layout."""


def to_array(plan: IterationPlan) -> IntArray:
    """`plan` as a flat int64 array; `from_array` restores an equal plan."""
    has_parts = not all(scheme.is_plain for scheme in plan.strategy.schemes)
    flat: list[int] = [
        _MAGIC_WITH_PARTS if has_parts else _MAGIC,
        plan.iteration,
        plan.num_devices,
        plan.num_label_tokens,
        _double_bits(plan.makespan_ms),
        _double_bits(plan.lower_bound_ms),
        len(plan.lengths),
        *plan.sample_indices,
        *plan.lengths,
        len(plan.pipelines),
    ]
    for pipeline in plan.pipelines:
        scheme = pipeline.scheme
        flat += [scheme.tp, scheme.pp]
        if has_parts:
            flat += [scheme.ckpt, scheme.repull, scheme.sp, len(scheme.stages), *scheme.stages]
        flat += [_double_bits(pipeline.makespan_ms), _double_bits(pipeline.lower_bound_ms)]
        flat.append(len(pipeline.micro_batches))
        for row in pipeline.micro_batches:
            flat += [len(row), *row]
    return np.array(flat, dtype=np.int64)


def from_array(array: IntArray) -> IterationPlan:
    """The plan in an array written by `to_array`; raises PlanMismatchError if it holds anything else."""
    try:
        values = iter(array.tolist())
        plan = _read_plan(values)
    except (StopIteration, ValueError, OverflowError, MemoryError) as error:
        raise PlanMismatchError(
            f"received {array.size} integers that are not a whole plan: {error!r}"
        ) from error
    left = sum(1 for _ in values)
    if left:
        raise PlanMismatchError(f"received a plan of {array.size - left} integers with {left} more after it")
    return plan


def _read_plan(values: Iterator[int]) -> IterationPlan:
    magic = next(values)
    if magic not in (_MAGIC, _MAGIC_WITH_PARTS):
        raise ValueError(
            f"starts with {magic:#x}, expected {_MAGIC:#x} or {_MAGIC_WITH_PARTS:#x}; "
            "all ranks need the same ds_hydra version"
        )
    iteration, num_devices, num_label_tokens = _take(values, 3)
    makespan, lower_bound = _take(values, 2)
    num_sequences = _read_count(values)
    sample_indices, lengths = _take(values, num_sequences), _take(values, num_sequences)
    has_parts = magic == _MAGIC_WITH_PARTS
    read = [_read_pipeline(values, has_parts) for _ in range(_read_count(values))]
    strategy = Strategy(tuple(scheme for scheme, *_ in read))
    return IterationPlan(
        iteration=iteration,
        num_devices=num_devices,
        strategy=strategy,
        sample_indices=sample_indices,
        lengths=lengths,
        num_label_tokens=num_label_tokens,
        pipelines=tuple(
            PipelinePlan(
                scheme=scheme, ranks=ranks, micro_batches=rows, makespan_ms=time, lower_bound_ms=bound
            )
            for (scheme, time, bound, rows), ranks in zip(read, strategy.place())
        ),
        makespan_ms=_double(makespan),
        lower_bound_ms=_double(lower_bound),
    )


def _read_pipeline(
    values: Iterator[int], has_parts: bool
) -> tuple[Scheme, float, float, tuple[tuple[int, ...], ...]]:
    tp, pp = _take(values, 2)
    ckpt, repull, sp = _take(values, 3) if has_parts else (0, 0, 1)
    stages = _take(values, _read_count(values)) if has_parts else ()
    makespan, lower_bound = _take(values, 2)
    rows = tuple([_take(values, _read_count(values)) for _ in range(_read_count(values))])
    scheme = Scheme(tp, pp, stages=stages, ckpt=ckpt, repull=repull, sp=sp)
    return scheme, _double(makespan), _double(lower_bound), rows


def _read_count(values: Iterator[int]) -> int:
    count = next(values)
    if count < 0:
        raise ValueError(f"announces {count} integers")
    return count


def _take(values: Iterator[int], count: int) -> tuple[int, ...]:
    taken = tuple(islice(values, count))
    if len(taken) != count:
        raise ValueError(f"ends where {count} integers were announced")
    return taken


def _double_bits(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _double(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])

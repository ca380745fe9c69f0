"""Plan of one iteration, which rank 0 broadcasts and every rank checks before acting."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import accumulate, chain
from typing import Any

from ds_hydra.configs.files import (
    MAX_DEVICES,
    MAX_LENGTH_TOKENS,
    check_counts,
    check_object,
    read_count,
    read_counts,
    read_list,
    read_text,
    read_time,
)
from ds_hydra.errors import HydraConfigError, InfeasiblePlanError
from ds_hydra.sampler.cuts import Piece, Row, tile
from ds_hydra.strategy.schemes.placement import Role, read_ranks
from ds_hydra.strategy.schemes.scheme import Scheme, Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalBatch:
    """The sequences of one iteration, before anything is decided or loaded.

    `sample_indices[i]` is the dataset row of sequence i, `lengths[i]` its tokens,
    `num_label_tokens` the number of positions that contribute to the loss of the whole global
    batch.
    """

    iteration: int
    sample_indices: tuple[int, ...]
    lengths: tuple[int, ...]
    num_label_tokens: int

    @classmethod
    def of_lengths(cls, lengths: Sequence[int], iteration: int = 0) -> GlobalBatch:
        """Rows 0, 1, ... of a dataset, each of whose tokens but the first is a label."""
        return cls(
            iteration=iteration,
            sample_indices=tuple(range(len(lengths))),
            lengths=tuple(lengths),
            num_label_tokens=sum(lengths) - len(lengths),
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(self.lengths)

    def to_json(self) -> dict[str, Any]:
        """The global batch as a JSON document; `from_json` restores it."""
        return {field.name: getattr(self, field.name) for field in fields(GlobalBatch)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> GlobalBatch:
        """The global batch in a document that has what `to_json` writes."""
        return cls(
            iteration=document["iteration"],
            sample_indices=tuple(document["sample_indices"]),
            lengths=tuple(document["lengths"]),
            num_label_tokens=document["num_label_tokens"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlan:
    """Work of one pipeline: its ranks and its packed micro-batches in 1F1B order.

    `micro_batches[j]` lists positions in `IterationPlan.lengths`; `ranks[((stage * cp + c) * sp +
    s) * tp + t]`. Under context parallelism `rows[j][c]` are the pieces of micro-batch j that row c
    has ([Note: Rows of a micro-batch]).
    """

    scheme: Scheme
    ranks: tuple[int, ...]
    micro_batches: tuple[tuple[int, ...], ...]
    makespan_ms: float
    lower_bound_ms: float
    rows: tuple[tuple[Row, ...], ...] = ()

    def own_row(self, micro_batch: int, row: int, lengths: Sequence[int]) -> Row:
        """The pieces of row `row`, whole sequences where there is no context parallelism."""
        if self.rows:
            return self.rows[micro_batch][row]
        return tuple(Piece(i, 0, lengths[i]) for i in self.micro_batches[micro_batch])


@dataclass(frozen=True, slots=True)
class RankPhase:
    """Work of one rank in one phase of a plan."""

    plan: IterationPlan
    """Plan of this phase."""
    role: Role | None
    """The rank's place; None where the phase's strategy leaves it idle."""

    @property
    def pipeline(self) -> PipelinePlan | None:
        """The rank's pipeline."""
        return None if self.role is None else self.plan.pipelines[self.role.pipeline]

    @property
    def micro_batches(self) -> tuple[tuple[int, ...], ...]:
        """Positions of the sequences of each micro-batch of the rank's pipeline."""
        return () if self.pipeline is None else self.pipeline.micro_batches

    @property
    def positions(self) -> Iterator[int]:
        """Positions of the sequences of all its micro-batches."""
        return chain.from_iterable(self.micro_batches)

    @property
    def reads_tokens(self) -> bool:
        """Whether its stage embeds tokens or has the loss: others see activations alone."""
        return self.role is not None and self.role.stage in (0, self.role.scheme.pp - 1)


@dataclass(frozen=True, kw_only=True)
class IterationPlan:
    """All decisions of one iteration. A plan that exists is legal: every sequence is placed exactly
    once.
    """

    iteration: int
    num_devices: int
    strategy: Strategy
    sample_indices: tuple[int, ...]
    lengths: tuple[int, ...]
    num_label_tokens: int
    pipelines: tuple[PipelinePlan, ...]
    makespan_ms: float
    lower_bound_ms: float

    def __post_init__(self) -> None:
        if problem := self._find_problem():
            raise InfeasiblePlanError(f"plan of iteration {self.iteration}: {problem}")
        if self.strategy.num_devices > self.num_devices:
            raise InfeasiblePlanError(
                f"strategy {self.strategy} needs {self.strategy.num_devices} ranks, there are {self.num_devices}"
            )

    def _find_problem(self) -> str:
        if len(self.sample_indices) != len(self.lengths):
            return f"{len(self.sample_indices)} sample indices for {len(self.lengths)} lengths"
        micro_batches = [m for pipeline in self.pipelines for m in pipeline.micro_batches]
        placed = sorted(chain.from_iterable(micro_batches))
        if placed != list(range(len(self.lengths))):
            return f"places {len(placed)} sequences ({len(set(placed))} distinct) of {len(self.lengths)}"
        if not all(micro_batches):
            return "has a micro-batch without sequences"
        schemes = tuple(p.scheme for p in self.pipelines)
        blocks = tuple(p.ranks for p in self.pipelines)
        if schemes != self.strategy.schemes or blocks != self.strategy.place():
            return f"pipelines do not follow strategy {self.strategy}"
        if not all(map(self._is_cut, self.pipelines)):
            return "the rows of a pipeline are not its micro-batches, every token once and as many rows as CP says"
        return ""

    def _is_cut(self, pipeline: PipelinePlan) -> bool:
        cp, micro_batches, rows = pipeline.scheme.cp, pipeline.micro_batches, pipeline.rows
        if cp == 1:
            return not rows
        return len(rows) == len(micro_batches) and all(
            len(of_one) == cp and tile(of_one, micro_batch, self.lengths)
            for micro_batch, of_one in zip(micro_batches, rows)
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of the global batch."""
        return sum(self.lengths)

    @property
    def in_turn(self) -> tuple[IterationPlan, ...]:
        """One plan for each phase, with the sequences of all: other phases place the rest."""
        phases = self.strategy.in_turn
        if len(phases) == 1:
            return (self,)
        ends = list(accumulate(len(phase.schemes) for phase in phases))
        own = [self.pipelines[begin:end] for begin, end in zip([0, *ends], ends)]
        return tuple(
            _Phase(
                **{field.name: getattr(self, field.name) for field in fields(IterationPlan)}
                | {
                    "strategy": phase,
                    "pipelines": pipelines,
                    "makespan_ms": max(p.makespan_ms for p in pipelines),
                    "lower_bound_ms": 0.0,
                }
            )
            for phase, pipelines in zip(phases, own)
        )

    def on_rank(self, rank: int) -> tuple[RankPhase, ...]:
        """Work of `rank`, phase by phase."""
        return tuple(RankPhase(phase, Role.find(phase.strategy, rank)) for phase in self.in_turn)

    @property
    def imbalance(self) -> float:
        """Predicted time of the slowest rank over that of the fastest, minus 1; ranks without
        sequences are not counted.
        """
        return imbalance_of((p.ranks, p.makespan_ms) for p in self.pipelines if p.micro_batches)

    def micro_batch_lengths(self, micro_batch: Sequence[int]) -> tuple[int, ...]:
        """Lengths of the sequences of one packed micro-batch."""
        return tuple(self.lengths[i] for i in micro_batch)

    @cached_property
    def digest(self) -> int:
        """63-bit fingerprint of every decision in the plan; equal on all ranks or nothing runs."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1

    def to_json(self) -> dict[str, Any]:
        """The plan as a JSON document; `from_json` restores an equal plan."""
        return {
            "schema": "ds_hydra.plan/1",
            "iteration": self.iteration,
            "num_devices": self.num_devices,
            "strategy": str(self.strategy),
            "makespan_ms": self.makespan_ms,
            "lower_bound_ms": self.lower_bound_ms,
            "num_label_tokens": self.num_label_tokens,
            "sample_indices": list(self.sample_indices),
            "lengths": list(self.lengths),
            "pipelines": [
                {
                    **p.scheme.to_json(),
                    "ranks": list(p.ranks),
                    "makespan_ms": p.makespan_ms,
                    "lower_bound_ms": p.lower_bound_ms,
                    "micro_batches": [list(micro_batch) for micro_batch in p.micro_batches],
                    **({"rows": _rows_to_json(p.rows)} if p.rows else {}),
                }
                for p in self.pipelines
            ],
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> IterationPlan:
        """The plan in a document written by `to_json`; raises HydraConfigError if it holds anything
        else.
        """
        try:
            return cls._read(document)
        except HydraConfigError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise HydraConfigError(
                f"not a valid ds_hydra.plan/1 document: {error!r}"[:300]
            ) from error

    @classmethod
    def _read(cls, document: Mapping[str, Any]) -> IterationPlan:
        return cls(
            iteration=read_count(document, "iteration"),
            num_devices=read_count(document, "num_devices", least=1, most=MAX_DEVICES),
            strategy=Strategy.parse(read_text(document, "strategy")),
            sample_indices=read_counts(document, "sample_indices"),
            lengths=read_counts(document, "lengths", least=1, most=MAX_LENGTH_TOKENS),
            num_label_tokens=read_count(document, "num_label_tokens"),
            makespan_ms=read_time(document, "makespan_ms"),
            lower_bound_ms=read_time(document, "lower_bound_ms"),
            pipelines=tuple(
                _read_pipeline(check_object(p, "a pipeline"))
                for p in read_list(document, "pipelines")
            ),
        )

    def __str__(self) -> str:
        bound = f" (lower bound {self.lower_bound_ms:.1f} ms)" if self.lower_bound_ms else ""
        width = max(8, *(len(str(p.scheme)) for p in self.pipelines))
        lines = [
            f"iteration {self.iteration}: {self.strategy}, {len(self.lengths)} sequences, "
            f"{self.num_tokens} tokens, predicted {self.makespan_ms:.1f} ms{bound}",
            f"  {'ranks':<12} {'scheme':<{width}} {'micro-batches':>13} {'tokens':>8} {'longest':>8} {'ms':>9}",
        ]
        phases = self.in_turn
        for number, phase in enumerate(phases, start=1):
            if len(phases) > 1:
                lines.append(f"  phase {number}: {phase.strategy}")
            for p in phase.pipelines:
                lengths = [self.lengths[i] for micro_batch in p.micro_batches for i in micro_batch]
                ranks = f"{p.ranks[0]}-{p.ranks[-1]}" if len(p.ranks) > 1 else f"{p.ranks[0]}"
                lines.append(
                    f"  {ranks:<12} {p.scheme!s:<{width}} {len(p.micro_batches):>13} {sum(lengths):>8} "
                    f"{max(lengths, default=0):>8} {p.makespan_ms:>9.1f}"
                )
                lines += _describe_rows(p)
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class _Phase(IterationPlan):
    """One phase of a plan, which was checked as a whole."""

    def __post_init__(self) -> None:
        pass


def imbalance_of(pipelines: Iterable[tuple[Sequence[int], float]]) -> float:
    """Time of the slowest rank over that of the fastest, minus 1, where pipelines of `(ranks, ms)`
    run one after another on the ranks that they share.

    >>> imbalance_of([((0, 1), 2.0), ((0,), 1.0), ((1,), 4.0)])
    1.0
    """
    of_rank: dict[int, float] = {}
    for ranks, ms in pipelines:
        for rank in ranks:
            of_rank[rank] = of_rank.get(rank, 0.0) + ms
    least = min(of_rank.values(), default=0.0)
    return max(of_rank.values()) / least - 1 if least > 0 else 0.0


def _describe_rows(pipeline: PipelinePlan) -> Iterator[str]:
    """One line for each micro-batch: how even its rows are."""
    for number, rows in enumerate(pipeline.rows):
        pieces = Counter(piece.position for row in rows for piece in row)
        tokens = [sum(piece.end - piece.begin for piece in row) for row in rows]
        yield (
            f"    micro-batch {number}: {sum(count > 1 for count in pieces.values())} of {len(pieces)} sequences "
            f"cut, {min(tokens)} to {max(tokens)} tokens in {len(rows)} rows"
        )


def _read_pipeline(document: Mapping[str, Any]) -> PipelinePlan:
    scheme = Scheme.from_json(document)
    return PipelinePlan(
        scheme=scheme,
        ranks=read_ranks(document, scheme),
        micro_batches=tuple(
            check_counts(micro_batch, "a micro-batch")
            for micro_batch in read_list(document, "micro_batches")
        ),
        rows=tuple(
            tuple(tuple(_read_piece(p) for p in row) for row in rows)
            for rows in document.get("rows", [])
        ),
        makespan_ms=read_time(document, "makespan_ms"),
        lower_bound_ms=read_time(document, "lower_bound_ms"),
    )


def _rows_to_json(rows: Sequence[Sequence[Row]]) -> list[list[list[list[int]]]]:
    return [[[list(piece) for piece in row] for row in of_one] for of_one in rows]


def _read_piece(values: Any) -> Piece:
    position, begin, end = check_counts(values, "a piece of a row", most=MAX_LENGTH_TOKENS)
    return Piece(position, begin, end)

"""Packed micro-batches as tensors of the stage that runs them.

Legend: tensors ending in `_T` have one value per token of a packed micro-batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ds_hydra.engine.losses.loss import Loss
from ds_hydra.engine.losses.objective import Objective
from ds_hydra.engine.model.attention_contract import LongSegment
from ds_hydra.engine.model.current_micro_batch import PackedMicroBatch, Segment
from ds_hydra.engine.model.noise import token_seeds
from ds_hydra.engine.parallel.one_f_one_b import PipelineStage
from ds_hydra.engine.parallel.token_cuts import KeysOfRow, TokenLayout
from ds_hydra.engine.ranks.memory import to_device
from ds_hydra.sampler.cuts import Piece, Row
from ds_hydra.sampler.data.examples import IGNORED_LABEL
from ds_hydra.sampler.plan import IterationPlan, PipelinePlan, RankPhase

Example = tuple[Tensor, Tensor]
"""(input_ids [l], labels [l]) of one sequence, int64; labels not yet shifted."""

LoadExample = Callable[[int], Example]
"""The sequence at a position of the plan; called only on ranks that need its tokens or labels."""


@dataclass(frozen=True, slots=True)
class Task:
    """Inputs of an iteration's passes, beside its plan."""

    load: LoadExample
    objective: Objective | None
    """Objective of the passes; None for the mean cross entropy."""
    loss_scale: float | None
    """Scale of the gradients; None where there is no backward."""
    noise_seed: int | None
    """Seed of dropout and NEFTune; None for passes without them."""

    @property
    def is_training(self) -> bool:
        """Whether gradients are computed."""
        return self.loss_scale is not None

    @property
    def loss(self) -> Loss | None:
        """The loss that the caller gave, if any."""
        return None if self.objective is None else self.objective.loss

    def scale(self, plan: IterationPlan) -> float:
        """Factor of a sum over tokens of `plan` before backward."""
        if self.loss_scale is None:
            return 1.0
        objective = self.objective
        return self.loss_scale / (
            plan.num_label_tokens if objective is None else objective.normaliser
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchTensors:
    """One packed micro-batch, or this rank's sequence shard of it, on the compute device; T are its
    tokens.

    Tokens only on first stages, targets only on last ones.
    """

    packed: PackedMicroBatch
    input_ids_T: Tensor | None
    """[1, T]."""
    targets_T: Tensor | None
    """[T]: the next token inside the same sequence, IGNORED_LABEL at sequence ends; of the tokens
    `packed.predicting` alone where it names some, as the fields.
    """
    fields: Mapping[str, Tensor] | None = None
    """[T] or [T, k] of each field that the loss of the iteration reads; None without one."""

    @classmethod
    def load(
        cls, phase: RankPhase, stage: PipelineStage, task: Task, layout: TokenLayout | None
    ) -> list[MicroBatchTensors]:
        """Load the tensors of `stage` for each micro-batch of `phase`: all tokens, or those of
        `layout`, cut after labels were shifted. They have the fields of the task's objective, and
        the seeds of its noise.
        """
        micro_batches = range(len(phase.micro_batches))
        return [cls._load(number, phase, stage, task, layout) for number in micro_batches]

    @classmethod
    def _load(
        cls,
        number: int,
        phase: RankPhase,
        stage: PipelineStage,
        task: Task,
        layout: TokenLayout | None,
    ) -> MicroBatchTensors:
        assert phase.pipeline is not None
        plan, pipeline, device = phase.plan, phase.pipeline, stage.device
        objective = task.objective
        row = pipeline.own_row(number, layout.row if layout else 0, plan.lengths)
        packed = _pack(plan, pipeline, number, row, device, layout)
        least = packed.keys.row_tokens if packed.keys else 0

        def join(parts: list[Tensor], fill: int) -> Tensor:
            row_T = torch.cat([torch.zeros(0, dtype=torch.int64), *parts])
            return row_T if layout is None else layout.cut(row_T, fill, least)

        ids, targets, fields = None, None, None
        if stage.is_first or stage.is_last:
            examples = [(task.load(piece.position), slice(piece.begin, piece.end)) for piece in row]
            if stage.is_first:
                ids = join([ids[part] for (ids, _), part in examples], 0).unsqueeze(0)
                ids = to_device(ids, device)
            if stage.is_last:
                # Shifted, then cut: the next token may be in another rank's piece.
                shifted = [shift_labels(labels)[part] for (_, labels), part in examples]
                targets = join(shifted, IGNORED_LABEL)
                predicting = find_predicting(targets)
                targets = to_device(targets[predicting], device)
                if isinstance(predicting, Tensor):
                    packed = replace(packed, predicting=to_device(predicting, device))
            if stage.is_last and objective is not None:
                # A row without tokens has the fields, none of which is anyone's
                of_any = Piece(pipeline.micro_batches[number][0], 0, 0)
                rows = [
                    objective.rows_of(p.position, slice(p.begin, p.end), plan.lengths[p.position])
                    for p in row or (of_any,)
                ]
                fields = {
                    name: to_device(join([r[name] for r in rows], 0)[predicting], device)
                    for name in rows[0]
                }
        if task.noise_seed is not None:
            seeds = [token_seeds(task.noise_seed, plan.iteration, *piece) for piece in row]
            # Padding counts as one token: noise is divided by the root of the length.
            lengths = [
                torch.full((p.end - p.begin,), plan.lengths[p.position], dtype=torch.int64)
                for p in row
            ]
            packed = replace(
                packed,
                token_seeds_T=to_device(join(seeds, 0), device),
                token_lengths_T=to_device(join(lengths, 1), device),
            )
        return cls(packed=packed, input_ids_T=ids, targets_T=targets, fields=fields)


def _pack(
    plan: IterationPlan,
    pipeline: PipelinePlan,
    number: int,
    row: Row,
    device: torch.device,
    layout: TokenLayout | None,
) -> PackedMicroBatch:
    """Pack the positions of the sequences of micro-batch `number`, or of one of its rows."""
    micro_batch = pipeline.micro_batches[number]
    number_of = {position: number for number, position in enumerate(micro_batch)}
    segments = [
        Segment(number_of[p.position], plan.lengths[p.position], p.begin, p.end) for p in row
    ]
    keys = None
    if layout is not None and layout.rows is not None:
        keys = KeysOfRow.find(pipeline.rows[number], layout, device)
    lengths = plan.micro_batch_lengths(micro_batch)
    return PackedMicroBatch.of_segments(segments, lengths, device, layout, keys)


def long_segments(plan: IterationPlan) -> Iterator[LongSegment]:
    """Long segments of all micro-batches and rows of `plan`."""
    for pipeline in (p for phase in plan.in_turn for p in phase.pipelines):
        for number, row in itertools.product(
            range(len(pipeline.micro_batches)), range(pipeline.scheme.cp)
        ):
            pieces = pipeline.own_row(number, row, plan.lengths)
            yield from LongSegment.of([p.end - p.begin for p in pieces], [p.end for p in pieces])


def shift_labels(labels_T: Tensor) -> Tensor:
    """[l] labels -> [l] targets: position i is scored against label i + 1, the last position not at
    all.
    """
    return torch.cat([labels_T[1:], labels_T.new_full((1,), IGNORED_LABEL)])


def find_predicting(targets_T: Tensor) -> Tensor | slice:
    """Places [t] of the tokens that predict one of `targets_T`, one at least; all of them where
    leaving out the others would save the head less than a sixteenth.
    """
    places = (targets_T != IGNORED_LABEL).nonzero().flatten()
    if len(places) > len(targets_T) * 15 // 16:
        return slice(None)
    return places if len(places) else torch.zeros(1, dtype=torch.int64)

"""Packed micro-batches as tensors of the stage that runs them.

Legend: tensors ending in `_T` have one value per token of a packed micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_hydra.engine.model.attention import PackedMicroBatch
from ds_hydra.engine.parallel.one_f_one_b import StageInfo
from ds_hydra.engine.parallel.ulysses import SequenceShard
from ds_hydra.engine.ranks.host_memory import to_device
from ds_hydra.sampler.data.examples import IGNORED_LABEL
from ds_hydra.sampler.plan import IterationPlan, PipelinePlan

Example = tuple[Tensor, Tensor]
"""(input_ids [l], labels [l]) of one sequence, int64; labels not yet shifted."""

LoadExample = Callable[[int], Example]
"""The sequence at a position of the plan; called only on ranks that need its tokens or labels."""


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
    """[T]: the next token inside the same sequence, IGNORED_LABEL at sequence ends."""

    @classmethod
    def load(
        cls,
        plan: IterationPlan,
        pipeline: PipelinePlan,
        stage: StageInfo,
        load: LoadExample,
        device: torch.device,
        sequence_shard: SequenceShard | None = None,
    ) -> list[MicroBatchTensors]:
        """The micro-batches of `pipeline` that `stage` needs, cut to `sequence_shard` after labels
        were shifted.
        """

        def join(parts: list[Tensor], fill: int) -> Tensor:
            micro_batch_T = torch.cat(parts)
            return to_device(
                micro_batch_T
                if sequence_shard is None
                else sequence_shard.cut(micro_batch_T, fill),
                device,
            )

        micro_batches = []
        for micro_batch in pipeline.micro_batches:
            ids, targets = None, None
            if stage.is_first or stage.is_last:
                examples = [load(position) for position in micro_batch]
                if stage.is_first:
                    ids = join([input_ids for input_ids, _ in examples], 0).unsqueeze(0)
                if stage.is_last:
                    targets = join([shift_labels(labels) for _, labels in examples], IGNORED_LABEL)
            packed = PackedMicroBatch.build(
                plan.micro_batch_lengths(micro_batch), device, sequence_shard
            )
            micro_batches.append(cls(packed=packed, input_ids_T=ids, targets_T=targets))
        return micro_batches


def shift_labels(labels_T: Tensor) -> Tensor:
    """[l] labels -> [l] targets: position i is scored against label i + 1, the last position not at
    all.
    """
    return torch.cat([labels_T[1:], labels_T.new_full((1,), IGNORED_LABEL)])

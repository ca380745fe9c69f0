"""The Trainer of transformers with stock ZeRO-3, as each contender configures it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader
from training_setup import Task, Turns, ds_config
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.data.data_collator import DataCollatorForSeq2Seq, DataCollatorWithFlattening
from workloads import (
    Batch,
    Placement,
    Shape,
    place_balanced_flops,
    place_balanced_tokens,
    place_evenly,
    place_first_fit,
    place_rebalanced,
)

from ds_hydra.engine.model.attention_contract import Scoring
from ds_hydra.engine.model.attention_operator import attention_per_sequence

PACKED_ATTENTION = "per_sequence"
"""Name under which the contenders' attention of packed micro-batches is registered: ds_hydra's own,
one call per sequence.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stock:
    """A way to run the Trainer on stock DeepSpeed. `parallel`: "data", "ulysses" or "autotp" (all
    ranks, one group).

    `attention` of flattened micro-batches: one call per sequence, or "sdpa" as transformers has it,
    with a mask of the micro-batch.
    """

    place: Callable[[Batch, Shape], Placement]
    packs: bool = True
    attention: str = PACKED_ATTENTION
    parallel: str = "data"
    checkpointing: bool = False
    compiled: bool = False
    """`TrainingArguments.torch_compile`."""


class Sequences(torch.utils.data.Dataset):
    """Examples as the collators of transformers expect them; the last one stands in for an empty
    micro-batch.
    """

    def __init__(self, task: Task):
        self._sequences = task.sequences()

    def __len__(self) -> int:
        return len(self._sequences) + 1

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        if index == len(self._sequences):
            return {"input_ids": [1, 1], "labels": [-100, -100]}
        ids = self._sequences[index]
        return {"input_ids": ids, "labels": ids}


def per_sequence_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    position_ids: Tensor | None = None,
    **_ignored: Any,
) -> tuple[Tensor, None]:
    """Attention of a flattened micro-batch whose positions restart in every sequence: ds_hydra's
    own code.
    """
    assert position_ids is not None
    begins = (position_ids[0] == 0).nonzero().flatten().tolist()
    lengths = [b - a for a, b in zip(begins, [*begins[1:], position_ids.shape[1]], strict=True)]
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    out = attention_per_sequence(query, key, value, Scoring(scale), lengths)
    return out.transpose(1, 2), None


class _Gate(TrainerCallback):
    """Lets the Trainer's own loop run one optimizer step per turn."""

    def __init__(self, turns: Turns, losses: list[float]):
        self._turns, self._losses = turns, losses

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._turns.ready()
        self._turns.wait()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._turns.done(sum(self._losses))
        self._losses.clear()
        self._turns.wait()


class BenchmarkTrainer(Trainer):
    """The Trainer with micro-batches chosen beforehand (its documented extension point) and its
    losses kept.

    Everything else is the Trainer's own: collator, num_items_in_batch, accumulation, backward,
    clipping, step.
    """

    micro_batches: list[list[int]]
    losses: list[float]
    sequence_weights: list[float] | None = None

    def get_train_dataloader(self) -> Any:
        """This rank's micro-batches in order."""
        return DataLoader(
            self.train_dataset, batch_sampler=self.micro_batches, collate_fn=self.data_collator
        )

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Under Ulysses the Trainer averages each micro-batch; weighing micro-batches by their
        tokens gives the token mean again.
        """
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        return loss if self.sequence_weights is None else loss * self.sequence_weights.pop(0)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        self.losses.append(float(loss) / dist.get_world_size())
        return loss


def run_stock(task: Task, turns: Turns, *, stock: Stock) -> None:
    """The Trainer on this rank's micro-batches."""
    transformers.AttentionInterface.register(PACKED_ATTENTION, per_sequence_attention)
    rank, world = dist.get_rank(), dist.get_world_size()
    sequences = Sequences(task)
    micro_batches, weights = _micro_batches_of(task, stock, len(sequences) - 1)
    model = task.model.build(task.shape.context_length)
    arguments: dict[str, Any] = {}
    if stock.parallel == "ulysses":
        # Ulysses accepts the name sdpa only; this process has no other use for it.
        transformers.AttentionInterface.register("sdpa", per_sequence_attention)
        arguments["parallelism_config"] = _ulysses(world)
    uses_sdpa = not stock.packs or stock.parallel == "ulysses"
    model.config._attn_implementation = "sdpa" if uses_sdpa else stock.attention
    accumulation = len(micro_batches[rank]) // len(task.batches)
    tp = {"tensor_parallel": {"autotp_size": world}} if stock.parallel == "autotp" else {}
    losses: list[float] = []
    trainer = BenchmarkTrainer(
        model=model,
        args=TrainingArguments(
            output_dir="unused",
            use_cpu=not torch.cuda.is_available(),
            deepspeed=ds_config(accumulation=accumulation, **tp),
            per_device_train_batch_size=1,
            gradient_accumulation_steps=accumulation,
            gradient_checkpointing=stock.checkpointing,
            gradient_checkpointing_kwargs={"use_reentrant": False} if stock.checkpointing else None,
            torch_compile=stock.compiled,
            max_steps=len(task.batches),
            max_grad_norm=1.0,
            learning_rate=1e-4,
            weight_decay=0.01,
            lr_scheduler_type="constant",
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
            **arguments,
        ),
        train_dataset=sequences,
        data_collator=_collator(stock, world),
        callbacks=[_Gate(turns, losses)],
    )
    if stock.parallel == "ulysses":
        # DeepSpeed's adapter gathers one micro-batch of every rank first, which gloo refuses for
        # micro-batches of unequal length; here the collator cuts micro-batches as the adapter
        # would, without that exchange.
        trainer.accelerator.deepspeed_ulysses_dl_adapter = lambda loader, model: loader
    trainer.losses = losses
    trainer.micro_batches = micro_batches[rank]
    trainer.sequence_weights = weights
    trainer.train()


def _micro_batches_of(
    task: Task, stock: Stock, filler: int
) -> tuple[list[list[list[int]]], list[float] | None]:
    """[rank][micro-batch] -> indices of sequences, over all global batches; and weights of
    micro-batches under Ulysses.
    """
    world = task.shape.num_ranks
    micro_batches: list[list[list[int]]] = [[] for _ in range(world)]
    weights: list[float] | None = [] if stock.parallel == "ulysses" else None
    first = 0
    for batch in task.batches:
        placement = stock.place(batch, task.shape)
        slots = [[[first + i for i in part] or [filler] for part in slot] for slot in placement]
        if stock.parallel != "data":  # every rank of the one group takes part in every micro-batch
            slots = [[part] * world for slot in slots for part in slot]
        for slot in slots:
            for rank, part in enumerate(slot):
                micro_batches[rank].append(part)
        if weights is not None:
            labels = [sum(batch[i] - 1 for i in part) for slot in placement for part in slot]
            weights += [len(labels) * n / sum(labels) for n in labels]
        first += len(batch)
    return micro_batches, weights


def _collator(stock: Stock, world: int) -> Callable[[Sequence[dict[str, Any]]], dict[str, Any]]:
    if not stock.packs:
        return DataCollatorForSeq2Seq(_padding_tokenizer(), padding=True)
    flatten = DataCollatorWithFlattening()
    if stock.parallel != "ulysses":
        return flatten

    def shard(features: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """This rank's part of a micro-batch; a filler sequence without labels makes micro-batches
        divisible.
        """
        missing = -sum(len(f["input_ids"]) for f in features) % world
        filler = [{"input_ids": [1] * missing, "labels": [-100] * missing}] if missing else []
        micro_batch = flatten([*features, *filler])
        micro_batch["shift_labels"] = nn.functional.pad(
            micro_batch.pop("labels"), (0, 1), value=-100
        )[:, 1:]
        return {
            key: value.chunk(world, dim=1)[dist.get_rank()].contiguous()
            for key, value in micro_batch.items()
        }

    return shard


def _padding_tokenizer() -> transformers.PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({"<pad>": 0}, unk_token="<pad>"))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", padding_side="right"
    )


def _ulysses(world: int) -> Any:
    from accelerate import ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    return ParallelismConfig(
        sp_backend="deepspeed",
        sp_size=world,
        sp_handler=DeepSpeedSequenceParallelConfig(
            sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"
        ),
    )


STOCK = {
    "padding": Stock(place=place_evenly, packs=False),
    "packing": Stock(place=place_first_fit),
    "packing_compiled": Stock(place=place_first_fit, compiled=True),
    "packing_sdpa": Stock(place=place_first_fit, attention="sdpa"),
    "rebalance": Stock(place=place_rebalanced),
    "rebalance_padding": Stock(place=place_rebalanced, packs=False),
    "kk_tokens": Stock(place=place_balanced_tokens),
    "kk_flops": Stock(place=place_balanced_flops),
    "ulysses": Stock(place=place_first_fit, parallel="ulysses"),
    "autotp": Stock(place=place_first_fit, parallel="autotp"),
    "checkpointing": Stock(place=place_first_fit, checkpointing=True),
}

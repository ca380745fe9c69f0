"""What runs in the ranks of the end-to-end benchmark: one contender per process group, stepped by
the driver.

Every contender trains the same model on the same global mini-batches with the same optimizer; each
is the real thing: the Trainer of transformers with stock DeepSpeed ZeRO-3, or
`ds_hydra.initialize`. Between two of its iterations a rank blocks in `Turns.wait`, so contenders
alternate on the same cores without sharing a process.
"""

from __future__ import annotations

import json
import os
import time
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import datasets
import deepspeed
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader
from training_setup import ModelSize, ds_config
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

import ds_hydra
from ds_hydra.engine.model.attention import attention_per_sequence
from ds_hydra.engine.ranks.host_memory import keep_freed_memory, process_bytes

PACKED_ATTENTION = "per_sequence"
"""Name under which the contenders' attention of packed micro-batches is registered: ds_hydra's own,
one call per sequence.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Everything that the contenders of one workload share."""

    workload: str
    batches: list[Batch]
    """One more than is trained, because the Trainer fetches ahead."""
    shape: Shape
    model: ModelSize
    profile: str | None = None
    """Path of the measured profile; None only for the contender that measures it."""
    memory_limit_bytes: int | None = None
    strategies: tuple[str, ...] = ()
    static_strategy: str = ""
    seed: int = 0

    def tokens_of(self, length: int, generator: torch.Generator) -> list[int]:
        """Random token ids; 0 is the padding token."""
        return torch.randint(1, self.model.vocab_size, (length,), generator=generator).tolist()

    def sequences(self) -> list[list[int]]:
        """Token ids of the sequences of all batches, in order."""
        generator = torch.Generator().manual_seed(self.seed)
        return [self.tokens_of(length, generator) for batch in self.batches for length in batch]


@dataclass
class Turns:
    """This rank's end of the conversation with the driver."""

    connection: Connection
    base_bytes: int = 0
    """Resident memory before anything was built: the libraries, shared with the driver."""
    _start: float = 0.0
    _cpu: float = 0.0

    def ready(self, **facts: Any) -> None:
        """Say that the contender is built."""
        self.connection.send({"ready": True, **facts})

    def wait(self) -> None:
        """Block until it is this contender's turn; after the last one the driver ends the
        process.
        """
        self.connection.recv()
        self._start, self._cpu = time.perf_counter(), time.process_time()

    def done(self, loss_share: float, **facts: Any) -> None:
        """Report the iteration since `wait`. The shares of all ranks add up to the loss."""
        self.connection.send(
            {
                "seconds": time.perf_counter() - self._start,
                "cpu_seconds": time.process_time() - self._cpu,
                "loss": loss_share,
                "peak_bytes": process_bytes("VmHWM") - self.base_bytes,
                **facts,
            }
        )


# ---- ds_hydra


def run_hydra(task: Task, turns: Turns, *, static: bool = False, compiled: bool = False) -> None:
    """`train_batch()` on the engine's own sampler; plans are made in line, so that no other
    contender pays for them.
    """
    rank = dist.get_rank()
    section = {
        "context_length": task.shape.context_length,
        "tokens_per_iteration": task.shape.tokens_per_iteration,
        "shuffle": False,
        "planner": {"num_workers": 0},
        "strategies": [task.static_strategy] if static else list(task.strategies),
        "profile": task.profile,
        "memory_limit_bytes": task.memory_limit_bytes,
        "compile_layers": compiled,
    }
    engine, *_ = ds_hydra.initialize(
        model=task.model.build(task.shape.context_length),
        config=ds_config(hydra=section),
        training_data=datasets.Dataset.from_dict({"input_ids": task.sequences()}),
    )
    turns.ready()
    for batch in task.batches[:-1]:
        turns.wait()
        loss = float(engine.train_batch())
        metrics = engine.last_metrics
        if metrics.num_tokens != sum(batch):
            raise RuntimeError(
                f"the engine drew {metrics.num_tokens} tokens, the others {sum(batch)}"
            )
        turns.done(loss if rank == 0 else 0.0, metrics=metrics.to_json())
    turns.wait()


def measure_profile(task: Task, turns: Turns, path: str) -> None:
    """Write the profile that ds_hydra measures on these ranks to `path`."""
    section = {
        "context_length": task.shape.context_length,
        "tokens_per_iteration": task.shape.tokens_per_iteration,
        "strategies": list(task.strategies),
    }
    engine, *_ = ds_hydra.initialize(
        model=task.model.build(task.shape.context_length), config=ds_config(hydra=section)
    )
    document = engine.hydra.know_profile().document
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(document, indent=1) + "\n")
    turns.ready()
    turns.wait()


# ---- the Trainer with stock DeepSpeed


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
    out = attention_per_sequence(query, key, value, lengths, scale, None, None)
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
    """[rank][micro-batch] -> indices of sequences, over all mini-batches; and weights of
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

TITLES = {
    "padding": "(1) Trainer, ZeRO-3, padding",
    "packing": "(2) ZeRO-3, first-fit-decreasing packing",
    "packing_compiled": "(2) the same, torch_compile",
    "packing_sdpa": "(2) the same, attention with a mask of the micro-batch (sdpa)",
    "rebalance": "(3) ZeRO-3, batch_rebalance, flattened",
    "rebalance_padding": "(3) ZeRO-3, batch_rebalance, padding",
    "kk_tokens": "(4) ZeRO-3, Karmarkar-Karp on tokens",
    "kk_flops": "(4) ZeRO-3, Karmarkar-Karp on tokens + tokens^2",
    "ulysses": "(5) ZeRO-3, Ulysses, packing",
    "autotp": "(5) ZeRO-3, AutoTP, packing",
    "checkpointing": "(5) ZeRO-3, packing, activation checkpointing",
    "hydra_static": "(6) ds_hydra, one homogeneous strategy",
    "hydra_compiled": "(7) ds_hydra, hydra.compile_layers",
    "hydra": "(7) ds_hydra",
}


def run_contender(name: str, task: Task, turns: Turns) -> None:
    """Run `name` until the driver says stop."""
    if name in STOCK:
        run_stock(task, turns, stock=STOCK[name])
    elif name == "profile":
        assert task.profile is not None
        measure_profile(task, turns, task.profile)
    else:
        run_hydra(task, turns, static=name == "hydra_static", compiled=name == "hydra_compiled")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Where a rank runs: its core, its threads, and where it meets the others."""

    rank: int
    world: int
    core: int
    rendezvous: str


def shared_memory_key(rendezvous: str) -> str:
    """What stands in MASTER_PORT: AutoTP's ranks find each other's memory by it, and not another
    contender's.
    """
    return str(zlib.crc32(rendezvous.encode()))


def run_rank(name: str, task: Task, place: RankPlace, connection: Connection) -> None:
    """The life of one forked rank; reports an exception instead of raising it."""
    import datetime
    import traceback

    os.sched_setaffinity(0, {place.core})
    os.environ.update(
        RANK=str(place.rank),
        LOCAL_RANK=str(place.rank),
        WORLD_SIZE=str(place.world),
        LOCAL_WORLD_SIZE=str(place.world),
        LOCAL_SIZE=str(place.world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=shared_memory_key(place.rendezvous),
    )
    torch.set_num_threads(1)
    keep_freed_memory()  # ds_hydra does it itself; the others are given the same
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    deepspeed.utils.logger.setLevel("ERROR")
    turns = Turns(connection, base_bytes=process_bytes("VmRSS"))
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{place.rendezvous}",
            rank=place.rank,
            world_size=place.world,
            timeout=datetime.timedelta(minutes=10),
        )
        # Takes the group that exists
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        run_contender(name, task, turns)
    except BaseException:
        connection.send({"error": traceback.format_exc()})
    finally:
        os._exit(0)  # the other ranks may be gone

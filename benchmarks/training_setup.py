"""The model and the DeepSpeed configuration that the end-to-end benchmarks share."""

from __future__ import annotations

import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen3MoeConfig
from workloads import Batch, Shape

import ds_hydra
from ds_hydra.engine.ranks.memory import process_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """A LLaMA of the benchmark, or a Qwen3-MoE as wide: a token has two experts of half the
    intermediate size.
    """

    hidden_size: int = 256
    intermediate_size: int = 704
    num_layers: int = 4
    num_heads: int = 4
    vocab_size: int = 2048
    num_experts: int = 0

    def build(self, context_length: int) -> PreTrainedModel:
        """The model, equal on every rank."""
        torch.manual_seed(0)
        kind, experts = LlamaConfig, {}
        if self.num_experts:
            kind, experts = Qwen3MoeConfig, {
                "num_experts": self.num_experts,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": self.intermediate_size // 2,
                "head_dim": self.hidden_size // self.num_heads,
            }  # fmt: skip
        return AutoModelForCausalLM.from_config(
            kind(
                **experts,
                vocab_size=self.vocab_size,
                hidden_size=self.hidden_size,
                intermediate_size=self.intermediate_size,
                num_hidden_layers=self.num_layers,
                num_attention_heads=self.num_heads,
                num_key_value_heads=self.num_heads,
                max_position_embeddings=context_length,
                tie_word_embeddings=False,
                use_cache=False,
                pad_token_id=0,
                bos_token_id=None,
                eos_token_id=None,
            )
        )

    @property
    def linear_flops(self) -> float:
        """Forward + backward FLOPs per token outside of attention scores (6 per weight of a matrix
        product).
        """
        attention = 4 * self.hidden_size**2
        mlp = 3 * self.hidden_size * self.intermediate_size
        return 6.0 * (self.num_layers * (attention + mlp) + self.hidden_size * self.vocab_size)

    @property
    def quadratic_flops(self) -> float:
        """The same of causal attention scores and values, per token squared: 2 products, half of
        the square.
        """
        return 6.0 * self.num_layers * self.hidden_size


def ds_config(*, accumulation: int = 1, **sections: Any) -> dict[str, Any]:
    """The DeepSpeed configuration of every contender: fp32, ZeRO-3, AdamW, clipping; buckets hold
    the whole model.
    """
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 20_000_000},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-4, "weight_decay": 0.01, "torch_adam": True, "fused": True},
        },
        **sections,
    }


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


def start_engine(task: Task, training_data: object = None, **keys: Any) -> ds_hydra.HydraEngine:
    """An engine of ds_hydra for `task`, `keys` in its section; plans are made in line, so that no
    other contender pays for them.
    """
    section = {
        "context_length": task.shape.context_length,
        "tokens_per_iteration": task.shape.tokens_per_iteration,
        "strategies": list(task.strategies),
        "memory_limit_bytes": task.memory_limit_bytes,
        **keys,
    }
    section["planner"] = {"num_workers": 0, **section.get("planner", {})}
    engine, *_ = ds_hydra.initialize(
        model=task.model.build(task.shape.context_length),
        config=ds_config(hydra=section),
        training_data=training_data,
    )
    return engine

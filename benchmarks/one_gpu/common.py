"""A LLaMA, an engine, rows of tokens and findings, for steps that run engines of their own."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from engines import ds_config

from benchmarks.one_gpu.telling import tell


def say(case: str, *, well: bool | None = None, **found: Any) -> None:
    """What rank 0 found."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        tell(case, found, is_well=well)


def rows_of(lengths: Sequence[int], vocab: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Rows of random tokens, the same on all ranks."""
    random = torch.Generator().manual_seed(seed)
    rows = [torch.randint(1, vocab, (n,), generator=random) for n in lengths]
    return [{"input_ids": row, "labels": row} for row in rows]


def prepare_kernels(lengths: Sequence[int]) -> None:
    """Let kernels of attention make their plans for sequences of these `lengths`, as they do once
    enough has been computed.
    """
    from ds_hydra.engine.model import attention_choice
    from ds_hydra.engine.model.attention_contract import LongSegment

    attention_choice.prepare_kernels(LongSegment.of(lengths, lengths), math.inf)


def llama(
    device: torch.device,
    dtype: torch.dtype,
    *,
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    kv: int,
    vocab: int,
    context: int,
) -> Any:
    """A LLaMA with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv, vocab_size=vocab, max_position_embeddings=context, tie_word_embeddings=False,
        use_cache=False, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    with device:
        return LlamaForCausalLM(config).to(dtype)


def engine_of(
    model: Any,
    *,
    lr: float,
    context: int,
    tokens: int,
    hydra: dict[str, Any] | None = None,
    **sections: Any,
) -> Any:
    """An engine whose plans do not depend on measured times."""
    import ds_hydra
    from ds_hydra.sampler.warm_up import warm_up

    if not dist.is_initialized() or dist.get_rank() == 0:
        warm_up()  # numba compiles the planner for a minute, once a checkout
    if dist.is_initialized():
        dist.barrier()
    config = ds_config(
        hydra={
            "context_length": context,
            "tokens_per_iteration": tokens,
            **(hydra or {}),
            "planner": {"num_workers": 0},
        },
        **{"gradient_clipping": 1.0, **sections},
    )
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr, weight_decay=0.0, fused=True)
    return ds_hydra.initialize(model=model, optimizer=optimizer, config=config)[0]

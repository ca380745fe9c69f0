"""Peak memory of iterations on stand-in ranks beside the formula that MaxLen comes from."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from engines import start_hydra
from models import tiny
from single_process import load_of, random_examples
from torch import Tensor

from ds_hydra.configs.hydra_config import HydraConfig
from ds_hydra.engine.model import attention
from ds_hydra.engine.parallel import recomputation
from ds_hydra.engine.parallel.tensor_parallel import TokenShards
from ds_hydra.engine.parallel.token_cuts import KeysOfRow, TokenLayout, attend_to_all_rows
from ds_hydra.engine.profiling import profiler
from ds_hydra.engine.profiling.memory import count_activation
from ds_hydra.engine.profiling.profile_document import (
    ProbeMicroBatch,
    layer_params,
    nominal_profile,
)
from ds_hydra.sampler.cuts import cut_micro_batch
from ds_hydra.sampler.plan import IterationPlan
from ds_hydra.strategy import Profile, Strategy
from ds_hydra.strategy.profiles.memory_model import MemoryModel, key_value_parts
from ds_hydra.strategy.schemes.scheme import Scheme
from standin import device, process_group

NUM_TOKENS = 768
NUM_SCORED = 4 * NUM_TOKENS
"""Of a sequence that is scored, which no rank trains."""
SIZES: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 344, "num_hidden_layers": 24, "num_key_value_heads": 4},
    "qwen3": {"intermediate_size": 384, "num_hidden_layers": 20, "head_dim": 32},
    "qwen2": {"intermediate_size": 256, "num_hidden_layers": 22, "tie_word_embeddings": False},
}
STRATEGIES = {
    2: (
        "2x<1,1>", "1x<2,1>", "1x<1,2>", "1x<sp2,1>", "1x<1,1>", "2x<1,1;ckpt=8>", "1x<2,1;ckpt=8>",
        "1x<1,2;ckpt=8>", "2x<1,1;ckpt=16;offload>", "1x<1,2;ckpt=8;offload>", "1x<sp2,1;ckpt=16;offload>",
        "2x<1,1;gather>", "1x<2,1;gather>", "1x<sp2,1;gather>",
    ),
    8: ("8x<1,1;gather>", "2x<sp4,1;gather>", "2x<sp4,1;ckpt=20;gather>", "2x<sp4,1;ckpt=20;offload;gather>"),
}  # fmt: skip
"""By the number of ranks."""

_per_sequence = attention.attention_per_sequence


class _Fused(torch.autograd.Function):
    """Attention that keeps what a fused kernel keeps: inputs, output, one number a row and head."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scoring: Any, lengths: Any) -> Tensor:
        def run() -> tuple[Tensor, Tensor]:
            out = _on_device(_per_sequence(*_on_host(q, k, v), scoring, lengths))
            return out, torch.empty(q.shape[1:3], dtype=torch.float32, device=q.device)

        out, sums = recomputation.run_once(run, keeps=True)
        ctx.save_for_backward(q, k, v, out, sums)
        ctx.how = scoring, lengths
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        recomputation.settle()
        inputs = [t.requires_grad_() for t in _on_host(*ctx.saved_tensors[:3])]
        with torch.enable_grad():
            out = _per_sequence(*inputs, *ctx.how)
        found = torch.autograd.grad(out, inputs, *_on_host(grad))
        return (*map(_on_device, found), None, None)


def _on_host(*tensors: Tensor) -> list[Tensor]:
    return [device.extension().as_host(tensor.detach()).detach() for tensor in tensors]


def _on_device(host: Tensor) -> Tensor:
    out = torch.empty(host.shape, dtype=host.dtype, device=device.NAME)
    return out.copy_(host)


def _attend(q: Tensor, k: Tensor, v: Tensor, scoring: Any, lengths: Any, *_: Any) -> Tensor:
    return _Fused.apply(q, k, v, scoring, lengths)


def _full_pipelines(strategy: Strategy, num_tokens: int = NUM_TOKENS) -> IterationPlan:
    """Plan in which a pipeline has as many micro-batches of one sequence as stages."""
    return profiler.probe_plan(strategy, dist.get_world_size(), ProbeMicroBatch(num_tokens))


def _formula_bytes(
    stage_model: Any,
    strategy: Strategy,
    num_tokens: int = NUM_TOKENS,
    *,
    forward_only: bool = False,
) -> float:
    """Of the tightest rank, with counted activations and the exchange buffers of a layer."""
    scheme = strategy.schemes[0]
    document = nominal_profile(stage_model, [scheme])
    hydra = HydraConfig(context_length=NUM_TOKENS, tokens_per_iteration=NUM_TOKENS)
    layer = count_activation(stage_model, scheme.tp, hydra)
    document["memory"] |= {
        "activation_bytes_per_token_per_layer_per_hidden": {str(scheme.tp): layer},
        "exchange_bytes": 4 * 4 * layer_params(stage_model),
    }
    memory = replace(Profile.from_json(document).memory, forward_only=forward_only)
    return memory.rank_bytes(scheme, dist.get_world_size(), num_tokens)


def _peak_of_passes(engine: Any, text: str, num_tokens: int, vocab_size: int) -> float:
    """The most bytes of any rank in full pipelines of a strategy."""
    accelerator, propagator = get_accelerator(), engine.propagator
    strategy = Strategy.parse(text)
    propagator.prepare([strategy])
    plan = _full_pipelines(strategy, num_tokens)
    examples = random_examples(plan.lengths, vocab_size, seed=1)
    if not engine.global_steps:  # moments are allocated in the first step
        engine.train_batch(examples, strategy=text)
    grads_P = engine._zero_gradient_shards()
    gc.collect()
    accelerator.reset_peak_memory_stats()
    propagator.train(plan, load_of(examples), grads_P, 1.0)
    return propagator.max_over_ranks(accelerator.max_memory_allocated())


def measured_profile() -> dict[str, Any]:
    """What a measured profile leaves free, what the communicators take of it, and how many tokens
    the longest micro-batch of its measurement had beside MaxLen.
    """
    engine = start_hydra(
        tiny("llama").to(device.NAME),
        hydra={
            "context_length": 64,
            "strategies": ["2x<1,1>", "1x<1,2>"],
            "profiling": {"repeats": 1, "lengths": [16, 32, 64]},
            "tokens_per_iteration": 4096,
        },
    )
    plans: list[IterationPlan] = []
    train = engine.propagator.train

    def noting(plan: IterationPlan, *arguments: Any) -> Any:
        plans.append(plan)
        return train(plan, *arguments)

    with mock.patch.object(engine.propagator, "train", noting):
        profile = engine.source.candidates.ensure_profile()
    last = plans[-1]
    tokens = [last.lengths[n] for n in last.pipelines[0].micro_batches[0]]
    engine.destroy()
    return {
        "reserved": profile.memory.reserved_bytes,
        "outside": len(process_group.sizes) * device.COMMUNICATOR_BYTES,
        "tokens": sum(tokens),
        "longest": max(tokens),
        "num_micro_batches": len(last.pipelines[0].micro_batches),
    }


VOCABULARIES = ("2x<1,1>", "1x<2,1>", "1x<sp2,1>", "1x<1,2>", "2x<1,1;gather>", "1x<2,1;gather>")
PROFILED_TOKENS = 256
"""Of the micro-batch that memory of a token is measured with, as the profiler does."""


def vocabulary(size: str) -> dict[str, dict[str, float]]:
    """By strategy: the most bytes of any rank in the passes of a model whose vocabulary outweighs
    its layers, and what the formula says with activations that the profiler measures. `size` may
    end in "tied": embedding and head are one.
    """
    vocab_size = int(size.removesuffix("tied"))
    is_tied = size.endswith("tied")
    sizes = {"hidden_size": 64, "max_position_embeddings": 4096, "tie_word_embeddings": is_tied}
    model = tiny("llama", vocab_size=vocab_size, num_hidden_layers=4, **sizes)
    model = model.bfloat16().to(device.NAME)
    model.tie_weights()  # the stand-in's tensors are new parameters
    engine = start_hydra(model, bf16={"enabled": True}, hydra={"context_length": PROFILED_TOKENS})
    propagator, stage_model = engine.propagator, engine.propagator.stage_model
    found = {}
    with mock.patch.object(attention, "attention_per_sequence", _attend):
        model = profiler._measure_memory(
            propagator,
            {s.schemes[0]: s for s in map(Strategy.parse, VOCABULARIES)},
            engine._hydra_config,
        )
        for text in VOCABULARIES:
            strategy = Strategy.parse(text)
            in_passes = _peak_of_passes(engine, text, PROFILED_TOKENS, vocab_size)
            document = nominal_profile(stage_model, [strategy.schemes[0]])
            memory = Profile.from_json({**document, "memory": model["memory"]}).memory
            # Of a micro-batch that is one chunk, a token's activations have its logits already
            once = replace(memory, logit_chunk_bytes=0.0)
            of_rank = strategy.schemes[0], 2, PROFILED_TOKENS
            found[text] = {
                "passes": in_passes,
                "formula": memory.rank_bytes(*of_rank),
                "with logits once": once.rank_bytes(*of_rank),
            }
    engine.destroy()
    return found


def peaks(family: str) -> dict[str, dict[str, float]]:
    """By strategy: the most bytes of any rank in passes, and in the optimizer's step; what the
    formula says.
    """
    accelerator = get_accelerator()
    sizes = {"hidden_size": 128, "vocab_size": 512, "max_position_embeddings": 4096}
    model = tiny(family, **sizes, **SIZES[family]).bfloat16().to(device.NAME)
    engine = start_hydra(model, bf16={"enabled": True}, hydra={"context_length": 4096})
    propagator = engine.propagator
    found = {}
    with mock.patch.object(attention, "attention_per_sequence", _attend):
        for text in STRATEGIES[dist.get_world_size()]:
            strategy = Strategy.parse(text)
            in_passes = _peak_of_passes(engine, text, NUM_TOKENS, 512)
            accelerator.reset_peak_memory_stats()
            engine._gradients.deposit()
            engine.set_gradient_accumulation_boundary(True)
            deepspeed.DeepSpeedEngine.step(engine)
            in_step = propagator.max_over_ranks(accelerator.max_memory_allocated())
            plan = _full_pipelines(strategy, NUM_SCORED)
            examples = random_examples(plan.lengths, 512, seed=1)
            gc.collect()
            accelerator.reset_peak_memory_stats()
            engine.score(examples, strategy=text, entropy=True)
            found[text] = {
                "passes": in_passes,
                "step": in_step,
                "scores": propagator.max_over_ranks(accelerator.max_memory_allocated()),
                "forward": _formula_bytes(
                    engine.propagator.stage_model, strategy, NUM_SCORED, forward_only=True
                ),
                "formula": _formula_bytes(engine.propagator.stage_model, strategy),
            }
    engine.destroy()
    return found


class _Kept(torch.autograd.Function):
    """What a fused kernel of attention allocates, forward and backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return torch.zeros_like(q.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return tuple(torch.zeros_like(x) for x in ctx.saved_tensors)


def gathered_keys(num_parts: str) -> dict[str, float]:
    """Copies of the keys and values of all rows that attention to them takes in forward, and in
    backward with the gradient of queries; those that MaxLen counts, and of the largest part's
    queries.
    """
    size, accelerator = dist.get_world_size(), get_accelerator()
    num_heads, head_dim, num_tokens = 8 if num_parts == "4" else 1, 64, 1024 * size
    rows = cut_micro_batch([0], [num_tokens], size)
    group = TokenShards(dist.new_group([*range(size)]), size)
    layout = TokenLayout(rows=group, row=dist.get_rank())
    keys = KeysOfRow.find(rows, layout, torch.device(device.NAME))
    shape = (1, num_heads, keys.row_tokens, head_dim)
    query, key, value = (torch.randn(shape).to(device.NAME).requires_grad_() for _ in range(3))
    grad_out = torch.zeros_like(query.transpose(1, 2))
    copy_bytes = 2 * query.nbytes * size
    forward, backward = [], []
    for _ in range(4):  # blocks that another stream still reads are freed late
        before = _at_rest()
        out = attend_to_all_rows(query, key, value, keys, lambda q, k, v, _: _Kept.apply(q, k, v))
        forward.append(accelerator.max_memory_allocated() - before)
        keys.before_backward(out)
        before = _at_rest()
        out.backward(grad_out)
        backward.append(accelerator.max_memory_allocated() - before)
        query.grad = key.grad = value.grad = out = None
    memory = MemoryModel(
        num_layers=1, hidden_size=num_heads * head_dim, vocab_size=0, activation_bytes={1: 1.0},
        state_bytes=0, sharded_fraction=0, memory_bytes=0, reserved_bytes=0, safety_margin_bytes=0,
        input_bytes=4, num_heads=num_heads,
    )  # fmt: skip
    scheme = Scheme(1, 1, cp=size)
    counted = (
        memory.rank_bytes(scheme, size, num_tokens)
        - memory.rank_bytes(replace(scheme, cp=1), size, num_tokens) / size
    )
    return {
        "forward": min(forward) / copy_bytes,
        "backward": min(backward) / copy_bytes,
        "counted": counted / copy_bytes,
        "query": max(key_value_parts(num_heads, int(num_parts))) / num_heads / (2 * size),
    }


def _at_rest() -> int:
    """Bytes that are allocated once all streams are done; peaks count from here."""
    gc.collect()
    get_accelerator().synchronize()
    dist.barrier()
    get_accelerator().reset_peak_memory_stats()
    return get_accelerator().memory_allocated()

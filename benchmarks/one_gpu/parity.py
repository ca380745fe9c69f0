"""Gradients of the whole engine against one process in fp32 that runs each sequence alone: every
kind of scheme, fp32 and bf16; repeated bits, host waits, races.

    python -m benchmarks.one_gpu.parity [--races]
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from engines import gather_gradients, start_hydra
from models import VOCAB_SIZE, tiny
from single_process import Examples, load_of, random_examples, token_mean_gradients
from standin.checks import OTHERS, SHORT, STRATEGIES
from test_engine_parity import LENGTHS, hand_plan, relative_errors
from torch import Tensor, nn

from benchmarks.one_gpu.device import HAS_GPU, join
from benchmarks.one_gpu.telling import skip, tell, trying
from ds_hydra.engine.iteration import gather_outcomes
from ds_hydra.engine.model import attention_contract, attention_cudnn
from ds_hydra.engine.model.attention_contract import LONG_TOKENS
from ds_hydra.errors import HydraError
from ds_hydra.strategy import Strategy

TOLERANCE = {"fp32": 1e-4 if HAS_GPU else 1e-5}
"""Kernels of a device choose their blocks by the shapes, and so the order of their sums."""
HALF_TOLERANCE, OVER_PLAIN = 2e-2, 1.5
"""Of bf16: less than this, or than so many times the error of plain transformers in bf16."""
ALONE = ("1x<1,1>", "1x<1,1;ckpt=2>", "1x<1,1;gather>")
FAMILIES = ("qwen3", "gemma3", "qwen3_moe", "lora")
NODES = {"link": {"devices_per_node": 2}}
COMPILED = {"compile_layers": True}
CUDNN = {"attention": "cudnn"}
_PHASES = "1x<sp2,1> then 2x<1,1>"
_PARTS = ("1x<sp2,1>", "1x<sp2,1;gather>", "1x<cp2,1>", "1x<cp2,1;gather>")
CASES: dict[int, tuple[tuple[str, str, Sequence[str], dict[str, Any]], ...]] = {
    1: (
        ("llama", "bf16", ("1x<1,1>", "1x<1,1;gather>"), CUDNN),
        ("llama", "bf16", ("1x<1,1>", "1x<1,1;gather>"), CUDNN | COMPILED),
        ("llama", "fp32", ALONE, {}),
        ("llama", "bf16", ALONE, {}),
        *((family, "bf16", ALONE[:1], {}) for family in FAMILIES),
    ),
    2: (
        ("llama", "bf16", (*_PARTS, "2x<1,1;gather>", "1x<2,1;gather>"), {}),
        ("llama", "bf16", ("2x<1,1;gather>", *_PARTS, "1x<2,1>", "1x<1,2>"), COMPILED),
        ("llama", "bf16", ("1x<sp2,1>", "1x<2,1>"), CUDNN),
        ("qwen3_moe", "bf16", ("1x<sp2,1;ep=2>",), {}),
        ("llama", "fp32", _PARTS, {}),
        ("llama", "bf16", SHORT, {}),
        ("llama", "fp32", (*STRATEGIES[2], *OTHERS, _PHASES), {}),
    ),
    4: (
        ("llama", "bf16", ("1x<sp2,cp2,1>", "1x<cp2,sp2,1>", "1x<cp2,sp2,1;gather>"), {}),
        ("qwen3_moe", "bf16", ("2x<sp2,1;ep=2>", "1x<4,1;ep=2>"), {}),
        ("llama", "fp32", ("4x<1,1>", "1x<2,2>", "1x<cp2,sp2,1;gather>", "4x<1,1;hpz>"), NODES),
        ("llama", "bf16", ("4x<1,1>", "1x<2,2>", "1x<2,1> + 1x<1,2>", "1x<cp4,1>"), {}),
        ("llama", "fp32", (*STRATEGIES[4], "1x<cp2,2,1>"), {}),
    ),
}
"""By number of ranks: family, dtype, strategies, keys of the configuration; what one GPU has not
been asked yet comes first.
"""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Subject:
    """A tiny model, the engine that trains it, and what one process computes."""

    def __init__(self, family: str, dtype: str, device: torch.device, **hydra: Any):
        model = _build(family)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.to(DTYPES[dtype]))
        self.names = [name for name, _ in model.named_parameters()]
        self.examples: Examples = random_examples(LENGTHS, VOCAB_SIZE, seed=1)
        self.loss, self.wanted = token_mean_gradients(copy.deepcopy(model), self.examples)
        self.plain_error = 0.0
        if dtype != "fp32":
            self.plain_error = self._error_of_plain(copy.deepcopy(model), DTYPES[dtype], device)
        sections = {} if dtype == "fp32" else {dtype: {"enabled": True}}
        model.to(device, DTYPES[dtype])
        self.engine = start_hydra(model, hydra=hydra, **sections)

    def _error_of_plain(self, model: nn.Module, dtype: torch.dtype, device: torch.device) -> float:
        on_device = [{k: v.to(device) for k, v in e.items()} for e in self.examples]
        _, grads = token_mean_gradients(model.to(device, dtype), on_device)
        return self.error_of([g.float().cpu() for g in grads])

    def error_of(self, grads: Sequence[Tensor]) -> float:
        """Largest error of a gradient."""
        return max(relative_errors(grads, self.wanted, self.names).values())

    def train(self, text: str) -> tuple[float, list[Tensor]]:
        """Loss and gradients under a strategy. Collective over all ranks."""
        engine, strategy = self.engine, Strategy.parse(text)
        if strategy.phases:
            engine.propagator.prepare(strategy.in_turn)
        else:
            engine.propagator.prepare([strategy])
        plan = hand_plan(strategy, self.examples)
        grads_P = engine._zero_gradient_shards()
        outcome = engine.propagator.train(plan, load_of(self.examples), grads_P, 1.0)
        losses = [o.loss_sum for o in gather_outcomes(engine.propagator, outcome).ranks]
        loss = sum(losses) / plan.num_label_tokens
        return loss, [g.float().cpu() for g in gather_gradients(engine, grads_P)]


def _build(family: str) -> nn.Module:
    if family != "lora":
        return tiny(family)
    import peft

    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    return peft.get_peft_model(tiny("llama"), config)


def check(case: tuple[str, str, Sequence[str], dict[str, Any]], device: torch.device) -> None:
    """Errors of all strategies of a case; collective over all ranks."""
    family, dtype, strategies, hydra = case
    words = {"link": "on two nodes", "compile_layers": "compiled", "attention": "with cuDNN"}
    name = " ".join([family, dtype, *(words.get(key, key) for key in hydra)])
    attention_cudnn._WORTH_FLOPS = 0
    attention_contract.LONG_TOKENS = 16 if hydra.get("attention") == "cudnn" else LONG_TOKENS
    subject = Subject(family, dtype, device, **hydra)
    for text in strategies:
        try:
            if "attention" in hydra:
                subject.train(text)  # heads are met
            loss, grads = subject.train(text)
        except HydraError as error:
            tell(f"{name}, {text}", str(error), wanted="gradients", is_well=False)
            continue
        error = max(subject.error_of(grads), abs(loss / subject.loss - 1))
        if dtype == "fp32":
            limit, wanted = TOLERANCE["fp32"], f"at most {TOLERANCE['fp32']:g}"
        else:
            limit = max(HALF_TOLERANCE, OVER_PLAIN * subject.plain_error)
            wanted = f"at most {limit:.2g}; transformers {subject.plain_error:.2g}"
        tell(f"{name}, {text}", error, wanted=wanted, is_well=error <= limit)
    subject.engine.destroy()


def check_repeats(device: torch.device, text: str) -> None:
    """Bits of two equal iterations with `hydra.deterministic`; collective over all ranks."""
    subject = Subject("llama", "bf16", device, deterministic=True)
    (loss, grads), (again, grads_again) = subject.train(text), subject.train(text)
    is_same = loss == again and all(map(torch.equal, grads, grads_again))
    case, found = (
        f"two iterations of {text}, deterministic",
        "the same bits" if is_same else "other bits",
    )
    tell(case, found, wanted="the same bits", is_well=is_same)
    subject.engine.destroy()


def check_steps(device: torch.device, compiled: bool) -> None:
    """Losses of three whole iterations on one rank against AdamW on one process."""
    model = tiny("llama")
    examples = random_examples(LENGTHS, VOCAB_SIZE, seed=1)
    wanted = train_alone(copy.deepcopy(model), examples, 3)
    engine = start_hydra(model.to(device), hydra={"compile_layers": compiled})
    losses = [float(engine.train_batch(examples, strategy="1x<1,1>")) for _ in range(3)]
    error = max(abs(a / b - 1) for a, b in zip(losses, wanted, strict=True))
    name = "three iterations, compiled" if compiled else "three iterations"
    tell(f"{name}: loss", error, wanted="at most 1e-4", is_well=error <= 1e-4)
    if not compiled:
        _count_waits(engine, examples)
    engine.destroy()


def train_alone(model: nn.Module, examples: Examples, num_steps: int) -> list[float]:
    """Losses of AdamW in one process, as `start_hydra` sets it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    losses = []
    for _ in range(num_steps):
        loss, grads = token_mean_gradients(model, examples)
        losses.append(loss)
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            parameter.grad = grad
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return losses


def _count_waits(engine: Any, examples: Examples) -> None:
    case = "host waits of an iteration"
    if not HAS_GPU:
        skip(case, "a CPU waits for nothing")
        return
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        engine.train_batch(examples, strategy="1x<1,1>")
    torch.cuda.set_sync_debug_mode("default")
    places = [
        f"{w.filename.rpartition('/')[2]}:{w.lineno}" for w in seen if "synchron" in str(w.message)
    ]
    found = f"{len(places)}: {', '.join(dict.fromkeys(places))}"
    tell(case, found, wanted="at most 3, none for each micro-batch", is_well=len(places) <= 3)


def cases_of(world: int) -> Iterator[tuple[str, str, Sequence[str], dict[str, Any]]]:
    """Fewer on CPU ranks, where other tests have all of them."""
    for case in CASES[world]:
        family, dtype, strategies, hydra = case
        if not HAS_GPU and hydra.keys() & {"compile_layers", "attention"}:
            skip(f"{family} {dtype}, {', '.join(hydra)}", "a CPU has no such kernels")
            continue
        step = 1 if HAS_GPU or (dtype, world) == ("fp32", 1) else 2 if dtype == "fp32" else 3
        yield family, dtype, strategies[::step], hydra


def main() -> None:
    device = join()
    torch.backends.cuda.matmul.allow_tf32 = False
    world = dist.get_world_size()
    if "--races" in sys.argv:  # under TORCH_CUDA_SANITIZER=1
        check(("llama", "bf16", SHORT, {}), device)
        return
    for case in cases_of(world):
        check(case, device)
    if world == 1:
        check_steps(device, compiled=False)
        if HAS_GPU:
            with trying("compiled layers"):
                check_steps(device, compiled=True)
        else:
            skip("three iterations, compiled", "a CPU compiles for a minute")
    if world < 4:
        check_repeats(device, {1: "1x<1,1>", 2: "1x<2,1>"}[world])
    dist.barrier()


if __name__ == "__main__":
    main()

"""A tiny LLaMA on all ranks: whether every kind of scheme gives the gradients of one process, and
whether exchanges and collectives of many strategies in a row ever hang.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from transformers import LlamaConfig

from ds_hydra.configs.hydra_config import LinkConfig
from ds_hydra.engine.doctor.findings import Finding, Status
from ds_hydra.engine.doctor.vigil import Vigil
from ds_hydra.engine.model.meta_model import make_model
from ds_hydra.engine.model.stage_model import StageModel
from ds_hydra.engine.profiling.profile_document import nominal_profile
from ds_hydra.engine.propagation import Propagator
from ds_hydra.errors import HydraConfigError
from ds_hydra.sampler.plan import GlobalBatch, IterationPlan
from ds_hydra.sampler.planner import plan_iteration
from ds_hydra.strategy import Profile, Scheme, Strategy
from ds_hydra.strategy.schemes.placement import groups_of

TOLERANCE = {"cpu": 1e-5}
_DEVICE_TOLERANCE = 1e-4
"""fp32 kernels of a device choose their blocks by the shapes, and so the order of their sums."""
_HALF_TOLERANCE = 1e-1
"""Of bf16 against fp32 of the same weights: one rank alone is off by 2e-2."""
_LENGTHS = (40, 7, 1, 33, 2, 64, 12, 5, 21, 3, 17, 9)
_VOCAB_SIZE = 251
_MAX_TP, _MAX_PP = 8, 4


def pick_strategies(num_ranks: int) -> tuple[Strategy, ...]:
    """Five strategies at most: data, tensor, pipeline and sequence parallelism, and a mixture.

    >>> [str(s) for s in pick_strategies(4)]
    ['4x<1,1>', '1x<4,1>', '1x<1,4>', '2x<sp2,1>', '1x<2,1> + 1x<1,2>']
    >>> [str(s) for s in pick_strategies(3)]
    ['3x<1,1>', '1x<2,1>', '1x<1,3>', '1x<sp2,1>', '1x<2,1> + 1x<1,1>']
    """
    one = Scheme(tp=1, pp=1)
    tp = Scheme(tp=min(_MAX_TP, 1 << (num_ranks.bit_length() - 1)), pp=1)
    pp = Scheme(tp=1, pp=min(_MAX_PP, num_ranks))
    alone = [one]
    if num_ranks > 1:
        alone += [tp, pp, Scheme(tp=1, pp=1, sp=2)]
    strategies = [Strategy.alike(scheme, num_ranks) for scheme in alone]
    if num_ranks >= 4:
        rest = (one,) * (num_ranks - 4)
        strategies.append(Strategy((Scheme(tp=2, pp=1), Scheme(tp=1, pp=2), *rest)))
    elif num_ranks == 3:
        strategies.append(Strategy((Scheme(tp=2, pp=1), one)))
    elif num_ranks == 2:
        strategies.append(Strategy((one,)))  # a rank is idle
    return tuple(strategies)


class SmallModel:
    """The model, its shards on this rank, and what one process computes. Equal on all ranks."""

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.float32):
        """Shards in `dtype`; what one process computes with the same weights is fp32."""
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            vocab_size=_VOCAB_SIZE,
            max_position_embeddings=256,
            initializer_range=0.1,  # larger than usual: attention and norms shall matter
            tie_word_embeddings=False,
        )
        model = make_model(config, dtype=torch.float32, attn_implementation="sdpa").to(device)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.to(dtype))
        generator = torch.Generator().manual_seed(1)
        self.examples = [
            torch.randint(0, _VOCAB_SIZE, (length,), generator=generator) for length in _LENGTHS
        ]
        self.num_labels = sum(length - 1 for length in _LENGTHS)
        self.loss, grads = self._compute_alone(model, device)
        self.wanted_P = [_shard(grad) for grad in grads]
        model.to(dtype)
        for parameter in model.parameters():
            parameter.ds_tensor = _shard(parameter.detach())
        self.tolerance = TOLERANCE.get(device.type, _DEVICE_TOLERANCE)
        if dtype != torch.float32:
            self.tolerance = _HALF_TOLERANCE
        self.stage_model = StageModel(model)
        self.stage_model.to_device(device)

    def _compute_alone(self, model: nn.Module, device: torch.device) -> tuple[float, list[Tensor]]:
        """Loss and gradients of one process that runs each sequence alone."""
        loss = 0.0
        for tokens in (example.to(device) for example in self.examples):
            logits = model(input_ids=tokens[None], use_cache=False).logits[0].float()
            part = F.cross_entropy(logits[:-1], tokens[1:], reduction="sum") / self.num_labels
            if len(tokens) > 1:
                part.backward()
                loss += float(part.detach())
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
        model.zero_grad()
        return loss, grads

    def plan(self, strategy: Strategy) -> IterationPlan:
        """All examples under `strategy`."""
        profile = Profile.from_json(nominal_profile(self.stage_model, strategy.schemes))
        batch = GlobalBatch(
            iteration=0,
            sample_indices=tuple(range(len(_LENGTHS))),
            lengths=_LENGTHS,
            num_label_tokens=self.num_labels,
        )
        return plan_iteration(
            batch, strategies=(strategy,), profile=profile, num_devices=dist.get_world_size()
        )

    def train(self, propagator: Propagator, strategy: Strategy) -> tuple[float, list[Tensor]]:
        """Loss and this rank's gradient shards under `strategy`. Collective over all ranks."""
        plan = self.plan(strategy)
        propagator.check_plan(plan)
        grads_P = [torch.zeros_like(wanted) for wanted in self.wanted_P]

        def load(position: int) -> tuple[Tensor, Tensor]:
            tokens = self.examples[plan.sample_indices[position]]
            return tokens, tokens

        outcome = propagator.train(plan, load, grads_P, 1.0)
        loss = torch.tensor(outcome.loss_sum, dtype=torch.float64, device=grads_P[0].device)
        dist.all_reduce(loss)
        return float(loss) / self.num_labels, grads_P

    def error_of(self, loss: float, grads_P: Sequence[Tensor], propagator: Propagator) -> float:
        """Largest relative error of the loss and of any gradient. Collective over all ranks."""
        names = zip(grads_P, self.wanted_P, strict=True)
        squares = torch.stack(
            [torch.stack([(g - w).square().sum(), w.square().sum()]) for g, w in names]
        ).double()
        dist.all_reduce(squares)
        off, norm = squares.sqrt().T
        worst = float((off / norm.clamp_min(1e-3 * norm.max())).max())
        return propagator.max_over_ranks(max(worst, abs(loss / self.loss - 1)))


def _shard(tensor: Tensor) -> Tensor:
    """This rank's flat partition, padded as ZeRO-3 pads."""
    rank, world = dist.get_rank(), dist.get_world_size()
    size = -(-tensor.numel() // world)
    padded = F.pad(tensor.flatten(), (0, size * world - tensor.numel()))
    return padded[rank * size : (rank + 1) * size].clone()


def open_propagator(
    model: SmallModel, strategies: Sequence[Strategy], *, overlap: bool
) -> Propagator:
    """Collective over all ranks; the caller closes it."""
    num_groups = len(set().union(*map(groups_of, strategies))) + 4
    propagator = Propagator(
        model.stage_model,
        device=model.wanted_P[0].device,
        max_groups=num_groups,
        link_config=LinkConfig(overlap=overlap),
    )
    propagator.prepare(strategies)
    return propagator


def check_halves(device: torch.device, vigil: Vigil, *, overlap: bool) -> Finding:
    """Gradients in bf16, which the kernels that train compute, under data, tensor and pipeline
    parallelism. Collective over all ranks.
    """
    with vigil.step("one process alone, bf16"):
        model = SmallModel(device, torch.bfloat16)
    return _check_apart(model, vigil, pick_strategies(dist.get_world_size())[:3], "bf16", overlap)


def check_gathered(model: SmallModel, vigil: Vigil, *, overlap: bool) -> Finding:
    """Gradients where layers are gathered for every pass. Collective over all ranks."""
    gathered = Strategy.alike(Scheme(tp=1, pp=1, gather=True), dist.get_world_size())
    # The first time nothing is posted beside computation
    found = _check_apart(model, vigil, [gathered, gathered], "gathered", overlap)
    return replace(found, check="gathered layers")


def _check_apart(
    model: SmallModel, vigil: Vigil, strategies: Sequence[Strategy], name: str, overlap: bool
) -> Finding:
    with vigil.step(f"connecting groups, {name}"):
        propagator = open_propagator(model, strategies, overlap=overlap)
    found = check_parity(model, propagator, vigil, name, strategies)
    propagator.close()
    return found


def check_streamed_gradients(model: SmallModel, vigil: Vigil, *, overlap: bool) -> Finding:
    """Gradients where all layers stream from a home. Collective over all ranks."""
    streamed = Strategy.alike(Scheme(tp=1, pp=1, stream=True), dist.get_world_size())
    name, check = "from a home", "streamed layers"
    try:
        with vigil.step("opening a home"):
            propagator = open_propagator(model, [streamed], overlap=overlap)
    except HydraConfigError as error:
        advice = "leave stream out of hydra.strategies here"
        return Finding(check=check, status=Status.WARNING, text=str(error), advice=advice)
    found = check_parity(model, propagator, vigil, name, [streamed])
    propagator.close()
    return replace(found, check=check)


def check_parity(
    model: SmallModel,
    propagator: Propagator,
    vigil: Vigil,
    name: str,
    strategies: Sequence[Strategy],
) -> Finding:
    """Gradients under every strategy against those of one process. Collective over all ranks."""
    errors = {}
    for strategy in strategies:
        with vigil.step(f"gradients of {strategy}, {name}"):
            loss, grads_P = model.train(propagator, strategy)
            name_of = f"{strategy}, again" if str(strategy) in errors else str(strategy)
            errors[name_of] = model.error_of(loss, grads_P, propagator)
    worst = max(errors, key=errors.__getitem__)
    # Also where it is no number
    wrong = [text for text, error in errors.items() if not error <= model.tolerance]
    count = len({*strategies})
    tried = "1 strategy" if count == 1 else f"{count} strategies"
    text = f"{tried}, {name}: largest error {errors[worst]:.1e} ({worst})"
    return Finding.judge(
        "gradients",
        f"{text}; wrong: {', '.join(wrong)}" if wrong else text,
        is_well=not wrong,
        otherwise=Status.PROBLEM,
        advice="report this with the JSON; meanwhile name strategies that are right in hydra.strategies",
        figures={"errors": errors, "tolerance": model.tolerance, "strategies": list(errors)},
    )


def check_hangs(
    model: SmallModel, propagator: Propagator, vigil: Vigil, seconds: float, name: str
) -> Finding:
    """Iterations under strategies drawn at random, ranks delayed at random, the device synchronised
    at random. Collective over all ranks; a hang ends in the vigil.
    """
    strategies = pick_strategies(propagator.num_ranks)
    common, own = np.random.default_rng(0), np.random.default_rng(1 + propagator.rank)
    is_over = threading.Event()
    disturbing = threading.Thread(
        target=_disturb, args=(propagator.device, is_over, own), daemon=True
    )
    disturbing.start()
    begin, count, worst = time.monotonic(), 0, 0.0
    try:
        while True:
            strategy = strategies[common.integers(len(strategies))]
            with vigil.step(f"iteration {count} of {name}, {strategy}"):
                time.sleep(own.random() * 0.02)
                loss, _ = model.train(propagator, strategy)
                worst = max(worst, abs(loss / model.loss - 1))
                count += 1
                elapsed = propagator.max_over_ranks(time.monotonic() - begin)
            if elapsed >= seconds:
                break
    finally:
        is_over.set()
        disturbing.join()
    text = f"{count} iterations under {len(strategies)} strategies, {name}, none hung"
    is_well = worst <= 10 * model.tolerance
    moved = f", but the loss of the same mini-batch moved by {worst:.1e}"
    return Finding.judge(
        "hangs",
        text if is_well else text + moved,
        is_well=is_well,
        otherwise=Status.PROBLEM,
        advice='set "link": {"overlap": false} in the "hydra" section, and report this with the JSON',
        figures={"iterations": count, "seconds": elapsed, "loss_error": worst},
    )


def _disturb(device: torch.device, is_over: threading.Event, own: np.random.Generator) -> None:
    """Synchronise `device` at random points, as an allocator that runs full does."""
    if device.type == "cpu":
        return
    accelerator = get_accelerator()
    accelerator.set_device(device.index)  # a new thread starts on device 0
    while not is_over.wait(own.random() * 0.1):
        accelerator.synchronize()

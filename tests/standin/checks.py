"""What is checked on stand-in ranks. Every function runs on all of them and returns JSON values."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from engines import start_hydra
from models import VOCAB_SIZE, tiny
from peer_homes import homes_in_parts
from single_process import num_label_tokens, random_examples, token_mean_gradients
from test_engine_parity import LENGTHS, hand_plan, relative_errors

from ds_hydra.engine import propagation
from ds_hydra.engine.ranks.agreement import gather_rows
from ds_hydra.engine.transfer import link_session
from ds_hydra.strategy import Strategy
from ds_hydra.zero_link import exchange, messages
from standin import device, process_group
from standin.streams import observer

STREAMED = ("2x<1,1;stream>", "1x<2,1;stream>", "1x<1,2;stream=1>", "1x<sp2,1;stream>")
STRATEGIES = ("2x<1,1>", "1x<2,1>", "1x<1,2>", "1x<sp2,1>", "1x<cp2,1>", "1x<1,1>")

messages.SINGLE_NUMEL = exchange.SINGLE_NUMEL = 64  # tiny models send in place, too


def _start(family: str, **hydra: Any) -> Any:
    model = tiny(family).to("standin")
    model.tie_weights()
    return start_hydra(model, hydra=hydra)


@contextlib.contextmanager
def _observed() -> Iterator[dict[str, Any]]:
    found: dict[str, Any] = {}
    observer.start()
    try:
        yield found
    finally:
        observer.stop()
        found["races"] = observer.races[:3]
        found["num_races"] = len(observer.races)
        found["num_waits"] = sum(observer.waits.values())
        found["waits"] = dict(observer.waits.most_common(12))
        found["num_kernels"] = observer.num_kernels


def _parity(family: str, strategies: tuple[str, ...] = STRATEGIES, **hydra: Any) -> dict[str, Any]:
    """Largest error of a gradient against one process on the CPU, and races, for each strategy."""
    model = tiny(family)
    names = [name for name, _ in model.named_parameters()]
    examples = random_examples(LENGTHS, VOCAB_SIZE, seed=1)
    wanted_loss, wanted = token_mean_gradients(copy.deepcopy(model), examples)
    engine = _start(family, **hydra)
    tensors = [(e["input_ids"], e["labels"]) for e in examples]
    results = {}
    for text in strategies:
        strategy = Strategy.parse(text)
        engine.hydra.prepare_forced(strategy)
        plan = hand_plan(strategy, LENGTHS, num_label_tokens(examples), empty_pipeline=False)
        grads_P = engine._zero_gradient_shards()
        with _observed() as found:
            outcome = engine.hydra.propagator.train(plan, tensors.__getitem__, grads_P, 1.0)
        outcomes = engine.hydra.gather_outcomes(outcome).ranks
        loss = sum(o.loss_sum for o in outcomes) / plan.num_label_tokens
        got = [
            gather_rows(grad_P).flatten()[: spec.numel].view(spec.shape).cpu()
            for spec, grad_P in zip(engine.hydra.stage_model.specs, grads_P, strict=True)
        ]
        found["error"] = max(relative_errors(got, wanted, names).values())
        found["loss_error"] = abs(loss / wanted_loss - 1)
        results[text] = found
    return results


def parity_llama() -> dict[str, Any]:
    return _parity("llama")


def parity_tied_with_shards() -> dict[str, Any]:
    return _parity("llama_tied", tp_sequence_parallel=True)


def parity_checkpointed() -> dict[str, Any]:
    return _parity("qwen3", ("1x<2,1>", "1x<1,2>"), activation_checkpointing=True)


def parity_streamed() -> dict[str, Any]:
    """Homes in parts, which are read and added to one-sidedly."""
    with homes_in_parts("standin", device.extension().as_device):
        return _parity("llama", STREAMED)


def iteration_streamed() -> dict[str, Any]:
    """An iteration of layers that stream, and where host threads waited in it."""
    engine_examples = random_examples(LENGTHS, VOCAB_SIZE, seed=1)
    results = {}
    with homes_in_parts("standin", device.extension().as_device):
        engine = _start("llama_tied")
        for text in STREAMED:
            engine.train_batch(engine_examples, strategy=text)
            with _observed() as found:
                found["loss"] = float(engine.train_batch(engine_examples, strategy=text))
            results[text] = found
    return results


def iteration() -> dict[str, Any]:
    """Host waits and kernels of a whole iteration, optimizer step included."""
    engine = _start("llama")
    examples = random_examples(LENGTHS, VOCAB_SIZE, seed=1)
    results = {}
    for text in STRATEGIES:
        engine.train_batch(examples, strategy=text)
        with _observed() as found:
            found["loss"] = float(engine.train_batch(examples, strategy=text))
        results[text] = found
    return results


def evaluation() -> dict[str, Any]:
    engine = _start("llama")
    examples = random_examples(LENGTHS, VOCAB_SIZE, seed=1)
    with _observed() as found:
        found["losses"] = [float(engine.eval_batch(examples, strategy=s)) for s in STRATEGIES]
    return found


def collectives() -> list[list[str]]:
    """What this rank called on each communicator of all ranks, in order."""
    engine = _start("llama")
    examples = random_examples(LENGTHS, VOCAB_SIZE, seed=1)
    for _, calls in process_group.calls:
        calls.clear()
    for text in STRATEGIES:
        engine.train_batch(examples, strategy=text)
    return [calls for size, calls in process_group.calls if size == dist.get_world_size()]


def without_the_wait_for_slices() -> int:
    """Races where the stream of the passes does not wait for what another thread's stream did."""
    engine = _start("llama")
    examples = random_examples(LENGTHS, VOCAB_SIZE, seed=1)
    engine.train_batch(examples, strategy="2x<1,1>")

    def wait_on_the_host_alone(flags: link_session.Flags, index: int) -> None:
        flags._raised[index].wait()

    with (
        mock.patch.object(link_session.Flags, "wait", wait_on_the_host_alone),
        _observed() as found,
    ):
        engine.train_batch(examples, strategy="2x<1,1>")
    return found["num_races"]


def items() -> dict[str, int]:
    """Host waits of ds_hydra, and of somebody who reads the loss of every micro-batch."""
    engine = _start("llama")
    examples = random_examples(LENGTHS, VOCAB_SIZE, seed=1)
    engine.train_batch(examples, strategy="2x<1,1>")
    original = propagation.Propagator._forward_micro_batch

    count = 0

    def read(*arguments: Any) -> Any:
        nonlocal count
        output = original(*arguments)
        output.sum().item()
        count += 1
        return output

    with _observed() as found:
        engine.train_batch(examples, strategy="2x<1,1>")
    with (
        mock.patch.object(propagation.Propagator, "_forward_micro_batch", read),
        _observed() as with_items,
    ):
        engine.train_batch(examples, strategy="2x<1,1>")
    return {"without": found["num_waits"], "with": with_items["num_waits"], "read": count}


def times_of_the_step() -> list[float]:
    """Step and iteration, ms, where the host waits 200 ms for the optimizer's kernels."""
    engine = _start("llama")
    examples = random_examples(LENGTHS, VOCAB_SIZE, seed=1)
    original = engine.get_global_grad_norm

    def wait() -> Any:
        time.sleep(0.2)
        return original()

    with mock.patch.object(engine, "get_global_grad_norm", wait):
        engine.train_batch(examples, strategy="2x<1,1>")
    return [engine.last_metrics.step_ms, engine.last_metrics.iteration_ms]


@contextlib.contextmanager
def _synchronising() -> Iterator[None]:
    """The device is synchronised before every forward pass, as an allocator that runs full does."""
    original = propagation.Propagator._forward_micro_batch

    def forward(*arguments: Any) -> Any:
        torch.standin.synchronize()
        return original(*arguments)

    process_group.occupies_device = True
    try:
        with mock.patch.object(propagation.Propagator, "_forward_micro_batch", forward):
            yield
    finally:
        process_group.occupies_device = False


UNEVEN = "1x<1,2;stages=3,1>"
"""The second rank has no bucket of its own in two rounds."""


def device_wide_synchronise() -> list[float]:
    """Losses of iterations in which the device is synchronised, all orders compared."""
    engine = _start("llama")
    examples = random_examples(LENGTHS, VOCAB_SIZE, seed=1)
    process_group.checks_order = True
    try:
        with _synchronising():
            return [float(engine.train_batch(examples, strategy=s)) for s in (*STRATEGIES, UNEVEN)]
    finally:
        process_group.checks_order = False


def swapped_collectives() -> str:
    """What two collectives in another order on one rank lead to."""
    group = dist.new_group([0, 1])
    small, large = torch.ones(3, device="standin"), torch.ones(5, device="standin")
    process_group.checks_order = True
    try:
        for tensor in (small, large) if dist.get_rank() else (large, small):
            dist.all_reduce(tensor, group=group, async_op=True)
    except RuntimeError as error:
        return str(error)
    finally:
        process_group.checks_order = False
    return "nothing"


def swapped_messages() -> str:
    """What two messages of a pair, received in another order than sent, lead to."""
    group = dist.new_group([0, 1])
    small, large = torch.ones(3, device="standin"), torch.ones(5, device="standin")
    process_group.checks_order = True
    try:
        if dist.get_rank():
            dist.irecv(large, 0, group)
            dist.irecv(small, 0, group)
        else:
            dist.isend(small, 1, group)
            dist.isend(large, 1, group)
    except RuntimeError as error:
        return str(error)
    finally:
        process_group.checks_order = False
    return "nothing"


def a_tensor_of_the_cpu() -> str:
    """What a collective over a tensor that was left on the CPU leads to."""
    try:
        dist.all_reduce(torch.ones(2))
    except RuntimeError as error:
        return str(error)
    return "nothing"


def mixed_devices() -> str:
    """What a tensor that was left on the CPU leads to."""
    try:
        torch.ones(2, device="standin") + torch.ones(2)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def a_block_freed_early() -> int:
    """Races where memory goes back while another stream uses it."""
    from standin.streams import Stream, stream

    with _observed() as found:
        block = torch.ones(8, device="standin")
        side = Stream()
        side.wait_stream(torch.standin.current_stream())
        with stream(side):
            block.add_(1)
        del block
    return found["num_races"]

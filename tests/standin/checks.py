"""What is checked on stand-in ranks. Every function runs on all of them and returns JSON values."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from engines import gather_gradients, start_hydra
from models import VOCAB_SIZE, tiny
from single_process import load_of, random_examples, token_mean_gradients
from test_engine_parity import LENGTHS, hand_plan, relative_errors

from ds_hydra.engine import HydraEngine, propagation
from ds_hydra.engine.iteration import gather_outcomes
from ds_hydra.engine.parallel import linear, token_cuts
from ds_hydra.engine.transfer import session, stage_weights
from ds_hydra.errors import HydraError
from ds_hydra.strategy import Strategy
from ds_hydra.zero_link.exchange import Link, RoundUnderWay
from standin import process_group
from standin.streams import elsewhere, observer

STRATEGIES = {
    2: (
        "2x<1,1>",
        "1x<2,1>",
        "1x<1,2>",
        "1x<sp2,1>",
        "1x<1,1>",
        "1x<1,2;stages=3,1>",
        "1x<2,1;ckpt=2>",
        "1x<1,2;ckpt=3>",
        "1x<2,1;ckpt=3;offload>",
        "1x<1,2;ckpt=3;offload>",
        "2x<1,1;gather>",
        "1x<2,1;gather>",
    ),
    4: (
        "4x<1,1>",
        "1x<4,1>",
        "1x<1,4>",
        "1x<2,2>",
        "1x<2,1> + 1x<1,2>",
        "1x<1,3> + 1x<1,1>",
        "1x<sp2,2,1>",
        "1x<sp2,1> + 1x<1,2;ckpt=2>",
        "1x<2,1>",
        "1x<sp2,1;gather> + 1x<2,1;gather>",
        "1x<sp4,1> then 1x<sp2,1> + 2x<1,1> then 4x<1,1>",
        "4x<1,1;gather> then 1x<sp4,1;gather> then 1x<sp2,1;gather> + 2x<1,1;gather>",
    ),
}
"""By number of ranks; the second of uneven stages has no bucket of its own in two rounds."""

OTHERS = ("1x<sp2,1;gather>", "1x<cp2,1>", "1x<cp2,1;gather>")
"""Further ones of two ranks."""

OF_LARGE = ("1x<1,2>", "1x<2,1>", "2x<1,1;gather>", "1x<cp2,1>")
"""Those in which more layers and micro-batches are more of everything that an iteration has."""

SHORT = STRATEGIES[2][:5]

token_cuts.LEAST_PART_BYTES = 1  # keys of tiny models travel in parts, too


def start(family: str, num_layers: int | None = None, **hydra: Any) -> Any:
    """An engine on this rank's device."""
    sizes = {} if num_layers is None else {"num_hidden_layers": num_layers}
    model = tiny(family, **sizes).to("standin")
    model.tie_weights()
    return start_hydra(model, hydra=hydra)


@contextlib.contextmanager
def observed() -> Iterator[dict[str, Any]]:
    """Fills in what the device saw inside."""
    found: dict[str, Any] = {}
    observer.start()
    try:
        yield found
    finally:
        observer.stop()
        found["races"] = observer.races[:3]
        found["num_races"] = len(observer.races)
        found["num_waits"] = sum(observer.waits.values())
        found["waits"] = dict(observer.waits.most_common(20))
        found["waited_for"] = dict(observer.waited_for)
        found["num_kernels"] = observer.num_kernels
        found["num_outside"] = observer.num_outside


def parity_of_others(case: str) -> dict[str, Any]:
    """`parity` under `OTHERS`."""
    return parity(case, OTHERS)


def parity_on_nodes(case: str) -> dict[str, Any]:
    """`parity` of weights that are gathered from another node once, or for each pass; four ranks
    are two nodes.
    """
    strategies = ("4x<1,1;hpz>", "4x<1,1;hpz> then 1x<sp4,1;hpz> then 2x<sp2,1;gather>", "4x<1,1>")
    return parity(case, strategies, link={"devices_per_node": 2})


def parity(case: str, strategies: Sequence[str] = (), **hydra: Any) -> dict[str, Any]:
    """Largest error of a gradient against one process on the CPU, and races, for each strategy.

    `case`: a family, and with "+" the names of options to switch on. A strategy that the family
    cannot run gives the reason.
    """
    family, *options = case.split("+")
    model = tiny(family)
    names = [name for name, _ in model.named_parameters()]
    examples = random_examples(LENGTHS, VOCAB_SIZE, seed=1)
    wanted_loss, wanted = token_mean_gradients(copy.deepcopy(model), examples)
    engine = start(family, **dict.fromkeys(options, True), **hydra)
    results: dict[str, Any] = {}
    for text in strategies or STRATEGIES[dist.get_world_size()]:
        strategy = Strategy.parse(text)
        try:
            if strategy.phases:
                engine.propagator.prepare(strategy.in_turn)
            else:
                engine.propagator.prepare([strategy])
        except HydraError as error:
            results[text] = str(error)
            continue
        plan = hand_plan(strategy, examples)
        grads_P = engine._zero_gradient_shards()
        with observed() as found:
            outcome = engine.propagator.train(plan, load_of(examples), grads_P, 1.0)
        outcomes = gather_outcomes(engine.propagator, outcome).ranks
        loss = sum(o.loss_sum for o in outcomes) / plan.num_label_tokens
        got = [g.cpu() for g in gather_gradients(engine, grads_P)]
        found["error"] = max(relative_errors(got, wanted, names).values())
        found["loss_error"] = abs(loss / wanted_loss - 1)
        results[text] = found
    engine.destroy()
    return results


def iteration() -> dict[str, Any]:
    """Whole iterations, optimizer step included, of small and of large models and global batches:
    races, host waits, and kernels outside the model's layers and the optimizer.

    [name of the size][strategy].
    """
    results: dict[str, Any] = {}
    every = (*STRATEGIES[2], *OTHERS)
    for size, num_layers, lengths, strategies in (
        ("small", 4, LENGTHS, every),
        ("large", 8, LENGTHS * 4, OF_LARGE),
    ):
        engine = start("llama", num_layers)
        examples = random_examples(lengths, VOCAB_SIZE, seed=1)
        with _layers_elsewhere():
            for text in strategies:
                engine.train_batch(examples, strategy=text)
                process_group.lone_messages.clear()
                with observed() as found:
                    found["loss"] = float(engine.train_batch(examples, strategy=text))
                found["num_lone_messages"] = len(process_group.lone_messages)
                results.setdefault(size, {})[text] = found
        engine.destroy()
    return results


@contextlib.contextmanager
def _layers_elsewhere() -> Iterator[None]:
    """Kernels of the model's layers, of the loss and of DeepSpeed's step are not "outside"."""
    with contextlib.ExitStack() as stack:
        for owner, name in (
            (propagation.Propagator, "_forward_micro_batch"),
            (HydraEngine, "_step"),
            (torch.autograd, "backward"),
        ):
            original = getattr(owner, name)

            def inside(*arguments: Any, _original: Any = original, **options: Any) -> Any:
                with elsewhere():
                    return _original(*arguments, **options)

            stack.enter_context(mock.patch.object(owner, name, inside))
        yield


def waits_of_phases() -> list[list[dict[str, Any]]]:
    """What the device saw in an iteration of one phase, and of four, of layers that stay and that
    are gathered.
    """
    engine = start("llama")
    examples = random_examples(LENGTHS, VOCAB_SIZE, seed=1)
    seen = []
    of_four = "1x<sp2,1> then 2x<1,1> then 1x<sp2,1> then 2x<1,1>"
    texts = ("1x<sp2,1>", of_four)
    for text in (*texts, *(text.replace(">", ";gather>") for text in texts)):
        strategy = Strategy.parse(text)
        engine.propagator.prepare(strategy.in_turn)
        plan = hand_plan(strategy, examples)
        grads_P = engine._zero_gradient_shards()
        with observed() as found:
            engine.propagator.train(plan, load_of(examples), grads_P, 1.0)
        seen.append(found)
    return [seen[:2], seen[2:]]


def times_of_the_step() -> list[float]:
    """Step and iteration, ms, where the optimizer's kernels take 200 ms."""
    engine = start("llama")
    examples = random_examples(LENGTHS, VOCAB_SIZE, seed=1)
    original = engine._step

    def step(*arguments: Any) -> None:
        time.sleep(0.2)
        original(*arguments)

    with mock.patch.object(engine, "_step", step):
        engine.train_batch(examples, strategy="2x<1,1>")
    return [engine.last_metrics.step_ms, engine.last_metrics.iteration_ms]


def late_reports() -> dict[str, Any]:
    """Iterations of the lines of metrics, and of `last_metrics`, after each of three iterations and
    at the end; norms of gradients, and times.
    """
    found: dict[str, Any] = {"lines": [], "last": [], "norms": [], "wanted": [], "times": []}
    examples = random_examples(LENGTHS, VOCAB_SIZE, seed=1)
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders, device=torch.device("standin", 0))
    engine = start("llama", run_dir=folders[0])

    def note() -> None:
        path = Path(folders[0]) / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        found["lines"].append([json.loads(line)["iteration"] for line in text.splitlines()])
        found["last"].append(engine.last_metrics.iteration)

    for _ in range(3):
        engine.train_batch(examples, strategy="2x<1,1>")
        note()
        squares = torch.stack(torch._foreach_norm(engine._gradients._grads_P)).square().sum()
        dist.all_reduce(squares)
        metrics = engine.last_metrics
        found["norms"].append(metrics.grad_norm)
        found["wanted"].append(float(squares.sqrt()))
        found["times"] += [metrics.step_ms, metrics.iteration_ms - metrics.step_ms]
    engine.destroy()
    note()
    return found


@contextlib.contextmanager
def full_allocator(share: float = 1.0) -> Iterator[None]:
    """That `share` of allocations wait until the device has nothing to do, as where an allocator
    must give cached memory back first.
    """
    chance = random.Random(dist.get_rank())
    process_group.hangs.clear()
    process_group.occupies_device = True
    observer.at_allocation = lambda: chance.random() < share and torch.standin.synchronize()
    try:
        yield
    finally:
        process_group.occupies_device, observer.at_allocation = False, None


@contextlib.contextmanager
def _rounds_under_way() -> Iterator[None]:
    """Rounds end where computation comes to them, not where they are posted: on a device nobody
    waits there.
    """
    rounds: list[tuple[RoundUnderWay, int, Callable[[int], None]]] = []

    def leave(window: session.RoundWindow, count: int) -> None:
        while len(window._on_wire) > count:
            index = next(iter(window._on_wire))
            rounds.append((window._on_wire.pop(index), index, window._is_over))

    def end(of: session.TransferSession, last: int) -> None:
        with of._clock.beside():
            while rounds and rounds[0][1] <= last:
                end_round, index, is_over = rounds.pop(0)
                end_round()
                is_over(index)

    wait_for, finish = session.TransferSession._wait_for, session.TransferSession.finish

    def wait_for_ended(of: session.TransferSession, number: int) -> None:
        if of._next <= number:
            of._catch_up(number + 1)
        end(of, number)
        wait_for(of, number)

    def finish_ended(of: session.TransferSession) -> None:
        finish(of)
        end(of, len(of._schedule.transfers))

    with (
        mock.patch.object(session.RoundWindow, "_finish_all_but", leave),
        mock.patch.object(session.TransferSession, "_wait_for", wait_for_ended),
        mock.patch.object(session.TransferSession, "finish", finish_ended),
    ):
        yield


@contextlib.contextmanager
def _synchronising() -> Iterator[None]:
    """Launches here and there, other ones on each rank, wait until the device has nothing to do, as
    where cuBLAS first uses a kernel; so do some allocations; and some threads are late.
    """
    chance = random.Random(dist.get_rank())

    def late(run: Any, *, waits: bool = False) -> Any:
        def first(*arguments: Any, **options: Any) -> Any:
            if chance.random() < 0.5:
                time.sleep(chance.random() * 5e-3)
                if waits:
                    torch.standin.synchronize()
            return run(*arguments, **options)

        return first

    synchronised = functools.partial(late, waits=True)

    def patched(owner: Any, name: str) -> Any:
        run = synchronised(getattr(owner, name))
        return mock.patch.object(
            owner, name, run if owner is not linear._Linear else staticmethod(run)
        )

    with (
        full_allocator(0.05),
        _rounds_under_way(),
        patched(propagation.Propagator, "_forward_micro_batch"),
        patched(linear._Linear, "forward"),
        patched(linear._Linear, "backward"),
        patched(stage_weights, "multiply_into"),
        mock.patch.object(Link, "begin_pull", late(Link.begin_pull)),
        mock.patch.object(Link, "begin_push", late(Link.begin_push)),
    ):
        yield


def device_wide_synchronise() -> dict[str, Any]:
    """Losses of iterations in which the device is synchronised, all orders compared, and what was
    under way there.
    """
    engine = start("llama")
    examples = random_examples(LENGTHS, VOCAB_SIZE, seed=1)
    process_group.checks_order = True
    process_group.waited_for.clear()
    try:
        with _synchronising():
            strategies = (*STRATEGIES[2], "1x<sp2,1;gather>", "1x<cp2,1;gather>") * 2
            losses = [float(engine.train_batch(examples, strategy=s)) for s in strategies]
    finally:
        process_group.checks_order = False
    waited_for = dict(process_group.waited_for)
    return {"losses": losses, "waited_for": waited_for, "hangs": process_group.hangs[:]}


def parity_of_full_allocators(case: str) -> dict[str, Any]:
    """`parity` of pipelines where all memory that is taken waits for the whole device."""
    with full_allocator():
        found = parity(case, ("1x<1,2>", "1x<1,2;ckpt=3>"))
    return {**found, "hangs": process_group.hangs[:]}

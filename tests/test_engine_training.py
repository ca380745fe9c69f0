"""Training: equal to stock DeepSpeed ZeRO-3, reproducible, resumable, and open to DeepSpeed's other
features.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import itertools
import json
import operator
import os
import random
import weakref
from pathlib import Path
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
import transformers
from as_stock import assert_as_stock
from distributed import run_distributed, wait_until
from engines import (
    dataset_of,
    ds_config,
    full_states,
    refused,
    small_profile,
    start_hydra,
    start_stock,
    stock_step,
    write_json,
)
from holdings import STRATEGIES_OF_4, Holdings, train_random_iteration
from models import VOCAB_SIZE, tiny
from single_process import random_examples, token_mean_gradients

import ds_hydra
from ds_hydra.engine import HydraEngine, candidates
from ds_hydra.engine.losses.loss import HeadLoss
from ds_hydra.engine.model.stage_model import StageModel
from ds_hydra.engine.parallel.one_f_one_b import one_forward_one_backward
from ds_hydra.engine.profiling.profile_document import count_flops
from ds_hydra.records.timeline import EventKind, Timeline
from ds_hydra.sampler.plan import IterationPlan
from ds_hydra.strategy import Profile, Scheme


def batches(num_batches, *, num_sequences=8):
    """Global batches with a long tail: one long sequence among short ones."""
    generator = torch.Generator().manual_seed(5)
    result = []
    for seed in range(num_batches):
        lengths = torch.randint(2, 40, (num_sequences,), generator=generator).tolist()
        lengths[seed % num_sequences] = 90
        result.append(random_examples(lengths, VOCAB_SIZE, seed=seed))
    return result


STOCK_AND_OURS = ((start_stock, stock_step), (start_hydra, HydraEngine.train_batch))


def losses_of(step, engine, data, strategies):
    """Of one step for each global batch; stock knows no strategies."""
    given = [{"strategy": s} if step is not stock_step else {} for s in strategies]
    return [float(step(engine, batch, **more)) for batch, more in zip(data, given, strict=True)]


def ten_steps_against_stock(family, strategies):
    data, runs = batches(len(strategies) // 2) * 2, []
    for start, step in STOCK_AND_OURS:
        model = tiny(family)
        engine = start(model)
        if step is not stock_step:
            ids = data[0][0]["input_ids"].unsqueeze(0)
            model(input_ids=ids, labels=ids).loss.backward()  # no part of an iteration
        losses = losses_of(step, engine, data, strategies)
        states = full_states(engine, list(model.parameters()))
        run = {"losses": losses, "norm": engine.get_global_grad_norm().item()}
        names = [name for name, _ in model.named_parameters()]
        runs.append(run | {"states": dict(zip(names, states, strict=True))})
    stock, mine = runs
    states = [run.pop("states") for run in runs]
    assert_as_stock(mine, stock)
    # Adam divides by sqrt(v): where a gradient is nearly zero, 1e-7 of difference may turn its
    # sign.
    assert_as_stock(states[1], states[0], 1e-4)
    assert all(second < first for first, second in zip(mine["losses"], mine["losses"][5:]))
    # Clipping is active (limit 0.5), so equal norms also mean equal clipping.
    assert stock["norm"] > 0.5
    before = dict(tiny(family).named_parameters())["model.embed_tokens.weight"]
    moved = states[1]["model.embed_tokens.weight"]["param"] - before
    assert float(moved.norm()) > 1e-3 * float(before.norm())
    assert (engine.global_steps, engine.global_samples) == (10, 80)


def losses_with_rates_of_the_optimizer():
    """Of stock and of ds_hydra, with an optimizer whose groups have no learning rate."""
    data, found = batches(3, num_sequences=2), []
    for of, hydra, step in ((deepspeed, None, stock_step), (ds_hydra, {}, HydraEngine.train_batch)):
        model = tiny("llama")
        optimizer = transformers.Adafactor(model.parameters(), warmup_init=True)
        engine, *_ = of.initialize(model=model, optimizer=optimizer, config=ds_config(hydra=hydra))
        found.append([float(step(engine, examples)) for examples in data])
    return found, engine.get_lr(), engine.last_metrics.lr


@pytest.mark.distributed
def test_an_optimizer_may_have_no_learning_rate():
    (stock, mine), rates, shown = run_distributed(losses_with_rates_of_the_optimizer, 2)[0]
    assert rates == [None]
    assert shown == 0.0
    assert_as_stock(mine, stock)


def ordinary_script(package, folder, words):
    """A script for DeepSpeed, with `package` in its place: what it finds, and how to go on."""
    parser = package.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(words)
    package.init_distributed()
    config = tiny("llama").config
    config.pad_token_id = None  # transformers would set a row of it, which zero.Init has taken away
    torch.manual_seed(3)
    with package.zero.Init(config_dict_or_path=args.deepspeed_config):
        model = transformers.LlamaForCausalLM(config)
    is_partitioned = all(p.numel() == 0 for p in model.parameters())
    engine, *_ = package.initialize(args=args, model=model, model_parameters=model.parameters())

    def finish():
        engine.save_checkpoint(folder)
        package.comm.barrier()
        weights = package.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder)
        return engine.global_steps, weights

    return engine, finish, is_partitioned and isinstance(engine, package.DeepSpeedEngine)


def ordinary_scripts(folder):
    data, found = batches(3), []
    adam = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    kinds = ((deepspeed, None, stock_step), (ds_hydra, {}, HydraEngine.train_batch))
    for package, hydra, step in kinds:
        document = ds_config(hydra=hydra, optimizer=adam)
        path = write_json(f"{folder}/{package.__name__}.json", document)
        words = ["--deepspeed", "--deepspeed_config", path]
        engine, finish, is_right = ordinary_script(package, f"{folder}/{package.__name__}", words)
        losses = [float(step(engine, examples)) for examples in data]
        found.append((losses, is_right, *finish()))
    assert_as_stock(found[1], found[0])
    loader = engine.deepspeed_io(dataset_of(data))
    batch = next(iter(loader))
    said = [
        refused(lambda: engine(**batch)),
        refused(lambda: {key: ids.cpu() for key, ids in batch.items()}),
        refused(lambda: batch["input_ids"]),
    ]
    return found[1][1:3], said, float(engine.train_batch(batch))


@pytest.mark.distributed
def test_an_ordinary_script_trains_with_the_import_changed(tmp_path):
    found, said, loss = run_distributed(ordinary_scripts, 2, str(tmp_path))[0]
    assert found == (True, 3)
    assert all("engine(**batch)" in s and "engine.train_batch(batch=examples)" in s for s in said)
    assert loss > 0


WITH_EXPERTS = (
    "1x<sp4,1;ep=4>", "4x<1,1>", "1x<2,1> + 1x<1,2>", "1x<sp2,1;ep=2> + 2x<1,1>", "1x<4,1>",
    "1x<sp2,2;ep=2>", "2x<sp2,1;ep=2>", "1x<2,1> + 1x<1,1>", "1x<sp4,1;ep=2>", "2x<1,2>",
)  # fmt: skip
IN_A_ROW = (
    *["1x<2,1> + 1x<1,2>"] * 3, *["4x<1,1;gather>"] * 3, *["2x<2,1;gather>"] * 2,
    *["2x<cp2,1;gather>"] * 2,
)  # fmt: skip
"""Weights of each serve the next one, where they are alike."""


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("family", "strategies"),
    [
        ("llama", STRATEGIES_OF_4),
        pytest.param("llama", IN_A_ROW, marks=pytest.mark.nightly),
        pytest.param("mixtral", WITH_EXPERTS, marks=pytest.mark.nightly),
    ],
)
def test_ten_steps_of_changing_strategies_equal_stock_deepspeed(family, strategies):
    run_distributed(ten_steps_against_stock, 4, family, strategies)


def bf16_against_stock():
    data, runs = batches(4) * 3, []
    for start, step in STOCK_AND_OURS:
        model = tiny("llama")
        engine = start(model, bf16={"enabled": True})
        losses = losses_of(step, engine, data, (STRATEGIES_OF_4 * 2)[: len(data)])
        runs.append((losses, {str(p.ds_tensor.dtype) for p in model.parameters()}))
    stock, mine = runs
    # 8 bits of mantissa: activations differ by 4e-3, losses average over hundreds of tokens.
    assert_as_stock(mine, stock, 5e-3)
    assert mine[1] == {"torch.bfloat16"}
    assert mine[0][-1] < mine[0][0] - 0.1


@pytest.mark.slow
@pytest.mark.distributed
def test_bf16_curve_stays_within_noise_of_stock():
    run_distributed(bf16_against_stock, 4)


def other_ways_to_start(folder):
    from transformers import LlamaForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    data = batches(2)
    reference = tiny("llama")
    loss = pytest.approx(token_mean_gradients(reference, data[0])[0], rel=1e-5)
    if dist.get_rank() == 0:
        reference.save_pretrained(folder)
    dist.barrier()
    # From_pretrained now partitions while it loads (zero.Init)
    keep_alive = HfDeepSpeedConfig(ds_config())
    partitioned = LlamaForCausalLM.from_pretrained(folder)
    del keep_alive
    assert all(hasattr(p, "ds_id") and p.numel() == 0 for p in partitioned.parameters())
    assert float(start_hydra(partitioned).train_batch(data[0], strategy="1x<2,2>")) == loss
    offload = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    offloading = start_hydra(tiny("llama"), zero_optimization=offload)
    assert float(offloading.train_batch(data[0], strategy="2x<2,1>")) == loss
    engine = start_hydra(tiny("llama"))
    assert float(engine.eval_batch(data[0], strategy="1x<1,2> + 1x<2,1>")) == loss
    assert float(engine.train_batch(data[0])) == loss
    norms = [float(each.get_global_grad_norm()) for each in (offloading, engine)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    engine.eval()
    with torch.no_grad():
        logits = engine(input_ids=data[0][0]["input_ids"].unsqueeze(0), use_cache=False).logits
    assert logits.shape == (1, len(data[0][0]["input_ids"]), VOCAB_SIZE)


@pytest.mark.slow
@pytest.mark.distributed
def test_zero_init_offload_and_evaluation(tmp_path):
    run_distributed(other_ways_to_start, 4, str(tmp_path))


def offloaded_states():
    """Losses and norms are the same with and without `offload_states` between iterations; what
    needs states that are away says so.
    """
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

    some = [OffloadStateTypeEnum.lp_grads, OffloadStateTypeEnum.lp_params]
    data, curves = batches(5), []
    for offloads in (False, True):
        engine, curve = start_hydra(tiny("llama")), []
        for batch in data:
            strategy = ("2x<1,1>", "1x<2,1>")[len(curve) % 2]
            curve.append(float(engine.train_batch(batch, strategy=strategy)))
            curve.append(float(engine.get_global_grad_norm()))
            if offloads:
                engine.offload_states(include=some)
                said = refused(functools.partial(engine.train_batch, batch))
                assert said.startswith("lp_grads, lp_params are offloaded")
                for evaluate in (engine.eval_batch, engine.score):
                    said = refused(functools.partial(evaluate, batch))
                    assert said.startswith("lp_params are offloaded")
                assert "call engine.reload_states() first" in said
                engine.reload_states()
        curves.append(curve)
    assert curves[0] == curves[1]


@pytest.mark.distributed
def test_states_may_be_offloaded_between_iterations():
    run_distributed(offloaded_states, 2)


def by_adagrad(train, start):
    """Losses of three steps; DeepSpeed puts another Adagrad in the place of the first."""
    model = tiny("llama")
    first, *others = model.parameters()
    groups = [{"params": [first], "lr": 1e-3}, {"params": others, "weight_decay": 0.1}]
    optimizer = torch.optim.Adagrad(groups, lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    step = start(model, optimizer, schedule)
    return [train(model, batch, step) for batch in batches(1) * 3]


def adagrad_beside_torch(folder):
    """And with a checkpoint that is saved and loaded before each step."""

    def start(model, optimizer, schedule):
        config = ds_config(hydra={"strategies": ["1x<1,1>"]}, gradient_clipping=0.0)
        engine, *_ = ds_hydra.initialize(
            model=model, optimizer=optimizer, lr_scheduler=schedule, config=config
        )
        return engine

    def train_alone(model, batch, both):
        loss, _ = token_mean_gradients(model, batch)
        for part in both:
            part.step()
        return loss

    def train(_, batch, engine):
        engine.save_checkpoint(folder)
        engine.load_checkpoint(folder)
        return float(engine.train_batch(batch))

    mine = by_adagrad(train, start)
    return mine, by_adagrad(train_alone, lambda _, *both: both)


@pytest.mark.distributed
def test_adagrad_steps_by_the_rates_of_its_groups_and_of_a_schedule(tmp_path):
    mine, alone = run_distributed(adagrad_beside_torch, 1, str(tmp_path))[0]
    assert mine == pytest.approx(alone, rel=1e-5)


@pytest.mark.distributed
def test_run_distributed_reports_the_failure_of_a_rank():
    with pytest.raises(AssertionError, match=r"(?s)rank 1 failed.*broken on purpose"):
        run_distributed(fail_on_rank_1, 2)


def fail_on_rank_1():
    if dist.get_rank() == 1:
        raise ValueError("broken on purpose")
    return Path.cwd().name


def train_from_dataset(folder):
    """Iterations from the engine's own sampler, and the same after a resume."""
    profile = write_json(f"{folder}/profile.json", small_profile(6_000_000, num_layers=4))
    dataset = dataset_of(batches(4))
    hydra = {
        "profile": profile,
        "strategies": ["4x<1,1>", "1x<2,1> + 2x<1,1>", "2x<2,1>"],
        "tokens_per_iteration": 300,
        "run_dir": f"{folder}/run",
        "trace_every": 2,
    }

    def start(**more):
        monitor = {"enabled": "run_dir" not in more, "output_path": folder, "job_name": "monitor"}
        own = hydra | more
        return start_hydra(tiny("llama"), hydra=own, training_data=dataset, csv_monitor=monitor)

    engine = start()
    losses = [float(engine.train_batch()) for _ in range(3)]
    engine.save_checkpoint(folder)
    losses += [float(engine.train_batch()) for _ in range(3)]
    engine.destroy()
    resumed = start(run_dir=None)
    resumed.load_checkpoint(folder)
    rest = [float(resumed.train_batch()) for _ in range(3)]
    first_batch = next(iter(resumed.training_dataloader))
    resumed.destroy()
    return losses, rest, {"input_ids", "labels"} == set(first_batch[0])


@pytest.mark.distributed
def test_training_from_a_dataset_writes_its_run_and_resumes_its_global_batches(tmp_path):
    results = run_distributed(train_from_dataset, 4, str(tmp_path))
    losses, rest, has_examples = results[0]
    assert all(result[0] == losses for result in results)
    assert rest == losses[3:]
    assert has_examples
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == list(range(6))
    assert [line["loss"] for line in lines] == pytest.approx(losses, rel=1e-6)
    check_run_folder(tmp_path / "run", lines)
    check_monitor(tmp_path / "monitor", lines)
    drawn = []
    for line in lines:
        path = tmp_path / f"run/plans/iteration_{line['iteration']:06d}.json"
        plan = IterationPlan.from_json(json.loads(path.read_text()))
        assert str(plan.strategy) == line["strategy"]
        assert plan.num_tokens == line["num_tokens"] <= 300
        drawn += plan.sample_indices
    assert len(set(drawn[:32])) == len(drawn[:32]), "a sequence was drawn twice in one epoch"


def check_run_folder(run_dir, lines):
    """What else a run of 6 iterations on 4 ranks writes, with every second iteration traced."""
    run = json.loads((run_dir / "run.json").read_text())
    assert (run["schema"], run["num_ranks"], run["hydra"]["trace_every"]) == (
        "ds_hydra.run/1",
        4,
        2,
    )
    assert run["model"]["num_parameters"] == sum(p.numel() for p in tiny("llama").parameters())
    assert json.loads((run_dir / "profile.json").read_text()) == small_profile(
        6_000_000, num_layers=4
    )
    for line in lines:
        assert line["schema"] == "ds_hydra.metrics/1"
        assert line["strategy_index"] in (0, 1, 2)
        assert 0 < line["pack_occupancy"] <= 1
        assert 0 < line["bubble"] < 1
        plan = json.loads((run_dir / f"plans/iteration_{line['iteration']:06d}.json").read_text())
        flops = count_flops(StageModel(tiny("llama"))).of(plan["lengths"])
        assert line["tflops_per_device"] == pytest.approx(flops / line["iteration_ms"] / 4 / 1e9)
        assert line["mfu"] is None  # nothing says what a CPU's peak is
        assert line["prediction_error"] == pytest.approx(
            line["measured_ms"] / line["predicted_ms"] - 1
        )
    traces = [json.loads(line) for line in (run_dir / "trace.jsonl").read_text().splitlines()]
    assert {0, 2, 4} <= {trace["iteration"] for trace in traces}
    by_iteration = {line["iteration"]: line for line in lines}
    for trace in traces:
        timeline = Timeline.from_json(trace)
        line = by_iteration[timeline.iteration]
        assert timeline.strategy == line["strategy"]
        assert len(trace["peak_bytes"]) == 4
        assert min(trace["peak_bytes"]) > 1_000_000
        check_timeline(timeline, line)


def check_monitor(folder, lines):
    """DeepSpeed's CSV monitor has the numbers of `metrics.jsonl`, at the samples trained so far."""
    wanted = {
        "train_loss": [line["loss"] for line in lines],
        "tokens_per_s": [line["tokens_per_s"] for line in lines],
        "tflops_per_device": [line["tflops_per_device"] for line in lines],
        "imbalance": [line["imbalance"] for line in lines],
        "bubble": [line["bubble"] for line in lines],
        "plan_wait_ms": [line["waited_ms"] for line in lines],
        "link_ms": [line["visible_pull_ms"] + line["visible_push_ms"] for line in lines],
        "prediction_error": [line["prediction_error"] for line in lines],
        "pack_occupancy": [line["pack_occupancy"] for line in lines],
        "strategy": [line["strategy_index"] for line in lines],
    }
    samples = list(itertools.accumulate(line["num_sequences"] for line in lines))
    for name, values in wanted.items():
        written = [
            line.split(",")
            for line in (folder / f"Train_Samples_{name}.csv").read_text().splitlines()[1:]
        ]
        # DeepSpeed itself writes a train_loss, too; its events come with the step, ours after it.
        ours = written[1::2] if len(written) == 2 * len(lines) else written
        assert [float(value) for _, value in ours] == pytest.approx(values), name
        assert [int(at) for at, _ in ours] == samples, name


def check_timeline(timeline, line):
    """Events of every stage in 1F1B order, within the times that the same ranks measured as a
    whole.
    """
    for index, (track, pipeline) in enumerate(
        zip(timeline.pipelines, line["pipelines"], strict=True)
    ):
        assert list(track.ranks) == pipeline["ranks"]
        for stage in range(track.scheme.pp):
            mine = [e for e in timeline.events if (e.pipeline, e.stage) == (index, stage)]
            kinds = [e.kind for e in mine]
            assert (kinds[-1], kinds.count(EventKind.STEP)) == (EventKind.STEP, 1)
            pulls = [e for e in mine if e.kind is EventKind.PULL]
            pushes = [e for e in mine if e.kind is EventKind.PUSH]
            assert pulls[0].start_ms < pushes[0].start_ms
            assert max(e.end_ms for e in pulls) <= pushes[0].start_ms, (
                "one thread pulls everything, then pushes"
            )
            passes = [e for e in mine if e.kind in (EventKind.FORWARD, EventKind.BACKWARD)]
            order = one_forward_one_backward(track.scheme.pp, stage, track.num_micro_batches)
            assert [(e.kind.name, e.micro_batch) for e in passes] == [
                (p.name, row) for p, row in order
            ]
            assert all(a.end_ms <= b.start_ms for a, b in itertools.pairwise(passes))
            # A pass waits for its slices; the measured time of a pipeline leaves that out.
            assert sum(e.duration_ms for e in passes) <= (
                pipeline["measured_ms"] + line["visible_pull_ms"] + 0.01
            )
    # Rank 0 measures an iteration; another rank may end its step a moment later.
    ends = [
        max(e.end_ms for e in timeline.events if (e.pipeline, e.stage) == (index, 0))
        for index, track in enumerate(timeline.pipelines)
        if track.ranks[0] == 0
    ]
    assert len(ends) == 1
    assert 0 < ends[0] <= line["iteration_ms"] + 0.01


def what_is_held():
    """Slices alive after a good iteration and after a failing one; what a rank holds before and
    after 20 iterations of random strategies.
    """

    engine = start_hydra(tiny("llama"))
    examples = batches(1)[0]
    alive, survivors = [], []
    bind = engine.propagator.stage_model.bind

    def watching_bind(scheme, stage, leaves, *callbacks):
        alive.extend(weakref.ref(leaf) for leaf in leaves.values())
        bind(scheme, stage, leaves, *callbacks)

    def fails(*_arguments, **_how):  # a mock would keep what it was called with
        raise RuntimeError("broken on purpose")

    gc.disable()  # slices must not wait for it
    engine.propagator.stage_model.bind = watching_bind
    engine.train_batch(examples, strategy="1x<4,1>")
    trained = list(alive)
    assert all(ref() is not None for ref in trained), "they wait for an iteration of the same kind"
    engine.eval_batch(examples, strategy="1x<4,1>")
    survivors.append(sum(ref() is not None for ref in trained))
    gc.enable()
    with contextlib.suppress(RuntimeError), mock.patch.object(HeadLoss, "of_chunk", fails):
        engine.train_batch(examples, strategy="1x<4,1>")
    gc.collect()
    survivors.append(sum(ref() is not None for ref in alive))
    engine.propagator.stage_model.bind = bind

    for strategy in (*STRATEGIES_OF_4, "4x<1,1>"):
        engine.train_batch(examples, strategy=strategy)
    gc.collect()
    gc.disable()
    before, generator = Holdings.of(engine), random.Random(2)
    for iteration in range(20):
        train_random_iteration(engine, generator, iteration)
    engine.train_batch(examples, strategy="4x<1,1>")  # whose weights stay, as before
    after = Holdings.of(engine)
    gc.enable()
    dist.barrier()  # ranks that leave close connections
    return len(alive), survivors, before, after


@pytest.mark.slow
@pytest.mark.distributed
def test_nothing_of_an_iteration_stays():
    for num_seen, survivors, before, after in run_distributed(what_is_held, 4):
        assert num_seen > 0
        assert survivors == [0, 0], (
            "once others took their place, without the garbage collector; after a failed iteration"
        )
        assert after == before, "open files, process groups, threads, tensors"


def engines_one_after_another(folder):
    """How many engines are alive after three, none of which leaves open files or threads that the
    first has not.
    """
    examples = random_examples([9, 5, 7], VOCAB_SIZE, seed=1)
    first, engines = [], weakref.WeakSet()
    for number in range(3):
        own = {
            "context_length": 32,
            "tokens_per_iteration": 100,
            "run_dir": f"{folder}/{number}",
            "profiling": {"repeats": 1},
        }
        engine = start_hydra(tiny("llama_tied"), hydra=own, training_data=dataset_of(batches(2)))
        engine.train_batch()
        for strategy in ("1x<2,1>", "1x<1,2>", "2x<1,1;gather>"):
            engine.train_batch(examples, strategy=strategy)
        engine.destroy()
        engines.add(engine)
        del engine
        gc.collect()
        dist.barrier()  # the other rank has closed its connections, too
        first = first or open_files_and_threads()
        # A thread that has ended is in /proc for a moment
        wait_until(lambda of=first: all(map(operator.le, open_files_and_threads(), of)), limit_s=60)
    return len(engines)


def open_files_and_threads():
    return [len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task")]


@pytest.mark.slow
@pytest.mark.distributed
def test_a_destroyed_engine_gives_back_files_threads_and_memory(tmp_path):
    assert run_distributed(engines_one_after_another, 2, str(tmp_path)) == [0, 0]
    schemes = json.loads((tmp_path / "0" / "profile.json").read_text())["schemes"]
    (deeper,) = [entry for entry in schemes if (entry["tp"], entry["pp"]) == (1, 2)]
    assert deeper["probed_as"] == "<1,1>"
    assert "measured" not in deeper
    assert deeper["rehearsed"]["runs"]


def what_a_destroyed_engine_holds():
    """Whether its optimizer lives on beside the model, and whether the model can go."""
    model = tiny("llama")
    engine = start_hydra(model)
    examples = random_examples([9, 5, 7], VOCAB_SIZE, seed=1)
    engine.train_batch(examples, strategy="1x<1,1>")
    engine.eval()
    with torch.no_grad():
        for _ in range(3):
            engine(input_ids=examples[0]["input_ids"][None])
    optimizer, model_ref = weakref.ref(engine.optimizer), weakref.ref(model)
    engine.destroy()
    del engine
    gc.collect()
    lives_on = optimizer() is not None
    del model
    gc.collect()
    return lives_on, model_ref() is not None


@pytest.mark.distributed
def test_a_destroyed_engine_holds_no_states_and_no_model_whose_forward_has_run():
    assert run_distributed(what_a_destroyed_engine_holds, 1) == [(False, False)]


def measure_options(folder):
    strategies = ["2x<1,1;ckpt=4>", "1x<1,2;stages=3,1>"]
    own = {
        "strategies": strategies,
        "tokens_per_iteration": 300,
        "run_dir": folder,
        "profiling": {"lengths": [16, 32, 48], "repeats": 1},
    }
    start_hydra(tiny("llama"), hydra=own, training_data=dataset_of(batches(2))).train_batch()


@pytest.mark.slow
@pytest.mark.distributed
def test_a_start_measures_candidates_with_options(tmp_path):
    run_distributed(measure_options, 2, str(tmp_path))
    profile = Profile.load(tmp_path / "profile.json")
    wanted = {Scheme.parse(text) for text in ("<1,1;ckpt=4>", "<1,2;stages=3,1>")}
    assert wanted <= set(profile.latency) - profile.assumed


def measured_as(document):
    """Within, profiles are measured as `document`."""
    return mock.patch.object(candidates, "measure_profile", return_value=document)


def train_without_a_scheme(folder):
    """A profile leaves out <1,2>, which was proposed: it is not planned with."""
    hydra = {"tokens_per_iteration": 300, "run_dir": folder}
    for data in (dataset_of(batches(2)), None):
        with measured_as(small_profile(6_000_000, num_layers=4)):
            engine = start_hydra(tiny("llama"), hydra=hydra, training_data=data)
            engine.train_batch(None if data is not None else batches(1)[0])
        metrics = engine.last_metrics
        found = {str(strategy) for strategy in engine.source.candidates.strategies}
        assert found >= {"1x<2,1>", "2x<1,1>", metrics.strategy}
        assert not any("<1,2>" in text for text in found)
        waits = min(metrics.waited_ms, metrics.planning_ms)
        assert waits > 0, "a given global batch waits, too"
        engine.train_batch(batches(1)[0], strategy="1x<1,2>")
        assert engine.reporter._traces._slowest == 0.0, "nobody knows how long <1,2> should take"
        engine.destroy()


@pytest.mark.distributed
def test_schemes_that_the_measured_profile_leaves_out_are_not_planned_for(tmp_path):
    run_distributed(train_without_a_scheme, 2, str(tmp_path))

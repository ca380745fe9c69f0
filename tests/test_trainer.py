"""HydraTrainer beside transformers.Trainer: same data, same global batches, same behaviour.

The behaviours are those that transformers tests of its Trainer (tests/trainer in its repository,
not in its wheel), as far as they apply. Left out, with the reason:

- batch size finding, gradient accumulation, group_by_length: refused or ignored
  (tests/test_trainer_arguments.py)
- DataLoader workers, samplers, drop_last: the engine draws the global batches
  (tests/test_batches.py); streams: tests/test_trainer_stream.py
- NEFTune, custom loss functions: refused; Liger kernels: tests/test_liger.py
- fp16/bf16 full evaluation, torch_compile, DataParallel, FSDP, SageMaker, TPU: refused or another
  launcher
- hub upload, model cards, search of hyperparameters, other kinds of models: not touched, refused,
  not for causal LMs
- mixed precision: tests/test_engine_training.py (bf16 against stock DeepSpeed)
"""

from __future__ import annotations

import contextlib
import errno
import functools
import math
import os
import shutil
import signal
import time
import weakref
from pathlib import Path
from unittest import mock

import datasets
import deepspeed
import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from as_stock import TIMED, assert_as_stock
from distributed import run_distributed
from engines import ds_config, refused, small_profile, write_json
from models import VOCAB_SIZE, tiny
from single_process import summed_loss
from torch.utils.data import SubsetRandomSampler
from transformers import (
    AutoModelForCausalLM,
    EarlyStoppingCallback,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

import ds_hydra
from ds_hydra.commands.init import start_config
from ds_hydra.engine.checkpointing import files
from ds_hydra.engine.model.stage_model import StageModel
from ds_hydra.engine.profiling.profile_document import count_flops
from ds_hydra.engine.ranks.agreement import on_all_ranks
from ds_hydra.errors import CheckpointError, HydraConfigError, PlanMismatchError
from ds_hydra.sampler.data.batches import SamplerState, epoch_order
from ds_hydra.trainer import HydraTrainer, mixin
from ds_hydra.trainer.arguments import NOT_CALLED
from ds_hydra.trainer.data import pad_examples

BUDGET = 64
PER_BATCH = 4
NUM_BATCHES = 6


def rows():
    """Sequences of 2 tokens and more; every 4 consecutive ones have exactly the budget of a
    global batch.
    """
    generator = np.random.default_rng(3)
    result = []
    for _ in range(NUM_BATCHES):
        lengths = 2 + generator.multinomial(BUDGET - 2 * PER_BATCH, np.ones(PER_BATCH) / PER_BATCH)
        result += [{"input_ids": generator.integers(0, VOCAB_SIZE, n).tolist()} for n in lengths]
    return [{**row, "labels": row["input_ids"]} for row in result]


def small_model(**more):
    return tiny("llama", num_hidden_layers=2, **more)


def pad(examples):
    return pad_examples([{key: np.array(value) for key, value in e.items()} for e in examples], 0)


BOTH = (("stock", transformers.Trainer), ("hydra", HydraTrainer))


def make_recorder(events):
    """A callback that adds to `events` what it is told, in which step and mode of the model."""

    def record(name):
        return lambda self, args, state, control, model, **_: events.append(
            f"{name} {state.global_step} {'training' if model.training else 'evaluating'}"
        )

    methods = {name: record(name) for name in vars(TrainerCallback) if name.startswith("on_")}
    return type("Recorder", (TrainerCallback,), methods)()


def training_arguments(folder, json_sections=None, hydra=None, is_stock=False, **settings):
    section = {
        "tokens_per_iteration": BUDGET,
        "profile": f"{folder}/profile.json",
        "strategies": ["2x<1,1>", "1x<2,1>"],
        **(hydra or {}),
    }
    config = ds_config(
        hydra=None if is_stock else section,
        train_micro_batch_size_per_gpu="auto",
        **({"gradient_clipping": "auto"} | (json_sections or {})),
    )
    config = {key: value for key, value in config.items() if value is not None}
    settings = {
        "num_train_epochs": 2,
        "learning_rate": 1e-3,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "per_device_train_batch_size": PER_BATCH // 2,
        "per_device_eval_batch_size": PER_BATCH // 2,
        "train_sampling_strategy": "sequential",
        **settings,
    }
    return TrainingArguments(deepspeed=config, **{"use_cpu": True, **settings})


def make(
    folder,
    run,
    base=HydraTrainer,
    *,
    data,
    sections=None,
    hydra=None,
    model=None,
    model_init=None,
    eval_dataset=None,
    compute_metrics=None,
    callbacks=(),
    processing_class=None,
    **settings,
):
    """A trainer of `data` that writes to the folder `run`; `settings` of its arguments."""
    is_stock = not issubclass(base, HydraTrainer)
    args = training_arguments(
        folder, sections, hydra, is_stock=is_stock, output_dir=f"{folder}/{run}", **settings
    )
    if model is None and model_init is None:
        model = small_model()
    return base(
        model=model,
        args=args,
        processing_class=processing_class,
        data_collator=pad if is_stock else None,
        train_dataset=data,
        eval_dataset=eval_dataset,
        model_init=model_init,
        compute_metrics=compute_metrics,
        callbacks=list(callbacks),
    )


def prepare(folder):
    deepspeed.utils.logger.setLevel("ERROR")
    transformers.logging.set_verbosity_error()
    write_json(f"{folder}/profile.json", small_profile(3_000_000))
    return datasets.Dataset.from_list(rows())


def error_of(function, *args, **kwargs):
    with pytest.raises(HydraConfigError) as raised:
        function(*args, **kwargs)
    return str(raised.value)


def without_times(history):
    return [{k: v for k, v in entry.items() if not any(t in k for t in TIMED)} for entry in history]


def side_by_side(folder):
    """The same run by both Trainers: saves, evaluations, best model, early stopping, schedules of
    both kinds.
    """
    data = prepare(folder)
    scheduler = {
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True, "fused": True},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "total_num_steps": "auto",
                "warmup_min_lr": 0,
                "warmup_max_lr": "auto",
                "warmup_num_steps": "auto",
            },
        },
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }
    gathered = {
        "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
    }
    result = {}
    # One evaluation batch: equal averages
    start = functools.partial(make, folder, data=data, eval_dataset=data.select(range(PER_BATCH)))
    for name, base in BOTH:
        events = []
        trainer = start(
            f"{name}-json",
            base,
            sections=scheduler,
            callbacks=[make_recorder(events)],
            eval_strategy="steps",
            eval_steps=2,
            save_steps=2,
            save_total_limit=2,
            warmup_steps=3,
            weight_decay=0.05,
            load_best_model_at_end=True,
            eval_on_start=True,
        )
        output = trainer.train()
        final = trainer.evaluate()
        trainer.save_model(f"{folder}/{name}-saved")
        weights = trainer.accelerator.get_state_dict(trainer.deepspeed)
        if trainer.args.should_save:  # as many scripts do, on the first rank alone
            trainer._save(f"{folder}/{name}-alone", state_dict=weights)
        dist.barrier()  # rank 0 writes
        result[name] = {
            "history": trainer.state.log_history,
            "events": events,
            "files": sorted(os.listdir(f"{folder}/{name}-json/checkpoint-12")),
            "checkpoints": sorted(os.listdir(f"{folder}/{name}-json")),
            "saved": sorted(os.listdir(f"{folder}/{name}-saved")),
            "alone": sorted(os.listdir(f"{folder}/{name}-alone")),
            "best": (
                os.path.basename(trainer.state.best_model_checkpoint),
                trainer.state.best_metric,
            ),
            "final": final["eval_loss"],
            "output": (output.global_step, output.training_loss, output.metrics),
            "config": {
                key: trainer.deepspeed.config[key]
                for key in ("gradient_clipping", "optimizer", "scheduler")
            },
            "flos": trainer.state.total_flos,
        }
        stopped = start(
            f"{name}-stopped",
            base,
            sections=gathered,
            callbacks=[EarlyStoppingCallback(2, early_stopping_threshold=100.0)],
            lr_scheduler_type="cosine",
            max_steps=11,
            eval_strategy="epoch",
            save_strategy="epoch",
            logging_strategy="epoch",
            metric_for_best_model="loss",
            load_best_model_at_end=True,
            num_train_epochs=5,
            max_grad_norm=0.0,
        )
        stopped.train()
        result[name]["stopped"] = stopped.state.log_history, stopped.state.global_step
    plain = start("plain", sections={"gradient_clipping": None}, max_steps=1)
    plain.train()
    result["clips"] = plain.engine.gradient_clipping()
    return result


def numbers(history, key):
    return [entry[key] for entry in history if key in entry]


ADDED = {
    "loss": {"tokens_per_second", "tflops_per_device", "imbalance"},
    "eval_loss": {"eval_perplexity"},
}
"""What ds_hydra logs beside what transformers does."""


@pytest.mark.distributed
def test_a_run_is_that_of_transformers(tmp_path):
    """Losses, norms and rates; events in their order; files, checkpoints, the best model; what is
    filled in for "auto".
    """
    found = run_distributed(side_by_side, 2, str(tmp_path))[0]
    mine, stock = (found[name] for name in ("hydra", "stock"))
    exact = ("learning_rate", "epoch", "step")
    assert_as_stock(mine, stock, exact=exact, added=ADDED)
    models = [
        AutoModelForCausalLM.from_pretrained(tmp_path / f"{n}-saved") for n in ("hydra", "stock")
    ]
    for (name, a), (_, b) in zip(*(m.named_parameters() for m in models), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=name)
    saved = [
        torch.load(tmp_path / f"{n}-saved/training_args.bin", weights_only=False)
        for n in ("hydra", "stock")
    ]
    assert saved[0].learning_rate == saved[1].learning_rate
    assert found["clips"] == 0.5  # max_grad_norm, where the JSON says nothing
    losses = numbers(mine["history"], "loss")
    assert len(losses) == 2 * NUM_BATCHES
    assert losses[-1] < losses[0]
    for history in (mine["history"], mine["stopped"][0]):
        for key in ("loss", "grad_norm", "eval_loss", "train_loss"):
            assert numbers(history, key), key
        for entry in history:
            if "eval_loss" in entry:
                assert entry["eval_perplexity"] == pytest.approx(math.exp(entry["eval_loss"]))
    told = {"on_evaluate 4", "on_save 12", "on_prediction_step 2", "on_epoch_end 6"}
    assert {f"{event} evaluating" for event in told} <= set(mine["events"])
    assert len([name for name in mine["checkpoints"] if name.startswith("checkpoint")]) == 2
    assert mine["final"] == pytest.approx(mine["best"][1], rel=1e-6)
    schedule = mine["config"]["scheduler"]["params"]
    assert (schedule["total_num_steps"], schedule["warmup_num_steps"]) == (12, 3)
    flops = count_flops(StageModel(small_model()))
    two_epochs = 2 * flops.of(len(row["input_ids"]) for row in rows())
    assert mine["flos"] == pytest.approx(two_epochs)


def resumed(folder):
    """A shuffled run with epochs of unequal length, resumed within and at the end of an epoch;
    save_model in shards.
    """
    data = prepare(folder)
    epoch_order.cache_clear()

    start = functools.partial(
        make,
        folder,
        data=data,
        sections={"zero_optimization": {"stage": 3}},
        hydra={"tokens_per_iteration": 100},
        num_train_epochs=3,
        save_steps=1,
        seed=7,
        train_sampling_strategy="random",
        include_num_input_tokens_seen="all",
    )
    whole = start("whole")
    whole.train()
    epochs = [whole._epochs.num_iterations(epoch) for epoch in range(3)]
    curves = {}
    for step in (2, epochs[0], epochs[0] + 1):
        # Other weights: everything must come from the checkpoint
        again = start("again", model=small_model(seed=1))
        again.train(resume_from_checkpoint=f"{folder}/whole/checkpoint-{step}")
        curves[step] = without_times(again.state.log_history)
    save = functools.partial(whole.model.save_pretrained, max_shard_size="30KB")

    def save_late(*args, **settings):
        time.sleep(1.0 - dist.get_rank())
        save(*args, **settings)

    whole.model.save_pretrained = save_late
    whole.save_model(f"{folder}/shards")
    is_there = os.path.exists(f"{folder}/shards/model.safetensors.index.json")
    drawn = whole.engine.hydra.source.sampler.state
    return (
        without_times(whole.state.log_history),
        curves,
        epochs,
        (drawn.epoch, drawn.position),
        epoch_order.cache_info().misses,
        is_there,
    )


@pytest.mark.slow
@pytest.mark.distributed
def test_a_resumed_run_continues_the_very_same_curve(tmp_path):
    results = run_distributed(resumed, 2, str(tmp_path))
    history, curves, epochs, drawn, _, _ = results[0]
    assert history == results[1][0]
    *_, num_orders_of_rank_1, is_there = results[1]
    assert is_there, "a rank may load what it has saved before the first one has written it"
    assert num_orders_of_rank_1 == 0, "orders of whole epochs belong on the rank that plans"
    num_steps = sum(epochs)
    for step, curve in curves.items():
        assert 0 < step < num_steps
        for key in ("loss", "epoch"):
            assert numbers(curve, key) == numbers(history, key)
        assert curve[-2] == history[-2]
    assert drawn >= (3, 0), "three epochs were not drawn"
    assert drawn[1] < 10, "more than a global batch of a fourth epoch"
    assert history[-1]["epoch"] == 3.0
    assert [e["epoch"] for e in history if "loss" in e][epochs[0] - 1] == 1.0
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 1
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "shards")
    checkpoint = AutoModelForCausalLM.from_pretrained(tmp_path / f"whole/checkpoint-{num_steps}")
    for a, b in zip(model.parameters(), checkpoint.parameters(), strict=True):
        assert torch.equal(a, b)


def trained_again(folder):
    """Evaluated, trained, and trained again, by one Trainer and by new ones on saved weights; a
    start that fails before.
    """
    data = prepare(folder)

    def start(run, model, strategies=("2x<1,1>", "1x<2,1>"), **sections):
        return make(
            folder,
            run,
            data=data,
            sections={"zero_optimization": {"stage": 3}, **sections},
            hydra={"strategies": strategies},
            model=model,
            eval_dataset=data,
            save_strategy="no",
            num_train_epochs=1,
        )

    def losses(trainer):
        trainer.train()
        return numbers(trainer.state.log_history, "loss")

    result = {}
    for name in ("alone", "one"):
        model = small_model()
        if name == "one":
            failing = start("failing", model, strategies=["1x<2,1>", "7x<1,1>"])
            result["error"] = error_of(failing.train)
        trainer = start(name, model)
        if name == "one":
            result["before"] = trainer.evaluate()["eval_loss"]
            evaluated = weakref.ref(trainer.engine)
        result[name] = losses(trainer)
        trainer.save_model(f"{folder}/{name}-weights")
        if name == "one":
            result["stays"] = evaluated() is not None
            trainer.lr_scheduler, own = object(), trainer.lr_scheduler
            result["own schedule"] = error_of(trainer.train)
            trainer.lr_scheduler = own
            result["one again"] = losses(trainer)
            result["after"] = trainer.evaluate()["eval_loss"]
        else:
            trainer = start(
                "again", AutoModelForCausalLM.from_pretrained(f"{folder}/{name}-weights")
            )
            result["alone again"] = losses(trainer)
            result["alone after"] = trainer.evaluate()["eval_loss"]
    result["held"] = error_of(start, "held", model)
    trainer.engine.destroy()
    third = start("third", model, bfloat16={"enabled": False})
    result["third"] = losses(third)
    third.engine.destroy()
    result["after destroy"] = third.evaluate()["eval_loss"] < result["after"]
    return result


@pytest.mark.distributed
def test_one_model_is_evaluated_and_trained_again_and_again(tmp_path):
    result, _ = run_distributed(trained_again, 2, str(tmp_path))
    assert "7x<1,1>" in result["error"]
    assert result["one"] == result["alone"]
    assert result["one again"] == result["alone again"]
    assert result["third"][0] < result["one again"][0] < result["one"][0]
    assert result["after"] == result["alone after"] < result["before"]
    assert not result["stays"], "the engine that evaluated is kept for ever"
    assert "an engine holds this LlamaForCausalLM" in result["held"]
    assert "lr_scheduler is a object that was given" in result["own schedule"]
    assert result["after destroy"]


def resumed_otherwise(folder):
    """Another budget, other data, callbacks that save or log on one rank, other rows there."""
    data = prepare(folder)

    start = functools.partial(make, folder, "run", data=data, num_train_epochs=1, save_steps=3)
    doubled = {"tokens_per_iteration": 2 * BUDGET}
    start().train()
    checkpoint, errors = f"{folder}/run/checkpoint-3", []
    few = data.select(range(2 * PER_BATCH))
    for trainer in (start(hydra=doubled), start(data=few, ignore_data_skip=True)):
        errors.append(error_of(trainer.train, checkpoint))
    longer = start(hydra=doubled, max_steps=5)
    longer.train(resume_from_checkpoint=checkpoint)
    drawn = longer.engine.hydra.source.sampler.state
    again = start(ignore_data_skip=True)
    again.train(resume_from_checkpoint=checkpoint)

    class SavesAlone(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_save = dist.get_rank() == 1

    class LogsAlone(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_log = dist.get_rank() == 1

    rows_of_rank = data.select(range(4 + dist.get_rank()))
    alone = (start(callbacks=[SavesAlone()]), start(callbacks=[LogsAlone()], logging_steps=100))
    mismatches = [
        refused(action, PlanMismatchError)
        for action in (*(a.train for a in alone), lambda: start().predict(rows_of_rank))
    ]
    looked_at = start()
    first, other = looked_at.get_train_dataloader, looked_at.train  # rank 0 wants the first batch
    mismatches.append(refused(first if dist.get_rank() == 0 else other, PlanMismatchError))
    return errors, (drawn.epoch, drawn.position), again.state.global_step, mismatches


@pytest.mark.slow
@pytest.mark.distributed
def test_what_is_left_of_the_data_is_trained_or_named(tmp_path):
    for errors, drawn, num_steps, mismatches in run_distributed(
        resumed_otherwise, 2, str(tmp_path)
    ):
        assert [e.partition("set ")[2].partition(",")[0] for e in errors] == [
            "max_steps=5",
            "max_steps=5 to train them",
        ]
        assert "0 would be trained of the 2 that are left" in errors[0]
        assert drawn[0] == 1, "all rows"
        assert drawn[1] <= 2 * PER_BATCH, "some of the next epoch"
        assert num_steps == NUM_BATCHES
        assert "saving a checkpoint of the Trainer on rank 1" in mismatches[0]
        assert "logging on rank 1" in mismatches[1]
        assert "test_dataset has 4 rows of 64 tokens on rank 0 and 5 of" in mismatches[2]
        assert "get_train_dataloader() on rank 0; train() on rank 1" in mismatches[3]


def killed_while_saving(folder):
    """What a kill leaves at several points of saving step 2, and runs resumed from it."""
    data = prepare(folder)
    points = (
        (HydraTrainer, "save_model", 2),
        (ds_hydra.HydraEngine, "save_checkpoint", 2),
        (HydraTrainer, "_save_rng_state", 2),
        (mixin, "raise_together", 2),  # all written
        (mixin, "do_together", 4),  # renamed; two calls for each checkpoint
    )

    start = functools.partial(
        make,
        folder,
        data=data,
        sections={"zero_optimization": {"stage": 3}},
        max_steps=3,
        save_steps=1,
    )

    def copies_after(owner, name, num_calls):
        """A process that ends after that call leaves the folder as it is then."""
        original, calls = getattr(owner, name), []

        def method(*args, **kwargs):
            result = original(*args, **kwargs)
            calls.append(name)
            if len(calls) == num_calls:
                dist.barrier()
                if dist.get_rank() == 0:
                    shutil.copytree(f"{folder}/whole", f"{folder}/{name}-{num_calls}")
                dist.barrier()
            return result

        return mock.patch.object(owner, name, method)

    whole = start("whole")
    with contextlib.ExitStack() as stack:
        for point in points:
            stack.enter_context(copies_after(*point))
        whole.train()
    results = {}
    for _, name, num_calls in points:
        run = f"{name}-{num_calls}"
        left, last = set(os.listdir(f"{folder}/{run}")), get_last_checkpoint(f"{folder}/{run}")
        results[run] = left, os.path.basename(last)
        dist.barrier()
    if dist.get_rank() == 0:  # as between the renames of a second saving
        os.rename(f"{folder}/{run}/checkpoint-2", f"{folder}/{run}/.replaced-checkpoint-2")
    resumed = {}

    class Stop(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 1 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)

        def on_step_end(self, args, state, control, **kwargs):
            control.should_save = False  # as where a metric decides

    faults = {"faults": {"save_on_sigterm": f"{folder}/stopped"}}
    stopped = start("stopped", hydra=faults, callbacks=[Stop()], save_steps=3, save_only_model=True)
    with pytest.raises(SystemExit):
        stopped.train()
    results["stopped"] = set(os.listdir(f"{folder}/stopped"))
    for run in ("save_checkpoint-2", "do_together-4", "stopped"):
        again = start(run)
        again.train(resume_from_checkpoint=True)
        resumed[run] = numbers(again.state.log_history, "loss"), set(os.listdir(f"{folder}/{run}"))
    return numbers(whole.state.log_history, "loss"), results, resumed


def test_two_jobs_never_save_into_one_folder_at_once(tmp_path):
    with mixin.made_anew(tmp_path / "_saving-checkpoint-2"):
        (tmp_path / "_saving-checkpoint-2/weights").touch()
        with (
            pytest.raises(CheckpointError, match="another job is saving to"),
            mixin.made_anew(tmp_path / "_saving-checkpoint-2"),
        ):
            pass
        assert (tmp_path / "_saving-checkpoint-2/weights").exists()
    with mixin.made_anew(tmp_path / "_saving-checkpoint-2"):
        assert not (tmp_path / "_saving-checkpoint-2/weights").exists()


@pytest.mark.distributed
def test_killed_while_saving_the_last_whole_checkpoint_is_resumed(tmp_path):
    losses, results, resumed = run_distributed(killed_while_saving, 2, str(tmp_path))[0]
    assert len(losses) == 3
    assert results.pop("do_together-4") == ({"checkpoint-1", "checkpoint-2"}, "checkpoint-2")
    assert results.pop("stopped") == {"checkpoint-2"}
    assert resumed["stopped"] == (losses, {"checkpoint-2", "checkpoint-3"})
    del resumed["stopped"]
    assert len(results) == 4
    for run, found in results.items():
        assert found == ({"checkpoint-1", "_saving-checkpoint-2"}, "checkpoint-1"), run
    for run, found in resumed.items():
        assert found == (losses, {"checkpoint-1", "checkpoint-2", "checkpoint-3"}), run


def refused_before_a_step(folder):
    """Errors, on this rank, of trainings that could not save; then one that shall not."""
    data, rank = prepare(folder), dist.get_rank()
    rename, write = os.rename, files._write_text

    def renames_no_folder(source, target):
        if os.path.isdir(source):
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(source))
        rename(source, target)

    def failing(number, on_rank):
        def fails(path, text):
            if rank == on_rank and ".trial-" in str(path):
                raise OSError(number, os.strerror(number), str(path))
            write(path, text)

        return mock.patch.object(files, "_write_text", fails)

    def unsavable():
        model = small_model()
        model.generation_config.temperature, model.generation_config.do_sample = 0.5, False
        return model

    start = functools.partial(make, folder, data=data, save_steps=1, max_steps=1)
    no_renames = functools.partial(mock.patch.object, os, "rename", renames_no_folder)
    sigterm = {"hydra": {"faults": {"save_on_sigterm": f"{folder}/stopped"}}, "save_strategy": "no"}
    errors = {}
    for name, patch, settings in (
        ("rename", no_renames(), {}),
        ("denied", failing(errno.EACCES, 1), {}),
        ("full", failing(errno.ENOSPC, 0), {}),
        ("generation", contextlib.nullcontext(), {"model": unsavable()}),
        ("tokenizer", contextlib.nullcontext(), {"processing_class": object()}),
        ("sigterm", no_renames(), sigterm),
    ):
        trainer = start(name, **settings)
        with patch:
            errors[name] = error_of(trainer.train)
        assert trainer.state.global_step == 0
        dist.barrier()  # until the other rank has removed its trial
        assert os.listdir(f"{folder}/{name}") == [], name
    own = Path(folder, f"host{rank}")  # no folder that ranks share
    check = functools.partial(files.try_folder, own, "output_dir", torch.device("cpu"))
    errors["apart"] = error_of(check, commits=rank == 0)
    check(commits=rank == 0, writes=rank == 0)
    if rank == 0:
        Path(folder, "file").touch()
        errors["file"] = error_of(start, "file")
    # Weights alone may go to a folder of rank 0, and without checkpoints nothing is tried
    with failing(errno.EACCES, 1):
        start("weights", save_only_model=True).train()
    said = []
    with (
        no_renames(),
        mock.patch.object(HydraTrainer, "_warn", lambda self, text: said.append(text)),
    ):
        model, tokenizer = unsavable(), object()
        start("nothing", model=model, processing_class=tokenizer, save_strategy="no").train()
    said = [text for text in said if "cannot be saved" in text]
    return errors, os.listdir(f"{folder}/weights"), said


@pytest.mark.distributed
def test_what_only_the_first_checkpoint_would_find_is_found_before_the_first_step(tmp_path):
    results = run_distributed(refused_before_a_step, 2, str(tmp_path))
    for rank, (errors, weights, said) in enumerate(results):
        for name, reason in (
            ("rename", "cannot rename a folder in it ([Errno 38]"),
            ("denied", "cannot write to it ([Errno 13]"),
            ("full", "cannot write to it ([Errno 28]"),
        ):
            assert f"output_dir is '{tmp_path}/{name}'" in errors[name]
            assert reason in errors[name]
        assert errors["denied"].startswith("rank 1: " if rank == 0 else "output_dir")
        assert "model.generation_config cannot be saved" in errors["generation"]
        assert "processing_class cannot be saved" in errors["tokenizer"]
        assert f"hydra.faults.save_on_sigterm is '{tmp_path}/stopped'" in errors["sigterm"]
        assert "use_node_local_storage" in errors["apart"]
        assert weights == ["checkpoint-1"]
        assert len(said) == 2 * (rank == 0)
    assert f"output_dir is '{tmp_path}/file', which is no folder" in results[0][0]["file"]


STOPS = ("packed", "padded", "at the end", "not at all")
"""Where SIGTERM arrives: in the evaluation after step 2, by both loops, or after the last step."""


def stopped_in(folder):
    """By where SIGTERM arrives on rank 1: how training ended, batches that were evaluated after it,
    what is saved, and calls of the program's own handler; then after another SIGTERM.
    """
    data, results = prepare(folder), {}
    for where in STOPS:
        calls, after = [], []
        signal.signal(signal.SIGTERM, lambda number, frame, calls=calls: calls.append("own"))

        class Stop(TrainerCallback):
            def __init__(self, where, after):
                self.where, self.after, self.is_sent = where, after, False

            def on_prediction_step(self, args, state, control, **kwargs):
                if self.is_sent:
                    self.after.append(state.global_step)
                elif self.where in ("packed", "padded"):
                    self.send()

            def on_step_end(self, args, state, control, **kwargs):
                if self.where == "at the end" and state.global_step == args.max_steps:
                    self.send()

            def send(self):
                self.is_sent = True
                if dist.get_rank() == 1:
                    os.kill(os.getpid(), signal.SIGTERM)

        trainer = make(
            folder,
            where,
            data=data,
            hydra={"faults": {"save_on_sigterm": f"{folder}/{where}/stopped"}},
            eval_dataset=data,
            compute_metrics=(lambda prediction: {}) if where == "padded" else None,
            callbacks=[Stop(where, after)],
            max_steps=3,
            eval_strategy="steps" if where in ("packed", "padded") else "no",
            eval_steps=2,
            save_strategy="no",
        )
        try:
            trainer.train()
            end = None
        except SystemExit as error:
            end = error.code
        during = list(calls)
        if trainer.deepspeed.is_destroyed or where == "not at all":
            os.kill(os.getpid(), signal.SIGTERM)
        stopped = f"{folder}/{where}/stopped"
        saved = os.listdir(stopped) if os.path.exists(stopped) else []
        results[where] = (end, len(after), saved, during, calls)
    return results


@pytest.mark.slow
@pytest.mark.distributed
def test_sigterm_is_answered_within_an_evaluation_and_at_the_end(tmp_path):
    first, second = run_distributed(stopped_in, 2, str(tmp_path))
    steps = {"packed": 2, "padded": 2, "at the end": 3}
    for where, step in steps.items():
        end, num_after, saved, during, calls = second[where]
        assert (end, saved) == (0, [f"checkpoint-{step}"]), where
        assert num_after <= 1, where
        assert (during, calls) == (["own"], ["own", "own"]), where
        assert (first[where][0], first[where][3]) == (0, []), where
    assert second["not at all"] == (None, 0, [], [], ["own"])


def other_uses(folder):
    """zero.Init and a chat data set, evaluation without training, compute_metrics, LoRA."""
    data = prepare(folder)
    result = {}
    if dist.get_rank() == 0:
        small_model().save_pretrained(f"{folder}/model")
    dist.barrier()

    args = training_arguments(folder, output_dir=f"{folder}/init", max_steps=2)
    # TrainingArguments turned zero.Init on
    partitioned = AutoModelForCausalLM.from_pretrained(f"{folder}/model")
    result["is_partitioned"] = all(hasattr(p, "ds_id") for p in partitioned.parameters())
    trainer = HydraTrainer(partitioned, args, train_dataset=rows())  # a plain list
    trainer.train()
    result["init"] = numbers(trainer.state.log_history, "loss")

    trainer = make(folder, "eval", data=None, eval_dataset={"a": data, "b": data.select([0])})
    result["before"] = trainer.evaluate()

    def accuracy(prediction):
        predicted, labels = prediction.predictions[:, :-1].argmax(-1), prediction.label_ids[:, 1:]
        return {"accuracy": float((predicted == labels)[labels != -100].mean())}

    for name, base in BOTH:
        trainer = make(
            folder,
            "metrics",
            base,
            data=data,
            eval_dataset=data,
            compute_metrics=accuracy,
            max_steps=1,
            bf16_full_eval=name == "hydra",  # has no effect
        )
        trainer.train()
        metrics = trainer.evaluate()
        above = list(range(1, 140))  # the context is 128
        odd = [{"input_ids": ids, "labels": [-100] * len(ids)} for ids in ([5], [6, 7, 8])]
        odd = [*rows()[:2], *odd, {"input_ids": above, "labels": above}]
        predicted = trainer.predict(datasets.Dataset.from_list(odd))
        result[f"metrics {name}"] = {
            "accuracy": metrics["eval_accuracy"],
            "loss": metrics["eval_loss"],
            "predicted": predicted.predictions.shape,
            "labels": predicted.label_ids.tolist(),
        }
    result["loaders kept"] = len(trainer.accelerator._dataloaders)
    result["buffers"] = {str(buffer.dtype) for buffer in trainer.model.buffers()}
    trainer.accelerator.even_batches = False
    result["uneven"] = error_of(trainer.predict, datasets.Dataset.from_list(rows()[:3]))
    result["full eval"] = trainer.args.bf16_full_eval
    sections = {"checkpoint": {"use_node_local_storage": True}, "fp16": None}
    result["on each node"] = make(
        folder, "nodes", data=data, sections=sections
    ).args.save_on_each_node
    return result


@pytest.mark.slow
@pytest.mark.distributed
def test_partitioned_models_evaluation_alone_and_metrics_on_logits(tmp_path):
    result = run_distributed(other_uses, 2, str(tmp_path))[0]
    assert result["is_partitioned"]
    examples = [{key: torch.tensor(value) for key, value in row.items()} for row in rows()]
    model = small_model()
    with torch.no_grad():
        losses = [float(summed_loss(model, example)) for example in examples]
    num_tokens = [len(example["input_ids"]) - 1 for example in examples]
    assert result["init"][0] == pytest.approx(
        sum(losses[:PER_BATCH]) / sum(num_tokens[:PER_BATCH]), rel=1e-5
    )
    assert result["before"]["eval_a_loss"] == pytest.approx(sum(losses) / sum(num_tokens), rel=1e-5)
    assert result["before"]["eval_b_perplexity"] == pytest.approx(
        math.exp(losses[0] / num_tokens[0]), rel=1e-5
    )
    assert_as_stock(result["metrics hydra"], result["metrics stock"], absolute={"accuracy": 1e-3})
    assert result["metrics hydra"]["predicted"] == (5, 139, VOCAB_SIZE)
    assert result["loaders kept"] == 0
    assert result["buffers"] == {"torch.float32"}
    assert result["full eval"] is True
    assert "accelerator_config.even_batches is False" in result["uneven"]
    assert result["on each node"]


def evaluate_for_logits(folder):
    """Losses of packed evaluation, and of those that compute logits with batches of some sizes."""
    prepare(folder)
    some = [
        {"input_ids": list(range(1, 31)), "labels": list(range(1, 31))},
        {"input_ids": [5, 6, 7], "labels": [-100] * 3},
        {"input_ids": [9], "labels": [9]},
        *({"input_ids": ids, "labels": [-100, *ids[1:]]} for ids in ([3, 4], list(range(40, 60)))),
    ]
    data, result = datasets.Dataset.from_list(some), []
    strategies = {"strategies": [f"{dist.get_world_size()}x<1,1>"]}
    trainer = make(
        folder,
        "logits",
        data=data,
        eval_dataset=data,
        hydra=strategies,
        label_smoothing_factor=0.1,
    )
    for epsilon in (0.1, 0.3):
        trainer.label_smoother.epsilon = epsilon
        trainer.compute_metrics = None
        packed = trainer.evaluate()
        result.append((packed["eval_loss"], packed["eval_perplexity"]))
        trainer.compute_metrics = lambda prediction: {"rows": len(prediction.predictions)}
        for size in (1, 2, 3, 8):
            trainer.args.per_device_eval_batch_size = size
            found, predicted = trainer.evaluate(), trainer.predict(data).metrics
            assert found["eval_rows"] == predicted["test_rows"] == len(data)
            result.append((found["eval_loss"], found["eval_perplexity"]))
            result.append((predicted["test_loss"], predicted["test_perplexity"]))
    return result


@pytest.mark.distributed
def test_losses_beside_logits_are_the_mean_over_label_tokens(tmp_path):
    for result in run_distributed(evaluate_for_logits, 2, str(tmp_path)):
        assert result[0] != pytest.approx(result[9], rel=1e-4)
        for number, found in enumerate(result):
            assert found == pytest.approx(result[number // 9 * 9], rel=1e-5)


def customised(folder):
    """What users override, set or call, by both Trainers where both honour it."""
    data = prepare(folder)
    order = [b * PER_BATCH + i for b in (4, 1, 5) for i in range(PER_BATCH)]
    result = {}

    class Lengths(TrainerCallback):
        def on_train_begin(self, args, state, control, train_dataloader=None, **kwargs):
            self.seen = len(train_dataloader), len(train_dataloader.dataset)

    def start(base, run, **given):
        if "model" not in given:
            given["model_init"] = lambda: small_model()
        run = f"{base.__name__}-{run}"
        return make(folder, run, base, data=data, eval_dataset=data, **given)

    def customise(base):
        class Customised(base):
            predicted = 0

            def __getattribute__(self, name):
                called.add(name)
                return super().__getattribute__(name)

            def _get_train_sampler(self, train_dataset=None):
                return order

            def prediction_step(self, *args, **kwargs):
                self.predicted += 1
                return super().prediction_step(*args, **kwargs)

        return Customised

    for name, base in BOTH:
        lengths = Lengths()
        called = result[f"called {name}"] = set()
        trainer = start(customise(base), name, callbacks=[lengths], save_strategy="no")
        trainer.train()
        first = numbers(trainer.state.log_history, "loss")
        metrics = trainer.evaluate()
        trainer.train()  # model_init: from the beginning
        result[name] = (
            first,
            numbers(trainer.state.log_history, "loss"),
            metrics["eval_loss"],
            trainer.predicted,
            lengths.seen[0],
        )
        result["sequences"] = lengths.seen[1]

    class Shuffled(HydraTrainer):
        def _get_train_sampler(self, train_dataset=None):
            return SubsetRandomSampler(order)

    trainer = start(Shuffled, "shuffled", lr_scheduler_type="polynomial", save_strategy="no")
    trainer.train()
    result["drawn"] = len(trainer.engine.hydra.source.sampler._lengths)
    result["polynomial"] = numbers(trainer.state.log_history, "learning_rate")
    errors = result["errors"] = {}

    class Distributed(HydraTrainer):
        def _get_train_sampler(self, train_dataset=None):
            return torch.utils.data.DistributedSampler(train_dataset, shuffle=False)

    errors["distributed"] = error_of(start(Distributed, "distributed").train)
    late = start(
        HydraTrainer,
        "late",
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr": 1e-4},
        save_strategy="no",
        num_train_epochs=1,
    )
    shown = list(late.get_train_dataloader())
    late.train()
    sampler, state, drawn = late.engine.hydra.source.sampler, SamplerState(), []
    for _ in shown:
        batch, state = sampler.draw(state)
        drawn.append(list(batch.lengths))
    result["shown"] = [batch["attention_mask"].sum(1).tolist() for batch in shown], drawn
    result["min_lr"] = numbers(late.state.log_history, "learning_rate")[-1]

    generating = start(HydraTrainer, "generator", eval_strategy="epoch")
    generating.eval_dataset = {"a": data, "b": (row for row in data)}
    errors["eval generator"] = error_of(generating.train)
    result["steps before"] = generating.state.global_step, generating.deepspeed is None
    generating.eval_dataset = data
    problem = on_all_ranks(HydraConfigError("the first start fails"))
    with mock.patch.object(ds_hydra.HydraEngine, "_start", side_effect=problem):
        errors["first start"] = error_of(generating.train)
    result["after a failed start"] = generating.optimizer, generating.lr_scheduler
    model = small_model()
    some = torch.optim.AdamW(list(model.parameters())[:3])
    config = training_arguments(folder, output_dir=folder).hf_deepspeed_config.config
    config = {k: v for k, v in config.items() if v != "auto"}
    start_engine = functools.partial(ds_hydra.initialize, config=config)
    errors["optimizer"] = error_of(start_engine, model=model, optimizer=some)
    args = training_arguments(folder, output_dir=f"{folder}/plain", max_steps=1)
    plain = transformers.Trainer(small_model(), args, train_dataset=data)
    errors["plain"] = error_of(plain.train)
    return result


@pytest.mark.slow
@pytest.mark.distributed
def test_what_users_override_is_honoured_or_refused(tmp_path):
    result = run_distributed(customised, 2, str(tmp_path))[0]
    assert_as_stock(result["hydra"], result["stock"])
    assert result["hydra"][3] == NUM_BATCHES
    assert result["hydra"][4] == 3
    assert result["sequences"] == 12
    methods = {name for name, value in vars(transformers.Trainer).items() if callable(value)}
    never_called = (result["called stock"] - result["called hydra"]) & methods - {
        row.name for row in NOT_CALLED
    }
    assert not never_called, "to be refused where users override it"
    assert result["drawn"] == 12
    assert result["steps before"] == (0, True)
    assert result["after a failed start"] == (None, None)
    shown, drawn = result["shown"]
    assert shown == drawn
    assert len(shown) == NUM_BATCHES
    assert len(set(result["polynomial"])) == len(result["polynomial"])
    cosine = (1 + math.cos(math.pi * (NUM_BATCHES - 1) / NUM_BATCHES)) / 2
    assert result["min_lr"] == pytest.approx(1e-4 + 9e-4 * cosine)
    wanted = {
        "distributed": "draws 12 rows on rank 0 and others on ranks [1]",
        "optimizer": "the optimizer has 3 of ",
        "eval generator": "eval_dataset['b'] is a generator, which has neither a length nor is a stream",
        "first start": "the first start fails",
        "plain": '"hydra" section, and deepspeed.initialize',
    }
    assert result["errors"].keys() == wanted.keys()
    for what, text in wanted.items():
        assert text in result["errors"][what], what


def with_adapters(folder):
    peft = pytest.importorskip("peft")
    data = prepare(folder)

    def start():
        torch.manual_seed(2)
        config = peft.LoraConfig(
            r=4,
            target_modules="all-linear",
            modules_to_save=["lm_head", "norm"],
            task_type="CAUSAL_LM",
        )
        model = peft.get_peft_model(small_model().bfloat16(), config)
        return make(
            folder,
            "lora",
            data=data,
            sections={"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3}},
            model=model,
            eval_dataset=data,
            bf16=True,
            learning_rate=2e-2,
            save_steps=3,
        )

    trainer = start()
    trainer.train()
    losses = numbers(trainer.state.log_history, "loss")
    trainer.save_model(f"{folder}/adapter")
    again = start()
    again.train(resume_from_checkpoint=f"{folder}/lora/checkpoint-9")
    trained = {str(p.dtype) for p in again.model.parameters() if p.requires_grad}
    return (
        losses,
        numbers(again.state.log_history, "loss"),
        trainer.evaluate()["eval_loss"],
        trained,
    )


@pytest.mark.slow
@pytest.mark.distributed
def test_adapters_train_resume_and_are_saved_alone(tmp_path):
    peft = pytest.importorskip("peft", reason="the extra ds_hydra[peft] is not installed")
    losses, again, eval_loss, dtypes = run_distributed(with_adapters, 2, str(tmp_path))[0]
    assert losses[-1] < losses[0] - 0.02
    assert again == losses
    assert dtypes == {"torch.bfloat16"}
    assert (tmp_path / "adapter/adapter_model.safetensors").exists()
    assert not (tmp_path / "adapter/model.safetensors").exists()
    model = peft.PeftModel.from_pretrained(small_model(), tmp_path / "adapter")
    total, count = 0.0, 0
    with torch.no_grad():
        for row in rows():
            ids = torch.tensor([row["input_ids"]])
            total += float(model(input_ids=ids, labels=ids, use_cache=False).loss) * (
                ids.shape[1] - 1
            )
            count += ids.shape[1] - 1
    assert total / count == pytest.approx(eval_loss, rel=1e-2)  # bf16 activations there, fp32 here


def around_training(folder):
    """One rank: evaluation first, arguments used again, schedules by metric, other data after a
    resume.
    """
    data = prepare(folder)
    of_json = {
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3, "momentum": 0.9}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"},
        },
    }
    result = {}

    start = functools.partial(
        make,
        folder,
        data=data,
        hydra={"strategies": ["1x<1,1>"]},
        eval_dataset=data.select(range(PER_BATCH)),
        save_strategy="no",
        max_steps=2,
    )

    def outcome(trainer):
        history = trainer.state.log_history
        inner = trainer.deepspeed.basic_optimizer
        return (
            type(inner).__name__,
            inner.param_groups[0].get("momentum"),
            numbers(history, "learning_rate"),
            numbers(history, "loss"),
        )

    trainer = start("plain", sections=of_json)
    trainer.train()
    result["plain"] = outcome(trainer)
    trainer = start("evaluated", sections=of_json, model_init=lambda: small_model())
    trainer.evaluate()
    trainer.train()
    result["evaluated"] = outcome(trainer)
    # As an error advises
    trainer = HydraTrainer(small_model(), trainer.args, train_dataset=data)
    trainer.train()
    result["same arguments"] = outcome(trainer)

    adam = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}}
    adam["optimizer"]["params"] |= {"weight_decay": 0.0}
    by_metric = {
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"patience": 0, "factor": 0.1},
        "eval_strategy": "steps",
        "eval_steps": 1,
    }
    same = datasets.concatenate_datasets([data.select(range(PER_BATCH))] * 3)
    trainer = start("metric", data=same, sections=adam, max_steps=3, **by_metric)
    trainer.train()
    result["falls"] = [group["lr"] for group in trainer.deepspeed.optimizer.param_groups]
    trainer.lr_scheduler.step(1e9)
    result["stands still"] = [group["lr"] for group in trainer.deepspeed.optimizer.param_groups]

    class Own(HydraTrainer):
        def create_scheduler(self, num_training_steps, optimizer=None):
            if self.lr_scheduler is None:
                self.lr_scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return self.lr_scheduler

    result["by name"] = error_of(start("by name", Own, sections=adam).train)

    for (
        name,
        base,
    ) in BOTH:  # on one rank: transformers takes the mean over ranks of smoothed losses
        trainer = start(
            f"smooth {name}",
            base,
            label_smoothing_factor=0.1,
            eval_strategy="steps",
            eval_steps=1,
            per_device_train_batch_size=PER_BATCH,
            per_device_eval_batch_size=PER_BATCH,
        )
        trainer.train()
        result[f"smooth {name}"] = without_times(trainer.state.log_history)

    saving = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}
    trainer = start("first", sections=adam, **saving)
    trainer.train()
    other = data.select(range(PER_BATCH, len(data)))
    checkpoint = f"{folder}/first/checkpoint-2"
    continued = functools.partial(start, "next", data=other, sections=adam, max_steps=4)
    result["other data"] = error_of(continued().train, checkpoint)
    again = continued(ignore_data_skip=True, lr_scheduler_type="constant")
    again.train(checkpoint)
    stepped = {float(s["step"]) for s in again.deepspeed.basic_optimizer.state.values()}
    result["next"] = again.engine.hydra.source.sampler.state_dict(), stepped
    with_mask = [trainer.engine.eval_batch(other.select(range(PER_BATCH)).to_list())]
    result["loss of the other data"] = float(with_mask[0]), numbers(again.state.log_history, "loss")
    source = again.engine.hydra.source
    with mock.patch("ds_hydra.engine.planning.logger.warning") as warning:
        source.load_state_dict({}, 7)
    result["no position"] = source.sampler.state_dict(), str(warning.call_args)
    return result


@pytest.mark.slow
@pytest.mark.distributed
def test_what_comes_before_and_after_training_is_as_transformers_has_it(tmp_path):
    result = run_distributed(around_training, 1, str(tmp_path))[0]
    assert result["plain"][:2] == ("SGD", 0.9)
    assert result["evaluated"] == result["same arguments"] == result["plain"]
    assert result["falls"] == [1e-3]
    assert result["stands still"] == [pytest.approx(1e-4)]
    assert "the schedule is ReduceLROnPlateau, whose step() needs a metric" in result["by name"]
    for name in ("loss", "eval_loss"):
        mine, stock = (numbers(result[f"smooth {kind}"], name) for kind in ("hydra", "stock"))
        assert_as_stock(mine, stock)
    assert "in a Trainer TrainingArguments(ignore_data_skip=True)" in result["other data"]
    state, stepped = result["next"]
    assert (state["iteration"], state["epoch"], state["position"]) == (4, 0, 2 * PER_BATCH)
    assert stepped == {4.0}
    loss, history = result["loss of the other data"]
    assert history[2] == pytest.approx(loss, rel=1e-5)
    state, said = result["no position"]
    assert (state["iteration"], state["epoch"], state["position"]) == (7, 0, 0)
    assert "the checkpoint has no position in the data" in said


def started_by_init(folder):
    """Losses of two iterations; arguments come before the model, which DeepSpeed then partitions
    while it is made.
    """
    shape = small_model().config
    shape.save_pretrained(folder)
    config, _ = start_config(folder, "cpu", 1, 64, BUDGET, trainer=True)
    args = TrainingArguments(
        f"{folder}/run", deepspeed=config, use_cpu=True, max_steps=2, learning_rate=1e-2, logging_steps=1,
        report_to="none", disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(shape)
    trainer = HydraTrainer(model, args, train_dataset=datasets.Dataset.from_list(rows()))
    trainer.train()
    (group,) = trainer.optimizer.param_groups
    losses = numbers(trainer.state.log_history, "loss")
    return losses, group["initial_lr"], group["eps"], group["betas"]


@pytest.mark.distributed
def test_what_init_writes_for_a_trainer_starts_with_arguments_before_the_model(tmp_path):
    losses, *values = run_distributed(started_by_init, 1, str(tmp_path))[0]
    assert losses == pytest.approx([math.log(VOCAB_SIZE)] * 2, rel=0.1)
    assert values == [1e-2, 1e-8, (0.9, 0.999)], "those of TrainingArguments"

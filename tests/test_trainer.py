"""HydraTrainer beside transformers.Trainer: same data, same global batches, same behaviour.

A row of ROWS is a run by both. Behind them comes what HydraTrainer has of its own: resuming, kills,
SIGTERM, several trainings. Of what transformers tests of its Trainer, refused arguments and data of
its loaders are elsewhere (tests/test_trainer_arguments.py, tests/test_batches.py), streams in
tests/test_trainer_stream.py, Liger kernels in tests/test_liger.py.
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
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import datasets
import deepspeed
import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from as_stock import assert_as_stock
from distributed import run_distributed
from engines import ds_config, refused, small_profile, write_json
from models import VOCAB_SIZE, tiny
from safetensors.torch import load_file
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


class Recorder(TrainerCallback):
    """Notes what it is told, in which step and mode of the model."""

    def __init__(self):
        self.events = []

    def __getattribute__(self, name):
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def note(args, state, control, model, train_dataloader=None, **_):
            mode = "training" if model.training else "evaluating"
            self.events.append(f"{name} {state.global_step} {mode}")
            if name == "on_train_begin":
                self.events.append(f"{len(train_dataloader)} batches")

        return note


OF_TRAINER = ("model", "model_init", "eval_dataset", "compute_metrics", "callbacks")


def make(folder, run, base=HydraTrainer, *, data, sections=None, hydra=None, **settings):
    """A trainer of `data` that writes to the folder `run`; `settings` of it or its arguments."""
    is_stock = not issubclass(base, HydraTrainer)
    given = {name: settings.pop(name) for name in OF_TRAINER if name in settings}
    if given.keys().isdisjoint(("model", "model_init")):
        given["model"] = small_model()
    return base(
        args=training_arguments(f"{folder}/{run}", folder, sections, hydra, is_stock, **settings),
        data_collator=pad if is_stock else None,
        train_dataset=data,
        **given,
    )


def training_arguments(output_dir, folder, sections=None, hydra=None, is_stock=False, **settings):
    section = {
        "tokens_per_iteration": BUDGET,
        "profile": f"{folder}/profile.json",
        "strategies": ["2x<1,1>", "1x<2,1>"],
        **(hydra or {}),
    }
    config = ds_config(
        hydra=None if is_stock else section,
        train_micro_batch_size_per_gpu="auto",
        **({"gradient_clipping": "auto"} | (sections or {})),
    )
    usual = {
        "num_train_epochs": 2,
        "learning_rate": 1e-3,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "per_device_train_batch_size": PER_BATCH // 2,
        "per_device_eval_batch_size": PER_BATCH // 2,
        "train_sampling_strategy": "sequential",
        "use_cpu": True,
    }
    config = {key: value for key, value in config.items() if value is not None}
    return TrainingArguments(output_dir, deepspeed=config, **usual | settings)


def prepare(folder):
    deepspeed.utils.logger.setLevel("ERROR")
    transformers.logging.set_verbosity_error()
    write_json(f"{folder}/profile.json", small_profile(3_000_000))
    return datasets.Dataset.from_list(rows())


def error_of(function, *args, **kwargs):
    with pytest.raises(HydraConfigError) as raised:
        function(*args, **kwargs)
    return str(raised.value)


def numbers(history, key):
    return [entry[key] for entry in history if key in entry]


def files_in(folder):
    """Names of the files and folders of `folder` and of its checkpoints."""
    found = [*Path(folder).glob("*"), *Path(folder).glob("checkpoint-*/*")]
    return sorted(str(path.relative_to(folder)) for path in found)


ODD = [
    *rows()[:2],
    *({"input_ids": ids, "labels": [-100] * len(ids)} for ids in ([5], [6, 7, 8])),
    {"input_ids": list(range(1, 140)), "labels": list(range(1, 140))},  # the context is 128
]
OF_JSON = {
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


def accuracy(prediction):
    predicted, labels = prediction.predictions[:, :-1].argmax(-1), prediction.label_ids[:, 1:]
    return {"accuracy": float((predicted == labels)[labels != -100].mean())}


def overriding(base):
    """A subclass that trains three global batches of its own, and notes what is looked up."""

    class Overriding(base):
        predicted, called = 0, set()

        def __getattribute__(self, name):
            type(self).called.add(name)
            return super().__getattribute__(name)

        def _get_train_sampler(self, train_dataset=None):
            return [b * PER_BATCH + i for b in (4, 1, 5) for i in range(PER_BATCH)]

        def prediction_step(self, *args, **kwargs):
            type(self).predicted += 1
            return super().prediction_step(*args, **kwargs)

    return Overriding


def saved_and_best(trainer):
    final, folder = trainer.evaluate(), trainer.args.output_dir
    trainer.save_model(f"{folder}-saved")
    weights = trainer.accelerator.get_state_dict(trainer.deepspeed)
    if trainer.args.should_save:  # as many scripts do, on the first rank alone
        trainer._save(f"{folder}-alone", state_dict=weights)
    dist.barrier()  # rank 0 writes
    best = os.path.basename(trainer.state.best_model_checkpoint), trainer.state.best_metric
    sections = ("gradient_clipping", "optimizer", "scheduler")
    return {
        "saved": files_in(f"{folder}-saved"),
        "alone": files_in(f"{folder}-alone"),
        "best": best,
        "final": final["eval_loss"],
        "config": {key: trainer.deepspeed.config[key] for key in sections},
        "flos": trainer.state.total_flos,
    }


def predicted(trainer):
    trainer.evaluate()
    odd = trainer.predict(datasets.Dataset.from_list(ODD))
    return {"shape": odd.predictions.shape, "labels": odd.label_ids.tolist()}


def trained_from_the_beginning(trainer):
    trainer.evaluate()
    trainer.train()
    return {"predicted": type(trainer).predicted, "called": type(trainer).called}


class Row(NamedTuple):
    """A run of both Trainers by `settings` of `make`; what `more` returns afterwards has to be
    equal, too.
    """

    settings: dict[str, Any]
    more: Callable[[Any], dict[str, Any]] = lambda trainer: {}
    change: Callable[[type], type] = lambda base: base
    num_ranks: int = 2


ROWS = {
    "saves, evaluations, best model, sections of the JSON": Row(
        {
            "sections": OF_JSON,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "save_steps": 2,
            "save_total_limit": 2,
            "warmup_steps": 3,
            "weight_decay": 0.05,
            "load_best_model_at_end": True,
            "eval_on_start": True,
        },
        saved_and_best,
    ),
    "early stopping, a cosine, nothing clipped": Row(
        {
            "sections": {"zero_optimization": OF_JSON["zero_optimization"]},
            "stops": True,
            "lr_scheduler_type": "cosine",
            "max_steps": 17,
            "eval_strategy": "epoch",
            "save_strategy": "epoch",
            "logging_strategy": "epoch",
            "metric_for_best_model": "loss",
            "load_best_model_at_end": True,
            "num_train_epochs": 5,
            "max_grad_norm": 0.0,
        },
    ),
    "metrics of logits, predictions": Row(
        {"compute_metrics": accuracy, "max_steps": 1, "save_strategy": "no"}, predicted
    ),
    "overrides, trained twice from a model_init": Row(
        {"model_init": lambda: small_model(), "save_strategy": "no"},
        trained_from_the_beginning,
        overriding,
    ),
    # On one rank: transformers takes the mean over ranks of smoothed losses
    "smoothed labels": Row(
        {
            "hydra": {"strategies": ["1x<1,1>"]},
            "label_smoothing_factor": 0.1,
            "eval_strategy": "steps",
            "eval_steps": 1,
            "max_steps": 2,
            "save_strategy": "no",
            "per_device_train_batch_size": PER_BATCH,
            "per_device_eval_batch_size": PER_BATCH,
        },
        num_ranks=1,
    ),
}  # fmt: skip


def run_rows(folder, num_ranks):
    """What each row of `num_ranks` leaves, by both Trainers."""
    data, found = prepare(folder), {}
    for number, (name, row) in enumerate(ROWS.items()):
        for kind, base in BOTH if row.num_ranks == num_ranks else ():
            recorder, settings = Recorder(), dict(row.settings)
            stops = [EarlyStoppingCallback(1, 100.0)] if settings.pop("stops", False) else []
            trainer = make(
                folder,
                f"{kind}-{number}",
                row.change(base),
                data=data,
                eval_dataset=data.select(range(PER_BATCH)),  # one batch: equal averages
                callbacks=[recorder, *stops],
                **settings,
            )
            output = trainer.train()
            more = row.more(trainer)
            dist.barrier()
            found[name, kind] = {
                "history": trainer.state.log_history,
                "events": recorder.events,
                "files": files_in(trainer.args.output_dir),
                "output": (output.global_step, output.training_loss, output.metrics),
                **more,
            }
    return found


ADDED = {
    "loss": {"tokens_per_second", "tflops_per_device", "imbalance"},
    "eval_loss": {"eval_perplexity"},
}
"""What ds_hydra logs beside what transformers does."""


@pytest.fixture(scope="module")
def beside(tmp_path_factory):
    folder = tmp_path_factory.mktemp("beside")
    found = run_distributed(run_rows, 2, str(folder), 2)[0]
    return folder, found | run_distributed(run_rows, 1, str(folder), 1)[0]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", ROWS)
def test_a_run_is_that_of_transformers(beside, name):
    """Losses, norms and rates; events in their order; files; what is filled in for "auto"."""
    mine, stock = (dict(beside[1][name, kind]) for kind in ("hydra", "stock"))
    called = [run.pop("called", set()) for run in (mine, stock)]
    exact = ("learning_rate", "epoch", "step")
    assert_as_stock(mine, stock, absolute={"eval_accuracy": 1e-3}, exact=exact, added=ADDED)
    for entry in mine["history"]:
        if "eval_loss" in entry:
            assert entry["eval_perplexity"] == pytest.approx(math.exp(entry["eval_loss"]))
    methods = {name for name, value in vars(transformers.Trainer).items() if callable(value)}
    never_called = (called[1] - called[0]) & methods - {row.name for row in NOT_CALLED}
    assert not never_called, "to be refused where users override it"


@pytest.mark.slow
@pytest.mark.distributed
def test_runs_beside_transformers_do_what_the_comparison_is_about(beside):
    folder, found = beside
    saved, stopped, metrics, overridden, _ = (found[name, "hydra"] for name in ROWS)
    losses = numbers(saved["history"], "loss")
    assert len(losses) == 2 * NUM_BATCHES
    assert losses[-1] < losses[0]
    for history in (saved["history"], stopped["history"]):
        for key in ("loss", "grad_norm", "eval_loss", "train_loss"):
            assert numbers(history, key), key
    told = {"on_evaluate 4", "on_save 12", "on_prediction_step 2", "on_epoch_end 6"}
    assert {f"{event} evaluating" for event in told} <= set(saved["events"])
    assert sum(name.count("/") == 0 for name in saved["files"] if "checkpoint" in name) == 2
    assert saved["final"] == pytest.approx(saved["best"][1], rel=1e-6)
    schedule = saved["config"]["scheduler"]["params"]
    assert (schedule["total_num_steps"], schedule["warmup_num_steps"]) == (12, 3)
    flops = count_flops(StageModel(small_model()))
    two_epochs = 2 * flops.of(len(row["input_ids"]) for row in rows())
    assert saved["flos"] == pytest.approx(two_epochs)
    assert stopped["output"][0] == 2 * NUM_BATCHES
    assert metrics["shape"] == (len(ODD), 139, VOCAB_SIZE)
    assert (overridden["predicted"], overridden["events"][2]) == (1, "3 batches")
    models = [
        AutoModelForCausalLM.from_pretrained(folder / f"{n}-0-saved") for n in ("hydra", "stock")
    ]
    for (name, a), (_, b) in zip(*(m.named_parameters() for m in models), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=name)
    arguments = torch.load(folder / "hydra-0-saved/training_args.bin", weights_only=False)
    assert arguments.learning_rate == 1e-3


def check_resumed(folder):
    """A shuffled run with epochs of unequal length continues, within and at the end of an epoch,
    the very same curve.
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
    history, epochs = whole.state.log_history, [*map(whole._epochs.num_iterations, range(3))]
    assert history[-1]["epoch"] == 3.0
    assert numbers(history[:-1], "epoch")[epochs[0] - 1] == 1.0
    assert len(numbers(history, "loss")) == sum(epochs)
    drawn = whole.engine.source.sampler.state
    assert drawn.epoch >= 3, "three epochs were not drawn"
    assert drawn.position < 10, "more than a global batch of a fourth epoch"
    for step in (2, epochs[0]):
        # Other weights: everything must come from the checkpoint
        again = start("again", model=small_model(seed=1))
        again.train(resume_from_checkpoint=f"{folder}/whole/checkpoint-{step}")
        for key in ("loss", "epoch", "num_input_tokens_seen"):
            found, wanted = (numbers(t.state.log_history[:-1], key) for t in (again, whole))
            assert found == wanted, (step, key)
    if dist.get_rank() == 1:
        assert epoch_order.cache_info().misses == 0, "orders belong on the rank that plans"


def check_save_model_waits(folder):
    """Any rank may load what it has saved, in shards, as it is in a checkpoint."""
    trainer = make(folder, "run", data=prepare(folder), max_steps=1, save_steps=1)
    trainer.train()
    save = functools.partial(trainer.model.save_pretrained, max_shard_size="30KB")

    def save_late(*args, **settings):
        time.sleep(1.0 - dist.get_rank())
        save(*args, **settings)

    trainer.model.save_pretrained = save_late
    trainer.save_model(f"{folder}/shards")
    assert len(list(Path(folder, "shards").glob("model-*.safetensors"))) > 1
    tensors = [safetensors_in(f"{folder}/{name}") for name in ("shards", "run/checkpoint-1")]
    torch.testing.assert_close(*tensors, rtol=0, atol=0)


def safetensors_in(folder):
    return {k: v for path in Path(folder).glob("*.safetensors") for k, v in load_file(path).items()}


def check_trained_again(folder):
    """One Trainer evaluates, trains and trains again, as new ones do on saved weights; its start
    may have failed before.
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

    alone = start("alone", small_model())
    first = losses(alone)
    alone.save_model(f"{folder}/weights")
    alone = start("again", AutoModelForCausalLM.from_pretrained(f"{folder}/weights"))
    second, after = losses(alone), alone.evaluate()["eval_loss"]
    model = small_model()
    assert "7x<1,1>" in error_of(start("failing", model, ["1x<2,1>", "7x<1,1>"]).train)
    trainer = start("one", model)
    before = trainer.evaluate()["eval_loss"]
    evaluated = weakref.ref(trainer.engine)
    assert losses(trainer) == first
    assert evaluated() is None, "the engine that evaluated is kept for ever"
    trainer.lr_scheduler, own = object(), trainer.lr_scheduler
    assert "lr_scheduler is a object that was given" in error_of(trainer.train)
    trainer.lr_scheduler = own
    assert losses(trainer) == second
    assert trainer.evaluate()["eval_loss"] == after < before
    assert "an engine holds this LlamaForCausalLM" in error_of(start, "held", model)
    trainer.engine.destroy()
    third = start("third", model, bfloat16={"enabled": False})
    assert losses(third)[0] < second[0] < first[0]
    third.engine.destroy()
    assert third.evaluate()["eval_loss"] < after


def check_resumed_otherwise(folder):
    """With another budget or other data what is left is trained or named; callbacks that save or
    log on one rank, and other rows there, are named.
    """
    data = prepare(folder)
    start = functools.partial(make, folder, "run", data=data, num_train_epochs=1, save_steps=3)
    doubled = {"tokens_per_iteration": 2 * BUDGET}
    start().train()
    checkpoint = f"{folder}/run/checkpoint-3"
    few = data.select(range(2 * PER_BATCH))
    for trainer in (start(hydra=doubled), start(data=few, ignore_data_skip=True)):
        said = error_of(trainer.train, checkpoint)
        assert said.endswith(
            "0 would be trained of the 2 that are left; set max_steps=5 to train them"
        )
    longer = start(hydra=doubled, max_steps=5)
    longer.train(resume_from_checkpoint=checkpoint)
    drawn = longer.engine.source.sampler.state
    assert drawn.epoch == 1, "all rows"
    assert drawn.position <= 2 * PER_BATCH, "some of the next epoch"

    class Alone(TrainerCallback):
        def __init__(self, flag):
            self.flag = flag

        def on_step_end(self, args, state, control, **kwargs):
            setattr(control, self.flag, dist.get_rank() == 1)

    rows_of_rank = data.select(range(4 + dist.get_rank()))
    looked_at = start()  # rank 0 wants the first batch
    other = looked_at.get_train_dataloader if dist.get_rank() == 0 else looked_at.train
    for action, message in (
        (start(callbacks=[Alone("should_save")]).train, "saving a checkpoint of the Trainer on rank 1"),
        (start(callbacks=[Alone("should_log")], logging_steps=100).train, "logging on rank 1"),
        (lambda: start().predict(rows_of_rank), "test_dataset has 4 rows of 64 tokens on rank 0 and 5 of"),
        (other, "get_train_dataloader() on rank 0; train() on rank 1"),
    ):  # fmt: skip
        assert message in refused(action, PlanMismatchError)


def check_killed_while_saving(folder):
    """What a kill leaves at several points of saving step 2; runs are resumed from it."""
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
                    shutil.copytree(f"{folder}/whole", f"{folder}/{name}")
                dist.barrier()
            return result

        return mock.patch.object(owner, name, method)

    whole = start("whole")
    with contextlib.ExitStack() as stack:
        for point in points:
            stack.enter_context(copies_after(*point))
        whole.train()
    losses = numbers(whole.state.log_history, "loss")
    for _, name, _ in points:
        second = "checkpoint-2" if name == "do_together" else "_saving-checkpoint-2"
        assert set(os.listdir(f"{folder}/{name}")) == {"checkpoint-1", second}, name
        last = os.path.basename(get_last_checkpoint(f"{folder}/{name}"))
        assert last == ("checkpoint-2" if name == "do_together" else "checkpoint-1"), name
    dist.barrier()
    if dist.get_rank() == 0:  # as between the renames of a second saving
        os.rename(f"{folder}/{name}/checkpoint-2", f"{folder}/{name}/.replaced-checkpoint-2")

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
    assert os.listdir(f"{folder}/stopped") == ["checkpoint-2"]
    for run, numbers_there in (("do_together", "123"), ("stopped", "23")):
        again = start(run)
        again.train(resume_from_checkpoint=True)
        assert numbers(again.state.log_history, "loss") == losses
        assert set(os.listdir(f"{folder}/{run}")) == {f"checkpoint-{n}" for n in numbers_there}


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


def check_folders_are_tried(folder):
    """A folder in which the first checkpoint would fail is found before the first step."""
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

    start = functools.partial(make, folder, data=data, save_steps=1, max_steps=1)
    no_renames = functools.partial(mock.patch.object, os, "rename", renames_no_folder)
    for name, patch, reason in (
        ("rename", no_renames(), "cannot rename a folder in it ([Errno 38]"),
        ("denied", failing(errno.EACCES, 1), "cannot write to it ([Errno 13]"),
        ("full", failing(errno.ENOSPC, 0), "cannot write to it ([Errno 28]"),
    ):
        trainer = start(name)
        with patch:
            said = error_of(trainer.train)
        assert f"output_dir is '{folder}/{name}'" in said
        assert reason in said
        assert said.startswith("rank 1: ") == (name == "denied" and rank == 0)
        assert trainer.state.global_step == 0
        dist.barrier()  # until the other rank has removed its trial
        assert os.listdir(f"{folder}/{name}") == [], name
    model = small_model()
    model.generation_config.temperature, model.generation_config.do_sample = 0.5, False
    for name, trainer in (
        ("model.generation_config", start("generation", model=model)),
        ("processing_class", start("tokenizer")),
    ):
        if name == "processing_class":
            trainer.processing_class = object()
        said = error_of(trainer.train)
        assert f"{name} cannot be saved, as it is with every checkpoint" in said
    said = []
    with mock.patch.object(HydraTrainer, "_warn", lambda self, text: said.append(text)):
        trainer = start("nothing", save_strategy="no")
        trainer.processing_class = object()
        trainer.train()
    assert sum("processing_class cannot be saved" in text for text in said) == (rank == 0)
    own = Path(folder, f"host{rank}")  # no folder that ranks share
    check = functools.partial(files.try_folder, own, "output_dir", torch.device("cpu"))
    assert "use_node_local_storage" in error_of(check, commits=rank == 0)
    check(commits=rank == 0, writes=rank == 0)
    if rank == 0:
        Path(folder, "file").touch()
        assert f"output_dir is '{folder}/file', which is no folder" in error_of(start, "file")
    # Weights alone may go to a folder of rank 0
    with failing(errno.EACCES, 1):
        start("weights", save_only_model=True).train()
    assert os.listdir(f"{folder}/weights") == ["checkpoint-1"]


class Stop(TrainerCallback):
    """SIGTERM on rank 1, in an evaluation or after the last step; counts batches evaluated then."""

    def __init__(self, where):
        self.where, self.num_after, self.is_sent = where, 0, False

    def on_prediction_step(self, args, state, control, **kwargs):
        self.num_after += self.is_sent
        if not self.is_sent and self.where in ("packed", "padded"):
            self.send()

    def on_step_end(self, args, state, control, **kwargs):
        if self.where == "at the end" and state.global_step == args.max_steps:
            self.send()

    def send(self):
        self.is_sent = True
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def check_stopped(folder):
    """SIGTERM is answered within an evaluation, by both loops, and at the end: a checkpoint, and
    the program's own handler, which has the next one for itself.
    """
    data, is_told = prepare(folder), dist.get_rank() == 1
    for where, step in (("packed", 2), ("padded", 2), ("at the end", 3), ("not at all", None)):
        calls, stop, end = [], Stop(where), None
        signal.signal(signal.SIGTERM, lambda number, frame, calls=calls: calls.append("own"))
        stopped = f"{folder}/{where}/stopped"
        trainer = make(
            folder,
            where,
            data=data,
            hydra={"faults": {"save_on_sigterm": stopped}},
            eval_dataset=data,
            compute_metrics=(lambda prediction: {}) if where == "padded" else None,
            callbacks=[stop],
            max_steps=3,
            eval_strategy="steps" if where in ("packed", "padded") else "no",
            eval_steps=2,
            save_strategy="no",
        )
        try:
            trainer.train()
        except SystemExit as error:
            end = error.code
        assert (end, calls) == (
            None if step is None else 0,
            ["own"] * (is_told and step is not None),
        )
        os.kill(os.getpid(), signal.SIGTERM)
        assert calls == ["own"] * (1 + (is_told and step is not None))
        assert stop.num_after <= 1
        saved = os.listdir(stopped) if step is not None else []
        assert saved == ([] if step is None else [f"checkpoint-{step}"])


def mean_loss(model, some):
    """Mean over the label tokens of rows that run alone."""
    examples = [{key: torch.tensor(value) for key, value in row.items()} for row in some]
    with torch.no_grad():
        total = sum(float(summed_loss(model, example)) for example in examples)
    return total / sum(len(example["input_ids"]) - 1 for example in examples)


def check_evaluated_alone(folder):
    """zero.Init and a plain list, evaluation without training, what the JSON leaves out."""
    data = prepare(folder)
    if dist.get_rank() == 0:
        small_model().save_pretrained(f"{folder}/model")
    dist.barrier()
    args = training_arguments(f"{folder}/init", folder, max_steps=2)
    # TrainingArguments turned zero.Init on
    partitioned = AutoModelForCausalLM.from_pretrained(f"{folder}/model")
    assert all(hasattr(p, "ds_id") for p in partitioned.parameters())
    trainer = HydraTrainer(partitioned, args, train_dataset=rows())
    trainer.train()
    first = numbers(trainer.state.log_history, "loss")[0]
    splits = {"a": data, "b": data.select([0])}
    trainer = make(folder, "eval", data=None, eval_dataset=splits, bf16_full_eval=True)
    found = trainer.evaluate()
    trainer.compute_metrics = accuracy
    assert trainer.evaluate(data)["eval_loss"] == pytest.approx(found["eval_a_loss"], rel=1e-2)
    assert not trainer.accelerator._dataloaders
    assert {buffer.dtype for buffer in trainer.model.buffers()} == {torch.float32}
    assert trainer.args.bf16_full_eval is True
    trainer.accelerator.even_batches = False
    said = error_of(trainer.predict, datasets.Dataset.from_list(rows()[:3]))
    assert "accelerator_config.even_batches is False" in said
    sections = {"checkpoint": {"use_node_local_storage": True}, "gradient_clipping": None}
    trainer = make(folder, "nodes", data=data, sections=sections)
    config = trainer.accelerator.state.deepspeed_plugin.hf_ds_config.config
    assert (trainer.args.save_on_each_node, config["gradient_clipping"]) == (True, 0.5)
    model = small_model()
    assert first == pytest.approx(mean_loss(model, rows()[:PER_BATCH]), rel=1e-5)
    assert found["eval_a_loss"] == pytest.approx(mean_loss(model, rows()), rel=1e-5)
    alone = mean_loss(model, rows()[:1])
    assert found["eval_b_perplexity"] == pytest.approx(math.exp(alone), rel=1e-5)


def check_losses_beside_logits(folder):
    """Losses beside logits, of batches of some sizes, are those of packed evaluation."""
    prepare(folder)
    some = [
        {"input_ids": list(range(1, 31)), "labels": list(range(1, 31))},
        {"input_ids": [5, 6, 7], "labels": [-100] * 3},
        {"input_ids": [9], "labels": [9]},
        *({"input_ids": ids, "labels": [-100, *ids[1:]]} for ids in ([3, 4], list(range(40, 60)))),
    ]
    data = datasets.Dataset.from_list(some)
    trainer = make(folder, "logits", data=data, eval_dataset=data, label_smoothing_factor=0.1)
    losses = []
    for epsilon in (0.1, 0.3):
        trainer.label_smoother.epsilon, trainer.compute_metrics = epsilon, None
        packed = trainer.evaluate()
        losses.append(packed["eval_loss"])
        trainer.compute_metrics = lambda prediction: {"rows": len(prediction.predictions)}
        for size in (1, 3):
            trainer.args.per_device_eval_batch_size = size
            for found, prefix in (
                (trainer.evaluate(), "eval"),
                (trainer.predict(data).metrics, "test"),
            ):
                assert found[f"{prefix}_rows"] == len(data)
                for name in ("loss", "perplexity"):
                    wanted = pytest.approx(packed[f"eval_{name}"], rel=1e-5)
                    assert found[f"{prefix}_{name}"] == wanted
    assert losses[0] != pytest.approx(losses[1], rel=1e-4)


def check_samplers_and_failures(folder):
    """Rows of a sampler that shuffles are shown as they are drawn; starts fail before a step."""
    data = prepare(folder)
    start = functools.partial(
        make, folder, data=data, eval_dataset=data, save_strategy="no", num_train_epochs=1
    )

    class Shuffled(HydraTrainer):
        def _get_train_sampler(self, train_dataset=None):
            return SubsetRandomSampler(range(3 * PER_BATCH))

    class Distributed(HydraTrainer):
        def _get_train_sampler(self, train_dataset=None):
            return torch.utils.data.DistributedSampler(train_dataset, shuffle=False)

    floor = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-4}}
    trainer = start("shuffled", Shuffled, train_sampling_strategy="random", **floor)
    shown = [batch["attention_mask"].sum(1).tolist() for batch in trainer.get_train_dataloader()]
    trainer.train()
    sampler, state = trainer.engine.source.sampler, SamplerState()
    for lengths in shown:
        batch, state = sampler.draw(state)
        assert list(batch.lengths) == lengths
    assert len(sampler._lengths) == 3 * PER_BATCH
    rates = numbers(trainer.state.log_history, "learning_rate")
    assert len({*rates}) == len(rates) == len(shown)
    assert 1e-4 < rates[-1] < rates[0] == 1e-3
    said = refused(start("other", Distributed).train, PlanMismatchError)
    assert "draws 12 rows on rank 0 and others on rank 1 (12)" in said
    trainer = start("generator", eval_strategy="epoch")
    trainer.eval_dataset = {"a": data, "b": (row for row in data)}
    assert "eval_dataset['b'] is a generator, which has neither a" in error_of(trainer.train)
    assert (trainer.state.global_step, trainer.deepspeed) == (0, None)
    trainer.eval_dataset = data
    problem = on_all_ranks(HydraConfigError("the first start fails"))
    with mock.patch.object(ds_hydra.HydraEngine, "_start", side_effect=problem):
        assert "the first start fails" in error_of(trainer.train)
    assert (trainer.optimizer, trainer.lr_scheduler) == (None, None)
    model = small_model()
    some = torch.optim.AdamW(list(model.parameters())[:3])
    config = training_arguments(folder, folder).hf_deepspeed_config.config
    config = {k: v for k, v in config.items() if v != "auto"}
    start_engine = functools.partial(ds_hydra.initialize, config=config)
    assert "the optimizer has 3 of " in error_of(start_engine, model=model, optimizer=some)
    args = training_arguments(f"{folder}/plain", folder, max_steps=1)
    plain = transformers.Trainer(small_model(), args, train_dataset=data)
    assert '"hydra" section, and deepspeed.initialize' in error_of(plain.train)


def check_adapters(folder):
    """Adapters train in bf16, resume and are saved alone."""
    import peft

    data = prepare(folder)

    def start():
        torch.manual_seed(2)
        config = peft.LoraConfig(
            r=4,
            target_modules="all-linear",
            modules_to_save=["lm_head", "norm"],
            task_type="CAUSAL_LM",
        )
        return make(
            folder,
            "lora",
            data=data,
            sections={"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3}},
            model=peft.get_peft_model(small_model().bfloat16(), config),
            eval_dataset=data,
            bf16=True,
            learning_rate=2e-2,
            save_steps=3,
        )

    trainer = start()
    trainer.train()
    losses = numbers(trainer.state.log_history, "loss")
    assert losses[-1] < losses[0] - 0.02
    trainer.save_model(f"{folder}/adapter")
    assert "adapter_model.safetensors" in os.listdir(f"{folder}/adapter")
    assert "model.safetensors" not in os.listdir(f"{folder}/adapter")
    again = start()
    again.train(resume_from_checkpoint=f"{folder}/lora/checkpoint-9")
    assert numbers(again.state.log_history, "loss") == losses
    assert {p.dtype for p in again.model.parameters() if p.requires_grad} == {torch.bfloat16}
    model = peft.PeftModel.from_pretrained(small_model(), f"{folder}/adapter")
    # bf16 activations there, fp32 here
    assert mean_loss(model, rows()) == pytest.approx(trainer.evaluate()["eval_loss"], rel=1e-2)


def check_around_training(folder):
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
        trainer.train()
        inner, history = trainer.deepspeed.basic_optimizer, trainer.state.log_history
        assert (type(inner), inner.param_groups[0]["momentum"]) == (torch.optim.SGD, 0.9)
        return numbers(history, "learning_rate"), numbers(history, "loss")

    wanted = outcome(start("plain", sections=of_json))
    trainer = start("evaluated", sections=of_json, model_init=lambda: small_model())
    trainer.evaluate()
    assert outcome(trainer) == wanted
    # As an error advises
    assert outcome(HydraTrainer(small_model(), trainer.args, train_dataset=data)) == wanted

    adam = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True, "weight_decay": 0.0}}
    start = functools.partial(start, sections={"optimizer": adam})
    by_metric = {
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"patience": 0, "factor": 0.1},
        "eval_strategy": "steps",
        "eval_steps": 1,
    }
    same = datasets.concatenate_datasets([data.select(range(PER_BATCH))] * 3)
    trainer = start("metric", data=same, max_steps=3, **by_metric)
    trainer.train()
    (group,) = trainer.deepspeed.optimizer.param_groups
    assert group["lr"] == 1e-3, "the metric falls"
    trainer.lr_scheduler.step(1e9)
    assert group["lr"] == pytest.approx(1e-4)

    class Own(HydraTrainer):
        def create_scheduler(self, num_training_steps, optimizer=None):
            if self.lr_scheduler is None:
                self.lr_scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return self.lr_scheduler

    said = error_of(start("by name", Own).train)
    assert "the schedule is ReduceLROnPlateau, whose step() needs a metric" in said
    saving = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}
    first = start("first", **saving)
    first.train()
    other, checkpoint = data.select(range(PER_BATCH, len(data))), f"{folder}/first/checkpoint-2"
    continued = functools.partial(start, "next", data=other, max_steps=4)
    assert "in a Trainer TrainingArguments(ignore_data_skip=True)" in error_of(
        continued().train, checkpoint
    )
    again = continued(ignore_data_skip=True, lr_scheduler_type="constant")
    again.train(checkpoint)
    state = again.engine.source.sampler.state
    assert state == SamplerState(iteration=4, epoch=0, position=2 * PER_BATCH)
    assert {float(s["step"]) for s in again.deepspeed.basic_optimizer.state.values()} == {4.0}
    loss = float(first.engine.eval_batch(other.select(range(PER_BATCH)).to_list()))
    assert numbers(again.state.log_history, "loss")[2] == pytest.approx(loss, rel=1e-5)
    with mock.patch("ds_hydra.engine.planning.logger.warning") as warning:
        again.engine.source.load_state_dict({}, 7)
    assert again.engine.source.sampler.state == SamplerState(iteration=7)
    assert "the checkpoint has no position in the data" in str(warning.call_args)


def check_started_by_init(folder):
    """What `init` writes for a Trainer; arguments come before the model, which DeepSpeed then
    partitions while it is made.
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
    losses, speeds = (numbers(trainer.state.log_history, k) for k in ("loss", "tokens_per_second"))
    assert losses == pytest.approx([math.log(VOCAB_SIZE)] * 2, rel=0.1)
    last = trainer.engine.last_metrics  # each iteration is logged
    assert speeds[-1] == pytest.approx(last.num_tokens / last.iteration_ms * 1e3, rel=1e-3)
    of_arguments = [1e-2, 1e-8, (0.9, 0.999)]
    assert [group[key] for key in ("initial_lr", "eps", "betas")] == of_arguments


NEEDS_PEFT = pytest.mark.skipif(
    find_spec("peft") is None, reason="the extra ds_hydra[peft] is not installed"
)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("check", "num_ranks"),
    [
        pytest.param(check_resumed, 2, marks=pytest.mark.slow),
        (check_save_model_waits, 2),
        pytest.param(check_trained_again, 2, marks=pytest.mark.slow),
        pytest.param(check_resumed_otherwise, 2, marks=pytest.mark.slow),
        pytest.param(check_killed_while_saving, 2, marks=pytest.mark.slow),
        (check_folders_are_tried, 2),
        pytest.param(check_stopped, 2, marks=pytest.mark.slow),
        pytest.param(check_evaluated_alone, 2, marks=pytest.mark.slow),
        (check_losses_beside_logits, 2),
        pytest.param(check_samplers_and_failures, 2, marks=pytest.mark.slow),
        pytest.param(check_adapters, 2, marks=[pytest.mark.slow, NEEDS_PEFT]),
        pytest.param(check_around_training, 1, marks=pytest.mark.slow),
        (check_started_by_init, 1),
    ],
)
def test_on_ranks(tmp_path, check, num_ranks):
    run_distributed(check, num_ranks, str(tmp_path))

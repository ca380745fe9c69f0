"""HydraTrainer on streams: it trains what `ds_hydra.initialize` trains, each row once after any
number of kills, and goes round as transformers does.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
from pathlib import Path

import pytest
import torch
from datasets.distributed import split_dataset_by_node
from distributed import run_distributed
from engines import ds_config, raised_by
from models import tiny
from test_stream import generated, row_of
from test_stream import rows as give
from test_trainer import make as make_trainer
from test_trainer import numbers, prepare
from torch.utils.data import IterableDataset
from transformers import TrainerCallback
from trl_runs import chats, make_tokenizer

import ds_hydra
from ds_hydra.errors import HydraConfigError

NUM_ROWS = 400
MAX_STEPS = 12
BUDGET = 150
SIZES = {"vocab_size": 259, "max_position_embeddings": 512, "num_hidden_layers": 2}


def tokenised_chats():
    tokenizer = make_tokenizer()
    return chats().map(
        lambda row: tokenizer.apply_chat_template(
            row["messages"], return_dict=True, return_assistant_tokens_mask=True
        )
    )


SECTION = {
    "tokens_per_iteration": BUDGET,
    "stream_window": 2,
    "strategies": None,
    "seed": 5,
    "planner": {"num_workers": 0},
}


def make(folder, run, stream, *, hydra=None, **settings):
    usual = {
        "max_steps": MAX_STEPS,
        "lr_scheduler_type": "constant",
        "save_strategy": "no",
        "seed": 5,
        "train_sampling_strategy": "random",
    }
    model = tiny("llama", **SIZES)
    hydra = SECTION | (hydra or {})
    return make_trainer(folder, run, data=stream, model=model, hydra=hydra, **usual | settings)


def losses_of(trainer, key="loss"):
    return numbers(trainer.state.log_history, key)


class Recorder(TrainerCallback):
    """Writes loss and rows of each step to a file; after step `kill_at` a rank dies."""

    def __init__(self, path, kill_at=0):
        self.path, self.kill_at, self.rows = path, kill_at, []

    def watch(self, trainer):
        source = trainer.engine.source
        share = source._share

        def watching(plan):
            received = share(plan)
            self.rows = [row_of(received[place][0]) for place in range(len(plan.lengths))]
            return received

        source._share = watching

    def on_step_begin(self, args, state, control, **_):
        if self.trainer.engine.source._share.__name__ != "watching":
            self.watch(self.trainer)

    def on_log(self, args, state, control, logs, **_):
        if "loss" in logs and state.is_world_process_zero:
            entry = [state.global_step, logs["loss"], self.rows]
            with open(self.path, "a") as file:
                file.write(json.dumps(entry) + "\n")

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.kill_at and args.process_index == args.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)


def recorded(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def train(folder, run, kill_at=0, **settings):
    prepare(folder)
    recorder = Recorder(f"{folder}/{run}.jsonl", kill_at)
    trainer = recorder.trainer = make(
        folder, run, generated(NUM_ROWS), callbacks=[recorder], **settings
    )
    found = Path(folder, run).exists() and any(Path(folder, run).glob("checkpoint-*"))
    trainer.train(resume_from_checkpoint=bool(found))
    state = trainer.state
    return losses_of(trainer), (state.epoch, state.global_step, state.max_steps)


def by_engine(folder):
    model = tiny("llama", **SIZES)
    engine, *_ = ds_hydra.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0, fused=True),
        config=ds_config(hydra=SECTION | {"profile": f"{folder}/profile.json"}),
        training_data=generated(NUM_ROWS),
    )
    return [float(engine.train_batch()) for _ in range(MAX_STEPS)]


def beside_the_engine(folder):
    prepare(folder)
    return train(folder, "whole"), by_engine(folder)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_stream_is_trained_as_by_the_engine_and_each_row_once_after_a_kill(tmp_path):
    folder = str(tmp_path)
    (losses, (epoch, steps, max_steps)), wanted = run_distributed(beside_the_engine, 2, folder)[0]
    torch.testing.assert_close(losses, wanted, rtol=1e-6, atol=0)
    assert (epoch, steps, max_steps) == (1.0, MAX_STEPS, MAX_STEPS)
    whole = recorded(tmp_path / "whole.jsonl")
    seen = [row for _, _, rows in whole for row in rows]
    assert len(seen) == len(set(seen)) > 100
    settings = {"save_strategy": "steps", "save_steps": 3}
    with pytest.raises(AssertionError, match=r"rank . (died|failed)"):
        run_distributed(train_saving, 2, folder, 5, settings)
    run_distributed(train_saving, 3, folder, 0, settings)
    killed = recorded(tmp_path / "killed.jsonl")
    steps = [step for step, *_ in killed]
    assert [later for step, later in itertools.pairwise(steps) if later <= step] == [4]
    assert steps[-1] == MAX_STEPS
    for step, loss, rows in killed:
        assert rows == whole[step - 1][2]
        assert loss == pytest.approx(whole[step - 1][1], rel=1e-5)


def train_saving(folder, kill_at, settings):
    return train(folder, "killed", kill_at, **settings)


class OfTorch(IterableDataset):
    def __iter__(self):
        return give(40)


def of_all_kinds(folder):
    prepare(folder)
    found = {}
    # A short stream begins again, as with transformers
    short = Recorder(f"{folder}/short{os.environ['RANK']}.jsonl")
    plain = {"max_steps": 6, "hydra": {"shuffle": False}}
    trainer = short.trainer = make(folder, "short", generated(40), callbacks=[short], **plain)
    trainer.train()
    found["short"] = losses_of(trainer)
    trainer = make(folder, "torch", OfTorch(), **plain)
    trainer.train()
    found["torch"] = losses_of(trainer)
    # Chats, of which the assistant's turns count, as of a dataset; with an evaluation
    for name in ("dataset", "stream"):
        rows = tokenised_chats().select(range(16))
        some = rows.select(range(3))
        if name == "stream":
            rows, some = rows.to_iterable_dataset(), some.to_iterable_dataset()
        trainer = make(
            folder,
            name,
            rows,
            hydra={"shuffle": False},
            eval_dataset=some,
            max_steps=4,
            eval_strategy="steps",
            eval_steps=2,
            train_sampling_strategy="sequential",
        )
        trainer.train()
        found[name] = losses_of(trainer), losses_of(trainer, "eval_loss")
    errors = found["errors"] = {}
    errors["endless"] = raised_by(lambda: make(folder, "e", generated(NUM_ROWS), max_steps=-1))
    trainer = make(folder, "e", generated(NUM_ROWS))
    trainer.args.max_steps = -1
    errors["set later"] = raised_by(trainer.train)
    part = split_dataset_by_node(generated(NUM_ROWS), 0, 2)
    errors["part"] = raised_by(make(folder, "e", part).train)
    errors["chats"] = raised_by(make(folder, "e", chats().to_iterable_dataset()).train)
    return found


@pytest.mark.distributed
def test_streams_of_all_kinds_train_as_they_do_with_transformers(tmp_path):
    found = run_distributed(of_all_kinds, 2, str(tmp_path))[0]
    rows = [row for _, _, rows in recorded(tmp_path / "short0.jsonl") for row in rows]
    assert rows == [place % 40 for place in range(len(rows))]
    assert len(rows) > 80, "goes round"
    assert found["torch"] == found["short"]
    for mine, theirs in zip(found["stream"], found["dataset"], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=0)
    assert len(found["stream"][1]) == 2
    errors = found["errors"]
    assert errors["endless"][0] is errors["set later"][0] is ValueError
    assert "max_steps has to be specified" in errors["endless"][1]
    assert "max_steps must be set to a positive value" in errors["set later"][1]
    for name, text in {
        "part": "part of rank 0 of 2 (split_dataset_by_node)",
        "chats": "tokenise chats before, by dataset.map(",
    }.items():
        kind, said = errors[name]
        assert kind is HydraConfigError
        assert text in said, said

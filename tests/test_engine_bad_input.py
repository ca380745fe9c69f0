"""Typical mistakes: every rank gets the same clear error, nothing hangs, and the engine stays
usable.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from dataclasses import fields
from pathlib import Path
from unittest import mock

import datasets
import numpy as np
import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from distributed import run_distributed
from engines import adamw, ds_config, raised_by, small_profile, start_hydra, write_json
from models import VOCAB_SIZE, tiny
from single_process import random_examples
from torch.testing._internal.two_tensor import TwoTensor

import ds_hydra
from ds_hydra import losses
from ds_hydra.configs import HydraConfig
from ds_hydra.engine.iteration import RankReport
from ds_hydra.engine.losses.objective import TokenScoreRecorder
from ds_hydra.engine.propagation import RankOutcome, RankTimes
from ds_hydra.engine.ranks import watchdog
from ds_hydra.engine.ranks.settings import check_same_settings, comparable
from ds_hydra.engine.telemetry.metrics import RunLog
from ds_hydra.errors import (
    CheckpointError,
    HydraConfigError,
    InfeasiblePlanError,
    PlanMismatchError,
    RankLostError,
    UnsupportedModelError,
)


def dataset(*lengths):
    return datasets.Dataset.from_list([{"input_ids": list(range(length))} for length in lengths])


def two_layers():
    return tiny("llama", num_hidden_layers=2)


def initialize(model=None, data=None, **sections):
    return start_hydra(model or two_layers(), training_data=data, **sections)


def with_weight(weight):
    model = two_layers()
    model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(weight, requires_grad=False)
    return model


def without_optimizer(model):
    return ds_hydra.initialize(model=model, config=ds_config(hydra={}))[0]


def train(engine):
    return engine.train_batch(batch=random_examples([7, 9], VOCAB_SIZE), strategy="2x<1,1>")


def with_schedule_of_rank():
    model, num_steps = two_layers(), 8 if dist.get_rank() == 1 else 4
    schedule = functools.partial(
        transformers.get_linear_schedule_with_warmup,
        num_warmup_steps=0,
        num_training_steps=num_steps,
    )
    engine, *_ = ds_hydra.initialize(
        model=model, optimizer=adamw(model), lr_scheduler=schedule, config=ds_config(hydra={})
    )
    train(engine)
    try:
        train(engine)
    finally:
        engine.destroy()


def with_alpha_of_rank():
    alpha = 8 if dist.get_rank() == 1 else 16
    return initialize(peft.get_peft_model(two_layers(), peft.LoraConfig(lora_alpha=alpha)))


def use_an_optimizer_again():
    model = two_layers()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(2):
        engine, *_ = ds_hydra.initialize(
            model=model, optimizer=optimizer, config=ds_config(hydra={})
        )
        engine.destroy()


MISTAKES = {
    "compile of DeepSpeed": (
        lambda: initialize().compile(), HydraConfigError,
        ("engine.compile()", "hydra.compile_layers", "dynamo_backend"),
    ),
    "batch size of DeepSpeed": (
        lambda: initialize().set_train_batch_size(64), HydraConfigError,
        ("set_train_batch_size(64)", "hydra.tokens_per_iteration"),
    ),
    "two configurations": (
        lambda: ds_hydra.initialize(
            argparse.Namespace(deepspeed_config="other.json"), two_layers(), config=ds_config()
        ),
        HydraConfigError, ("--deepspeed_config other.json", "config="),
    ),
    "schedule of another rank": (
        with_schedule_of_rank, PlanMismatchError, ("optimizer.param_groups[0].lr is 0.000875, and 0.00075 on rank 0",),
    ),
    "LoRA's alpha of one rank": (
        with_alpha_of_rank, PlanMismatchError, ("peft_config.default.lora_alpha is 8, and 16 on rank 0",),
    ),
    "clipping of one rank": (
        lambda: initialize(gradient_clipping=1.0 + dist.get_rank()), PlanMismatchError,
        ("deepspeed.gradient_clipping is 2.0, and 1.0 on rank 0",),
    ),
    "epsilon of the norms of one rank": (
        lambda: initialize(tiny("llama", rms_norm_eps=1e-6 * (1 + dist.get_rank()))), PlanMismatchError,
        ("model.config.rms_norm_eps is 2e-06, and 1e-06 on rank 0",),
    ),
    "CP above the context": (
        lambda: initialize(hydra={"strategies": ["1x<cp256,1>"]}), HydraConfigError,
        ("<cp256,1>", "CP 256", "hydra.context_length, 128 tokens", "CP 128 or less"),
    ),
    "not a Hugging Face model": (
        lambda: initialize(torch.nn.Linear(2, 2)), UnsupportedModelError, ("Linear", "LlamaForCausalLM"),
    ),
    "quantised weights": (
        lambda: initialize(with_weight(torch.zeros(72, 32, dtype=torch.int8))), UnsupportedModelError,
        ("layers.0.mlp.up_proj.weight is a tensor of torch.int8", "quantization_config"),
    ),
    "weights of two tensors": (
        lambda: initialize(with_weight(TwoTensor(torch.zeros(72, 32), torch.zeros(72, 32)))), UnsupportedModelError,
        ("layers.0.mlp.up_proj.weight is a TwoTensor of torch.float32", "quantize_()"),
    ),
    "token id outside the vocabulary": (
        lambda: initialize(data=datasets.Dataset.from_dict({"input_ids": [[1, VOCAB_SIZE + 4, 3]]})), HydraConfigError,
        (str(VOCAB_SIZE + 4), str(VOCAB_SIZE), "hydra.tokenizer"),
    ),
    "label outside the vocabulary": (
        lambda: initialize(
            data=datasets.Dataset.from_dict(
                {"input_ids": [[1, 2], [1, 2]], "labels": [[1, 2], [-100, VOCAB_SIZE]]}
            )
        ),
        HydraConfigError, ("row 1", "labels", str(VOCAB_SIZE), "resize_token_embeddings"),
    ),
    "another dataset on each rank": (
        lambda: initialize(data=dataset(5, 7 + dist.get_rank())), PlanMismatchError,
        ("2 sequences of 12 tokens", "2 sequences of 13 tokens", "on rank 1"),
    ),
    "other rows of the same lengths on each rank": (
        lambda: initialize(data=datasets.Dataset.from_list([{"input_ids": [dist.get_rank(), 2, 3]}] * 2)),
        PlanMismatchError, ("2 sequences of 6 tokens, 4 predicted (digest", "on rank 1", "with a seed"),
    ),
    "no tokenizer there": (
        lambda: initialize(data=datasets.Dataset.from_dict({"text": ["a b"]}), hydra={"tokenizer": "./nowhere"}),
        HydraConfigError, ("hydra.tokenizer", "nowhere", "tokenizer.json"),
    ),
    "nothing to train": (
        lambda: train(without_optimizer(two_layers().requires_grad_(False))), HydraConfigError,
        ("no parameter that requires gradients", "requires_grad_(True)", "eval_batch"),
    ),
    "no optimizer": (
        lambda: train(without_optimizer(two_layers())), HydraConfigError,
        ("no optimizer", '"optimizer" section', "eval_batch"),
    ),
    "an optimizer of another engine": (
        use_an_optimizer_again, HydraConfigError, ("the AdamW has no parameters", "make a new optimizer"),
    ),
    "a checkpoint for an engine without optimizer": (
        lambda: without_optimizer(two_layers()).load_checkpoint("checkpoints"), CheckpointError,
        ("load_checkpoint('checkpoints')", '"optimizer" section', "zero_to_fp32.py"),
    ),
}  # fmt: skip


def test_ranks_may_have_other_places_of_files_and_a_key_of_a_section_is_named():
    def values(sigterm, **planner):
        given = {"faults": {"save_on_sigterm": sigterm}, "planner": planner}
        numbers = {"context_length": 8, "tokens_per_iteration": 8}
        return comparable(HydraConfig.parse(numbers | given))

    first = values("/node0/saved", num_workers=4)
    assert values("/node1/saved", num_workers=2) == first
    second = values(None, solver="none")
    differing = {key for key in first if first[key] != second[key]}
    assert differing == {"hydra.faults.save_on_sigterm", "hydra.planner.solver"}


def test_what_only_one_rank_shows_may_differ():
    document = {"wandb": {"enabled": True}, "steps_per_print": 7, "gradient_clipping": 1.0}
    engine = mock.Mock(module=two_layers(), optimizer=None, lr_scheduler=None)
    engine._config._param_dict = document
    alone = mock.patch("ds_hydra.engine.ranks.settings.run_together", lambda action, _: action())
    with alone, mock.patch("ds_hydra.engine.ranks.settings.check_alike") as check:
        check_same_settings(engine)
    compared = {key for key in check.call_args.args[0] if key.startswith("deepspeed.")}
    assert compared == {"deepspeed.gradient_clipping"}


GROUPS_OF_RANKS = (
    # Two groups, of one weighted sum, mean and maximum
    ("lr", [2e-4, 1e-4], [1e-4, 2e-4], "[0].lr is 0.0001, and 0.0002 on rank 0"),
    ("betas", [(0.9, 0.99), (0.8, 0.9)], [(0.9, 0.99), (0.8, 0.95)], "[1].betas[1] is 0.95, and 0.9 on rank 0"),
    ("eps", [1e-12, 1e-12], [1e-12, 1e-13], "[1].eps is 1e-13, and 1e-12 on rank 0"),
    ("weight_decay", [np.float32(0.1), 0.0], [np.float32(0.2), 0.0], "[0].weight_decay is 0.2"),
    ("lr", [torch.tensor(0.1), 0.1], [torch.tensor(0.1), 0.2], "[1].lr is 0.2, and 0.1 on rank 0"),
    ("lr", [1e-3, 1e-20], [1e-3 * (1 + 1e-7), 0.0], None),  # as of hosts with other libraries
)  # fmt: skip


def set_groups_of_ranks():
    """Every number of the optimizer's groups is compared between ranks."""
    model = two_layers()
    bands = [[p for p in model.parameters() if (p.dim() > 1) == is_matrix] for is_matrix in (0, 1)]
    optimizer = torch.optim.AdamW([{"params": band} for band in bands], lr=1e-3)
    engine, *_ = ds_hydra.initialize(model=model, optimizer=optimizer, config=ds_config(hydra={}))
    for key, *of_ranks, said in GROUPS_OF_RANKS:
        groups = engine.optimizer.param_groups
        before = [group[key] for group in groups]
        for group, value in zip(groups, of_ranks[dist.get_rank()], strict=True):
            group[key] = value
        if said is None:
            train(engine)
        else:
            check(lambda: train(engine), PlanMismatchError, f"optimizer.param_groups{said}")
        for group, value in zip(groups, before, strict=True):
            group[key] = value


@pytest.mark.distributed
def test_every_number_of_the_optimizers_groups_is_compared_between_ranks():
    run_distributed(set_groups_of_ranks, 2)


def test_a_row_of_a_rank_gives_back_what_it_was_made_of():
    loss_sum, balance_loss = (torch.tensor(x, dtype=torch.float64) for x in (3.5, 0.25))
    none = dict.fromkeys(("plan", "objective", "recorder"))
    outcome = RankOutcome(loss_sum=loss_sum, balance_loss=balance_loss, spans=(), losses=(), **none)
    flags = {"has_problem": True, "is_stop_requested": False, "settings": float(2**48 - 1)}
    for squares, times in (((), ()), ((7.0,), ()), ((7.0, 8.0), (9.0, 10.0, 11.0))):
        squares_G = torch.tensor(squares, dtype=torch.float64)
        row = RankReport.row_of(outcome, squares_G, **flags, times=times)
        told = dict(flags, loss_sum=3.5, balance_loss=0.25, squares=squares, times=times)
        assert RankReport.from_row(row.tolist(), len(squares))._asdict() == told
    names = [field.name for field in fields(RankTimes) if field.name != "phase_ms"]
    times = RankTimes(**{n: float(i) for i, n in enumerate(names)}, phase_ms=(7.0, 8.0))
    assert RankTimes.from_row(times.to_row()) == times


def error_of(action):
    if dist.get_rank() == 0:
        time.sleep(0.05)  # rank 1 has raised its own by then, and told it
    return raised_by(action)


def check(action, kind, *words):
    """Assert that `action` raises an error of this `kind` on this rank that says the `words`."""
    found, message = error_of(action)
    assert found is kind, message
    assert all(word in message for word in words), (words, message)


CONFIG, MISMATCH = HydraConfigError, PlanMismatchError


def lose_a_rank_while_joining():
    with mock.patch.object(watchdog, "gather_flags", side_effect=RuntimeError("no answer")):
        initialize()


def make_mistakes(folder):
    """Of engines that are made, then of one engine that stays as it is."""
    for mistake, kind, words in MISTAKES.values():
        check(mistake, kind, *words)
    make_mistakes_with_files(Path(folder))
    before = watchdog._num_engines
    check(lose_a_rank_while_joining, RankLostError, "no answer")
    assert watchdog._num_engines == before, "the last engine would wait for one that did not start"
    engine = start_hydra(two_layers())
    rank, strategies = dist.get_rank(), ("1x<2,1>", "2x<1,1>")
    good = random_examples([7, 9], VOCAB_SIZE)
    mine = random_examples([7, 9 + rank], VOCAB_SIZE, seed=rank)
    long, two = [{"input_ids": list(range(129))}], [{"input_ids": [[1, 2], [3, 4]]}]

    def train_on(batch, strategy="2x<1,1>"):
        return lambda: engine.train_batch(batch=batch, strategy=strategy)

    check(lambda: engine(good[0]["input_ids"].unsqueeze(0)), CONFIG, "forward()", "train_batch")
    check(lambda: engine.backward(torch.zeros(())), CONFIG, "backward()", "train_batch")
    check(engine.step, CONFIG, "step()", "train_batch")
    check(engine.train_batch, CONFIG, "training_data", "train_batch(batch=")
    check(train_on([]), CONFIG, "0 examples")
    check(train_on([{"ids": [1, 2]}]), CONFIG, "example 0", "input_ids")
    check(train_on([{"input_ids": [1]}]), CONFIG, "-100")
    check(train_on(good, "1x<4,1>"), CONFIG, "1x<4,1>", "4 ranks", "there are 2")
    check(train_on(good, 2), CONFIG, "strategy is 2", "2x<1,1>")
    phases = "2x<1,1;gather> then 1x<cp2,1;gather>"
    check(train_on(good, phases), CONFIG, "2 phases", "hydra.strategies by itself")
    outside = [{"input_ids": [1, VOCAB_SIZE, 2]}]
    check(train_on(outside), CONFIG, "example 0", str(VOCAB_SIZE), "resize_token_embeddings")
    on_rank_1 = train_on(long if rank == 1 else good)
    check(on_rank_1, CONFIG, "example 0", "129", "128", "hydra.context_length")
    check(train_on(two if rank == 1 else good), CONFIG, "example 0", "'input_ids'", "[2, 2]")
    check(train_on({"input_ids": [[1, 2]]}), CONFIG, "dict of 'input_ids'", "expected a list")
    check(lambda: engine.eval_batch(None), CONFIG, "global batch is None", "expected a list")
    padded = [{"input_ids": [9, *example["input_ids"].tolist(), 9, 9]} for example in good]
    for example in padded:
        example["attention_mask"] = [0] + [1] * (len(example["input_ids"]) - 3) + [0, 0]
    both = [float(engine.eval_batch(batch, strategy="2x<1,1>")) for batch in (padded, good)]
    assert both[0] == both[1], "padding is taken away"
    frozen = engine.propagator.stage_model.params[0].requires_grad_(False)
    check(train_on(good), CONFIG, "requires_grad", "before ds_hydra.initialize")
    frozen.requires_grad_(rank != 1)
    check(train_on(good), CONFIG, "requires_grad is False and was True")
    frozen.requires_grad_(True)
    two_sizes = "2 sequences of 16 tokens", "2 sequences of 17 tokens", "on rank 1"
    check(train_on(mine), MISMATCH, "global batch", *two_sizes)
    called = "train_batch(batch) of 1x<2,1> on rank 0; train_batch(batch) of 2x<1,1> on rank 1"
    check(train_on(good, strategies[rank]), MISMATCH, called)
    before = engine.global_steps
    wanted = float(engine.eval_batch(good, strategy="1x<2,1>"))
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
        found = [engine.eval_batch(good, "1x<2,1>"), engine.train_batch(good, strategy="1x<2,1>")]
    assert [float(loss) for loss in found] == pytest.approx([wanted] * 2, rel=1e-6)
    assert (before, engine.global_steps) == (0, 1), "a refused global batch is no step"
    assert error_of(engine.destroy) == (None, ""), "taken for a lost rank"


def make_mistakes_with_files(folder):
    rank, strategies = dist.get_rank(), ["2x<1,1>", "1x<2,1>"]
    document = small_profile(400_000)
    profile = write_json(folder / "profile.json", document)
    without_cp = write_json(
        folder / "without_cp.json", {**document, "schemes": document["schemes"][1:]}
    )
    (folder / "file").touch()
    listed = folder / f"strategies{rank}.json"
    schema = {"schema": "ds_hydra.strategies/1", "strategies": strategies[: 2 - rank]}
    listed.write_text(json.dumps(schema))

    def start(data=None, **hydra):
        return lambda: initialize(data=data, hydra=hydra)

    of_cp = start(profile=without_cp, strategies=["1x<cp2,1>"])
    check(of_cp, CONFIG, "<cp2,1>", "which has <2,1>", "hydra.strategies")
    hydra = {"profile": profile, "strategies": strategies, "context_length": 120}
    too_long = start(dataset(110, 110, 110), **hydra)
    check(too_long, InfeasiblePlanError, "110", "hydra.memory_limit_bytes")
    of_one = start(run_dir=None if rank else f"{folder}/of_one")
    said = "hydra.run_dir is null", '"(a path)" on rank 0', "the same configuration"
    check(of_one, MISMATCH, *said)
    said = 'hydra.strategies is ["2x<1,1>"]', '["2x<1,1>", "1x<2,1>"] on rank 0'
    check(start(strategies=str(listed)), MISMATCH, *said)
    check(start(run_dir=f"{folder}/file"), CONFIG, "hydra.run_dir", "file")
    measures = {"profiling": {"lengths": [8, 16, 32], "repeats": 1}}
    measuring = start(run_dir=f"{folder}/full", strategies=["2x<1,1>"], **measures)()
    full = OSError(28, "No space left on device")
    batch = random_examples([7, 9], VOCAB_SIZE)
    with mock.patch.object(RunLog, "write_profile", side_effect=full):
        said = "hydra.run_dir", "No space left on device"
        check(lambda: measuring.train_batch(batch=batch), CONFIG, *said)
    measuring.destroy()


@pytest.mark.distributed
def test_mistakes_get_the_same_clear_error_on_all_ranks(tmp_path):
    run_distributed(make_mistakes, 2, str(tmp_path))


def numbers_of(engine, examples):
    """A loss that reads fields, and the scores of all tokens."""
    loss = engine.eval_batch(examples, "1x<2,1>", losses.CrossEntropy(weights="weights"))
    return torch.cat([loss.view(1), *engine.score(examples, "2x<1,1>").log_probs])


def run_under_other_defaults():
    """Numbers under default types of the user's are those under torch's, which stay; scores that
    fail on a rank are an error on all.
    """
    model, examples = two_layers(), random_examples([7, 9], VOCAB_SIZE)
    for example in examples:
        example["weights"] = [1 / (3 + i) for i in range(len(example["labels"]))]
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("meta")
    engine = start_hydra(model)
    under_others = numbers_of(engine, examples)
    assert (torch.get_default_dtype(), torch.get_default_device().type) == (torch.bfloat16, "meta")
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.testing.assert_close(under_others, numbers_of(engine, examples), rtol=0, atol=0)
    record = TokenScoreRecorder.__call__
    fails = mock.Mock(side_effect=RuntimeError("no memory"))
    fails_here = fails if dist.get_rank() == 1 else record
    with mock.patch.object(TokenScoreRecorder, "__call__", fails_here):
        said = "TokenScoreRecorder raised RuntimeError", "no memory"
        check(lambda: engine.score(examples, "2x<1,1>"), HydraConfigError, *said)


@pytest.mark.distributed
def test_default_types_of_the_user_change_no_number():
    run_distributed(run_under_other_defaults, 2)

"""Typical mistakes: every rank gets the same clear error, nothing hangs, and the engine stays
usable.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
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
from distributed import free_port, remove_shared_memory, run_distributed
from engines import adamw, ds_config, raised_by, small_profile, start_hydra
from models import VOCAB_SIZE, tiny
from single_process import random_examples
from torch.testing._internal.two_tensor import TwoTensor

import ds_hydra
from ds_hydra import losses
from ds_hydra.configs import HydraConfig
from ds_hydra.engine.iteration import RankReport
from ds_hydra.engine.losses.objective import TokenScoreRecorder
from ds_hydra.engine.propagation import RankOutcome, RankTimes
from ds_hydra.engine.ranks.settings import check_same_settings, comparable
from ds_hydra.engine.telemetry.metrics import RunLog
from ds_hydra.errors import (
    CheckpointError,
    HydraConfigError,
    InfeasiblePlanError,
    PlanMismatchError,
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


def with_rate_of_rank():
    model = two_layers()
    rate = 1e-3 if dist.get_rank() == 1 else 1e-4
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    return ds_hydra.initialize(model=model, optimizer=optimizer, config=ds_config(hydra={}))


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
    "misspelled hydra key": (
        lambda: initialize(hydra={"contxt_length": 64}), HydraConfigError, ("contxt_length", "context_length"),
    ),
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
    "learning rate of one rank": (
        with_rate_of_rank, PlanMismatchError, ("optimizer.param_groups[0].lr is 0.001, and 0.0001 on rank 0",),
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
    "too many ranks": (
        lambda: initialize(hydra={"strategies": ["1x<2,2>"]}), HydraConfigError,
        ("1x<2,2>", "4 ranks", "there are 2", "hydra.strategies"),
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


GROUPS_OF_RANKS = {
    # Two groups, of one weighted sum, mean and maximum
    "lr": ([2e-4, 1e-4], [1e-4, 2e-4]),
    "betas": ([(0.9, 0.99), (0.8, 0.9)], [(0.9, 0.99), (0.8, 0.95)]),
    "eps": ([1e-12, 1e-12], [1e-12, 1e-13]),
    "weight_decay": ([np.float32(0.1), 0.0], [np.float32(0.2), 0.0]),
    "lr of a tensor": ([torch.tensor(0.1), 0.1], [torch.tensor(0.1), 0.2]),
    "last digit": ([1e-3, 1e-20], [1e-3 * (1 + 1e-7), 0.0]),
}


def set_groups_of_ranks():
    """(type, message) of the error of an iteration in which ranks have other groups, by key."""
    model = two_layers()
    bands = [[p for p in model.parameters() if (p.dim() > 1) == is_matrix] for is_matrix in (0, 1)]
    optimizer = torch.optim.AdamW([{"params": band} for band in bands], lr=1e-3)
    engine, *_ = ds_hydra.initialize(model=model, optimizer=optimizer, config=ds_config(hydra={}))
    raised = {}
    for name, of_ranks in GROUPS_OF_RANKS.items():
        key = name.split()[0] if name != "last digit" else "lr"
        before = [group[key] for group in engine.optimizer.param_groups]
        for group, value in zip(engine.optimizer.param_groups, of_ranks[dist.get_rank()]):
            group[key] = value
        raised[name] = error_of(lambda: train(engine))
        for group, value in zip(engine.optimizer.param_groups, before):
            group[key] = value
    return raised


@pytest.mark.distributed
def test_every_number_of_the_optimizers_groups_is_compared_between_ranks():
    for raised in run_distributed(set_groups_of_ranks, 2):
        assert raised.pop("last digit")[0] is None  # as of hosts with other libraries
        assert {kind for kind, _ in raised.values()} == {PlanMismatchError}
        for name, named in (
            ("lr", "[0].lr is 0.0001, and 0.0002 on rank 0"),
            ("betas", "[1].betas[1] is 0.95, and 0.9 on rank 0"),
            ("eps", "[1].eps is 1e-13, and 1e-12 on rank 0"),
            ("weight_decay", "[0].weight_decay is 0.2"),
            ("lr of a tensor", "[1].lr is 0.2, and 0.1 on rank 0"),
        ):
            assert f"optimizer.param_groups{named}" in raised[name][1]


def test_a_row_of_a_rank_gives_back_what_it_was_made_of():
    loss_sum, balance_loss = (torch.tensor(x, dtype=torch.float64) for x in (3.5, 0.25))
    outcome = RankOutcome(
        loss_sum=loss_sum, balance_loss=balance_loss, passes=(), clock=None, recorder=None
    )
    flags = {"has_problem": True, "is_stop_requested": False, "settings": float(2**48 - 1)}
    for squares, times in (((), ()), ((7.0,), ()), ((7.0, 8.0), (9.0, 10.0, 11.0))):
        squares_G = torch.tensor(squares, dtype=torch.float64)
        row = RankReport.row_of(outcome, squares_G, **flags, times=times)
        told = dict(flags, loss_sum=3.5, balance_loss=0.25, squares=squares, times=times)
        assert RankReport.from_row(row.tolist(), len(squares))._asdict() == told
    names = [field.name for field in fields(RankTimes) if field.name != "phase_ms"]
    times = RankTimes(**{n: float(i) for i, n in enumerate(names)}, phase_ms=(7.0, 8.0))
    assert RankTimes.from_row(times.to_row()) == times


def make_mistakes(folder):
    """(type, message) of the error that each mistake raised on this rank."""
    raised = {}
    for name, (mistake, _, _) in MISTAKES.items():
        raised[name] = error_of(mistake)
    profile, without_cp = (Path(folder) / name for name in ("profile.json", "without_cp.json"))
    if dist.get_rank() == 0:
        document = small_profile(400_000)
        profile.write_text(json.dumps(document))
        without_cp.write_text(json.dumps({**document, "schemes": document["schemes"][1:]}))
    dist.barrier()
    strategies = ["2x<1,1>", "1x<2,1>"]
    hydra = {"profile": str(profile), "strategies": strategies, "context_length": 120}
    raised["profile without CP"] = error_of(
        lambda: initialize(hydra={"profile": str(without_cp), "strategies": ["1x<cp2,1>"]})
    )
    raised["longer than any pipeline fits"] = error_of(
        lambda: initialize(data=dataset(110, 110, 110), hydra=hydra)
    )
    rank = dist.get_rank()
    raised["run_dir of one rank"] = error_of(
        lambda: initialize(hydra={"run_dir": None if rank else f"{folder}/of_one"})
    )
    listed = Path(folder) / f"strategies{rank}.json"
    schema = {"schema": "ds_hydra.strategies/1", "strategies": strategies[: 2 - rank]}
    listed.write_text(json.dumps(schema))
    raised["strategies of another file"] = error_of(
        lambda: initialize(hydra={"strategies": str(listed)})
    )
    engine = start_hydra(two_layers())
    good = random_examples([7, 9], VOCAB_SIZE)
    mine = random_examples([7, 9 + dist.get_rank()], VOCAB_SIZE, seed=dist.get_rank())
    raised["forward by hand"] = error_of(lambda: engine(good[0]["input_ids"].unsqueeze(0)))
    raised["backward by hand"] = error_of(lambda: engine.backward(torch.zeros(())))
    raised["step by hand"] = error_of(engine.step)
    raised["no data"] = error_of(engine.train_batch)
    raised["empty batch"] = error_of(lambda: engine.train_batch(batch=[]))
    raised["no input_ids"] = error_of(lambda: engine.train_batch(batch=[{"ids": [1, 2]}]))
    raised["nothing to predict"] = error_of(lambda: engine.train_batch(batch=[{"input_ids": [1]}]))
    long = [{"input_ids": list(range(129))}]
    raised["forced strategy too large"] = error_of(
        lambda: engine.train_batch(batch=good, strategy="1x<4,1>")
    )
    raised["forced strategy of no type"] = error_of(
        lambda: engine.train_batch(batch=good, strategy=2)
    )
    raised["forced phases"] = error_of(
        lambda: engine.train_batch(batch=good, strategy="2x<1,1;gather> then 1x<cp2,1;gather>")
    )
    outside = [{"input_ids": [1, VOCAB_SIZE, 2]}]
    raised["id outside the vocabulary"] = error_of(
        lambda: engine.train_batch(batch=outside, strategy="1x<2,1>")
    )
    only_rank_1 = long if dist.get_rank() == 1 else good
    raised["mistake on rank 1 alone"] = error_of(
        lambda: engine.train_batch(batch=only_rank_1, strategy="2x<1,1>")
    )
    padded = [{"input_ids": [9, *example["input_ids"].tolist(), 9, 9]} for example in good]
    for example in padded:
        example["attention_mask"] = [0] + [1] * (len(example["input_ids"]) - 3) + [0, 0]
    raised["padding taken away"] = ("ok", float(engine.eval_batch(padded, strategy="2x<1,1>")))
    raised["without padding"] = ("ok", float(engine.eval_batch(good, strategy="2x<1,1>")))
    two = [{"input_ids": [[1, 2], [3, 4]]}] if dist.get_rank() == 1 else good
    raised["two sequences in one"] = error_of(lambda: engine.train_batch(batch=two))
    raised["one dict"] = error_of(lambda: engine.train_batch(batch={"input_ids": [[1, 2]]}))
    raised["evaluation of nothing"] = error_of(lambda: engine.eval_batch(None))
    frozen = engine.hydra.stage_model.params[0].requires_grad_(False)
    raised["frozen later"] = error_of(lambda: engine.train_batch(batch=good, strategy="2x<1,1>"))
    frozen.requires_grad_(dist.get_rank() != 1)
    raised["frozen by rank 1"] = error_of(
        lambda: engine.train_batch(batch=good, strategy="2x<1,1>")
    )
    frozen.requires_grad_(True)
    blocked = Path(folder) / "file"
    blocked.touch()
    raised["run_dir is a file"] = error_of(lambda: initialize(hydra={"run_dir": str(blocked)}))
    run_dir = {"run_dir": f"{folder}/full", "strategies": ["2x<1,1>"]}
    measuring = initialize(hydra={**run_dir, "profiling": {"lengths": [8, 16, 32], "repeats": 1}})
    full = OSError(28, "No space left on device")
    with mock.patch.object(RunLog, "write_profile", side_effect=full):
        raised["profile on a full disk"] = error_of(lambda: measuring.train_batch(batch=good))
    measuring.destroy()
    raised["another batch on each rank"] = error_of(
        lambda: engine.train_batch(batch=mine, strategy="2x<1,1>")
    )
    forced = "2x<1,1>" if dist.get_rank() else "1x<2,1>"
    raised["another strategy on each rank"] = error_of(
        lambda: engine.train_batch(batch=good, strategy=forced)
    )
    before = engine.global_steps
    wanted = float(engine.eval_batch(good, strategy="1x<2,1>"))
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
        raised["evaluated under autocast"] = (wanted, float(engine.eval_batch(good, "1x<2,1>")))
        loss = float(engine.train_batch(batch=good, strategy="1x<2,1>"))
        raised["trained under autocast"] = (wanted, loss)
    raised["afterwards"] = ("ok", f"{loss:.6f} {before} {engine.global_steps}")
    raised["end"] = error_of(engine.destroy)
    return raised


LATER_MISTAKES = {
    "profile without CP": (HydraConfigError, ("<cp2,1>", "which has <2,1>", "hydra.strategies")),
    "run_dir of one rank": (
        PlanMismatchError, ("hydra.run_dir is null", '"(a path)" on rank 0', "the same configuration"),
    ),
    "strategies of another file": (
        PlanMismatchError, ('hydra.strategies is ["2x<1,1>"]', '["2x<1,1>", "1x<2,1>"] on rank 0'),
    ),
    "longer than any pipeline fits": (InfeasiblePlanError, ("110", "hydra.memory_limit_bytes")),
    "forward by hand": (HydraConfigError, ("forward()", "train_batch")),
    "backward by hand": (HydraConfigError, ("backward()", "train_batch")),
    "step by hand": (HydraConfigError, ("step()", "train_batch")),
    "no data": (HydraConfigError, ("training_data", "train_batch(batch=")),
    "empty batch": (HydraConfigError, ("0 examples",)),
    "no input_ids": (HydraConfigError, ("example 0", "input_ids")),
    "nothing to predict": (HydraConfigError, ("-100",)),
    "forced strategy too large": (HydraConfigError, ("1x<4,1>", "4 ranks", "there are 2")),
    "forced strategy of no type": (HydraConfigError, ("strategy is 2", "2x<1,1>")),
    "forced phases": (HydraConfigError, ("2 phases", "hydra.strategies by itself")),
    "id outside the vocabulary": (HydraConfigError, ("example 0", str(VOCAB_SIZE), "resize_token_embeddings")),
    "mistake on rank 1 alone": (HydraConfigError, ("example 0", "129", "128", "hydra.context_length")),
    "two sequences in one": (HydraConfigError, ("example 0", "'input_ids'", "[2, 2]")),
    "one dict": (HydraConfigError, ("dict of 'input_ids'", "expected a list")),
    "evaluation of nothing": (HydraConfigError, ("global batch is None", "expected a list")),
    "frozen later": (HydraConfigError, ("requires_grad", "before ds_hydra.initialize")),
    "frozen by rank 1": (HydraConfigError, ("requires_grad is False and was True",)),
    "run_dir is a file": (HydraConfigError, ("hydra.run_dir", "file")),
    "another batch on each rank": (
        PlanMismatchError, ("global batch", "2 sequences of 16 tokens", "2 sequences of 17 tokens", "on rank 1"),
    ),
    "profile on a full disk": (HydraConfigError, ("hydra.run_dir", "No space left on device")),
    "another strategy on each rank": (
        PlanMismatchError, ("train_batch(batch) of 1x<2,1> on rank 0; train_batch(batch) of 2x<1,1> on rank 1",),
    ),
}  # fmt: skip


def error_of(action):
    if dist.get_rank() == 0:
        time.sleep(0.05)  # rank 1 has raised its own by then, and told it
    return raised_by(action)


@pytest.mark.distributed
def test_mistakes_get_the_same_clear_error_on_all_ranks(tmp_path):
    raised = run_distributed(make_mistakes, 2, str(tmp_path))
    expected = {name: (kind, words) for name, (_, kind, words) in MISTAKES.items()} | LATER_MISTAKES
    for name, (kind, words) in expected.items():
        for rank, by_rank in enumerate(raised):
            got_kind, message = by_rank[name]
            assert got_kind is kind, f"{name}, rank {rank}: {got_kind}: {message}"
            for word in words:
                assert word in message, f"{name}, rank {rank}: no {word!r} in {message!r}"
    assert raised[0]["padding taken away"] == raised[0]["without padding"]
    for wanted, found in (raised[0][f"{what} under autocast"] for what in ("evaluated", "trained")):
        assert found == pytest.approx(wanted, rel=1e-6)
    assert raised[0]["end"] == raised[1]["end"] == (None, ""), "taken for a lost rank"
    kind, text = raised[0]["afterwards"]
    assert kind == "ok"
    assert text.split()[1:] == ["0", "1"], "a refused global batch must not count as a step"
    assert raised[1]["afterwards"] == raised[0]["afterwards"]


def numbers_of(engine, examples):
    """A loss that reads fields, and the scores of all tokens."""
    loss = engine.eval_batch(examples, "1x<2,1>", losses.CrossEntropy(weights="weights"))
    return torch.cat([loss.view(1), *engine.score(examples, "2x<1,1>").log_probs])


def run_under_other_defaults():
    """Numbers under default types of the user's, and under torch's; what is left as the default;
    the error of scores that fail on a rank.
    """
    model, examples = two_layers(), random_examples([7, 9], VOCAB_SIZE)
    for example in examples:
        example["weights"] = [1 / (3 + i) for i in range(len(example["labels"]))]
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("meta")
    engine = start_hydra(model)
    under_others = numbers_of(engine, examples)
    left = torch.get_default_dtype(), torch.get_default_device().type
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    wanted = numbers_of(engine, examples)
    record = TokenScoreRecorder.__call__
    fails = mock.Mock(side_effect=RuntimeError("no memory"))
    with mock.patch.object(
        TokenScoreRecorder, "__call__", fails if dist.get_rank() == 1 else record
    ):
        error = error_of(lambda: engine.score(examples, "2x<1,1>"))
    return under_others, wanted, left, error


@pytest.mark.distributed
def test_default_types_of_the_user_change_no_number():
    for under_others, wanted, left, (kind, message) in run_distributed(run_under_other_defaults, 2):
        torch.testing.assert_close(under_others, wanted, rtol=0, atol=0)
        assert left == (torch.bfloat16, "meta")
        assert kind is HydraConfigError
        assert "TokenScoreRecorder raised RuntimeError" in message
        assert "no memory" in message


SCRIPT = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from models import tiny
import ds_hydra
model = tiny("llama")
config = {"zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
          "hydra": {"context_length": 64, "tokens_per_iteration": 128, "strategy": ["2x<1,1>"]}}
ds_hydra.initialize(model=model, config=config)
print("not reached")
"""


@pytest.mark.nightly
@pytest.mark.distributed
def test_the_launcher_stops_with_the_message_and_a_failing_exit_code(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    tests = str(Path(__file__).parent)
    launcher = [
        sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--no_local_rank",
    ]  # fmt: skip
    port = free_port()
    result = subprocess.run(
        [*launcher, "--master_port", str(port), str(script), tests],
        capture_output=True,
        text=True,
        timeout=800,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        check=False,
    )
    remove_shared_memory(port)
    output = result.stdout + result.stderr
    assert result.returncode != 0
    assert "hydra.strategy is not a key; did you mean hydra.strategies?" in output
    assert "not reached" not in output

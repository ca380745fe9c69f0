"""Resume: bit-identical on the same ranks, the same state on others, exchange of files with stock
DeepSpeed.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.lr_schedules import WarmupLR
from distributed import run_distributed
from engines import (
    dataset_of,
    ds_config,
    full_states,
    small_profile,
    start_hydra,
    start_stock,
    stock_step,
    write_profile,
)
from hypothesis import given
from hypothesis import strategies as st
from models import tiny
from test_engine_training import batches

import ds_hydra
from ds_hydra.engine.checkpointing import reshard
from ds_hydra.engine.model import held_models
from ds_hydra.errors import CheckpointError

NUM_SEQUENCES = 32
BF16 = {"bf16": {"enabled": True}}


def start(folder, model, *, hydra=None, num_workers=0, **sections):
    """An engine that trains on 32 sequences, about four iterations an epoch; plans ahead in any
    case.
    """
    own = {
        "profile": write_profile(folder),
        "tokens_per_iteration": 300,
        "planner": {"num_workers": num_workers},
    }
    data = dataset_of(batches(NUM_SEQUENCES // 8))
    return start_hydra(model, hydra=own | (hydra or {}), training_data=data, **sections)


def train(engine, num_iterations):
    """Losses, and the dataset rows that were trained on."""
    losses, consumed = [], []
    original = engine.propagator.train

    def watching(plan, *arguments):
        consumed.append(list(plan.sample_indices))
        return original(plan, *arguments)

    engine.propagator.train = watching
    for _ in range(num_iterations):
        losses.append(float(engine.train_batch()))
    engine.propagator.train = original
    return losses, consumed


def resume_everywhere(folder, num_workers, precision):
    """Two epochs in one go, and in three parts; candidates are left to the planner."""
    save_dir = f"{folder}/saved"
    engine = start(folder, tiny("llama_tied"), **precision)
    losses, consumed = train(engine, 14)
    engine.destroy()
    engine = start(folder, tiny("llama_tied"), **precision)
    parts = [train(engine, 3)]
    engine.save_checkpoint(save_dir)
    engine.destroy()
    engine = start(folder, tiny("llama_tied", seed=1), num_workers=num_workers, **precision)
    engine.load_checkpoint(save_dir)
    parts.append(train(engine, 2))
    engine.save_checkpoint(save_dir)
    assert train(engine, 4)[0] == losses[5:9]
    engine.destroy()
    # The last four iterations are lost and trained once more.
    engine = start(folder, tiny("llama_tied", seed=2), **precision)
    engine.load_checkpoint(save_dir)
    parts.append(train(engine, 9))
    assert [loss for own, _ in parts for loss in own] == losses
    assert [rows for _, own in parts for rows in own] == consumed
    assert engine.global_steps == 14
    order = [row for drawn in consumed for row in drawn]
    assert len(order) >= 2 * NUM_SEQUENCES
    for epoch in range(2):
        once = order[epoch * NUM_SEQUENCES : (epoch + 1) * NUM_SEQUENCES]
        assert sorted(once) == list(range(NUM_SEQUENCES)), epoch
    assert Path(save_dir, "latest").read_text() == "global_step5"


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("num_workers", "precision"),
    [(1, {}), pytest.param(0, BF16, marks=pytest.mark.nightly)],
    ids=("fp32", "bf16"),
)
def test_resume_is_bit_identical_and_every_sequence_is_trained_once_an_epoch(
    tmp_path, num_workers, precision
):
    run_distributed(resume_everywhere, 2, str(tmp_path), num_workers, precision)


def resume_with_other_strategies(folder):
    """A run of `1x<2,1>` goes on, whose profile was measured for that alone."""
    from ds_hydra.engine import candidates

    def measure(_propagator, strategies, _config, **_options):
        degrees = {(s.tp, s.pp) for strategy in strategies for s in strategy.schemes}
        document = small_profile(6_000_000, num_layers=4)
        own = [s for s in document["schemes"] if (s["tp"], s["pp"]) in degrees]
        return document | {"schemes": own}

    def planned(strategies, *, loads=True, saves=False):
        engine = start(folder, tiny("llama"), hydra={"profile": None, "strategies": strategies})
        if loads:
            engine.load_checkpoint(f"{folder}/saved")
        engine.train_batch()
        found = sorted(map(str, engine.source.candidates.strategies))
        if saves:
            engine.save_checkpoint(f"{folder}/saved")
        engine.destroy()
        return found

    with mock.patch.object(candidates, "measure_profile", measure):
        planned(["1x<2,1>"], loads=False, saves=True)
        for strategies in (["1x<2,1>"], ["2x<1,1>"]):
            assert planned(strategies) == strategies
        assert set(planned(None)) >= {"1x<2,1>", "2x<1,1>"}
        both = ["1x<2,1>", "2x<1,1>"]
        assert planned(both, saves=True) == both
        assert planned(["1x<sp2,1>"]) == ["1x<sp2,1>"]  # whose times follow from both


@pytest.mark.slow
@pytest.mark.distributed
def test_a_run_goes_on_with_other_strategies_than_its_profile_was_measured_for(tmp_path):
    run_distributed(resume_with_other_strategies, 2, str(tmp_path))


def frozen(model):
    for name, param in model.named_parameters():
        param.requires_grad_("layers.2" not in name)
    return model


def make(kind, seed=0):
    model = tiny("llama_tied", seed)
    return frozen(model) if kind == "frozen" else model


SETTINGS = {
    "bf16": BF16,
    "frozen": {},
    # Small enough for several sub-groups, whose borders depend on the number of ranks.
    "groups": {"zero_optimization": {"stage": 3, "sub_group_size": 3000}},
}


def gathered(engine):
    """Everything that a checkpoint has to restore, whole and comparable."""
    params = [p for p in engine.module.parameters() if p.requires_grad]
    states = full_states(engine, params)
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        weights = {n: p.detach().clone() for n, p in engine.module.named_parameters()}
    counts = (engine.global_steps, engine.global_samples, engine.skipped_steps)
    steps = sorted({float(s["step"]) for s in engine.optimizer.optimizer.state.values()})
    return states, weights, str((counts, steps, engine.source.sampler.state))


def save_all(folder):
    continued = {}
    for kind, sections in SETTINGS.items():
        engine = start(folder, make(kind), **sections)
        train(engine, 3)
        save_dir = f"{folder}/{kind}_{dist.get_world_size()}"
        engine.save_checkpoint(save_dir, client_state={"mine": [1, "two"]})
        state = gathered(engine)
        if dist.get_rank() == 0:
            torch.save(state, f"{save_dir}/expected.pt")
        continued[kind] = train(engine, 3)
        engine.destroy()
    return continued


def load_all(folder, old_world, continued):
    """The same state, and training goes on as in `continued`."""
    for kind, sections in SETTINGS.items():
        save_dir = f"{folder}/{kind}_{old_world}"
        own = {"strategies": ["2x<1,1>", "1x<2,1>"]} if kind == "groups" else None
        engine = start(folder, make(kind, seed=3), hydra=own, **sections)
        _, client_state = engine.load_checkpoint(save_dir)
        expected = torch.load(f"{save_dir}/expected.pt", weights_only=True)
        torch.testing.assert_close(gathered(engine)[:2], expected[:2], rtol=0, atol=0)
        assert gathered(engine)[2] == expected[2], kind
        assert client_state.get("mine") == [1, "two"], kind
        losses, consumed = train(engine, 3)
        wanted_losses, wanted_consumed = continued[kind]
        assert consumed == wanted_consumed, kind
        tolerance = 5e-3 if kind == "bf16" else 1e-5  # another strategy sums in another order
        assert losses == pytest.approx(wanted_losses, rel=tolerance), kind
        engine.destroy()


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("old_world", "new_world"),
    [(3, 2), pytest.param(2, 4, marks=pytest.mark.nightly)],
)
def test_resume_on_another_number_of_ranks(tmp_path, old_world, new_world):
    continued = run_distributed(save_all, old_world, str(tmp_path))[0]
    run_distributed(load_all, new_world, str(tmp_path), old_world, continued)


def exchange_with_stock(folder):
    """Stock DeepSpeed from our files, we from stock's and from its universal format; weights
    alone.
    """
    data = batches(6)
    model = tiny("llama_tied")
    stock = start_stock(copy.deepcopy(model))
    engine = start_hydra(model)
    for examples in data[:3]:
        stock_step(stock, examples)
        engine.train_batch(examples, strategy="1x<2,1>")
    stock.save_checkpoint(f"{folder}/stock")
    engine.save_checkpoint(f"{folder}/ours")
    wanted = [stock_step(stock, e) for e in data[3:]]

    def check(start, of, step, **sections):
        other = start(tiny("llama_tied", seed=1), **sections)
        other.load_checkpoint(f"{folder}/{of}")
        losses = [float(step(other, examples)) for examples in data[3:]]
        torch.testing.assert_close(losses, wanted, rtol=1e-5, atol=0)
        assert other.global_steps == 6

    check(start_stock, "ours", stock_step)
    check(start_hydra, "stock", lambda e, batch: e.train_batch(batch, strategy="1x<1,2>"))
    if dist.get_rank() == 0:
        convert_to_universal(Path(folder, "ours"))
    dist.barrier()
    universal = {"checkpoint": {"load_universal": True}}
    check(start_hydra, "ours", lambda e, b: e.train_batch(b, strategy="2x<1,1>"), **universal)
    trained = float(engine.eval_batch(data[5], strategy="2x<1,1>"))
    for option, num_steps in (("load_module_only", 0), ("load_optimizer_states", 3)):
        fresh = start_hydra(tiny("llama_tied", seed=1))
        fresh.load_checkpoint(f"{folder}/ours", **{option: num_steps == 0})
        moments = [s["exp_avg"].abs().max() for s in fresh.optimizer.optimizer.state.values()]
        assert float(fresh.eval_batch(data[5], strategy="2x<1,1>")) == trained
        assert (fresh.global_steps, float(max(moments, default=0))) == (num_steps, 0)


def convert_to_universal(folder):
    """Do what `python -m deepspeed.checkpoint.ds_to_universal` does, in this process."""
    from deepspeed.checkpoint import ds_to_universal

    universal = folder / "global_step3_universal"
    arguments = ds_to_universal.parse_arguments.__globals__["argparse"].Namespace(
        input_folder=str(folder / "global_step3"),
        output_folder=str(universal),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=False,
    )
    ds_to_universal.main(arguments)
    (folder / "latest_universal").write_text(universal.name)


@pytest.mark.slow
@pytest.mark.distributed
def test_files_are_exchanged_with_stock_deepspeed(tmp_path):
    run_distributed(exchange_with_stock, 2, str(tmp_path))


SHAPES = st.lists(st.tuples(st.integers(1, 7), st.integers(1, 5)), min_size=1, max_size=6)


@given(SHAPES, st.integers(1, 5), st.integers(1, 5), st.integers(1, 40), st.integers(1, 40))
def test_pieces_bring_every_element_once(shapes, old_world, new_world, old_size, new_size):
    named = {f"p{i}": shape for i, shape in enumerate(shapes)}
    old = reshard.ShardLayout.build(sub_groups(named, old_world, old_size), old_world)
    new = reshard.ShardLayout.build(sub_groups(named, new_world, new_size), new_world)
    values = {
        name: torch.arange(a * b, dtype=torch.float64) + 1000 * (i + 1)
        for i, (name, (a, b)) in enumerate(named.items())
    }
    for rank in range(new_world):
        targets = [torch.zeros(n, dtype=torch.float64) for n in new.group_numel]
        for old_rank in range(old_world):
            sources = cut(values, old, old_rank, padding=math.nan)
            for piece in reshard.shard_moves(old, old_rank, new, rank):
                reshard._copy(piece, sources[piece.source], targets[piece.target])
        for mine, wanted in zip(targets, cut(values, new, rank), strict=True):
            assert torch.equal(mine, wanted)


def sub_groups(named, world_size, size):
    """Sub-groups as DeepSpeed cuts them: closed when their shards reach `size` elements."""
    groups, numel = [{}], 0
    for name, (a, b) in named.items():
        if numel >= size:
            groups.append({})
            numel = 0
        groups[-1][name] = (a, b)
        numel += -(-a * b // world_size)
    return groups


def cut(values, layout, rank, padding=0.0):
    """The flat tensors of `rank`, by padding and slicing whole parameters."""
    flats = [torch.zeros(n, dtype=torch.float64) for n in layout.group_numel]
    for name, (group, offset, numel) in layout.place.items():
        size = -(-numel // layout.world_size)
        padded = torch.full((size * layout.world_size,), padding, dtype=torch.float64)
        padded[:numel] = values[name]
        flats[group][offset : offset + size] = padded[rank * size : (rank + 1) * size]
    return flats


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"another model: parameter b has shape \(3,\) there and None here"
    ):
        reshard.read_optimizer_states(tmp_path, [{"a": (2,), "b": (3,)}], 2, [{"a": (2,)}], 0, 2)


def test_sub_groups_that_were_one_count_their_steps_apart(tmp_path):
    """Each of them adds one to its count in place."""
    state = {"step": torch.tensor(3.0), "exp_avg": torch.arange(5.0)}
    base = {"state": {0: state}, "param_groups": [{"params": [0]}]}
    zero = {"optimizer_state_dict": base, "fp32_flat_groups": [10 + torch.arange(5.0)]}
    name = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": zero}, tmp_path / name)
    groups = [{"a": (2,), "b": (3,)}], 1, [{"a": (2,)}, {"b": (3,)}]
    found = reshard.read_optimizer_states(tmp_path, *groups, 0, 1)["optimizer_state_dict"]
    assert [flat.tolist() for flat in found["fp32_flat_groups"]] == [[10, 11], [12, 13, 14]]
    first, second = found["optimizer_state_dict"]["state"].values()
    assert [first["exp_avg"].tolist(), second["exp_avg"].tolist()] == [[0, 1], [2, 3, 4]]
    first["step"] += 1
    assert (float(first["step"]), float(second["step"])) == (4, 3)


def weights_between_checkpoints(folder):
    """Tags that load after 16-bit weights were saved in between; what SGD says of AdamW's."""
    engine, examples = start_hydra(tiny("llama")), batches(1)[0]
    engine.train_batch(examples)
    state = {"epoch": 3}
    for tag in (1, 2):
        engine.save_checkpoint(folder, tag=tag, client_state=state)
        engine.save_16bit_model(f"{folder}/weights")
        # Saved again, as DeepSpeed's tutorial does
        _, state = engine.load_checkpoint(folder)
        assert state == {"epoch": 3}
    tags = [Path(engine.load_checkpoint(folder, tag=tag)[0]).parent.name for tag in (1, 2)]
    with mock.patch("ds_hydra.engine.checkpointing.engine.logger.info") as info:
        engine.load_checkpoint(folder)
        assert not info.called
        engine.optimizer.param_groups[0]["lr"] = 5e-4
        engine.load_checkpoint(folder)
    if dist.get_rank() == 0:
        assert "at the checkpoint's [0.001], not at this run's [0.0005]" in str(info.call_args)
    # As where a launcher gives each rank a device of its own, and all of them LOCAL_RANK=0
    engine.local_rank, engine._config.use_node_local_storage = 0, True
    engine.save_checkpoint(f"{folder}/local")
    engine.load_checkpoint(f"{folder}/local")
    engine.destroy()
    model = tiny("llama", seed=1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine, *_ = ds_hydra.initialize(model=model, optimizer=sgd, config=ds_config(hydra={}))
    with pytest.raises(CheckpointError) as raised:
        engine.load_checkpoint(folder)
    for option in ({"load_optimizer_states": False}, {"load_module_only": True}):
        engine.load_checkpoint(folder, **option)
        engine.train_batch(examples)
    engine.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(sgd, lambda _: 1.0)
    with pytest.raises(CheckpointError, match="load_lr_scheduler_states=False"):
        engine.load_checkpoint(folder, load_optimizer_states=False)
    engine.load_checkpoint(folder, load_optimizer_states=False, load_lr_scheduler_states=False)
    return tags, str(raised.value)


def given_by_the_loader(folder):
    """A loop over DeepSpeed's loader goes on where it was left, as told by first tokens of global
    batches.
    """

    def first_tokens(batches, number):
        return [
            [int(example["input_ids"][0]) for example in examples]
            for examples, _ in zip(batches, range(number))
        ]

    engine, trained = start(folder, tiny("llama")), []
    for _ in range(3):  # the loader has no end, so that each loop is left
        for number, examples in enumerate(engine.training_dataloader):
            if number == 2:
                break
            engine.train_batch(examples)
            trained += first_tokens([examples], 1)
    engine.save_checkpoint(f"{folder}/given")
    wanted = first_tokens(engine.source.iterate_examples(), 2)
    engine.destroy()
    engine = start(folder, tiny("llama"))
    whole = first_tokens(engine.training_dataloader, 8)
    assert whole == trained + wanted
    engine.load_checkpoint(f"{folder}/given")
    assert first_tokens(engine.training_dataloader, 2) == wanted
    engine.load_checkpoint(f"{folder}/given", load_data_position=False)
    assert first_tokens(engine.training_dataloader, 2) == whole[:2]


def test_optimizers_are_told_apart_by_what_they_keep():
    def states(group, *names):
        kept = {name: torch.zeros(3) for name in names} | {"step": torch.tensor(1.0)}
        return {"param_groups": [group], "state": {0: kept} if names else {}}

    adam = states({"betas": (0.9, 0.99)}, "exp_avg", "exp_avg_sq")
    reshard.check_same_optimizer(Path("x"), adam, states({"betas": (0.9, 0.95)}))
    for other in (states({"betas": (0.9, 0.99)}, "exp_avg"), states({"momentum": 0.9})):
        with pytest.raises(CheckpointError, match="states of another optimizer"):
            reshard.check_same_optimizer(Path("x"), adam, other)
    # Muon has momentum from the start, and Adam for other parameters, which has not stepped yet.
    groups = [{"momentum": 0.95}, {"betas": (0.9, 0.99)}]
    fresh = {"param_groups": groups, "state": {0: {"momentum_buffer": torch.zeros(3)}, 1: {}}}
    moments = {"exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}
    saved = {**fresh, "state": {**fresh["state"], 1: moments}}
    reshard.check_same_optimizer(Path("x"), saved, fresh)
    with pytest.raises(CheckpointError, match="states of another optimizer"):
        reshard.check_same_optimizer(Path("x"), {**saved, "state": {0: moments, 1: moments}}, fresh)


def test_schedulers_are_told_apart_by_where_they_keep_their_position():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    of_torch = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    of_deepspeed = WarmupLR(optimizer)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
    reshard.check_same_scheduler(Path("x"), cosine.state_dict(), of_torch)
    for saved, own in ((None, of_torch), (None, of_deepspeed), (of_deepspeed, of_torch)):
        state = saved and saved.state_dict()
        with pytest.raises(CheckpointError, match=f"this run has a {type(own).__name__}"):
            reshard.check_same_scheduler(Path("x"), state, own)


def save_what_is_empty(folder):
    """Weights that are saved empty are announced, once and by rank 0."""
    model = tiny("llama")
    engine = start_hydra(model)
    engine.train_batch(batches(1)[0])
    is_first = dist.get_rank() == 0
    with mock.patch.object(held_models.logger, "warning") as warn:
        for save in (
            lambda: model.save_pretrained(f"{folder}/{dist.get_rank()}"),
            engine.module.state_dict,
            lambda: engine.save_checkpoint(f"{folder}/checkpoint"),
            lambda: engine.save_16bit_model(f"{folder}/weights"),
        ):
            save()
            assert warn.call_count == is_first
        with deepspeed.zero.GatheredParameters([*model.parameters()]):
            model.state_dict()
        engine.destroy()
        held_models._told_of_empty.discard(model)
        model.state_dict()  # still in shards
        assert warn.call_count == 2 * is_first


def lives_of_engines(folder):
    """Engines one after the other, each with files of its own."""
    found = weights_between_checkpoints(f"{folder}/weights")
    given_by_the_loader(folder)
    save_what_is_empty(f"{folder}/empty")
    return found


@pytest.mark.slow
@pytest.mark.distributed
def test_weights_between_checkpoints_another_optimizer_and_loops_over_the_loader(tmp_path):
    for tags, error in run_distributed(lives_of_engines, 2, str(tmp_path)):
        assert tags == ["1", "2"]
        assert (
            "2 has states of another optimizer (betas in 1 parameter groups; the one here has momentum in 1 "
            "parameter groups); resume with the optimizer that has saved it, or pass load_optimizer_states=False"
        ) in error

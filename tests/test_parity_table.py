"""Gradients and loss of one process under every pair of what a run may have: the rows of
`parity_table.txt`, which `parity_rows.py` writes.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import itertools
from unittest import mock

import parity_rows
import pytest
import torch
import torch.distributed as dist
from distributed import run_distributed
from engines import start_hydra
from models import VOCAB_SIZE, tiny
from parity_rows import (
    FACTORS,
    all_pairs,
    broken_rules,
    engine_of,
    pairs_of,
    pairs_of_compiled,
    read_table,
    row_of,
)
from single_process import random_examples
from test_engine_parity import (
    LENGTHS,
    RELATIVE_TOLERANCE,
    hand_plan,
    run_alone,
    worst_errors,
)

from ds_hydra.engine.parallel import linear, token_cuts
from ds_hydra.strategy import Strategy

HAS_PEFT = importlib.util.find_spec("peft") is not None
if HAS_PEFT:
    import test_lora  # before ranks are forked: its imports are paid once

IN_MINUTES = ("llama",)
"""Families of which `make test` runs the rows; those of the others are slow."""

LENGTHS_OF = {
    "many": LENGTHS,
    "short": (1, 1, 5, 2, 1, 3),
    "few_labels": LENGTHS,
    "single": (64,),
    "empty_pipeline": LENGTHS,
}
"""Short: shards of one token, experts without any. Few labels: of each sequence a quarter counts,
of the longest none. Empty pipeline: the last one has no sequence.
"""
BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 10.0}
"""A coefficient that makes it as large as the rest of the loss."""
LINKS = {
    "one_node": {},
    "nodes_of_2": {"devices_per_node": 2},
    "nodes_of_3": {"devices_per_node": 3},
}


def model_of(row):
    more = {"tie_word_embeddings": row["trained"] == "tied"}
    model = tiny(row["family"], **more, **(BALANCED if row["balance"] == "balance" else {}))
    torch.manual_seed(2)
    for name, param in model.named_parameters():
        if name.endswith(".bias"):  # zeros, of which nobody would miss one
            torch.nn.init.normal_(param, std=0.1)
    if row["trained"] == "frozen":
        frozen = (model.get_input_embeddings(), *model.model.layers[:3:2])
        for module in frozen:
            module.requires_grad_(False)
    if row["trained"] == "lora":
        is_dense = row["family"] in parity_rows.DENSE
        modules = "all-linear" if is_dense else ["q_proj", "v_proj", "o_proj"]
        biased = {"lora_bias": True, "use_rslora": True} if row["family"] == "llama_bias" else {}
        model = test_lora.with_adapters(model, target_modules=modules, **biased)
    return model


def engine_for(model, row):
    hydra = {
        "compile_layers": row["layers"] == "compiled",
        "activation_checkpointing": row["ckpt"] == "ckpt_all",
        "link": LINKS[row["routes"]],
    }
    return start_hydra(model, hydra=hydra)


def examples_of(lengths):
    examples = random_examples(LENGTHS_OF[lengths], VOCAB_SIZE, seed=1)
    for example in examples if lengths == "few_labels" else ():
        length = len(example["labels"])
        example["labels"][: length if length == max(LENGTHS) else int(length * 0.75)] = -100
    return examples


@contextlib.contextmanager
def traced():
    """torch.compile traces forward and backward, without a compiler behind it, and gives up on no
    layer.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    traces = functools.partial(torch.compile, backend="aot_eager")
    with (
        mock.patch("torch.compile", traces),
        mock.patch("ds_hydra.engine.model.stage_forward._check_cpp_compiler"),
        torch._dynamo.config.patch(fail_on_recompile_limit_hit=True),
    ):
        yield torch._dynamo.utils.counters["stats"]


def check_rows(names):
    """(worst error of a gradient, its name, error of the loss) of each row of `names`."""
    linear.LEAST_NUMEL.clear()  # gradients add up in products, as those of large weights
    token_cuts.LEAST_PART_BYTES = 1  # keys travel in parts, as those of large micro-batches
    rows = [(name, row_of(name)) for name in names]
    # Frozen slices may stay from one row to the next where weights are kept
    rows.sort(key=lambda item: (engine_of(item[1]), item[1]["weights"]))
    found, wanted = {}, {}
    for _, group in itertools.groupby(rows, key=lambda item: engine_of(item[1])):
        of_engine = list(group)
        if of_engine[0][1]["layers"] == "interpreted":
            found |= check_engine(of_engine, wanted)
            continue
        with traced() as stats:
            found |= check_engine(of_engine, wanted)
            is_compiled = stats["unique_graphs"] > 0 or dist.get_rank() > 0  # others may be idle
            assert is_compiled, f"{of_engine[0][0]}: nothing was compiled"
    return found


def check_engine(rows, wanted_of):
    """The same of rows that one engine runs; loss and gradients of one process, which engines
    share, are kept in `wanted_of`.
    """
    model = model_of(rows[0][1])
    reference = copy.deepcopy(model)
    engine = engine_for(model, rows[0][1])
    found = {}
    for row_name, row in rows:
        examples = examples_of(row["lengths"])
        key = tuple(row[factor] for factor in ("family", "trained", "balance", "lengths"))
        if key not in wanted_of:
            wanted_of[key] = run_alone(reference, examples)
        strategy = Strategy.parse(parity_rows.strategy_of(row))
        plan = hand_plan(strategy, examples, empty_pipeline=row["lengths"] == "empty_pipeline")
        found[row_name] = worst_errors(engine, plan, examples, *wanted_of[key])
    engine.destroy()
    return found


def is_compiled(name):
    return row_of(name)["layers"] == "compiled"


def run_with(name):
    """What one start of ranks runs: all rows of a family, a row of compiled layers alone."""
    if is_compiled(name):
        return (name,)
    rows = {other: row_of(other) for other in read_table() if not is_compiled(other)}
    return tuple(
        other
        for other, row in rows.items()
        if row["family"] == row_of(name)["family"] and (HAS_PEFT or row["trained"] != "lora")
    )


@functools.cache
def results_of(names):
    """`check_rows` of `names`, or how it failed."""
    try:
        return run_distributed(check_rows, parity_rows.NUM_RANKS, names)[0]
    except AssertionError as error:
        return dict.fromkeys(names, error)


def rows_to_run():
    for name in read_table():
        marks = () if row_of(name)["family"] in IN_MINUTES else (pytest.mark.slow,)
        if is_compiled(name):  # to trace a layer takes each rank seconds
            marks = (pytest.mark.nightly,)
        yield pytest.param(name, marks=marks)


@pytest.mark.distributed
@pytest.mark.parametrize("name", rows_to_run())
def test_gradients_equal_one_process(name):
    if row_of(name)["trained"] == "lora" and not HAS_PEFT:
        pytest.skip("the extra ds_hydra[peft] is not installed")
    found = results_of(run_with(name))[name]
    if isinstance(found, AssertionError):
        raise found
    error, parameter, loss_error = found
    strategy = read_table()[name]
    assert error <= RELATIVE_TOLERANCE, f"{strategy}: gradient of {parameter} is off by {error:.1e}"
    assert loss_error <= RELATIVE_TOLERANCE, f"{strategy}: loss is off by {loss_error:.1e}"


def test_the_table_is_what_the_generator_writes():
    assert parity_rows.TABLE.read_text() == parity_rows.table_text(), (
        "run python tests/parity_rows.py"
    )


def test_every_family_has_rows():
    assert {row_of(name)["family"] for name in read_table()} == {*FACTORS["family"]}


def test_every_pair_that_can_meet_is_in_a_row():
    rows = [row_of(name) for name in read_table()]
    assert not any(broken_rules(row) for row in rows)
    for layers, pairs in (("interpreted", all_pairs()), ("compiled", pairs_of_compiled())):
        covered = {p for row in rows if row["layers"] == layers for p in pairs_of(row)}
        assert covered >= {pair for pair in pairs if not broken_rules(dict(pair))}


def test_a_name_says_all_factors():
    values = [value for factor in FACTORS.values() for value in factor]
    assert len(set(values)) == len(values)
    for name, strategy in read_table().items():
        assert parity_rows.name_of(row_of(name)) == name
        assert parity_rows.strategy_of(row_of(name)) == strategy
        assert Strategy.parse(strategy).num_devices <= parity_rows.NUM_RANKS

"""Every row of the tables of refusals, by its example: name, value and advice are told, the advice
works, and the documentation has it.
"""

from __future__ import annotations

import contextlib
import html
import importlib.util
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import trl
from models import tiny
from test_config import ds_config, merge, nested
from transformers import TrainingArguments

from ds_hydra.configs import HydraConfig, hydra_config, read_ds_config
from ds_hydra.configs import ds_config as json_keys
from ds_hydra.engine.checks.config_check import _warnings_to
from ds_hydra.engine.model import model_checks
from ds_hydra.errors import HydraConfigError
from ds_hydra.refusals import Refusal
from ds_hydra.trainer import HydraTrainer, arguments
from ds_hydra.trl import HydraSFTTrainer, mixin


def ask_arguments(check: Callable[..., None], *kinds: type) -> Callable[..., list[str]]:
    """Ask a check of arguments about one, of the first kind that has it."""

    def ask(name: str, value: Any) -> list[str]:
        kind = next(kind for kind in kinds if hasattr(kind, name) or name in kind.__annotations__)
        args = kind(output_dir="unused", use_cpu=True, report_to="none", bf16=False)
        setattr(args, name, value)
        notes: list[str] = []
        check(args, notes.append)
        return notes

    return ask


def ask_override(kind: type, rows: Sequence[Refusal]) -> Callable[..., list[str]]:
    """Ask about a method of a subclass."""

    def ask(name: str, value: Any) -> list[str]:
        trainer = object.__new__(type("Mine", (kind,), {name: lambda self: None} if value else {}))
        arguments.check_overrides(trainer, rows)
        return []

    return ask


def ask_json(name: str, value: Any) -> list[str]:
    notes: list[str] = []
    with _warnings_to(notes):
        read_ds_config(merge(ds_config(), nested(name, value)))
    return notes


def ask_section(name: str, value: Any) -> list[str]:
    HydraConfig.parse(ds_config(**nested(f"hydra.{name}", value))["hydra"])
    return []


def ask_model(name: str, value: Any) -> list[str]:
    model = tiny("llama")
    setattr(model.config, name, value)
    model_checks.check_supported(model)
    return []


class Table(NamedTuple):
    """Rows, and how to ask about a name and value: raises, or returns what it notes."""

    rows: Sequence[Refusal]
    ask: Callable[[str, Any], list[str]]
    is_refused: bool = True


ROOT = Path(__file__).parents[1]
OF_TRL = (trl.SFTConfig, trl.DPOConfig, trl.GRPOConfig)
TABLES = {
    "TrainingArguments": Table(
        arguments.REFUSED, ask_arguments(arguments.check_arguments, TrainingArguments)
    ),
    "unused TrainingArguments": Table(
        arguments.WITHOUT_EFFECT,
        ask_arguments(arguments.check_arguments, TrainingArguments),
        is_refused=False,
    ),
    "overrides": Table(arguments.NOT_CALLED, ask_override(HydraTrainer, arguments.NOT_CALLED)),
    "TRL": Table(mixin.REFUSED, ask_arguments(mixin.check_trl_arguments, *OF_TRL)),
    "overrides of TRL": Table(
        mixin.NOT_CALLED_OF_TRL, ask_override(HydraSFTTrainer, mixin.NOT_CALLED_OF_TRL)
    ),
    "DeepSpeed": Table(json_keys.REFUSALS, ask_json),
    "unused of DeepSpeed": Table(json_keys.WITHOUT_EFFECT, ask_json, is_refused=False),
    "hydra": Table(hydra_config.REMOVED, ask_section),
    "models": Table(model_checks.CONFIG_REFUSED, ask_model),
}

NUM_ROWS = {
    "TrainingArguments": 11,
    "unused TrainingArguments": 16,
    "overrides": 17,
    "TRL": 3,
    "overrides of TRL": 4,
    "DeepSpeed": 30,
    "unused of DeepSpeed": 9,
    "hydra": 15,
    "models": 5,
}


def test_no_row_is_lost():
    """A row that goes is taken away here, too; no walk misses it."""
    assert {name: len(table.rows) for name, table in TABLES.items()} == NUM_ROWS


@pytest.mark.parametrize(
    ("table", "row"),
    [
        pytest.param(table, row, id=f"{name}: {row.name}")
        for name, table in TABLES.items()
        for row in table.rows
    ],
)
def test_an_example_is_told_and_its_advice_works(table, row):
    with pytest.raises(HydraConfigError) if table.is_refused else contextlib.nullcontext() as error:
        told = table.ask(row.name, row.example)
    if table.is_refused:
        (told,) = [line for line in str(error.value).splitlines() if row.name in line]
        values = [f"{row.name}={row.example!r}: ", f"{row.name} is {json.dumps(row.example)}: "]
        values += [f"{row.name}(): ", f"  {row.name}: ", f"hydra.{row.name} is no longer a key; "]
        assert any(value in told for value in values)
        assert row.advice
    else:
        (told,) = told
        assert f"{row.name} has no effect: " in told or f"{row.name}={row.example!r} has no" in told
    assert told.endswith(row.text)
    if row.works is not None:
        assert table.ask(row.name, row.works) == []


def test_the_documentation_has_every_row():
    pytest.importorskip("mkdocs", reason="the extra ds_hydra[docs] is not installed")
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs/hooks.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    page = hooks.on_page_markdown((ROOT / "docs/reference/refusals.md").read_text())
    assert not re.search(r"<\w+\d", page), "would be a tag"
    page = html.unescape(page)
    for table in TABLES.values():
        verdict = "refused" if table.is_refused else "no effect"
        for row in table.rows:
            lines = [line for line in page.splitlines() if f"`{row.name}`" in line]
            assert any(f"| {verdict} | {row.reason} | {row.advice} |" in line for line in lines), (
                row
            )


MORE = [
    *(("TrainingArguments", "optim", kind) for kind in ("lomo", "galore_adamw_layerwise")),
    *(("TrainingArguments", "optim", kind) for kind in ("apollo_adamw", "schedule_free_sgd")),
    ("TrainingArguments", "activation_checkpointing_kwargs", {"every_n_layers": 2}),
    ("unused TrainingArguments", "train_sampling_strategy", "batch_rebalance"),
    ("DeepSpeed", "zero_optimization.offload_param.device", "nvme"),
    *(("DeepSpeed", "zero_optimization.stage", stage) for stage in (0, 1, None, True, "3")),
    *(("DeepSpeed", "sequence_parallel_size", value) for value in ("2", 2.0, "two", [2])),
    ("models", "use_bidirectional_attention", True),
    *(("DeepSpeed", "hybrid_engine.enabled", value) for value in ("yes", 1)),
]


@pytest.mark.parametrize(("table", "name", "value"), MORE, ids=str)
def test_other_values_of_a_row_are_refused_too(table, name, value):
    if not TABLES[table].is_refused:
        (told,) = TABLES[table].ask(name, value)
        assert name in told
        return
    with pytest.raises(HydraConfigError, match=name):
        TABLES[table].ask(name, value)

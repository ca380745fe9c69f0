"""What mkdocs generates: the references of configuration, refusals, commands and metrics, and a
place for pages that the navigation omits.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from pydantic import BaseModel

if TYPE_CHECKING:
    from ds_hydra.refusals import Refusal

ROOT = Path(__file__).parents[1]
ROOT_PAGES = ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
"""Pages of the repository's root that become pages of the site, where they exist."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the root's pages, and put every page that no one listed under "More", but for decisions,
    which their index lists.
    """
    for name in ROOT_PAGES:
        if (ROOT / name).exists():
            text = (ROOT / name).read_text(encoding="utf-8")
            files.append(
                File.generated(config, f"project/{name.lower()}", content=_move_links(text))
            )
    listed = set(_paths(config.nav))
    pages = [f.src_uri for f in files.documentation_pages()]
    more = [page for page in pages if page not in listed and not page.startswith("decisions/")]
    config.nav = [*(config.nav or []), {"More": sorted(more)}]
    return files


def _move_links(text: str) -> str:
    """Links of a page of the root as they are from `project/`; those to files outside of the site
    become text.
    """

    def move(match: re.Match[str]) -> str:
        label, target = match.groups()
        if target.startswith(("http", "#")):
            return match[0]
        if target.startswith("docs/"):
            return f"[{label}](../{target.removeprefix('docs/')})"
        return f"[{label}]({target.lower()})" if target in ROOT_PAGES else label

    return re.sub(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)", move, text)


def _paths(nav: Any) -> Iterator[str]:
    for entry in nav or []:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            if isinstance(value, str):
                yield value
            else:
                yield from _paths(value)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the marks with what the code says."""
    for mark, generate in (
        ("<!-- configuration -->", configuration_reference),
        ("<!-- refusals -->", refusals_reference),
        ("<!-- commands -->", command_reference),
        ("<!-- metrics -->", metrics_reference),
    ):
        if mark in markdown:
            markdown = markdown.replace(mark, generate())
    return markdown


def configuration_reference() -> str:
    """A table for every section of HydraConfig, nested ones included."""
    from ds_hydra.configs import HydraConfig

    return "\n".join(_section(HydraConfig, "hydra"))


def _section(section: type[BaseModel], name: str) -> Iterator[str]:
    about = " ".join((section.__doc__ or "").split())
    yield from (
        f"## {name}",
        "",
        about,
        "",
        "| key | type | default | meaning |",
        "|---|---|---|---|",
    )
    nested = []
    for key, field in section.model_fields.items():
        meaning = " ".join((field.description or "").split())
        if isinstance(field.default, BaseModel):
            nested.append((key, type(field.default)))
            yield f"| [`{key}`](#{name.replace('.', '')}{key}) | section | | {meaning} |"
            continue
        default = "**required**" if field.is_required() else f"`{json.dumps(field.default)}`"
        yield f"| `{key}` | {_type(section, key)} | {default} | {meaning} |"
    yield ""
    for key, model in nested:
        yield from _section(model, f"{name}.{key}")


def _type(section: type[BaseModel], key: str) -> str:
    """What JSON may hold, with the bounds of numbers (of those that may be null the message of the
    error has them).
    """
    schema = section.model_json_schema()["properties"][key]
    words = {"ge": "≥", "gt": ">", "lt": "<"}
    bounds = [
        f"{sign} {getattr(bound, word)}"
        for bound in section.model_fields[key].metadata
        for word, sign in words.items()
        if getattr(bound, word, None) is not None
    ]
    return " ".join([" or ".join(dict.fromkeys(_names(schema))), ", ".join(bounds)]).strip()


def _names(schema: dict[str, Any]) -> Iterator[str]:
    if "anyOf" in schema:
        for option in schema["anyOf"]:
            yield from _names(option)
    elif "enum" in schema:
        yield from (f"`{json.dumps(value)}`" for value in schema["enum"])
    elif "const" in schema:
        yield f"`{json.dumps(schema['const'])}`"
    else:
        yield schema["type"].replace("array", "list")


def refusals_reference() -> str:
    """A table for each place where settings are written."""
    from ds_hydra.configs import ds_config, hydra_config
    from ds_hydra.engine.model.model_checks import CONFIG_REFUSED
    from ds_hydra.trainer import arguments
    from ds_hydra.trl import mixin

    tables: dict[str, tuple[Sequence[Refusal], Sequence[Refusal]]] = {
        "Keys of the DeepSpeed JSON": (ds_config.REFUSALS, ds_config.WITHOUT_EFFECT),
        'Former keys of the "hydra" section': (hydra_config.REMOVED, ()),
        "TrainingArguments, of any trainer": (arguments.REFUSED, arguments.WITHOUT_EFFECT),
        "Methods of transformers' Trainer that HydraTrainer does not call": (
            arguments.NOT_CALLED,
            (),
        ),
        "Configurations of TRL under HydraMixin": (mixin.REFUSED, ()),
        "Configurations of models": (CONFIG_REFUSED, ()),
        "Methods that HydraMixin does not call": (mixin.NOT_CALLED_OF_TRL, ()),
    }
    return "\n".join(line for title, rows in tables.items() for line in _refusals(title, *rows))


def _refusals(title: str, refused: Sequence[Refusal], unused: Sequence[Refusal]) -> Iterator[str]:
    yield from (f"## {title}", "", "| name | verdict | why | instead |", "|---|---|---|---|")
    for verdict, rows in (("refused", refused), ("no effect", unused)):
        for text, same in groupby(rows, key=lambda row: row.text.replace("<", "&lt;")):
            names = [
                f"`{row.name}`"
                if row.example is True
                else f"`{row.name}` (as {_code(row.example)})"
                for row in same
            ]
            why, _, instead = text.partition("; ")
            yield f"| {', '.join(names)} | {verdict} | {why} | {instead} |"
    yield ""


def _code(value: Any) -> str:
    return f"`{json.dumps(value)}`"


def metrics_reference() -> str:
    """A table of the fields of a line of `metrics.jsonl`, in its order."""
    from ds_hydra.records import metrics

    module = ast.parse(Path(metrics.__file__).read_text(encoding="utf-8"))
    body = next(
        node.body
        for node in module.body
        if isinstance(node, ast.ClassDef) and node.name == metrics.IterationMetrics.__name__
    )
    lines = ["| field | meaning |", "|---|---|"]
    for entry, about in pairwise(body):
        if isinstance(entry, ast.AnnAssign) and isinstance(about, ast.Expr):
            lines.append(
                f"| `{ast.unparse(entry.target)}` | {' '.join(about.value.value.split())} |"
            )
    error = metrics.IterationMetrics.prediction_error.__doc__ or ""
    return "\n".join([*lines, f"| `prediction_error` | {' '.join(error.split())} |"])


def command_reference() -> str:
    """Every ds-hydra command with its options, as `--help` shows them."""
    from ds_hydra.cli import app

    group = typer.main.get_command(app)
    lines = []
    for name, command in sorted(group.commands.items()):
        context = typer.Context(command, info_name=f"ds-hydra {name}")
        about, _, examples = (command.help or "").replace("\b", "").partition("Example:")
        lines += [f"## ds-hydra {name}", "", about.strip(), ""]
        for example in examples.split("Example:") if examples else []:
            lines += ["```console", "$ " + " ".join(example.split()), "```", ""]
        lines += ["| option | default | meaning |", "|---|---|---|"]
        for parameter in command.params:
            record = parameter.get_help_record(context)
            if record is None and parameter.param_type_name == "option":
                continue
            shown = (
                ", ".join(parameter.opts)
                if parameter.param_type_name == "option"
                else parameter.name.upper()
            )
            default = "**required**" if parameter.required else _default(parameter)
            lines.append(f"| `{shown}` | {default} | {getattr(parameter, 'help', '') or ''} |")
        lines.append("")
    return "\n".join(lines)


def _default(parameter: Any) -> str:
    value = getattr(parameter.default, "value", parameter.default)
    return "" if value is None or callable(value) else f"`{json.dumps(value)}`"

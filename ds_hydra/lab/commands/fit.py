"""`ds-hydra fit`: the seven parameters of the whole-iteration model from measured iterations."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ds_hydra.commands.common import (
    AsJson,
    check_folder,
    errors_to_stderr,
    print_json,
    write_document,
)

if TYPE_CHECKING:
    from ds_hydra.lab.whole_iteration import IterationFit


def fit(
    points: Annotated[
        Path, typer.Option(help='JSON {"points": [{"setup": {...}, "iteration_ms": ...}, ...]}.')
    ],
    out: Annotated[
        Path | None, typer.Option(help="Where to write ds_hydra.whole_iteration/1.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Fit the time of whole iterations to measurements (Rubick's model).

    A setup has the fields of `IterationSetup`: forward_ms, params_mi, dp, and where they are not 1
    or 0 tp, pp, batch, hidden_elements, num_layers, is_sharded, is_offloaded, bandwidth_dp and so
    on.

    Example: ds-hydra fit --points measured.json --out model.json
    """
    from ds_hydra.configs.files import read_json_object
    from ds_hydra.lab.whole_iteration import fit_iterations, measured_from_json

    with errors_to_stderr():
        check_folder(out)
        fitted = fit_iterations(measured_from_json(read_json_object(points), source=str(points)))
        write_document(fitted.to_json(), out)
    print_json(fitted.to_json()) if as_json else print(_describe(fitted))


def _describe(fitted: IterationFit) -> str:
    lines = [f"{name:12} {value:.6g}" for name, value in asdict(fitted.model).items()]
    errors = [abs(error) for error in fitted.relative_errors]
    lines.append(
        f"error of the fitted points: mean {sum(errors) / len(errors):.1%}, largest {max(errors):.1%}"
    )
    return "\n".join(lines)

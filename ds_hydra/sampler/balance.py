"""Balanced rows for any data-parallel trainer: the planner as a library, without an engine and
without torch.

[Note: Waves]
Where ranks run in lockstep, the n-th rows of all ranks, a wave, take as long as the longest of
them: so it is where ZeRO-3 or FSDP gather each layer for a forward and backward pass of every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ds_hydra.configs.files import (
    MAX_DEVICES,
    MAX_LENGTH_TOKENS,
    check_count,
    find_file,
    list_files,
    read_json_object,
)
from ds_hydra.errors import HydraConfigError, InfeasiblePlanError
from ds_hydra.sampler.group_steps import MixedGroups, plan_steps
from ds_hydra.sampler.plan import GlobalBatch
from ds_hydra.sampler.planner import plan_iteration
from ds_hydra.sampler.planner_settings import PlannerSettings
from ds_hydra.sampler.schedule import steps_ms
from ds_hydra.strategy.cost_models.analytic import Hardware, predict_latency
from ds_hydra.strategy.cost_models.described_config import describe_config
from ds_hydra.strategy.profiles.memory_model import MemoryModel
from ds_hydra.strategy.profiles.profile import PROFILE_SCHEMA, LatencyModel, Profile
from ds_hydra.strategy.schemes.scheme import Scheme, Strategy

_ONE_RANK = Scheme(1, 1)

_UNUSED_MEMORY = MemoryModel(
    num_layers=1,
    hidden_size=1,
    vocab_size=0,
    activation_bytes={1: 1.0},
    state_bytes=0.0,
    sharded_fraction=1.0,
    memory_bytes=1,
    reserved_bytes=0,
    safety_margin_bytes=0,
)
"""Nobody asks it how long a row may be: the caller has said so."""

Rows = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BalancedRows:
    """Which sequences each rank packs into which row, and what the loss is divided by.

    `rows[rank][row]` lists positions in the lengths that were given; every position is in one row.
    `num_label_tokens` counts the tokens of the loss in the whole mini-batch, `num_label_sequences`
    the sequences that have any. `row_ms[rank][row]` is the predicted time of a row, forward and
    backward; `predicted_ms` that of the mini-batch, with what ranks wait for each other where they
    run in lockstep; no placement takes less than `lower_bound_ms`.
    """

    rows: tuple[Rows, ...]
    row_ms: tuple[tuple[float, ...], ...]
    num_label_tokens: int
    num_label_sequences: int
    predicted_ms: float
    lower_bound_ms: float

    @property
    def imbalance(self) -> float:
        """Predicted time over that of perfect balance, minus 1."""
        return self.predicted_ms / self.lower_bound_ms - 1


def balance_rows(
    lengths: Sequence[int],
    *,
    num_ranks: int,
    max_tokens: int,
    model: str | Path | Mapping[str, Any] | LatencyModel | Profile,
    hardware: str = "h100",
    lockstep: bool = True,
    label_tokens: Sequence[int] | None = None,
) -> BalancedRows:
    """Rows of at most `max_tokens` tokens for `num_ranks` data-parallel ranks, balanced by time.

    `lockstep`: every rank gets the same number of rows, and those that run together take about as
    long as each other; what ZeRO-3 and FSDP need, whose ranks gather each layer together. A row may
    then be empty, only where fewer sequences than ranks are left: its rank runs a row in which no
    token counts. Without `lockstep` every rank has rows of its own number, as ranks of DDP may that
    sum gradients once.

    A row takes a l^2 + b l for each of its sequences, and a constant. `model` says where these come
    from: the coefficients (`LatencyModel`, ms), a profile or the path of one, or the fields or path
    of a config.json or the name of a shipped model, whose attention and matrix products are counted
    on `hardware` (a shipped name or a path): nothing is measured then, and what matters is the
    ratio of a to b. `label_tokens[i]` of sequence i are counted by the loss, all but one if None.

    Equal arguments give equal rows in every process, so each rank may call it by itself: nothing is
    communicated. Raises HydraConfigError for arguments that are none, InfeasiblePlanError naming
    the first sequence above `max_tokens`.
    """
    check_count(num_ranks, "num_ranks", least=1, most=MAX_DEVICES)
    check_count(max_tokens, "max_tokens", least=1, most=MAX_LENGTH_TOKENS)
    tokens = _read_lengths(lengths, max_tokens)
    counted = _read_label_tokens(label_tokens, tokens)
    latency = read_latency(model, hardware)
    rows = (
        _lockstep_rows(tokens, num_ranks, max_tokens, latency)
        if lockstep
        else _own_rows(tokens, num_ranks, max_tokens, latency)
    )
    row_ms = tuple(
        tuple(latency.micro_batch_ms(tokens[i] for i in row) for row in own) for own in rows
    )
    of_ranks = [np.array(own, dtype=np.float64) for own in row_ms]
    predicted = float(steps_ms(of_ranks).sum()) if lockstep else max(map(sum, row_ms))
    return BalancedRows(
        rows=rows,
        row_ms=row_ms,
        num_label_tokens=sum(counted),
        num_label_sequences=sum(count > 0 for count in counted),
        predicted_ms=predicted,
        # A bound that is reached may lie above the prediction by rounding.
        lower_bound_ms=min(predicted, _lower_bound_ms(tokens, num_ranks, max_tokens, latency)),
    )


def read_latency(
    model: str | Path | Mapping[str, Any] | LatencyModel | Profile, hardware: str = "h100"
) -> LatencyModel:
    """T of one rank by `model`, as `balance_rows` takes it; raises HydraConfigError naming what it
    is instead.
    """
    if isinstance(model, LatencyModel):
        return model
    if isinstance(model, Profile):
        return _latency_in(model)
    source = "model"
    if isinstance(model, str | Path):
        source = str(model)
        is_profile = source in list_files("profiles")
        model = read_json_object(find_file("profiles" if is_profile else "models", source))
    if not isinstance(model, Mapping):
        raise HydraConfigError(
            f"model is {model!r:.80}, expected the fields of a config.json (config.to_dict()), its path, the name "
            "of a shipped model or profile, a Profile, or LatencyModel(quadratic_ms=..., linear_ms=..., "
            "constant_ms=...)"
        )
    if model.get("schema") == PROFILE_SCHEMA:
        return _latency_in(Profile.from_json(model, source=source))
    return predict_latency(describe_config(model, source)[0], Hardware.load(hardware), _ONE_RANK)


def _latency_in(profile: Profile) -> LatencyModel:
    if not profile.has_latency(_ONE_RANK):
        raise HydraConfigError(
            f"profile {profile.name!r} has no times of one rank, {_ONE_RANK}; give the config.json of the model, or a "
            "profile measured with that scheme"
        )
    return profile.get_latency(_ONE_RANK)


def _read_lengths(lengths: Sequence[int], max_tokens: int) -> tuple[int, ...]:
    tokens = _read_counts(lengths, "lengths", least=1)
    longest = max(tokens, default=0)
    if longest > max_tokens:
        too_long = [i for i, length in enumerate(tokens) if length > max_tokens]
        raise InfeasiblePlanError(
            f"sequence {too_long[0]} has {tokens[too_long[0]]} tokens, max_tokens is {max_tokens}"
            f"{f' ({len(too_long)} sequences are longer)' if len(too_long) > 1 else ''}; set it to {longest} or "
            "more, or shorten the sequences"
        )
    if not tokens:
        raise HydraConfigError("lengths is empty, expected the tokens of one sequence at least")
    return tokens


def _read_label_tokens(
    label_tokens: Sequence[int] | None, tokens: tuple[int, ...]
) -> tuple[int, ...]:
    if label_tokens is None:
        return tuple(length - 1 for length in tokens)
    counted = _read_counts(label_tokens, "label_tokens", least=0)
    if len(counted) != len(tokens):
        raise HydraConfigError(
            f"label_tokens has {len(counted)} entries, expected one for each of {len(tokens)} lengths"
        )
    for i, (count, length) in enumerate(zip(counted, tokens)):
        if count > length:
            raise HydraConfigError(
                f"sequence {i} has {length} tokens, and label_tokens says that {count} of them count"
            )
    if not any(counted):
        raise HydraConfigError(
            f"no token of the {len(tokens)} sequences counts (label_tokens are 0), so the loss has nothing to be "
            "divided by; leave out this mini-batch"
        )
    return counted


def _read_counts(values: Sequence[int], name: str, *, least: int) -> tuple[int, ...]:
    """Whole numbers, of numpy or a tensor as well."""
    plain = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(plain, Sequence) or isinstance(plain, str):
        raise HydraConfigError(f"{name} is {plain!r:.80}, expected a list of whole numbers")
    return tuple(
        check_count(
            value.item() if hasattr(value, "item") else value,
            f"{name}[{i}]",
            least=least,
            most=MAX_LENGTH_TOKENS,
        )
        for i, value in enumerate(plain)
    )


def _lockstep_rows(
    tokens: tuple[int, ...], num_ranks: int, max_tokens: int, latency: LatencyModel
) -> tuple[Rows, ...]:
    """A wave is a step of groups of one rank ([Note: Mixed groups])."""
    lengths = np.array(tokens, dtype=np.int64)
    order = np.argsort(-lengths, kind="stable")
    ranks = MixedGroups(
        num_ranks, (1,), (max_tokens,), (latency.constant_ms,), (latency.sequences_ms,)
    )
    steps = plan_steps([ranks], lengths[order], lambda slowest_ms: float(slowest_ms.sum()))
    waves = []
    # The longest wave first, so that what memory it takes is there for the others.
    for step in sorted(steps, key=lambda step: -step.slowest_ms):
        members = order[step.members]
        rows = [members[step.group_of == rank].tolist() for rank in range(num_ranks)]
        for row in rows:
            fullest = max(rows, key=len)
            if not row and len(fullest) > 1:
                row.append(fullest.pop())  # its shortest one, which lengthens nothing
        if members.size:
            waves.append(map(tuple, rows))
    return tuple(zip(*waves, strict=True))


def _own_rows(
    tokens: tuple[int, ...], num_ranks: int, max_tokens: int, latency: LatencyModel
) -> tuple[Rows, ...]:
    plan = plan_iteration(
        GlobalBatch(
            iteration=0,
            sample_indices=tuple(range(len(tokens))),
            lengths=tokens,
            num_label_tokens=0,
        ),
        strategies=[Strategy.alike(_ONE_RANK, num_ranks)],
        profile=Profile(
            name="balance_rows",
            latency={_ONE_RANK: latency},
            memory=_UNUSED_MEMORY,
            saturation_tokens={},
            document={},
        ),
        num_devices=num_ranks,
        # No integer program: its limit of time could end elsewhere on another rank.
        settings=PlannerSettings(
            max_len_override={_ONE_RANK: max_tokens}, overlaps_links=False, solver="none"
        ),
    )
    return tuple(pipeline.micro_batches for pipeline in plan.pipelines)


def _lower_bound_ms(
    tokens: tuple[int, ...], num_ranks: int, max_tokens: int, latency: LatencyModel
) -> float:
    """The longest sequence alone, or all ranks busy with as few rows as hold the tokens."""
    num_rows = -(-sum(tokens) // max_tokens)
    work = sum(latency.sequence_ms(length) for length in tokens)
    alone = latency.sequence_ms(max(tokens)) + latency.constant_ms
    return max(alone, (work + num_rows * latency.constant_ms) / num_ranks)

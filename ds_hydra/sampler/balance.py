"""Balanced rows for any data-parallel trainer: the planner as a library, without an engine and
without torch.

[Note: Waves]
Where ranks run in lockstep, the n-th rows of all ranks, a wave, take as long as the longest of
them: so it is where ZeRO-3 or FSDP gather each layer for a forward and backward pass of every rank.
Rows are numbered wave * ranks + rank; sequences come in descending order.
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
from ds_hydra.sampler.plan import GlobalBatch
from ds_hydra.sampler.planner.bounds import min_num_micro_batches
from ds_hydra.sampler.planner.iteration import plan_iteration
from ds_hydra.sampler.planner.packing import fewest_micro_batches, fill_targets
from ds_hydra.sampler.planner.planner_settings import PlannerSettings
from ds_hydra.sampler.planner.problem import EPSILON
from ds_hydra.sampler.schedule import FloatArray, IntArray, steps_ms
from ds_hydra.strategy.compiled import compiled
from ds_hydra.strategy.cost_models.analytic import Hardware, predict_latency
from ds_hydra.strategy.cost_models.flops import describe_config
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
    """Sequences of each rank in each of its rows, and the divisor of the loss.

    `rows[rank][row]` lists positions in the lengths that were given; every position is in one row.
    `num_label_tokens` counts the tokens of the loss in the whole global batch,
    `num_label_sequences` the sequences that have any. `row_ms[rank][row]` is the predicted time of
    a row, forward and backward; `predicted_ms` that of the global batch, with what ranks wait for
    each other where they run in lockstep; no placement takes less than `lower_bound_ms`.
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
            "divided by; leave out this global batch"
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
    lengths = np.array(tokens, dtype=np.int64)
    order = np.argsort(-lengths, kind="stable")
    descending = lengths[order]
    row_of, num_waves = pack_waves(
        descending, latency.sequences_ms(descending), num_ranks, max_tokens, latency.constant_ms
    )
    rows: list[list[int]] = [[] for _ in range(num_waves * num_ranks)]
    for position, row in zip(order.tolist(), row_of.tolist()):
        rows[row].append(position)
    return tuple(
        tuple(tuple(rows[wave * num_ranks + rank]) for wave in range(num_waves))
        for rank in range(num_ranks)
    )


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


_NUM_COUNTS = 4
"""Numbers of waves that are tried, from the fewest that hold the sequences."""
_NUM_TRIES = 12
_ENOUGH_GAP = 1e-3
# Counted, not timed: each rank makes the rows by itself, and they have to be equal.
_MAX_EVALUATIONS = 5_000_000
_EVENNESS = 1e-6
"""Worth of a more even wave beside a shorter one: it leads to exchanges that shorten the wave."""


def pack_waves(
    lengths: IntArray,
    sequence_ms: FloatArray,
    num_ranks: int,
    max_tokens: int,
    constant_ms: float,
) -> tuple[IntArray, int]:
    """The row of each sequence and the number of waves, so that the sum over waves of their longest
    rows is short.

    `lengths` and `sequence_ms` descend; no row has more than `max_tokens`; a wave costs
    `constant_ms` once. A row may be empty only in a wave of fewer sequences than ranks.
    """
    fullest = np.zeros_like(lengths)
    bound = min_num_micro_batches(lengths, max_tokens)
    num_rows = fewest_micro_batches(lengths, max_tokens, bound, _NUM_TRIES, fullest)
    fewest, first = -(-num_rows // num_ranks), -(-bound // num_ranks)
    best, best_ms, best_count = fullest, np.inf, fewest
    # Without constants, which each number of waves adds by itself.
    least_ms = max(float(sequence_ms[0]), float(sequence_ms.sum()) / num_ranks)
    for num_waves in range(first, fewest + _NUM_COUNTS):
        if least_ms + num_waves * constant_ms >= best_ms * (1 - EPSILON):
            break
        rows = np.zeros_like(lengths)
        targets = _targets(sequence_ms, num_ranks, num_waves)
        if not fill_targets(sequence_ms, lengths, targets, max_tokens, rows):
            # No packing into so few waves is known, so there is nothing to begin with.
            if num_waves < fewest:
                continue
            rows = _in_waves(fullest, sequence_ms, num_rows)
        taken = improve_waves(
            sequence_ms,
            lengths,
            rows,
            num_ranks,
            num_waves,
            max_tokens,
            least_ms * (1 + _ENOUGH_GAP),
            _MAX_EVALUATIONS,
        )
        if taken + num_waves * constant_ms < best_ms * (1 - EPSILON):
            best, best_ms, best_count = rows, taken + num_waves * constant_ms, num_waves
    _fill_empty(sequence_ms, best, num_ranks, best_count)
    return _longest_first(best, sequence_ms, num_ranks, best_count), best_count


def _targets(sequence_ms: FloatArray, num_ranks: int, num_waves: int) -> FloatArray:
    """Time of sequences that each row should get: a wave is as long as the longest sequence that
    must be in it, or as its share of the rest after the waves before it.
    """
    left, targets = float(sequence_ms.sum()), np.zeros(num_waves * num_ranks)
    for wave in range(num_waves):
        first = wave * num_ranks
        longest = sequence_ms[first] if first < sequence_ms.size else 0.0
        height = max(longest, left / (num_ranks * (num_waves - wave)))
        targets[first : first + num_ranks] = height
        left = max(0.0, left - num_ranks * height)
    return targets


def _in_waves(rows: IntArray, sequence_ms: FloatArray, num_rows: int) -> IntArray:
    """The same rows numbered by descending time, so that those of a wave are alike."""
    times = np.bincount(rows, weights=sequence_ms, minlength=num_rows)
    number = np.empty(num_rows, dtype=np.int64)
    number[np.argsort(-times, kind="stable")] = np.arange(num_rows)
    return number[rows]


def _fill_empty(sequence_ms: FloatArray, rows: IntArray, num_ranks: int, num_waves: int) -> None:
    """Gives empty rows the shortest sequence of the fullest row of their wave, which lengthens
    nothing.
    """
    counts = np.bincount(rows, minlength=num_waves * num_ranks)
    for row in np.flatnonzero(counts == 0):
        first = row - row % num_ranks
        source = first + int(counts[first : first + num_ranks].argmax())
        if counts[source] > 1:
            # Lengths descend, so the last one is the shortest.
            rows[np.flatnonzero(rows == source)[-1]] = row
            counts[source] -= 1
            counts[row] += 1


def _longest_first(
    rows: IntArray, sequence_ms: FloatArray, num_ranks: int, num_waves: int
) -> IntArray:
    """Sort waves by length, the longest first, so that its memory is there for the others."""
    times = np.bincount(rows, weights=sequence_ms, minlength=num_waves * num_ranks)
    number = np.empty(num_waves, dtype=np.int64)
    height = times.reshape(num_waves, num_ranks).max(axis=1)
    number[np.argsort(-height, kind="stable")] = np.arange(num_waves)
    return number[rows // num_ranks] * num_ranks + rows % num_ranks


@compiled
def improve_waves(
    sequence_ms: FloatArray,
    lengths: IntArray,
    rows: IntArray,
    num_ranks: int,
    num_waves: int,
    max_tokens: int,
    enough_ms: float,
    max_evaluations: int,
) -> float:
    """Moves sequences out of the longest row of a wave, or swaps them with shorter ones of other
    rows, while the sum of longest rows falls; changes `rows`, returns the sum.
    """
    num_rows = num_waves * num_ranks
    times, tokens = np.zeros(num_rows), np.zeros(num_rows, dtype=np.int64)
    for i in range(rows.size):
        times[rows[i]] += sequence_ms[i]
        tokens[rows[i]] += lengths[i]
    others = np.zeros(num_rows)  # longest row of the wave without this one
    height = np.zeros(num_waves)
    # Squares over the longest row are ms, as heights are; rows of no time divide nothing by 0.
    weight = _EVENNESS / max(times.max(), 1e-300)
    left = max_evaluations
    is_better = True
    while is_better:
        is_better = False
        for wave in range(num_waves):
            # Anew for each wave: the exchange before may have changed a row of this one.
            _longest_others(times, others, height, num_ranks)
            if left <= 0 or height.sum() <= enough_ms:
                return float(height.sum())
            a, second, third_ms = _longest(times, wave * num_ranks, num_ranks)
            # A gain within rounding is none: exchanges would go in circles.
            best, best_i, best_j, best_b = -EPSILON * weight * times[a] ** 2, -1, -1, -1
            for i in range(rows.size):
                if rows[i] != a:
                    continue
                left -= num_rows + rows.size
                for candidate in range(num_rows + rows.size):
                    # First every other row, for a move; then every shorter sequence, for a swap.
                    j = candidate - num_rows
                    b = candidate if j < 0 else rows[j]
                    change_ms = sequence_ms[i] - (sequence_ms[j] if j >= 0 else 0.0)
                    change = lengths[i] - (lengths[j] if j >= 0 else 0)
                    if b == a or change_ms <= 0 or tokens[b] + change > max_tokens:
                        continue
                    new_a, new_b = times[a] - change_ms, times[b] + change_ms
                    if b // num_ranks == wave:
                        # Of the rows beside both: where the partner is the second longest, the
                        # third counts.
                        rest = third_ms if b == second else others[a]
                        gain = max(new_a, new_b, rest) - height[wave]
                    else:
                        gain = max(new_a, others[a]) - height[wave]
                        gain += max(new_b, others[b]) - height[b // num_ranks]
                    # Sum of squares of the two rows, after less before.
                    gain += weight * 2 * change_ms * (new_b - times[a])
                    if gain < best:
                        best, best_i, best_j, best_b = gain, i, j, b
            if best_i < 0:
                continue
            i, j, b = best_i, best_j, best_b
            for row, sign in ((a, -1), (b, 1)):
                times[row] += sign * (sequence_ms[i] - (sequence_ms[j] if j >= 0 else 0.0))
                tokens[row] += sign * (lengths[i] - (lengths[j] if j >= 0 else 0))
            rows[i] = b
            if j >= 0:
                rows[j] = a
            is_better = True
    _longest_others(times, others, height, num_ranks)
    return float(height.sum())


@compiled
def _longest(times: FloatArray, first_row: int, num_ranks: int) -> tuple[int, int, float]:
    """The longest row of the wave from `first_row` on, the longest of the others (itself where
    there is none), and the time of the longest of the rest.
    """
    a = first_row
    for row in range(first_row, first_row + num_ranks):
        if times[row] > times[a]:
            a = row
    # No other row is `a`, so it stands for none, as where there is one rank.
    second, third_ms = a, 0.0
    for row in range(first_row, first_row + num_ranks):
        if row == a:
            continue
        if second == a:
            second = row
        elif times[row] > times[second]:
            third_ms = times[second]
            second = row
        else:
            third_ms = max(third_ms, times[row])
    return a, second, third_ms


@compiled
def _longest_others(
    times: FloatArray, others: FloatArray, height: FloatArray, num_ranks: int
) -> None:
    """Writes the longest row of each wave, and for each row the longest of the others there."""
    for wave in range(height.size):
        first_row = wave * num_ranks
        a, second, _ = _longest(times, first_row, num_ranks)
        height[wave] = times[a]
        others[first_row : first_row + num_ranks] = times[a]
        others[a] = times[second] if second != a else 0.0

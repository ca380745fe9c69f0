"""Sequences of a stream: windows of rows that a thread reads ahead, shuffled, drawn, and kept in
checkpoints.

[Note: Windows]
Of a stream nobody knows the lengths in advance. So rank 0 reads a window of rows, some iterations'
worth of tokens, while the one before is trained; global batches are drawn from window after window,
each in a shuffled order of its own. Which rows are in a window depends on the stream alone, not on
how fast it is. A checkpoint holds the sequences of the windows at hand that are not trained yet,
and the place in the stream where the next window begins: the stream's own state before the last
rows that were read, and a checksum of these. They are read again after a resume: a stream that
gives other rows then is found out. Where a stream keeps no exact state (`shuffle` loses its
buffer), it is read again from its beginning.
"""

from __future__ import annotations

import copy
import itertools
import logging
import queue
import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, TypeAlias

import datasets
import numpy as np
import numpy.typing as npt

from ds_hydra.errors import HydraConfigError, HydraDataError, HydraError
from ds_hydra.progress import say_once
from ds_hydra.sampler.data.batches import SamplerState, TokenBudgetSampler
from ds_hydra.sampler.data.dataset import (
    OverLength,
    Tokenize,
    check_dataset_columns,
    describe_outside,
    tokenize_texts,
)
from ds_hydra.sampler.data.examples import (
    IGNORED_LABEL,
    check_columns,
    find_unread,
    hint_for,
    to_example,
)
from ds_hydra.sampler.plan import GlobalBatch

logger = logging.getLogger(__name__)

TokenArray: TypeAlias = npt.NDArray[np.int32]
TokenPair: TypeAlias = tuple[TokenArray, TokenArray]
"""`input_ids` and `labels` [length] of one sequence."""

_ROWS_PER_READ = 32
"""Rows that are tokenised together, and read again after a resume."""
_FRUITLESS_ROWS = 100_000
"""Rows without a sequence after which a stream is taken for one that has none."""
_PATIENCE_S = 60.0
"""Seconds of waiting for a stream after which it is named."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Place in a stream at which a window begins."""

    window: int = 0
    """Number of the window."""
    num_rows: int = 0
    """Rows before the last ones that were read."""
    num_again: int = 0
    """Rows that were read last, which are read again from `state`."""
    checksum: int = 0
    """CRC-32 of the tokens of these."""
    state: Any = None
    """State of the stream before these rows; None is its beginning."""


@dataclass(frozen=True, slots=True)
class Window:
    """Sequences in the order of training, and where the next window begins."""

    sequences: list[TokenPair]
    after: Mark


@dataclass(frozen=True, slots=True, kw_only=True)
class RowReading:
    """Settings that make sequences of rows."""

    context_length: int
    over_length: OverLength
    text_column: str
    tokenize: Tokenize | None
    num_inputs: int = 0
    """Rows of the embedding; token ids are below."""
    num_labels: int = 0
    """Rows of the output head."""

    def read(self, rows: Sequence[Mapping[str, Any]], first: int) -> list[TokenPair]:
        """The sequences of `rows`, of which the first is row `first` of the stream; without those
        that predict nothing. Raises HydraConfigError naming a row that cannot be used.
        """
        if rows and (unread := find_unread(rows[0], self.text_column)):
            say_once(f"the stream has columns that nothing reads: {', '.join(unread)}")
        if rows and "input_ids" not in rows[0]:
            check_columns(rows[0], lambda name: isinstance(rows[0][name], list), "the stream")
            rows = self._tokenize(rows, first)
        sequences = []
        for index, row in enumerate(rows, start=first):
            input_ids, labels = to_example(row, f"row {index} of the stream")
            if len(input_ids) > self.context_length:
                if self.over_length == "refuse":
                    raise HydraConfigError(
                        f"row {index} of the stream has {len(input_ids)} tokens, more than hydra.context_length "
                        f'{self.context_length}; set hydra.over_length to "truncate" or "drop"'
                    )
                if self.over_length == "drop":
                    continue
                input_ids, labels = input_ids[: self.context_length], labels[: self.context_length]
            named = (("input_ids", input_ids, self.num_inputs), ("labels", labels, self.num_labels))
            for name, ids, size in named:
                outside = (ids < 0) | (ids >= size)
                if name == "labels":
                    outside &= ids != IGNORED_LABEL
                if outside.any():
                    raise HydraConfigError(
                        describe_outside(index, name, int(ids[outside][0]), size, "stream")
                    )
            if count_predicted(labels):
                sequences.append((input_ids.astype(np.int32), labels.astype(np.int32)))
        return sequences

    def _tokenize(self, rows: Sequence[Mapping[str, Any]], first: int) -> list[dict[str, Any]]:
        columns = ", ".join(map(str, rows[0]))
        for index, row in enumerate(rows, start=first):
            if not isinstance(row.get(self.text_column), str):
                advice = hint_for(list(row), "set hydra.text_column to one of them")
                raise HydraConfigError(
                    f"row {index} of the stream has neither 'input_ids' nor a text under {self.text_column!r}, but "
                    f"the columns {columns}; {advice}"
                )
        if self.tokenize is None:
            raise HydraConfigError(
                f"column {self.text_column!r} of the stream holds text and there is no tokenizer; set hydra.tokenizer "
                "to its path or hub id, or give a stream with 'input_ids'"
            )
        eos = getattr(self.tokenize, "eos_token_id", None)
        texts = [row[self.text_column] for row in rows]
        batch = tokenize_texts(texts, self.tokenize, eos)["input_ids"]
        return [{"input_ids": ids} for ids in batch]


def count_predicted(labels: npt.NDArray[Any]) -> int:
    """Number of tokens that a sequence predicts: its labels but the first, without -100."""
    return int((labels[1:] != IGNORED_LABEL).sum())


class TokenStream(NamedTuple):
    """Training data that is a stream, with the settings that make sequences of its rows."""

    stream: datasets.IterableDataset
    reading: RowReading
    """Settings, without those of the model."""


class StreamReader:
    """Reads windows of at least `window_tokens` tokens ahead, by a thread; rank 0 has one."""

    def __init__(
        self,
        stream: datasets.IterableDataset,
        reading: RowReading,
        *,
        window_tokens: int,
        seed: int,
        shuffle: bool,
    ) -> None:
        if stream._distributed is not None and stream._distributed.world_size > 1:
            raise HydraConfigError(
                f"the stream is the part of rank {stream._distributed.rank} of {stream._distributed.world_size} "
                "(split_dataset_by_node), but rank 0 alone reads, for all ranks; give the whole stream"
            )
        if stream.features is not None:
            check_dataset_columns(stream)
        self._stream, self._reading = _own(stream), reading
        self._window_tokens, self._seed, self._shuffle = window_tokens, seed, shuffle
        self._keeps_state = _keeps_state(stream)
        self._run: _Run | None = None

    def begin_at(self, mark: Mark) -> None:
        """Read from `mark` on."""
        self.close()
        # Copied here: a thread may not copy what another one changes
        self._run = _Run(self._windows(mark, _own(self._stream)))

    def is_ready(self) -> bool:
        """Whether `next` would not wait."""
        return self._run is not None and not self._run.results.empty()

    def next(self) -> Window | None:
        """The next window; None where the stream has ended. Raises what reading has raised."""
        assert self._run is not None
        return self._run.next()

    def close(self) -> None:
        """Stop reading."""
        if self._run is not None:
            self._run.stop()

    def _windows(self, mark: Mark, stream: datasets.IterableDataset) -> Iterator[Window]:
        """The windows of `stream` from `mark` on, without an end where it has none."""
        skipped = 0 if mark.state is not None else mark.num_rows
        if mark.state is not None:
            stream.load_state_dict(mark.state)
        elif skipped:
            logger.info(f"the stream keeps no exact state: its first {skipped} rows are read again")
        rows = iter(stream)
        for _ in itertools.islice(rows, skipped):
            pass
        self._read_again(rows, mark)
        window, num_rows, sequences = mark.window, mark.num_rows + mark.num_again, []
        num_tokens = num_fruitless = 0
        while True:
            state = stream.state_dict() if self._keeps_state and num_rows else None
            read, failure = _take(rows, _ROWS_PER_READ, num_rows)
            found = self._reading.read(read, num_rows)
            after = Mark(window + 1, num_rows, len(read), _checksum(found), state)
            num_rows += len(read)
            num_fruitless = 0 if found else num_fruitless + len(read)
            if num_fruitless >= _FRUITLESS_ROWS:
                raise HydraDataError(
                    f"no sequence is left of rows {num_rows - num_fruitless} to {num_rows} of the stream: they have no "
                    f"token to predict, or more than hydra.context_length {self._reading.context_length} and "
                    f"hydra.over_length is {self._reading.over_length!r}"
                )
            sequences += found
            num_tokens += sum(len(input_ids) for input_ids, _ in found)
            is_last = failure is not None or len(read) < _ROWS_PER_READ
            if sequences and (num_tokens >= self._window_tokens or is_last):
                yield Window(self._in_order(sequences, window), after)
                window, num_tokens, sequences = window + 1, 0, []
            if failure is not None:
                raise failure
            if is_last:
                return

    def _read_again(self, rows: Iterator[Any], mark: Mark) -> None:
        """Read the rows before `mark`. Raises HydraDataError where they are others now."""
        read, failure = _take(rows, mark.num_again, mark.num_rows)
        if failure is not None:
            raise failure
        found = self._reading.read(read, mark.num_rows)
        if len(read) < mark.num_again or _checksum(found) != mark.checksum:
            raise HydraDataError(
                f"rows {mark.num_rows} to {mark.num_rows + mark.num_again} of the stream are not those that were read "
                "before the checkpoint: a stream has to give the same rows each time it is read (files that stay, "
                "seeds for what is random, the same tokenizer and hydra.context_length); mend it, or begin it anew: "
                "load_checkpoint(..., load_data_position=False)"
            )

    def _in_order(self, sequences: list[TokenPair], window: int) -> list[TokenPair]:
        if not self._shuffle:
            return sequences
        generator = np.random.Generator(np.random.PCG64([self._seed, window]))
        return [sequences[index] for index in generator.permutation(len(sequences)).tolist()]


class _Run:
    """A thread that iterates over windows, one of which waits at a time."""

    def __init__(self, windows: Iterator[Window]) -> None:
        self.results: queue.Queue[Window | Exception | None] = queue.Queue(maxsize=1)
        self._windows, self._is_stopped = windows, threading.Event()
        # A daemon: a source that never answers may hold it
        self._thread = threading.Thread(target=self._read, name="ds_hydra-stream", daemon=True)
        self._thread.start()

    def next(self) -> Window | None:
        try:
            result = self.results.get(timeout=_PATIENCE_S)
        except queue.Empty:
            logger.warning(
                f"training has waited {_PATIENCE_S:.0f} s for rows of the stream, whose source is slower than training "
                "or does not answer"
            )
            result = self.results.get()
        if result is None or isinstance(result, Exception):
            self.results.put(result)  # so it stays
        if isinstance(result, Exception):
            raise result
        return result

    def stop(self) -> None:
        self._is_stopped.set()
        self._thread.join(2.0)

    def _read(self) -> None:
        try:
            for window in self._windows:
                self._put(window)
                if self._is_stopped.is_set():
                    return
            self._put(None)
        except Exception as error:  # told where its rows are wanted
            self._put(error)

    def _put(self, result: Window | Exception | None) -> None:
        while not self._is_stopped.is_set():
            try:
                self.results.put(result, timeout=0.2)
                return
            except queue.Full:
                continue


def _take(
    rows: Iterator[Any], count: int, first: int
) -> tuple[list[Mapping[str, Any]], HydraError | None]:
    """Up to `count` rows, and the error that their source has raised after them."""
    read: list[Mapping[str, Any]] = []
    try:
        for row in itertools.islice(rows, count):
            if not isinstance(row, Mapping):
                raise HydraConfigError(
                    f"row {first + len(read)} of the stream is a {type(row).__name__}, expected a dict such as "
                    "{'input_ids': [1, 2, 3]}"
                )
            read.append(row)
    except HydraError as error:
        return read, error
    except Exception as error:  # whatever the user's source raises
        failure = HydraDataError(
            f"the stream raised {type(error).__name__} after row {first + len(read)}: {error}; the rows before are "
            "trained. Mend its source, and resume from the last checkpoint"
        )
        failure.__cause__ = error
        return read, failure
    return read, None


def _checksum(sequences: Sequence[TokenPair]) -> int:
    checksum = 0
    for tokens in itertools.chain.from_iterable(sequences):
        checksum = zlib.crc32(tokens.astype("<i4").tobytes(), checksum)
    return checksum


def _own(stream: datasets.IterableDataset) -> datasets.IterableDataset:
    """A stream with a position of its own: the inner parts of one that two iterate over share
    it.
    """
    try:
        return copy.deepcopy(stream)
    except Exception:  # whatever a source holds that cannot be copied
        return copy.copy(stream)


def _keeps_state(stream: datasets.IterableDataset) -> bool:
    """Whether the stream's own state leads to the next row exactly."""
    found = [stream._ex_iterable]
    for inner in found:  # which grows meanwhile
        if type(inner).__name__ == "BufferShuffledExamplesIterable":
            return False
        found += getattr(inner, "ex_iterables", ())
        if hasattr(inner, "ex_iterable"):
            found.append(inner.ex_iterable)
    return True


class StreamSampler(TokenBudgetSampler):
    """Draws the global batches of a stream by the rule of `TokenBudgetSampler`, window after
    window; on ranks but the first, which has the `reader`, it only counts.

    `position` of its states counts sequences from the stream's first. There is one epoch.
    """

    def __init__(self, reader: StreamReader | None, tokens_per_iteration: int) -> None:
        self._reader = reader
        self._tokens_per_iteration = tokens_per_iteration
        self._state = SamplerState()
        self._past_states: OrderedDict[int, SamplerState] = OrderedDict()
        self._begin_window(Mark(), 0, [])

    def _begin_window(self, mark: Mark, position: int, sequences: Sequence[TokenPair]) -> None:
        """Have these sequences from `position` on, and read after them from `mark` on."""
        self._sequences = dict(enumerate(sequences, start=position))
        self._end = position + len(sequences)
        self._mark = mark
        if self._reader is not None:
            self._reader.begin_at(mark)

    def first_window(self) -> list[TokenPair]:
        """The first sequences, of whose lengths the candidates are proposed."""
        if not self._sequences and not self._read_window():
            raise HydraConfigError(
                "the stream is empty: none of its rows has a token to predict; give one with rows"
            )
        return list(self._sequences.values())

    def __getitem__(self, position: int) -> TokenPair:
        return self._sequences[position]

    def can_draw(self, state: SamplerState) -> bool:
        """Whether `draw` would not wait for the stream."""
        assert self._reader is not None
        at_hand = range(state.position, self._end)
        num_tokens = sum(len(self._sequences[position][0]) for position in at_hand)
        return num_tokens > self._tokens_per_iteration or self._reader.is_ready()

    def draw(self, state: SamplerState) -> tuple[GlobalBatch, SamplerState]:
        """The batch at `state` and the state after it; waits for the stream. Raises HydraDataError
        where that has ended, or has failed.
        """
        position, room = state.position, self._tokens_per_iteration
        drawn: list[int] = []
        while position < self._end or self._read_window():
            length = len(self._sequences[position][0])
            if drawn and length > room:
                break
            drawn.append(position)
            room -= length
            position += 1
        if not drawn:
            raise HydraDataError(
                f"the stream has ended: its {state.position} sequences are trained, in {state.iteration} iterations; "
                "end the loop there, or give a stream that goes on, such as stream.repeat(2)"
            )
        batch = GlobalBatch(
            iteration=state.iteration,
            sample_indices=tuple(drawn),
            lengths=tuple(len(self._sequences[index][0]) for index in drawn),
            num_label_tokens=sum(count_predicted(self._sequences[index][1]) for index in drawn),
        )
        return batch, self._after(state, len(drawn))

    def _after(self, state: SamplerState, num_sequences: int) -> SamplerState:
        return SamplerState(iteration=state.iteration + 1, position=state.position + num_sequences)

    def _read_window(self) -> bool:
        """Whether there was another window."""
        assert self._reader is not None
        window = self._reader.next()
        if window is None:
            return False
        self._sequences |= enumerate(window.sequences, start=self._end)
        self._end += len(window.sequences)
        self._mark = window.after
        return True

    def forget_before(self, iteration: int) -> None:
        """Release what iterations before this one have trained."""
        position = self._past_states.get(iteration, self._state).position
        for trained in itertools.takewhile(lambda index: index < position, list(self._sequences)):
            del self._sequences[trained]

    def state_dict(self, iteration: int | None = None) -> dict[str, Any]:
        """State from which `load_state_dict` continues with `iteration`; on the first rank with the
        sequences that are read and not trained.
        """
        state = super().state_dict(iteration)
        if self._reader is None:
            return state
        rest = [self._sequences[index] for index in range(state["position"], self._end)]
        empty = np.zeros(0, np.int32)
        window = {
            "lengths": np.array([len(input_ids) for input_ids, _ in rest], np.int32),
            "input_ids": np.concatenate([empty, *(input_ids for input_ids, _ in rest)]),
            "labels": np.concatenate([empty, *(labels for _, labels in rest)]),
        }
        return state | {"window": window, "after": asdict(self._mark)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken, of any number of ranks. Raises HydraConfigError if
        it is not one of a stream.
        """
        if not state_dict.get("stream"):
            raise HydraConfigError(
                "the checkpoint was taken with a datasets.Dataset, and the training data is a stream; give the "
                "dataset, or begin the data anew: load_checkpoint(..., load_data_position=False)"
            )
        names = ("iteration", "epoch", "position")
        self._state = SamplerState(**{name: state_dict[name] for name in names})
        self._past_states.clear()
        if self._reader is not None:
            window = state_dict["window"]
            ends = np.cumsum(window["lengths"])[:-1]
            pairs = zip(
                np.split(window["input_ids"], ends), np.split(window["labels"], ends), strict=True
            )
            sequences = list(pairs) if len(window["lengths"]) else []
            self._begin_window(Mark(**state_dict["after"]), self._state.position, sequences)

    def begin_at(self, iteration: int) -> None:
        """Draw the stream from its beginning, for `iteration` and those after it."""
        super().begin_at(iteration)
        self._begin_window(Mark(), 0, [])

    @property
    def identity(self) -> dict[str, Any]:
        """Facts that a state is compared by: of a stream that it is one."""
        return {"stream": True}

    def close(self) -> None:
        """Stop reading ahead."""
        if self._reader is not None:
            self._reader.close()

"""Sequences of each iteration: an endless, resumable stream of token-budget global batches."""

from __future__ import annotations

import functools
import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ds_hydra.errors import HydraConfigError
from ds_hydra.sampler.plan import GlobalBatch

IntArray = npt.NDArray[np.integer[Any]]

_BLOCK = 4096
"""Sequences that are looked at together: an epoch may have many millions."""

NUM_REMEMBERED_STATES = 4096
"""Iterations by which planning may run ahead of training so that a checkpoint of the executed
iteration is still possible.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerState:
    """Position of the stream before `iteration` is drawn: `position` sequences into `epoch`."""

    iteration: int = 0
    epoch: int = 0
    position: int = 0


@functools.lru_cache(maxsize=2)
def epoch_order(num_sequences: int, seed: int, epoch: int) -> IntArray:
    """The sequences in the order of a shuffled epoch, in as few bytes as hold their numbers.

    All samplers of a process share it. Two are kept: where an epoch ends, some draw from the next
    one already.
    """
    order = np.arange(num_sequences, dtype=np.min_scalar_type(num_sequences - 1))
    np.random.Generator(np.random.PCG64([seed, epoch])).shuffle(order)
    order.flags.writeable = False
    return order


def budget_of(lengths: npt.ArrayLike, tokens_per_iteration: int) -> int:
    """`tokens_per_iteration`, or all tokens of a dataset that has fewer: each iteration is then an
    epoch.
    """
    return min(tokens_per_iteration, max(1, int(np.sum(lengths, dtype=np.int64))))


class TokenBudgetSampler:
    """Draws the global batch of every iteration; the same arguments give the same batches on
    every rank.

    The rule: sequences are drawn in the order of the epoch as long as the sum of their tokens stays
    within `tokens_per_iteration`, and at least one is drawn. So a batch exceeds its budget only
    where a single sequence does, and no sequence is skipped to fill a batch. A batch runs on from
    the end of an epoch into the next. Each epoch holds each sequence once, in an order seeded by
    (seed, epoch), or in dataset order if `shuffle` is false.

    >>> sampler = TokenBudgetSampler([3, 4, 2, 9], [2, 3, 1, 8], 8, shuffle=False)
    >>> [next(sampler).sample_indices for _ in range(4)]
    [(0, 1), (2,), (3,), (0, 1)]
    """

    def __init__(
        self,
        lengths: npt.ArrayLike,
        num_label_tokens: npt.ArrayLike,
        tokens_per_iteration: int,
        *,
        seed: int = 42,
        shuffle: bool = True,
        token_digest: str = "",
    ) -> None:
        self._lengths = np.asarray(lengths, dtype=np.int32)
        self._num_label_tokens = np.asarray(num_label_tokens, dtype=np.int32)
        self._tokens_per_iteration = tokens_per_iteration
        self._seed = seed
        self._shuffle = shuffle
        self._token_digest = token_digest
        self._state = SamplerState()
        self._past_states: OrderedDict[int, SamplerState] = OrderedDict()

    @property
    def state(self) -> SamplerState:
        """Position of the stream, for `draw`."""
        return self._state

    def __iter__(self) -> Iterator[GlobalBatch]:
        return self

    def __next__(self) -> GlobalBatch:
        """The next batch; never raises StopIteration."""
        batch, _ = self.draw(self._state)
        self.advance(len(batch.lengths))
        return batch

    def advance(self, num_sequences: int) -> None:
        """Go on past a batch of as many sequences, which may have been drawn elsewhere."""
        self._past_states[self._state.iteration] = self._state
        if len(self._past_states) > NUM_REMEMBERED_STATES:
            self._past_states.popitem(last=False)
        self._state = self._after(self._state, num_sequences)

    def can_draw(self, state: SamplerState) -> bool:
        """Whether `draw` would not wait."""
        return True

    def draw(self, state: SamplerState) -> tuple[GlobalBatch, SamplerState]:
        """The batch at `state` and the state after it. Leaves the stream of `__next__` where it
        is.
        """
        epoch, position, room = state.epoch, state.position, self._tokens_per_iteration
        drawn: list[int] = []
        while True:
            block = self._read_order(epoch, position)
            tokens_until = np.cumsum(self._lengths[block], dtype=np.int64)
            num_fitting = int(np.searchsorted(tokens_until, room, side="right"))
            # One at least, also where it alone is above the budget: no iteration is empty.
            num_fitting = max(num_fitting, 0 if drawn else 1)
            drawn += block[:num_fitting].tolist()
            position += num_fitting
            if num_fitting < len(block):
                break
            room -= int(tokens_until[-1])
            if position == len(self._lengths):
                epoch, position = epoch + 1, 0
        batch = GlobalBatch(
            iteration=state.iteration,
            sample_indices=tuple(drawn),
            lengths=tuple(self._lengths[drawn].tolist()),
            num_label_tokens=int(self._num_label_tokens[drawn].sum()),
        )
        return batch, self._after(state, len(drawn))

    def _after(self, state: SamplerState, num_sequences: int) -> SamplerState:
        epochs, position = divmod(state.position + num_sequences, len(self._lengths))
        return SamplerState(
            iteration=state.iteration + 1, epoch=state.epoch + epochs, position=position
        )

    def _read_order(self, epoch: int, position: int) -> IntArray:
        """The sequences from `position` of `epoch` on, at most `_BLOCK` of them."""
        stop = min(position + _BLOCK, len(self._lengths))
        if not self._shuffle:
            return np.arange(position, stop)
        return epoch_order(len(self._lengths), self._seed, epoch)[position:stop]

    def state_dict(self, iteration: int | None = None) -> dict[str, Any]:
        """State from which `load_state_dict` continues with `iteration`, JSON-able.

        None means the first iteration that has not been drawn. Planning draws ahead of training, so
        a checkpoint after k executed iterations (counted from 0) asks for `state_dict(k)`.
        """
        state = self._state
        if iteration is not None and iteration != state.iteration:
            if iteration not in self._past_states:
                raise ValueError(
                    f"no state for iteration {iteration}: {state.iteration} iterations were drawn, and the "
                    f"last {len(self._past_states)} are remembered"
                )
            state = self._past_states[iteration]
        return asdict(state) | self.identity

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken. Raises HydraConfigError if it belongs to another
        order.
        """
        if state_dict.get("stream"):
            raise HydraConfigError(
                "the checkpoint was taken with a stream (datasets.IterableDataset), and the training data is a "
                "datasets.Dataset; give the stream, or begin the data anew: load_checkpoint(..., "
                "load_data_position=False)"
            )
        changes = [
            f"{key} {state_dict[key]} (now {value})"
            for key, value in self.identity.items()
            if state_dict.get(key, value) != value  # older checkpoints have no digest
        ]
        if changes:
            raise HydraConfigError(
                f"the checkpoint was taken with {', '.join(changes)}: the order of the data would not be "
                "continued; use the same data, hydra.context_length, hydra.seed and hydra.shuffle, or go on with the "
                "optimizer and its schedule on this data from its beginning: load_checkpoint(..., "
                "load_data_position=False), and in a Trainer TrainingArguments(ignore_data_skip=True)"
            )
        self._state = SamplerState(**{key: state_dict[key] for key in asdict(self._state)})
        self._past_states.clear()

    def begin_at(self, iteration: int) -> None:
        """Draw the data from its beginning, for `iteration` and those after it."""
        self._state = SamplerState(iteration=iteration)
        self._past_states.clear()

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """Facts that are equal for two samplers that draw the same sequences, JSON-able."""
        digest = hashlib.blake2b(digest_size=8)
        for array in (self._lengths, self._num_label_tokens):
            for begin in range(0, len(array), _BLOCK):
                digest.update(array[begin : begin + _BLOCK].astype("<i4").tobytes())
        return {
            "num_sequences": len(self._lengths),
            "seed": self._seed,
            "shuffle": self._shuffle,
            "num_tokens": int(self._lengths.sum()),
            "num_label_tokens": int(self._num_label_tokens.sum()),
            "data_digest": digest.hexdigest(),
        } | ({"token_digest": self._token_digest} if self._token_digest else {})

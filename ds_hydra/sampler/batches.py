"""Which sequences an iteration trains on: an endless, resumable stream of token-budget mini-batches."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ds_hydra.errors import HydraConfigError
from ds_hydra.sampler.plan import GlobalBatch

IntArray = npt.NDArray[np.int64]

NUM_REMEMBERED_STATES = 4096
"""How far planning may run ahead of training and a checkpoint of the executed iteration still be possible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerState:
    """Where the stream stands before `iteration` is drawn: `position` sequences into `epoch`."""

    iteration: int = 0
    epoch: int = 0
    position: int = 0


class TokenBudgetSampler:
    """Draws the global mini-batch of every iteration; the same arguments give the same batches on every rank.

    The rule: sequences are drawn in the order of the epoch as long as the sum of their tokens stays within
    `tokens_per_iteration`, and at least one is drawn. So a batch exceeds its budget only where a single
    sequence does, and no sequence is skipped to fill a batch. A batch runs on from the end of an epoch into
    the next. Each epoch holds each sequence once, in an order seeded by (seed, epoch), or in dataset order if
    `shuffle` is false.

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
    ) -> None:
        self._lengths = np.asarray(lengths, dtype=np.int64)
        self._num_label_tokens = np.asarray(num_label_tokens, dtype=np.int64)
        self._tokens_per_iteration = tokens_per_iteration
        self._seed = seed
        self._shuffle = shuffle
        self._state = SamplerState()
        self._past_states: OrderedDict[int, SamplerState] = OrderedDict()
        self._prepared: tuple[int, IntArray, IntArray] | None = None
        self._check_arguments()

    def _check_arguments(self) -> None:
        if self._lengths.shape != self._num_label_tokens.shape or self._lengths.ndim != 1:
            raise ValueError(
                f"lengths has shape {self._lengths.shape}, num_label_tokens has "
                f"{self._num_label_tokens.shape}"
            )
        if not self._lengths.size:
            raise HydraConfigError("the dataset is empty: there is no sequence to draw")
        if self._lengths.min() < 1:
            raise ValueError(f"sequence {int(self._lengths.argmin())} has no token")
        if self._tokens_per_iteration < 1:
            raise HydraConfigError(
                f"hydra.tokens_per_iteration is {self._tokens_per_iteration}, expected 1 or more, for "
                f"example {int(self._lengths.max())}, the longest sequence"
            )

    @property
    def batch_sampler(self) -> TokenBudgetSampler:
        """This sampler: the Trainer of transformers asks for `batch_sampler.batch_sampler` after a resume."""
        return self

    @property
    def state(self) -> SamplerState:
        """Where the stream stands, for `draw`."""
        return self._state

    def __iter__(self) -> Iterator[GlobalBatch]:
        return self

    def __next__(self) -> GlobalBatch:
        """The next batch; never raises StopIteration."""
        self._remember(self._state)
        batch, self._state = self.draw(self._state)
        return batch

    def draw(self, state: SamplerState) -> tuple[GlobalBatch, SamplerState]:
        """The batch at `state` and the state after it. Leaves the stream of `__next__` where it is."""
        epoch, position, room = state.epoch, state.position, self._tokens_per_iteration
        drawn: list[int] = []
        while True:
            order, tokens_before = self._prepare_epoch(epoch)
            limit = tokens_before[position] + room
            stop = int(np.searchsorted(tokens_before, limit, side="right")) - 1
            stop = max(stop, position if drawn else position + 1)
            drawn += order[position:stop].tolist()
            room -= int(tokens_before[stop] - tokens_before[position])
            position = stop
            if position < len(order):
                break
            epoch, position = epoch + 1, 0
        batch = GlobalBatch(
            iteration=state.iteration,
            sample_indices=tuple(drawn),
            lengths=tuple(self._lengths[drawn].tolist()),
            num_label_tokens=int(self._num_label_tokens[drawn].sum()),
        )
        return batch, SamplerState(iteration=state.iteration + 1, epoch=epoch, position=position)

    def _prepare_epoch(self, epoch: int) -> tuple[IntArray, IntArray]:
        """Order of the sequences in `epoch`, and the tokens before each place of it (one entry more)."""
        if self._prepared is None or self._prepared[0] != epoch:
            order = np.arange(len(self._lengths), dtype=np.int64)
            if self._shuffle:
                order = np.random.Generator(np.random.PCG64([self._seed, epoch])).permutation(order)
            tokens_before = np.concatenate([[0], np.cumsum(self._lengths[order])])
            self._prepared = (epoch, order, tokens_before)
        return self._prepared[1:]

    def _remember(self, state: SamplerState) -> None:
        self._past_states[state.iteration] = state
        while len(self._past_states) > NUM_REMEMBERED_STATES:
            self._past_states.popitem(last=False)

    def state_dict(self, iteration: int | None = None) -> dict[str, Any]:
        """What `load_state_dict` needs to continue with `iteration`, JSON-able.

        None means the first iteration that has not been drawn. Planning draws ahead of training, so a
        checkpoint after k executed iterations (counted from 0) asks for `state_dict(k)`.
        """
        state = self._state
        if iteration is not None and iteration != state.iteration:
            if iteration not in self._past_states:
                raise ValueError(
                    f"no state for iteration {iteration}: {state.iteration} iterations were drawn, and the "
                    f"last {len(self._past_states)} are remembered"
                )
            state = self._past_states[iteration]
        return asdict(state) | self._identity()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken. Raises HydraConfigError if it belongs to another order."""
        for key, value in self._identity().items():
            if state_dict[key] != value:
                raise HydraConfigError(
                    f"the checkpoint was taken with {key} {state_dict[key]}, now it is {value}: the order of "
                    "the data would not be continued; use the same data, hydra.seed and hydra.shuffle"
                )
        self._state = SamplerState(**{key: state_dict[key] for key in asdict(self._state)})
        self._past_states.clear()

    def _identity(self) -> dict[str, Any]:
        return {"num_sequences": len(self._lengths), "seed": self._seed, "shuffle": self._shuffle}

"""Batches as collators make them, taken apart into sequences, and values of their tokens put back.

Legend: B rows and L places of a collated batch, l tokens of one sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ds_hydra.errors import HydraConfigError


class Span(NamedTuple):
    """Where a sequence lies in a batch."""

    row: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Sequences:
    """The sequences of one collated batch, without padding, in the order of its rows."""

    ids: tuple[Tensor, ...]
    """[l] int64 on the CPU."""
    spans: tuple[Span, ...]
    shape: tuple[int, int]
    device: torch.device

    @classmethod
    def read(
        cls,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Sequences:
        """Sequences of `input_ids` [B, L]: where `attention_mask` is 1, or from each position 0 on.

        Those of a single token, in which nothing is predicted, are left out. Raises
        HydraConfigError for a mask with holes.

        >>> ids = torch.tensor([[0, 5, 6], [7, 8, 0]])
        >>> Sequences.read(ids, (ids > 0).long()).spans
        (Span(row=0, begin=1, end=3), Span(row=1, begin=0, end=2))
        >>> Sequences.read(torch.tensor([[5, 6, 7, 8]]), None, torch.tensor([[0, 1, 0, 1]])).spans
        (Span(row=0, begin=0, end=2), Span(row=0, begin=2, end=4))
        """
        on_cpu = input_ids.detach().cpu()
        if attention_mask is not None:
            spans = list(_between_padding(attention_mask.detach().cpu()))
        elif position_ids is not None:
            spans = list(_from_position_0(position_ids.detach().cpu().expand(on_cpu.shape)))
        else:
            spans = [Span(row, 0, on_cpu.shape[1]) for row in range(len(on_cpu))]
        spans = [span for span in spans if span.end - span.begin > 1]
        ids = tuple(on_cpu[row, begin:end] for row, begin, end in spans)
        return cls(ids, tuple(spans), tuple(on_cpu.shape), input_ids.device)

    def spread(self, values: Sequence[Tensor]) -> Tensor:
        """[B, L-1] fp32 of a value [l] for each token: place i is about token i+1, padding is 0."""
        spread = torch.zeros(self.shape)
        for (row, begin, end), of_tokens in zip(self.spans, values, strict=True):
            spread[row, begin:end] = of_tokens
        return spread[:, 1:].to(self.device)

    def collect(self, spread: Tensor | None) -> list[Tensor]:
        """[l] for each sequence out of what `spread` makes; zeros where that is None."""
        if spread is None:
            return [torch.zeros(len(ids)) for ids in self.ids]
        whole = torch.nn.functional.pad(spread.detach().float().cpu(), (1, 0))
        return [whole[row, begin:end].clone() for row, begin, end in self.spans]


def _between_padding(mask: Tensor) -> Iterator[Span]:
    for row, values in enumerate(mask.bool()):
        places = values.nonzero().flatten().tolist()
        if not places:
            continue
        span = Span(row, places[0], places[-1] + 1)
        if len(places) != span.end - span.begin:
            raise HydraConfigError(
                f"'attention_mask' of row {row} of a batch has {len(places)} ones between place {span.begin} and "
                f"{span.end - 1}; only padding at the beginning or the end can be taken away: mend data_collator"
            )
        yield span


def _from_position_0(position_ids: Tensor) -> Iterator[Span]:
    for row, positions in enumerate(position_ids):
        begins = (positions == 0).nonzero().flatten().tolist()
        for begin, end in zip(begins, [*begins[1:], len(positions)], strict=True):
            yield Span(row, begin, end)

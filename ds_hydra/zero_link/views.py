"""Where the pieces of a message are: in the tensors of a rank, and in a packed buffer."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from ds_hydra.zero_link.messages import SINGLE_NUMEL, Message, Piece


def view_of(tensor: Tensor, piece: Piece) -> Tensor:
    """[rows, cols] of a flat tensor."""
    offset = tensor.storage_offset() + piece.offset
    return tensor.as_strided((piece.rows, piece.cols), (piece.stride, 1), offset)


def places_in(buffer: Tensor, message: Message) -> Iterable[tuple[Piece, Tensor]]:
    """Each piece of `message` and its [rows, cols] place in the packed `buffer`."""
    begin = 0
    for piece in message:
        yield piece, buffer[begin : begin + piece.numel].view(piece.rows, piece.cols)
        begin += piece.numel


def message_numel(message: Message) -> int:
    """Elements of a message."""
    return sum(piece.numel for piece in message)


def is_one_run(message: Message) -> bool:
    """Whether `message` is one contiguous block, which needs no buffer."""
    return len(message) == 1 and message[0].numel >= SINGLE_NUMEL and message[0].is_run


def cut_off(space: Tensor, message: Message) -> tuple[Tensor, Tensor]:
    """The place of `message` at the beginning of `space`, and the rest."""
    numel = message_numel(message)
    return space[:numel], space[numel:]

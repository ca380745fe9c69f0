"""One-forward-one-backward over the packed micro-batches of one pipeline, micro-batches of unequal
length allowed.

The order of forwards and backwards is a pure function; the runner adds the sends and receives that
it implies.

[Note: Memory before a send]
A full allocator waits for the whole device, so for a send, so for the neighbour's receive. Both
neighbours would wait for ever where each takes memory between its send and its receive. So what the
next pass receives into is taken before this pass sends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hydra.engine.telemetry.trace import Recorder
from ds_hydra.records.timeline import EventKind

_PASSES_AHEAD = 4
"""Passes of a stage that are launched and not over at most: two micro-batches."""


def one_forward_one_backward(
    num_stages: int, stage: int, num_micro_batches: int
) -> Iterator[tuple[EventKind, int]]:
    """Passes of `stage` in 1F1B order (PipeDream-Flush): warm-up forwards, alternation, drain.

    >>> [f"{p.value[0]}{i}" for p, i in one_forward_one_backward(2, 0, 3)]
    ['f0', 'f1', 'b0', 'f2', 'b1', 'b2']
    """
    # The last stage alternates at once; each stage before it needs one more forward.
    num_warmup = min(num_stages - 1 - stage, num_micro_batches)
    for index in range(num_warmup):
        yield EventKind.FORWARD, index
    for index in range(num_micro_batches - num_warmup):
        yield EventKind.FORWARD, num_warmup + index
        yield EventKind.BACKWARD, index
    for index in range(num_micro_batches - num_warmup, num_micro_batches):
        yield EventKind.BACKWARD, index


@dataclass(kw_only=True)
class PipelineStage:
    """This rank's place in its pipeline: the form of activations there, and the neighbours that it
    sends to and receives from (same SP and TP rank, stage before and after).

    Two groups, one per direction, so that an activation going down and a gradient coming up between
    the same two ranks never wait for each other on one communicator. Every message is a batch of
    one: for a lone one NCCL makes a communicator of the two ranks, which nobody has counted.
    """

    num_stages: int
    stage: int
    hidden_size: int
    dtype: torch.dtype
    device: torch.device
    previous_rank: int | None = None
    next_rank: int | None = None
    down_group: dist.ProcessGroup | None = None
    up_group: dist.ProcessGroup | None = None
    before_message: Callable[[], None] = lambda: None
    """Post messages that other stages may be waiting for before this rank's part of a message."""
    _in_flight: list[tuple[dist.Work, Tensor]] = field(default_factory=list)

    @property
    def is_first(self) -> bool:
        """Whether this stage embeds tokens."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage computes the loss."""
        return self.stage == self.num_stages - 1

    def activation_memory(self, num_tokens: int) -> Tensor | None:
        """Memory for what `receive_activation` receives, [1, num_tokens, hidden]; None on the first
        stage.
        """
        if self.is_first:
            return None
        shape = (1, num_tokens, self.hidden_size)
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def gradient_memory(self, output: Tensor) -> Tensor | None:
        """Memory for the gradient of `output`; None on the last stage."""
        return None if self.is_last else torch.empty_like(output)

    def receive_activation(self, memory: Tensor | None, *, requires_grad: bool) -> Tensor | None:
        """Activation of the previous stage, in `memory`; None on the first."""
        if memory is None:
            return None
        received = self._receive(memory, self.previous_rank, self.down_group)
        return received.requires_grad_(requires_grad)

    def receive_gradient(self, memory: Tensor | None) -> Tensor | None:
        """Gradient of an output from the next stage, in `memory`; None on the last."""
        if memory is None:
            return None
        return self._receive(memory, self.next_rank, self.up_group)

    def send_activation(self, tensor: Tensor) -> None:
        """Send to the next stage without waiting."""
        self._send(tensor, self.next_rank, self.down_group)

    def send_gradient(self, tensor: Tensor) -> None:
        """Send to the previous stage without waiting."""
        self._send(tensor, self.previous_rank, self.up_group)

    def finish(self) -> None:
        """Wait until everything sent has left; call once at the end of the iteration."""
        for work, _ in self._in_flight:
            work.wait()
        self._in_flight.clear()

    def _send(self, tensor: Tensor, peer: int | None, group: dist.ProcessGroup | None) -> None:
        self.before_message()
        tensor = tensor.contiguous()
        (work,) = dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, peer, group)])
        # The tensor must live until it has left; drop those that have.
        self._in_flight = [entry for entry in self._in_flight if not entry[0].is_completed()]
        # Gloo counts a send as completed once it was waited for, so there all stay until `finish`.
        self._in_flight.append((work, tensor))

    def _receive(self, like: Tensor, peer: int | None, group: dist.ProcessGroup | None) -> Tensor:
        self.before_message()
        (work,) = dist.batch_isend_irecv([dist.P2POp(dist.irecv, like, peer, group)])
        work.wait()
        return like


MicroBatchForward = Callable[[int, Tensor | None], Tensor]
"""(micro-batch, activation of the previous stage or None) -> activation, or the loss on the last
stage.
"""


def run_1f1b(
    stage: PipelineStage,
    micro_batch_tokens: Sequence[int],
    forward: MicroBatchForward,
    recorder: Recorder,
    before_last_backward: Callable[[], None] = lambda: None,
) -> list[Tensor]:
    """Forward and backward of every micro-batch through this stage; returns the detached losses
    (last stage only).

    `micro_batch_tokens[j]` is the length of micro-batch j, so receivers know every shape from the
    plan. `recorder` gets the span of each pass, without waits for other stages.
    `before_last_backward` is called before the backward pass that completes the gradients.
    Collective over the pipeline: all its ranks call it with the same micro-batches.
    """
    losses: list[Tensor] = []
    saved: dict[int, tuple[Tensor | None, Tensor]] = {}
    passes = [*one_forward_one_backward(stage.num_stages, stage.stage, len(micro_batch_tokens))]

    def memory_of(number: int) -> Tensor | None:
        """Memory that the pass of that number receives into."""
        if number == len(passes):
            return None
        following, index = passes[number]
        if following is EventKind.FORWARD:
            return stage.activation_memory(micro_batch_tokens[index])
        return stage.gradient_memory(saved[index][1])

    memory = memory_of(0)
    for number, (pass_, index) in enumerate(passes):
        recorder.keep_up(_PASSES_AHEAD)
        if pass_ is EventKind.FORWARD:
            received = stage.receive_activation(memory, requires_grad=True)
            with recorder.span(pass_, index):
                output = forward(index, received)
            saved[index] = (received, output)
            memory = memory_of(number + 1)  # [Note: Memory before a send]
            if stage.is_last:
                # On the device: reading it here would make the host wait for every micro-batch.
                losses.append(output.detach())
            else:
                # Detached, or what is in flight would keep the graph of its pass.
                stage.send_activation(output.detach())
        else:
            received, output = saved.pop(index)
            grad = stage.receive_gradient(memory)
            if index == len(micro_batch_tokens) - 1:
                before_last_backward()
            if output.requires_grad:  # false where everything up to here is frozen
                with recorder.span(pass_, index):
                    torch.autograd.backward(output, grad)
            memory = memory_of(number + 1)
            if received is not None:
                # Zeros where nothing depends on it: the stage before receives one for every micro-
                # batch.
                stage.send_gradient(
                    torch.zeros_like(received) if received.grad is None else received.grad
                )
    stage.finish()
    return losses


def run_forward_only(
    stage: PipelineStage, micro_batch_tokens: Sequence[int], forward: MicroBatchForward
) -> list[Tensor]:
    """Forward of every micro-batch without gradients; returns the losses (last stage only)."""
    losses: list[Tensor] = []
    with torch.no_grad():
        memory = stage.activation_memory(micro_batch_tokens[0]) if micro_batch_tokens else None
        for index in range(len(micro_batch_tokens)):
            output = forward(index, stage.receive_activation(memory, requires_grad=False))
            if index + 1 < len(micro_batch_tokens):
                # [Note: Memory before a send]
                memory = stage.activation_memory(micro_batch_tokens[index + 1])
            if stage.is_last:
                losses.append(output)
            else:
                stage.send_activation(output)
    stage.finish()
    return losses

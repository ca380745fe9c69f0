"""Expert parallelism inside a stage's SP x TP group: each rank has some of a layer's experts, whole
ones, and tokens travel to them.

[Note: Tokens travel to experts]
Ranks of a TP group have the same tokens, of which each takes a part to the experts; where TP cuts
micro-batches it has a shard of them anyway. A token's hidden state is sent once for each expert
that it chose, sorted by expert, to the rank that has it: the one of the sender's own `ep`
neighbours in the group, which hold all experts between them. What the expert makes of it, weighted,
comes back the same way and is added up in the order of the router. Both exchanges are one
all-to-all of unequal parts over the group, their backward the opposite one, so nothing crosses
pipelines and every rank of the group takes part, with tokens or without. A rank whose experts
nobody chose computes one row of weight 0: its gradients are zeros, not missing.

Legend: T tokens of this rank's sequence shard, or of its part of it, K experts of a token, S = T K,
R rows received, H hidden size, E experts of the layer, e = E / EP.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ds_hydra.engine.parallel.tensor_parallel import TensorParallel, exchange


class ExpertParallel:
    """The group whose ranks share experts now; size 1 switches every hook off. `tp`: the TP group,
    which is part of it.
    """

    def __init__(self, tp: TensorParallel) -> None:
        self._tp = tp
        self.leave()

    def enter(self, group: dist.ProcessGroup | None, num_ranks: int, place: int, size: int) -> None:
        """Share experts among `size` neighbours of the `num_ranks` of `group` from now on."""
        self._group, self._num_ranks, self.size = group, num_ranks, size
        self._first_neighbour = place // size * size

    def leave(self) -> None:
        """Have all experts of a layer again."""
        self.enter(None, 1, 0, 1)

    @torch.compiler.disable
    def dispatch(
        self, hidden_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor, num_experts: int
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Travel]:
        """What this rank's experts get: hidden states [R, H], experts [R, 1] counted from its first
        one, weights [R, 1]; and the way back. Collective over the group, in backward too.
        """
        num_tokens = len(hidden_TH)
        first, end = self._own_tokens(num_tokens)
        if self._has_same_tokens:
            hidden_TH, weights_TK = map(self._tp.copy_to_group, (hidden_TH, weights_TK))
            hidden_TH, experts_TK, weights_TK = (
                x[first:end] for x in (hidden_TH, experts_TK, weights_TK)
            )
        num_chosen, each = experts_TK.shape[1], num_experts // self.size
        # Stable, so that the rows of an expert are in the same order in every run.
        order_S = experts_TK.flatten().argsort(stable=True)
        sent_E = _count(experts_TK, num_experts)
        counts_PE = sent_E.new_zeros(self._num_ranks, each)
        # Others hold the same experts between them, for tokens of their own: nothing goes there.
        counts_PE[self._first_neighbour : self._first_neighbour + self.size] = sent_E.view(-1, each)
        received_PE = torch.empty_like(counts_PE)
        dist.all_to_all_single(received_PE, counts_PE, group=self._group)
        # The one wait of a layer for an accelerator
        sent_P, received_P = torch.stack([counts_PE.sum(dim=1), received_PE.sum(dim=1)]).tolist()
        travel = Travel(self._group, order_S, sent_P, received_P, num_chosen)
        # Copies before the sort: their gradients add up in the order of the router
        rows_SH = hidden_TH.unsqueeze(1).expand(-1, num_chosen, -1).flatten(0, 1)[order_S]
        rows_RH, weights_R = (
            travel.there(x) for x in (rows_SH, weights_TK.flatten()[order_S].unsqueeze(1))
        )
        names_PE = torch.arange(each, device=counts_PE.device).expand_as(received_PE)
        # Without `output_size` the host would wait for the device to learn the number of rows.
        experts_R = names_PE.flatten().repeat_interleave(
            received_PE.flatten(), output_size=sum(received_P)
        )
        experts_R = experts_R.unsqueeze(1)
        if not len(rows_RH):
            rows_RH, weights_R, experts_R = (
                torch.cat([x, x.new_zeros(1, x.shape[1])]) for x in (rows_RH, weights_R, experts_R)
            )
        return (rows_RH, experts_R, weights_R), travel

    @property
    def _has_same_tokens(self) -> bool:
        """Whether all ranks of the TP group have this rank's tokens."""
        return self._tp.size > 1 and self._tp.shards is None

    def _own_tokens(self, num_tokens: int) -> tuple[int, int]:
        """The first token that this rank takes to the experts, and the one after its last."""
        if not self._has_same_tokens:
            return 0, num_tokens
        place, size = self._tp.rank, self._tp.size
        return place * num_tokens // size, (place + 1) * num_tokens // size

    @torch.compiler.disable
    def combine(self, output_RH: Tensor, travel: Travel, num_tokens: int) -> Tensor:
        """[num_tokens, H]: the sum over each token's experts, of what they made of it."""
        first, end = self._own_tokens(num_tokens)
        rows_SH = travel.back(output_RH)
        inverse_S = torch.empty_like(travel.order_S)
        inverse_S[travel.order_S] = torch.arange(len(inverse_S), device=inverse_S.device)
        # A sum over a dimension has one order; rows that are added to tokens by index have none.
        own_TH = rows_SH[inverse_S].unflatten(0, (end - first, travel.num_chosen)).sum(dim=1)
        if not self._has_same_tokens:
            return own_TH
        return self._tp.sum_over_group(F.pad(own_TH, (0, 0, first, num_tokens - end)))


def _count(experts_TK: Tensor, num_experts: int) -> Tensor:
    """[E] int64: how often each expert was chosen. `bincount` would read the largest on the host,
    and the smallest.
    """
    chosen_S = experts_TK.flatten().long()
    counts_E = chosen_S.new_zeros(num_experts)
    return counts_E.scatter_add_(0, chosen_S, torch.ones_like(chosen_S))


class Travel:
    """Where the S rows of a sequence shard go, sorted by expert, and how many come from where."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        order_S: Tensor,
        sent_P: Sequence[int],
        received_P: Sequence[int],
        num_chosen: int,
    ) -> None:
        self.order_S, self.num_chosen = order_S, num_chosen
        self._sent_P, self._received_P = sent_P, received_P
        self._send = partial(_all_to_all, group=group, sent_P=sent_P, received_P=received_P)
        self._return = partial(_all_to_all, group=group, sent_P=received_P, received_P=sent_P)

    def there(self, rows_S: Tensor) -> Tensor:
        """The rows for this rank's experts, ordered by sender and expert."""
        return exchange(rows_S, self._send, self._return)

    def back(self, rows_R: Tensor) -> Tensor:
        """The senders' rows, in the order in which they went."""
        # Without the row of weight 0, which nobody has sent.
        return exchange(rows_R[: sum(self._received_P)], self._return, self._send)


def _all_to_all(
    rows: Tensor, group: dist.ProcessGroup | None, sent_P: Sequence[int], received_P: Sequence[int]
) -> Tensor:
    """All-to-all of rows, `sent_P[i]` of them to rank i."""
    received = rows.new_empty(sum(received_P), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), received_P, sent_P, group=group)
    return received


def hook_dispatch(module: nn.Module, ep: ExpertParallel) -> None:
    """Let `module`, called with hidden states, experts and weights of tokens, run on the tokens of
    the experts that this rank has.
    """
    num_experts: int = module.num_experts
    running: list[tuple[Travel, int]] = []

    def before(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if ep.size == 1:
            return None
        hidden, experts, weights = args
        received, travel = ep.dispatch(hidden, experts, weights, num_experts)
        running.append((travel, len(hidden)))
        # Experts' own code goes by this number; this rank has the parameters of so many.
        module.num_experts = num_experts // ep.size
        return received

    def after(_module: nn.Module, _args: tuple[Any, ...], output: Tensor | None) -> Tensor | None:
        module.num_experts = num_experts
        under_way = running.pop() if running else None
        return None if output is None or under_way is None else ep.combine(output, *under_way)

    module.register_forward_pre_hook(before)
    # Always, because a layer that runs again may be left by an exception inside of the experts.
    module.register_forward_hook(after, always_call=True)

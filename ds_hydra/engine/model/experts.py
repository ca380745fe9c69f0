"""Experts: how tokens spread over them (how many each gets, a loss that balances them), and expert
parallelism inside a stage's SP x TP group, where each rank has some of a layer's experts, whole
ones, and tokens travel to them.

[Note: Balance of each sequence]
transformers' loss of balance is over all tokens of a micro-batch, so it would change with the
strategy. Here it is that of each sequence by itself, DeepSeek-V3's complementary loss (Sec. 2.1.2,
Eqs. 17-20): for sequence s of T_s tokens in one layer

    L_s = E sum_e (c_se / T_s) (p_se / T_s)

where c_se tokens have expert e among their highest scores and p_se is the sum of the normalised
scores of e. The mean over layers and tokens, times the model's own coefficient, joins the loss.
Only p has a gradient, so a rank that holds some tokens of a sequence needs the counts of all of
them and nothing else: one all-reduce in forward, none in backward. The gradient enters where
routers hand weights to experts; a layer that is computed again, streams, or lies on another stage
needs no more.

[Note: Tokens travel to experts]
Ranks of a TP group have the same tokens, of which each takes a part to the experts; where TP cuts
micro-batches it has a shard of them anyway. A token's hidden state is sent once for each expert
that it chose, sorted by expert, to the rank that has it: the one of the sender's own `ep`
neighbours in the group, which hold all experts between them. What the expert makes of it, weighted,
comes back the same way and is added up in the order of the router. Both exchanges are one
all-to-all of unequal parts over the group, their backward the opposite one, so nothing crosses
pipelines and every rank of the group takes part, with tokens or without. A rank whose experts
nobody chose computes one row of weight 0: its gradients are zeros, not missing.

Legend: T tokens of this rank (of its sequence shard, or of its part of it), N sequences of the
micro-batch, K experts of a token, S = T K, R rows received, H hidden size, E experts of the layer,
e = E / EP.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ds_hydra.engine.model.current_micro_batch import (
    PackedMicroBatch,
    current_micro_batch,
    is_computed_again,
)
from ds_hydra.engine.parallel.tensor_parallel import TensorParallel, exchange
from ds_hydra.engine.ranks.memory import to_device
from ds_hydra.errors import UnsupportedModelError

_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef", "aux_loss_alpha")
_OWN_LOSS = "load_balancing_loss_func"
"""Name of the balance loss in transformers' module of a family that has one."""
_BIASES = ("e_score_correction_bias", "expert_bias")
"""Names of biases that routers add to scores to choose experts, and to nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceLoss:
    """A model's loss of balance, taken for each sequence."""

    key: str
    """Name of `coefficient` in the model or its configuration."""
    coefficient: float
    is_own: bool
    """Whether transformers has one for the family: softmax of the router's logits, and a value of K
    where all experts get as much. Else Eqs. 17-20: a value of 1.
    """
    has_sigmoid: bool
    """Whether scores are sigmoids divided by their sum (Eq. 19)."""

    @classmethod
    def find(cls, model: nn.Module) -> BalanceLoss | None:
        """Find the balance loss of `model`. None unless the model or its configuration asks for one
        (`output_router_logits`) and has a coefficient.
        """
        config = model.base_model.config
        asking = (model, model.config, config)
        asked = any(getattr(owner, "output_router_logits", False) for owner in asking)
        # A model reads what it was made with, whatever its configuration says later.
        held = [
            (key, vars(owner)[key])
            for owner in (model, config)
            for key in _COEFFICIENTS
            if key in vars(owner)
        ]
        key, coefficient = next(((key, value) for key, value in held if value is not None), ("", 0))
        if not asked or not coefficient:
            return None
        kinds = (sys.modules.get(kind.__module__) for kind in type(model).__mro__)
        is_own = any(hasattr(module, _OWN_LOSS) for module in kinds)
        return cls(
            key=key,
            coefficient=float(coefficient),
            is_own=is_own,
            has_sigmoid=not is_own and _has_biases(model),
        )

    def __str__(self) -> str:
        meant = (
            "transformers' is over all layers and tokens of a micro-batch at once"
            if self.is_own
            else "as DeepSeek-V3's, transformers has none for this model"
        )
        return (
            f"loss of balance of each sequence in each layer, mean over tokens and layers, times {self.key} = "
            f"{self.coefficient:g} ({meant}; output_router_logits = False leaves it out)"
        )

    def scores(self, logits_TE: Tensor) -> Tensor:
        """[T, E] in fp32, 1 in total for each token."""
        if not self.has_sigmoid:
            return logits_TE.float().softmax(dim=-1)
        scores_TE = logits_TE.float().sigmoid()
        return scores_TE / scores_TE.sum(dim=-1, keepdim=True)


class ExpertBalance:
    """Watches the experts of a model's layers: counts tokens, adds the loss of balance.

    Its hooks stand before those of TP and `ep`, so they see this rank's own tokens.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module],
        tp: TensorParallel,
        *,
        with_loss: bool,
    ) -> None:
        self._tp, self._model = tp, model
        self.loss = BalanceLoss.find(model) if with_loss else None
        for config in (model.config, model.base_model.config):
            if getattr(config, "output_router_logits", False):
                config.output_router_logits = False  # the model would add its own
        found = [(i, m) for i, layer in enumerate(layers) for m in layer.modules() if is_experts(m)]
        self.layers = tuple(index for index, _ in found)
        """Layers with experts."""
        self.num_experts = max((int(m.num_experts) for _, m in found), default=0)
        self.counts_LE = torch.zeros(len(found), self.num_experts, dtype=torch.int64)
        """[layers with experts, E]: how many of this rank's tokens chose an expert since `begin`;
        ranks that hold the same tokens count them once.
        """
        self._value = torch.zeros(())
        self._scale, self._num_tokens = 0.0, 1
        self._logits_TE: Tensor | None = None
        self._seen: tuple[PackedMicroBatch, Tensor, Tensor] | None = None
        """The last micro-batch, and its result of `_sequences`."""
        routers = _routers(model.base_model) if self.loss is not None else {}
        self._num_routers = len(routers)
        if not routers and not found:  # of no experts, as of a dense Doge
            self.loss = None
        of_layer = {module: i for i, layer in enumerate(layers) for module in layer.modules()}
        alone = [router for router in routers if of_layer.get(router) not in self.layers]
        if self.loss is not None and (alone or not routers):
            raise UnsupportedModelError(
                f"{type(model).__name__} asks for a loss of balance (output_router_logits, {self.loss.key} = "
                f"{self.loss.coefficient:g}), and {len(routers)} routers and {len(found)} experts are found of it, "
                "which have to belong together; without that loss: output_router_logits = False"
            )
        for router, index in routers.items():
            self._hook_router(router, index)
        for row, (_, module) in enumerate(found):
            self._hook_experts(module, row)

    def begin(self, device: torch.device, loss_scale: float | None, num_tokens: int) -> None:
        """Start an iteration of `num_tokens`; `loss_scale` None computes no gradient."""
        if self.loss is not None and self.loss.key in vars(self._model):
            # Read in every forward by transformers, too
            self.loss = replace(self.loss, coefficient=vars(self._model)[self.loss.key] or 0.0)
        self.counts_LE = torch.zeros_like(self.counts_LE, device=device)
        self._value = torch.zeros((), device=device)
        self._seen = None
        self._scale, self._num_tokens = loss_scale or 0.0, num_tokens

    def describe_tokens(self, tokens_LE: Tensor | None) -> dict[str, Any] | None:
        """Layers with experts and the tokens of each expert, for a trace."""
        if tokens_LE is None:
            return None
        return {"layers": list(self.layers), "tokens": tokens_LE.tolist()}

    @property
    def value(self) -> Tensor | float:
        """This rank's part of the loss of balance since `begin`, coefficient included; where the
        model has one a copy on its device, so that nobody waits for it.
        """
        return 0.0 if self.loss is None else self._value.double()

    def _hook_router(self, router: nn.Module, index: int) -> None:
        def after(_module: nn.Module, _args: Any, output: Any) -> None:
            logits = output[index] if isinstance(output, tuple) else output
            # Handed to the experts' hook: routers run right before the experts of their layer
            self._logits_TE = logits.flatten(0, -2)

        router.register_forward_hook(torch.compiler.disable(after))

    def _hook_experts(self, experts: nn.Module, row: int) -> None:
        def before(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            logits_TE, self._logits_TE = self._logits_TE, None
            # Cleared in any case: logits of a forward outside of passes must not stay
            if (micro_batch := current_micro_batch()) is None:
                return None
            hidden_TH, experts_TK, weights_TK = args
            # All layers of a micro-batch have the same tokens
            if self._seen is None or self._seen[0] is not micro_batch:
                self._seen = micro_batch, *self._sequences(micro_batch, len(experts_TK))
            _, sequences_T, lengths_N = self._seen
            if self._is_counted:
                is_real_T = lengths_N[sequences_T] > 0
                ones_TK = is_real_T.unsqueeze(1).expand_as(experts_TK).flatten().long()
                self.counts_LE[row].scatter_add_(0, experts_TK.flatten().long(), ones_TK)
            if logits_TE is None:
                return None
            loss = self._sequence_loss(
                logits_TE, experts_TK.shape[1], sequences_T, lengths_N, micro_batch
            )
            if self._is_counted:
                self._value += loss.detach()
            return hidden_TH, experts_TK, _AddLoss.apply(weights_TK, loss, self._scale)

        experts.register_forward_pre_hook(torch.compiler.disable(before))

    @property
    def _is_counted(self) -> bool:
        """False for a second forward in backward, and for tokens that another TP rank counts."""
        has_own_tokens = self._tp.shards is not None or self._tp.rank == 0
        return has_own_tokens and not is_computed_again()

    def _sequences(self, micro_batch: PackedMicroBatch, num_tokens: int) -> tuple[Tensor, Tensor]:
        """[T]: the sequence of each token of this rank; [N]: lengths of all sequences of the
        micro-batch, 0 for padding.
        """
        ends = micro_batch.cu_seqlens
        shard = micro_batch.layout
        rank = 0 if shard is None else shard.rank
        if self._tp.shards is not None:
            # TP cuts the shard that SP has left of the micro-batch
            rank = rank * self._tp.shards.size + self._tp.rank
        begin = rank * num_tokens
        places_T = torch.arange(begin, begin + num_tokens, dtype=ends.dtype, device=ends.device)
        numbers = torch.tensor([s.number for s in micro_batch.segments])
        lengths_N = torch.tensor(micro_batch.sequence_lengths)
        numbers, lengths_N = (to_device(x, ends.device) for x in (numbers, lengths_N))
        return numbers[torch.searchsorted(ends, places_T, right=True) - 1], lengths_N

    def _sequence_loss(
        self,
        logits_TE: Tensor,
        num_chosen: int,
        sequences_T: Tensor,
        lengths_N: Tensor,
        micro_batch: PackedMicroBatch,
    ) -> Tensor:
        """This rank's part of the loss of one layer and micro-batch, coefficient included.

        Collective over the ranks that share the micro-batch.
        """
        assert self.loss is not None
        scores_TE = self.loss.scores(logits_TE)
        num_experts = scores_TE.shape[1]
        with torch.no_grad():
            chosen_TK = scores_TE.topk(num_chosen, dim=-1).indices
            places_TK = sequences_T.unsqueeze(1) * num_experts + chosen_TK
            counts_NE = scores_TE.new_zeros(len(lengths_N) * num_experts)
            counts_NE.scatter_add_(
                0, places_TK.flatten(), torch.ones_like(places_TK, dtype=scores_TE.dtype).flatten()
            )
            counts_NE = counts_NE.view(-1, num_experts)
            self._sum_over_shards(counts_NE, micro_batch)
            # Over K as in Eq. 18; transformers' own loss is not divided by it
            factor = num_experts if self.loss.is_own else num_experts / num_chosen
            # Sums over tokens weigh sequences by their lengths: over all tokens, a mean of tokens
            factor *= self.loss.coefficient / self._num_routers / self._num_tokens
            is_real_N = lengths_N > 0
            # Padding is a sequence of length 0, and has no part in the loss
            factors_N = torch.where(is_real_N, factor / lengths_N.clamp(min=1), 0.0)
            weights_TE = (counts_NE * factors_N.unsqueeze(1))[sequences_T]
        return (scores_TE * weights_TE).sum()

    def _sum_over_shards(self, counts_NE: Tensor, micro_batch: PackedMicroBatch) -> None:
        shard, keys = micro_batch.layout, micro_batch.keys
        if self._tp.shards is not None and self._tp.size > 1:
            dist.all_reduce(counts_NE, group=self._tp.group)
        if shard is not None and shard.size > 1:
            dist.all_reduce(counts_NE, group=shard.group)
        if keys is not None:
            dist.all_reduce(counts_NE, group=keys.group.group)


class _AddLoss(torch.autograd.Function):
    """The weights of experts, untouched; in backward `loss` gets the gradient `scale`."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.gradient = loss.new_full((), scale)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, ctx.gradient, None


def is_experts(module: nn.Module) -> bool:
    """Whether `module` has the experts of a layer as transformers writes them, called with hidden
    states [T, H], experts and weights [T, K].
    """
    return hasattr(module, "_is_expert_parallel")


def _has_biases(model: nn.Module) -> bool:
    """Whether routers correct the scores by which they choose."""
    held = ({**module._buffers, **module._parameters} for module in model.modules())
    return any(names.get(bias) is not None for names in held for bias in _BIASES)


def _routers(base: Any) -> dict[nn.Module, int]:
    """Module whose output, at the index, are logits [..., E], as transformers records them."""
    found = (getattr(base, "_can_record_outputs", None) or {}).get("router_logits", [])
    recorders = found if isinstance(found, list) else [found]
    return {
        module: getattr(recorder, "index", 0)
        for recorder in recorders
        for module in base.modules()
        if isinstance(module, getattr(recorder, "target_class", recorder))
    }


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
        """Restore all experts of a layer."""
        self.enter(None, 1, 0, 1)

    @torch.compiler.disable
    def dispatch(
        self, hidden_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor, num_experts: int
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Travel]:
        """Send tokens to the ranks of their experts. Returns this rank's hidden states [R, H],
        experts [R, 1] counted from its first one and weights [R, 1], and the way back. Collective
        over the group, in backward too.
        """
        num_tokens = len(hidden_TH)
        first, end = self._own_tokens(num_tokens)
        if self._has_same_tokens:
            # Each rank takes a part of the same tokens: their gradients are added up over the group
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
            # Else the parameters would have no gradients, in place of zeros
            rows_RH, weights_R, experts_R = (
                torch.cat([x, x.new_zeros(1, x.shape[1])]) for x in (rows_RH, weights_R, experts_R)
            )
        return (rows_RH, experts_R, weights_R), travel

    @property
    def _has_same_tokens(self) -> bool:
        """Whether all ranks of the TP group have this rank's tokens."""
        return self._tp.size > 1 and self._tp.shards is None

    def _own_tokens(self, num_tokens: int) -> tuple[int, int]:
        """Return the first token that this rank takes to experts, and the one after its last."""
        if not self._has_same_tokens:
            return 0, num_tokens
        place, size = self._tp.rank, self._tp.size
        return place * num_tokens // size, (place + 1) * num_tokens // size

    @torch.compiler.disable
    def combine(self, output_RH: Tensor, travel: Travel, num_tokens: int) -> Tensor:
        """[num_tokens, H]: the sum of each token's outputs of its experts."""
        first, end = self._own_tokens(num_tokens)
        rows_SH = travel.back(output_RH)
        inverse_S = torch.empty_like(travel.order_S)
        inverse_S[travel.order_S] = torch.arange(len(inverse_S), device=inverse_S.device)
        # A sum over a dimension has one order; rows that are added to tokens by index have none.
        own_TH = rows_SH[inverse_S].unflatten(0, (end - first, travel.num_chosen)).sum(dim=1)
        if not self._has_same_tokens:
            return own_TH
        # Zeros where other ranks have taken the tokens: the sum puts all in their places
        return self._tp.sum_over_group(F.pad(own_TH, (0, 0, first, num_tokens - end)))


def _count(experts_TK: Tensor, num_experts: int) -> Tensor:
    """[E] int64: how often each expert was chosen. `bincount` would read the largest on the host,
    and the smallest.
    """
    chosen_S = experts_TK.flatten().long()
    counts_E = chosen_S.new_zeros(num_experts)
    return counts_E.scatter_add_(0, chosen_S, torch.ones_like(chosen_S))


class Travel:
    """Destinations of a sequence shard's S rows, sorted by expert, and counts of rows by source."""

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
        """Receive the rows for this rank's experts, ordered by sender and expert."""
        return exchange(rows_S, self._send, self._return)

    def back(self, rows_R: Tensor) -> Tensor:
        """Receive this rank's own rows again, in the order in which they went."""
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

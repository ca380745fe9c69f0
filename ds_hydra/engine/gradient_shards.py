"""This rank's fp32 gradient shards, in ZeRO-3's own memory where that can be."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from deepspeed.utils import safe_get_local_grad, safe_set_local_grad
from torch import Tensor, nn

from ds_hydra.progress import say_once


class GradientShards:
    """Gradient shards [shard] of `params`, the same memory in every iteration; not collective.

    ZeRO-3's where it is fp32 on this device; else memory that `deposit` copies from. Empty for
    frozen parameters.
    """

    def __init__(self, optimizer: Any, params: Sequence[nn.Parameter], device: torch.device):
        self._optimizer = optimizer
        self._params = params
        self._device = device
        self._grads_P: list[Tensor] = []
        self._in_zero: set[int] = set()
        self._buffer_at = 0
        """Address of ZeRO-3's buffer of gradients when the shards in it were taken."""
        self._held: list[list[Tensor]] = []
        """Shards that are not empty of each group that ZeRO-3 steps at once."""
        self._totals: list[float] = []
        """Squared norm of each such group over all ranks, of this iteration's gradients."""
        self._is_scaled = False
        """Whether ZeRO-3 has a group's shards scaled and clipped already."""
        self._is_deposited = False
        # Muon makes an update of the gradients before the step, and takes the norm of that.
        if getattr(optimizer, "use_muon", False):
            return
        self._lend_shards()
        # On a CPU a norm waits for no device, so ZeRO-3 takes its own.
        if device.type != "cpu":
            self._lend_norms()

    def zeroed(self) -> list[Tensor]:
        """The shards, set to zero."""
        if not self._grads_P or self._have_moved():
            self.release()
            self._grads_P = [self._of(param) for param in self._params]
            self._buffer_at = self._find_buffer()
            shard_of = {id(p): g for p, g in zip(self._params, self._grads_P) if g.numel()}
            # In ZeRO-3's order: by it norms are told, and asked for again.
            groups = self._optimizer.fp16_groups
            self._held = [[shard_of[id(p)] for p in group if id(p) in shard_of] for group in groups]
        torch._foreach_zero_(self._grads_P)
        self._totals, self._is_deposited = [], False
        self._drop_others()
        return self._grads_P

    def _drop_others(self) -> None:
        """Forget those of a backward of the user's through the bare model, which ZeRO-3 has
        collected and would add to these.
        """
        for bucket in getattr(self._optimizer, "ipg_buckets", {}).values():
            if bucket.params:
                say_once(
                    "gradients of a backward() beside train_batch() are left out of its step; losses of several terms "
                    "are train_batch(batch, loss=...)"
                )
            for param in bucket.params:
                param.grad = None
            bucket.clear_params()

    def release(self) -> None:
        """Let go of the memory until `zeroed`."""
        self._grads_P, self._held, self._totals = [], [], []
        self._in_zero.clear()

    def squares(self) -> Tensor:
        """[groups] fp64: squared norm of this rank's shards of each group that ZeRO-3 steps at
        once, NaN or Inf where an element is; few kernels on a device.
        """
        if not (held := [shard for group in self._held for shard in group]):  # all are frozen
            return torch.zeros(len(self._held), dtype=torch.float64, device=self._device)
        # In fp64, because in fp32 the square of a norm of 2e19 is infinite.
        squares = torch.stack(torch._foreach_norm(held)).double().square()
        return torch.stack([own.sum() for own in squares.split([*map(len, self._held)])])

    def tell(self, totals: Sequence[float]) -> None:
        """Take `squares` summed over all ranks, of which ZeRO-3 clips and steps."""
        self._totals = list(totals)

    def deposit(self) -> None:
        """Hand them to ZeRO-3 as if its own backward had reduced them."""
        for param, grad_P in zip(self._params, self._grads_P, strict=True):
            if param.requires_grad and grad_P.data_ptr() not in self._in_zero:
                safe_set_local_grad(param, grad_P)
        # Makes the lists that ZeRO-3's step reads; its buckets are empty, so nothing is reduced.
        self._optimizer.independent_gradient_partition_epilogue()
        self._is_deposited = True

    def _have_moved(self) -> bool:
        """Whether ZeRO-3 has its gradients, which lie in one buffer, elsewhere than before: where
        its `reload_states` has put them.
        """
        return bool(self._in_zero) and self._find_buffer() != self._buffer_at

    def _find_buffer(self) -> int:
        buffer = getattr(self._optimizer, "grad_partitions_flat_buffer", None)
        return 0 if buffer is None else buffer.data_ptr()

    def _lend_norms(self) -> None:
        """Let ZeRO-3 have the norms that ranks have told each other, on the host: it would take
        them anew, and wait for the device. Its optimizer's method is not private to one version;
        where there is none, or gradients are not these shards, it takes its own.
        """
        # Weak: what is put into the optimizer must not keep the shards alive.
        optimizer, shards = self._optimizer, weakref.ref(self)
        plain = getattr(optimizer, "get_grad_norm_direct", None)
        if plain is None:
            return

        def get_grad_norm_direct(gradients: Any, params: Any, norm_type: float = 2) -> Any:
            mine = shards()
            total = None if mine is None else mine._total_of(gradients, params)
            if norm_type != 2 or total is None:
                return plain(gradients, params, norm_type)
            # As ZeRO-3's own: -1 where a gradient is NaN or Inf
            return torch.tensor(math.sqrt(total) if math.isfinite(total) else -1.0)

        optimizer.get_grad_norm_direct = get_grad_norm_direct

    def _lend_shards(self) -> None:
        """Let ZeRO-3 step on shards that lie in a row where they are, in place of a copy that it
        scales: 16 bytes a parameter less, 8 where norms are clipped. Bits are those of its own
        step; so is what the shards hold afterwards.
        """
        # Weak, as in `_lend_norms`.
        optimizer, shards = self._optimizer, weakref.ref(self)
        flatten = getattr(optimizer, "flatten", None)
        unscale = getattr(optimizer, "unscale_and_clip_grads", None)
        if flatten is None or unscale is None:
            return

        def flatten_or_lend(tensors: Any) -> Tensor:
            mine = shards()
            found = None if mine is None else mine._in_a_row(tensors)
            if found is None:
                return flatten(tensors)
            factor = mine._factor()
            mine._is_scaled = factor is not None
            # A copy where ZeRO-3 scales: it does so in place, and shards stay as they are.
            return found.clone() if factor is None else found if factor == 1 else found * factor

        def unscale_once(index: int, total_norm: Any) -> None:
            mine = shards()
            if mine is None or not mine._is_scaled:
                unscale(index, total_norm)
            else:
                mine._is_scaled = False

        optimizer.flatten, optimizer.unscale_and_clip_grads = flatten_or_lend, unscale_once

    def _in_a_row(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """All of `tensors` as one, if they are shards here, one behind the other."""
        # No gradient is at address 0: before `deposit` nothing is lent.
        begin = tensors[0].data_ptr() if self._is_deposited else 0
        for tensor in tensors:
            if tensor.data_ptr() not in self._in_zero or tensor.data_ptr() != begin:
                return None
            begin += tensor.nbytes
        first = tensors[0]
        return first.as_strided((sum(t.numel() for t in tensors),), (1,), first.storage_offset())

    def _factor(self) -> Any:
        """The number that ZeRO-3 multiplies gradients with, computed as it does; None where the
        norm is on a device, for which the host would wait.
        """
        optimizer = self._optimizer
        norm, scale = optimizer._global_grad_norm, optimizer.loss_scale
        if optimizer.clip_grad > 0.0:
            if not isinstance(norm, Tensor) or norm.device.type != "cpu":
                return None
            scale = torch.clamp((norm + 1e-6) / optimizer.clip_grad, min=1.0) * scale
        return 1.0 / scale

    def _total_of(self, gradients: Sequence[Tensor], params: Any) -> float | None:
        """The told square of the group `params`, if its `gradients` are shards here."""
        groups = self._optimizer.fp16_groups
        index = next((i for i, group in enumerate(groups) if group is params), -1)
        is_known = index >= 0 and self._totals and self._in_zero
        if not is_known or any(g.numel() and g.data_ptr() not in self._in_zero for g in gradients):
            return None
        return self._totals[index]

    def _of(self, param: nn.Parameter) -> Tensor:
        # With offload ZeRO-3 takes norms where gradients are set, so these go by `deposit`.
        if param.requires_grad and not self._optimizer.offload_optimizer:
            # Asked twice: what ZeRO-3 has in another type it copies, to a new address each time.
            own, again = safe_get_local_grad(param), safe_get_local_grad(param)
            if own.data_ptr() == again.data_ptr():  # no copy in fp32
                self._in_zero.add(own.data_ptr())
                return own
        numel = param.ds_tensor.numel() if param.requires_grad else 0  # type: ignore[attr-defined]
        return torch.empty(numel, dtype=torch.float32, device=self._device)

"""This rank's fp32 gradient shards, in ZeRO-3's own memory where that can be."""

from __future__ import annotations

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
        self._norms: dict[int, Tensor] = {}
        """Norms by address of a shard, since `norms` and until the next iteration."""
        if device.type != "cpu":
            self._lend_norms()

    def zeroed(self) -> list[Tensor]:
        """The shards, set to zero."""
        if not self._grads_P or self._have_moved():
            self.release()
            self._grads_P = [self._of(param) for param in self._params]
        torch._foreach_zero_(self._grads_P)
        self._norms = {}
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
        self._grads_P, self._norms = [], {}
        self._in_zero.clear()

    def norms(self) -> Tensor:
        """The norm of each shard that is not empty, once they hold gradients: few kernels on a
        device.
        """
        held_P = [grad_P for grad_P in self._grads_P if grad_P.numel()]  # not of what is frozen
        if not held_P:
            return torch.zeros(0, device=self._device)
        norms = torch.stack(torch._foreach_norm(held_P))
        self._norms = {g.data_ptr(): norm for g, norm in zip(held_P, norms.unbind(), strict=True)}
        return norms

    def deposit(self) -> None:
        """Hand them to ZeRO-3 as if its own backward had reduced them."""
        for param, grad_P in zip(self._params, self._grads_P, strict=True):
            if param.requires_grad and grad_P.data_ptr() not in self._in_zero:
                safe_set_local_grad(param, grad_P)
        self._optimizer.independent_gradient_partition_epilogue()

    def _have_moved(self) -> bool:
        """Whether ZeRO-3 has its gradients, which lie in one buffer, elsewhere than before: where
        its `reload_states` has put them.
        """
        for param, grad_P in zip(self._params, self._grads_P, strict=True):
            if grad_P.data_ptr() in self._in_zero:
                return safe_get_local_grad(param).data_ptr() != grad_P.data_ptr()
        return False

    def _lend_norms(self) -> None:
        """Let ZeRO-3 have `norms` where it would take them anew, one kernel or two for each
        parameter. Its optimizer's method is not private to one version; where there is none, or
        gradients are changed between, it takes its own.
        """
        optimizer, norms_of = self._optimizer, weakref.ref(self)
        plain = getattr(optimizer, "get_grad_norm_direct", None)
        if plain is None or getattr(optimizer, "use_muon", False):
            return

        def get_grad_norm_direct(gradients: Any, params: Any, norm_type: float = 2) -> Any:
            mine = norms_of()
            known = {} if mine is None else mine._norms
            norms = [known.get(g.data_ptr()) for g in gradients if g.numel()]
            if norm_type == 2 and norms and None not in norms:
                gradients = [torch.stack(norms)]  # of which the norm is that of all
            return plain(gradients, params, norm_type)

        optimizer.get_grad_norm_direct = get_grad_norm_direct

    def _of(self, param: nn.Parameter) -> Tensor:
        if param.requires_grad and not self._optimizer.offload_optimizer:
            own, again = safe_get_local_grad(param), safe_get_local_grad(param)
            if own.data_ptr() == again.data_ptr():  # no copy in fp32
                self._in_zero.add(own.data_ptr())
                return own
        numel = param.ds_tensor.numel() if param.requires_grad else 0  # type: ignore[attr-defined]
        return torch.empty(numel, dtype=torch.float32, device=self._device)

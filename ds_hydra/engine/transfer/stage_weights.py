"""Weights of one iteration on this rank: pulled slices and their gradients, in reused memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ds_hydra.engine.parallel.linear import (
    LEAST_NUMEL,
    can_multiply_into,
    multiply_into,
    set_gradient,
)
from ds_hydra.zero_link import Bucket, BucketEntry, ParamSpec, RankBuckets

ALIGNMENT = 64
"""Slices begin at multiples of this many elements, as fast matrix kernels want them."""

BucketKey = tuple[str, int]
"""(kind, index of the bucket)."""


class SlicePool:
    """Flat tensors that outlive the iteration, one per bucket and kind ("slices", "grads"), or per
    slot ("window").

    On the CPU a tensor stays as large as the largest bucket it ever held, because touching memory
    for the first time is what costs there. Elsewhere (`exact`) it is always as large as the current
    strategy needs: device memory belongs to activations, and the caching allocator makes a change
    of size cheap.
    """

    def __init__(self, device: torch.device, *, exact: bool | None = None):
        self._device = device
        self._exact = device.type != "cpu" if exact is None else exact
        self._held: dict[BucketKey, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(tensor.nbytes for tensor in self._held.values())

    def addresses(self) -> set[int]:
        """Addresses of the storages held, of weights and of their gradients."""
        return {tensor.untyped_storage().data_ptr() for tensor in self._held.values()}

    def resize(
        self, numels: dict[BucketKey, int], dtypes: dict[str, torch.dtype]
    ) -> dict[BucketKey, Tensor]:
        """A flat tensor [numel] for each key; content survives where the size does, and is unknown
        elsewhere.

        `dtypes` names the kinds that the keys belong to. Without keys everything stays for whoever
        comes next.
        """
        if self._exact and numels:
            for key in [
                k for k in self._held if k[0] in dtypes and self._held[k].numel() != numels.get(k)
            ]:
                del self._held[key]  # before anything new is allocated
        taken = {}
        for key, numel in numels.items():
            held = self._held.get(key)
            if held is None or held.numel() < numel:
                # The old tensor goes first, so that both are never held at once.
                self._held.pop(key, None)
                del held
                held = self._held[key] = torch.empty(
                    numel, dtype=dtypes[key[0]], device=self._device
                )
            taken[key] = held[:numel]
        return taken


def _padded_numel(spec: ParamSpec, entry: BucketEntry) -> int:
    """Elements that a slice takes in its bucket's flat tensor (a FIRST_RANK slice has its full
    shape everywhere).
    """
    return -(-prod(spec.slice_shape(entry.region)) // ALIGNMENT) * ALIGNMENT


def slice_numel(specs: Sequence[ParamSpec], bucket: Bucket) -> int:
    """Elements of the flat tensor that holds the slices of `bucket`."""
    return sum(_padded_numel(specs[entry.param], entry) for entry in bucket)


def gradient_numel(specs: Sequence[ParamSpec], bucket: Bucket) -> int:
    """Elements of the flat tensor that holds the gradients of `bucket`."""
    return sum(
        _padded_numel(specs[entry.param], entry)
        for entry in bucket
        if specs[entry.param].requires_grad
    )


@dataclass(slots=True)
class _BucketState:
    """Remaining work for a bucket; tensors are flat."""

    not_pulled: list[Tensor] = field(default_factory=list)
    """Slices that nothing is pulled into."""
    gradients: dict[int, Tensor] = field(default_factory=dict)
    """Gradients that add up here, by trained parameter."""
    without_gradient: dict[int, Tensor] = field(default_factory=dict)
    """Gradients among them that no micro-batch has added to."""
    missing: set[int] = field(default_factory=set)
    """Trained parameters that the last backward pass has not come to."""


class _Gradient:
    """The gradient of one leaf: what autograd brings is `take`n, and factors of a product are
    multiplied where it belongs, if `multiply` is given.

    `complete` is called at the end of a micro-batch whose backward calls `pass_by`: all uses of the
    leaf have passed by, and no product is still to come.
    """

    def __init__(
        self,
        take: Callable[[Tensor], None],
        multiply: Callable[[Tensor, Tensor], None] | None = None,
    ):
        self.take = take
        self.is_direct = multiply is not None
        self._multiply = multiply
        self.complete: Callable[[], None] = lambda: None
        self._num_expected, self._is_passed = 0, False

    def expect_product(self) -> None:
        """`add_product` will be called once more, perhaps after `pass_by`."""
        self._num_expected += 1

    def add_product(self, grad_TO: Tensor, input_TH: Tensor) -> None:
        """Add `grad_TO.T @ input_TH`."""
        if self._multiply is None:
            self.take(grad_TO.T @ input_TH)
        else:
            self._multiply(grad_TO.transpose(0, 1), input_TH)
        self._num_expected -= 1
        if self._is_passed and not self._num_expected:
            self.pass_by()

    def pass_by(self, *_: Any) -> None:
        """Backward is done with the leaf, but for products that were postponed."""
        # A product that waits for an exchange comes later; the last of them calls this again.
        self._is_passed = bool(self._num_expected)
        if not self._is_passed:
            self.complete()


class StageWeights:
    """The slices of this rank's stage for one iteration, and their gradients if `training`.

    - The tensors are views into `pool`: new StageWeights of a pool end the life of the old ones'
      content.
    - Gradients are fp32 and add up over micro-batches. They are complete after `on_gradient` or
      `zero_missing`. `on_gradient(bucket)`, if set, is called in backward when all gradients of a
      bucket have been accumulated in the micro-batch that `expect_last_backward` announces.
    - Buckets in `slot_of` are gathered. They take turns in the memory of their slot: `prepare` once
      a bucket is brought, until another bucket takes the slot. Autograd may save slices of a slot.
      Saved views are valid in backward because the bucket is brought again before. Gradients take
      turns as well. They are those of one micro-batch, in `dtype`; `expect_next` once they are
      pushed.
    - An iteration that needs the same begins with `begin_again`: to make all of this anew takes the
      host 0.14 ms a parameter.
    """

    def __init__(
        self,
        specs: Sequence[ParamSpec],
        buckets: RankBuckets,
        pool: SlicePool,
        dtype: torch.dtype,
        *,
        training: bool = True,
        slot_of: Mapping[int, int] | None = None,
    ):
        self.leaves: dict[int, nn.Parameter] = {}
        self.bucket_S: list[list[Tensor]] = []
        self.grad_bucket_S: list[list[Tensor]] = []
        self.on_gradient: Callable[[int], None] | None = None
        self._states = [_BucketState() for _ in buckets]
        self._nodes: list[tuple[torch.autograd.graph.Node, _Gradient]] = []
        self._hooks: list[Any] = []
        slot_of = slot_of or {}
        self._gathered = frozenset(slot_of)
        numbers = range(len(buckets))
        of_slices = [("window", slot_of[r]) if r in slot_of else ("slices", r) for r in numbers]
        of_grads: list[BucketKey] = []
        dtypes = {"slices": dtype, "window": dtype}
        if training:
            # fp32 where micro-batches add up; what is pushed after each has nothing to add to.
            dtypes |= {"grads": torch.float32, "gathered": dtype}
            of_grads = [("gathered", slot_of[r]) if r in slot_of else ("grads", r) for r in numbers]
        numels: dict[BucketKey, int] = {}
        for key, bucket in zip(of_slices, buckets, strict=True):
            # Buckets that take turns in a slot share it, so it has room for the largest.
            numels[key] = max(numels.get(key, 0), slice_numel(specs, bucket))
        # Not strict: without training no bucket has gradients.
        for key, bucket in zip(of_grads, buckets):
            numels[key] = max(numels.get(key, 0), gradient_numel(specs, bucket))
        flat = pool.resize(numels, dtypes)
        for index, bucket in enumerate(buckets):
            shares = index in slot_of
            grads = flat[of_grads[index]] if of_grads else None
            self._add_bucket(
                index, specs, bucket, flat[of_slices[index]], grads, shares_memory=shares
            )
            # What is in a slot changes: it is prepared whenever a bucket was brought there.
            if not shares:
                self.prepare(index)

    def prepare(self, index: int) -> None:
        """Set slices without a pull to zero; call when a bucket was brought into its slot."""
        for flat in self._states[index].not_pulled:
            flat.zero_()

    def expect_last_backward(self) -> None:
        """Report buckets whose gradients are complete, from now on. Call before the last
        micro-batch's backward.
        """
        # Of nodes, not of leaves: not every torch runs those where all of a gradient comes as
        # products. In other passes nobody asks.
        self._hooks = [node.register_hook(gradient.pass_by) for node, gradient in self._nodes]
        # Buckets without trained parameters: no hook would report them.
        for index, state in enumerate(self._states):
            if not state.missing:
                self._report(index)

    def begin_again(self) -> StageWeights:
        """Reset these weights for another iteration and return them. The last one is over, and its
        pool has served nobody else.
        """
        for hook in self._hooks:  # of the last micro-batch alone
            hook.remove()
        self._hooks = []
        for state in self._states:
            state.without_gradient.update(state.gradients)
            state.missing.update(state.gradients)
        return self

    def zero_missing(self, index: int) -> None:
        """Set to zero gradients of this bucket that no micro-batch has added to."""
        without_gradient = self._states[index].without_gradient
        for grad in without_gradient.values():
            grad.zero_()
        without_gradient.clear()

    def expect_next(self, index: int) -> None:
        """The gradients of a gathered bucket have been pushed: the next micro-batch's replace
        them.
        """
        if index in self._gathered:
            # As in a first micro-batch: the next gradient is copied over this one.
            state = self._states[index]
            state.without_gradient.update(state.gradients)

    def _add_bucket(
        self,
        index: int,
        specs: Sequence[ParamSpec],
        bucket: Bucket,
        slices_flat: Tensor,
        grads_flat: Tensor | None,
        *,
        shares_memory: bool,
    ) -> None:
        flats, grads = [], []
        for entry in bucket:
            spec = specs[entry.param]
            shape = spec.slice_shape(entry.region)
            numel, padded = prod(shape), _padded_numel(spec, entry)
            flat, slices_flat = slices_flat[:numel], slices_flat[padded:]
            flats.append(flat)
            if not entry.region.numel:
                self._states[index].not_pulled.append(flat)
            # By way of `data`, so that the next bucket in the slot is no modification of what
            # autograd has saved.
            leaf = nn.Parameter(
                (flat.data if shares_memory else flat).view(shape), spec.requires_grad
            )
            self.leaves[entry.param] = leaf
            if grads_flat is None or not leaf.requires_grad:
                # Empty, but there: slots are numbered alike in pull and push.
                grads.append(flat.new_empty(0, dtype=torch.float32))
                continue
            grad, grads_flat = grads_flat[:numel], grads_flat[padded:]
            self._attach_gradient(leaf, grad.view_as(leaf), index, entry.param)
            grads.append(grad)
        self.bucket_S.append(flats)
        self.grad_bucket_S.append(grads)

    def _attach_gradient(
        self, leaf: nn.Parameter, main_grad: Tensor, bucket: int, param: int
    ) -> None:
        """Let the gradient of `leaf` add up over micro-batches in `main_grad`.

        The first one is copied, so that nobody has to set the memory to zero.
        """
        state = self._states[bucket]
        state.gradients[param] = state.without_gradient[param] = main_grad
        state.missing.add(param)

        def is_first() -> bool:
            return state.without_gradient.pop(param, None) is not None

        def take(grad: Tensor) -> None:
            # A 16-bit sum over micro-batches would lose what small gradients contribute.
            if is_first():
                main_grad.copy_(grad)
            else:
                main_grad.add_(grad)

        def multiply(left: Tensor, right: Tensor) -> None:
            multiply_into(main_grad, left, right, adds=not is_first())

        pays = leaf.ndim == 2 and leaf.numel() >= LEAST_NUMEL.get(leaf.device.type, 0)
        is_direct = pays and can_multiply_into(main_grad.dtype, leaf.dtype, leaf.device)
        gradient = _Gradient(take, multiply if is_direct else None)
        set_gradient(leaf, gradient)

        def take_over(leaf: Tensor) -> None:
            if leaf.grad is not None:
                take(leaf.grad)
                # Else autograd would add the next micro-batch's to it, in the type of the weights.
                leaf.grad = None

        leaf.register_post_accumulate_grad_hook(take_over)
        # What the node refers to may not hold the node.
        weak_self = weakref.ref(self)

        def complete() -> None:
            weights = weak_self()
            assert weights is not None
            missing = weights._states[bucket].missing
            if param in missing:
                missing.remove(param)
                if not missing:
                    weights._report(bucket)

        gradient.complete = complete
        # The node that accumulates into the leaf runs after all uses of it have passed by.
        self._nodes.append((torch.autograd.graph.get_gradient_edge(leaf).node, gradient))

    def _report(self, bucket: int) -> None:
        if self.on_gradient is not None:
            self.on_gradient(bucket)

"""Which kernel runs the attention of a model: what was asked for, or the fastest that is here,
takes the model's heads and dtype, and computes on this device what each sequence alone gives.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ds_hydra.engine.model import attention_kernels as kernels
from ds_hydra.engine.model.attention_kernels import (
    PER_SEQUENCE,
    Demand,
    Kernel,
    MissingKernelError,
    load_kernel,
)
from ds_hydra.engine.model.attention_operator import KernelUse, attend
from ds_hydra.engine.model.attention_per_sequence import attention_per_sequence
from ds_hydra.errors import HydraConfigError, UnsupportedModelError

logger = logging.getLogger(__name__)

AUTO = "auto"
_KERNEL_DEVICES = ("cuda",)
_MOST_DIFFERENCE = 2e-2
"""Of 16 bit, against fp32: the mantissa of bf16 has 8 bits."""
_PROBE_LENGTHS, _PROBE_KEY_LENGTHS = (5, 64, 1, 90), (5, 100, 7, 90)
"""Whole sequences, and ends of others."""
_PROBE_WINDOW = 9
_PROBE_SOFTCAP = 5.0
_REFUSALS = (RuntimeError, ValueError, AssertionError, TypeError, NotImplementedError)
"""What kernels raise for what they do not take."""

_in_use: dict[tuple[int, int, torch.dtype, bool], KernelUse | None] = {}
"""What each demand runs by since the last start; None: each sequence alone."""


class WrongKernelError(UnsupportedModelError):
    """A kernel computes something else on this device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What runs a demand; None: each sequence alone."""

    demand: Demand
    kernel: Kernel | None
    passed_over: tuple[tuple[str, str], ...] = ()
    """Faster kernels, and why each does not run."""
    error: float | None = None
    """Largest relative error that the trial has shown."""

    @property
    def name(self) -> str:
        """As `hydra.attention` has it."""
        return PER_SEQUENCE if self.kernel is None else self.kernel.name

    def __str__(self) -> str:
        package = f" ({self.kernel.package})" if self.kernel else " (one call for each sequence)"
        return f"{self.name}{package} for {self.demand}"

    def reasons(self) -> str:
        """Why faster kernels do not run, as part of a sentence; "" where there are none."""
        return "; ".join(f"not {name}: {reason}" for name, reason in self.passed_over)

    def describe(self) -> str:
        """What runs, and why nothing faster does."""
        return "; ".join(filter(None, (str(self), self.reasons())))


def choose(
    demand: Demand,
    device: torch.device | None = None,
    *,
    request: str = AUTO,
    is_ordered: bool = False,
) -> Choice:
    """What runs `demand`: `request`, or the fastest there is. On a `device` it is tried first; None
    asks what the packages here would take on any.

    Raises WrongKernelError where the kernel computes something else, HydraConfigError where
    `request` cannot run.
    """
    generation = _generation(device)
    passed_over: list[tuple[str, str]] = []
    if request == PER_SEQUENCE:
        return Choice(demand=demand, kernel=None)
    for name in kernels.KERNELS if request == AUTO else (request,):
        try:
            kernel = load_kernel(name)
        except MissingKernelError as error:
            passed_over.append((name, str(error)))
            continue
        problem, difference = kernel.refusal(demand, generation, is_ordered=is_ordered), None
        if not problem and device is not None:
            try:
                difference = kernel_error(kernel, device, demand)
            except _REFUSALS as refusal:
                problem = f"it refuses: {kernels.first_line(refusal)}"
        if problem:
            passed_over.append((name, problem))
            continue
        if difference is not None and not difference <= _MOST_DIFFERENCE:  # nor where it is NaN
            raise WrongKernelError(
                f"the attention kernel {name} ({kernel.package}) is off by {difference:.1e} for {demand}, at most "
                f"{_MOST_DIFFERENCE:g} is expected; reinstall it for this version of torch and CUDA, remove it, or set "
                f"hydra.attention to {_others(demand, device, name, is_ordered)}"
            )
        return Choice(
            demand=demand, kernel=kernel, passed_over=tuple(passed_over), error=difference
        )
    if request != AUTO:
        raise HydraConfigError(
            f'hydra.attention is "{request}", and for {demand} it cannot run: {passed_over[0][1]}; set it to '
            f'{_others(demand, device, request, is_ordered)}, or to "auto"'
        )
    return Choice(demand=demand, kernel=None, passed_over=tuple(passed_over))


def _others(demand: Demand, device: torch.device | None, but: str, is_ordered: bool) -> str:
    """What works in place of a kernel, the fastest first."""
    found = kernels_here(demand, device, is_ordered=is_ordered)
    names = [f'"{kernel.name}"' for kernel in found if kernel.name != but]
    return " or ".join([*names, f'"{PER_SEQUENCE}"'])


def kernels_here(
    demand: Demand, device: torch.device | None, *, is_ordered: bool = False
) -> Iterator[Kernel]:
    """All kernels that are right for `demand` on `device`, the fastest first."""
    if device is not None and not has_kernels(device):
        return
    generation = _generation(device)
    for name in kernels.KERNELS:
        try:
            kernel = load_kernel(name)
            if kernel.refusal(demand, generation, is_ordered=is_ordered):
                continue
            if device is None or kernel_error(kernel, device, demand) <= _MOST_DIFFERENCE:
                yield kernel
        except (MissingKernelError, *_REFUSALS):
            continue


def _generation(device: torch.device | None) -> int | None:
    """Major compute capability of an NVIDIA device; None where that is not known."""
    if (
        device is None
        or device.type != "cuda"
        or torch.version.hip
        or not torch.cuda.is_available()
    ):
        return None
    return torch.cuda.get_device_capability(device)[0]


def kernel_error(kernel: Kernel, device: torch.device, demand: Demand) -> float:
    """Largest relative error of outputs and gradients of a packed micro-batch on `device`, whole
    sequences and ends of others, causal, with a window and with sinks, against fp32.
    """
    generator = torch.Generator(device=device).manual_seed(0)
    lengths, key_lengths = _PROBE_LENGTHS, _PROBE_KEY_LENGTHS
    widths = (demand.query_width, demand.value_width)
    shapes = ((8, lengths, widths[0]), (4, key_lengths, widths[0]), (4, key_lengths, widths[1]))
    exact = [
        torch.randn((1, heads, sum(of), width), generator=generator, device=device).requires_grad_()
        for heads, of, width in shapes
    ]
    exact.append(torch.randn(8, generator=generator, device=device).requires_grad_())
    rounded = [t.detach().to(demand.dtype).requires_grad_() for t in exact]
    ends = [
        torch.tensor([0, *of], device=device).cumsum(0, dtype=torch.int32)
        for of in (lengths, key_lengths)
    ]
    boundaries = (*ends, torch.tensor([max(lengths), max(key_lengths)]))
    use, scale = KernelUse.of(kernel, demand), widths[0] ** -0.5
    softcap, errors = _PROBE_SOFTCAP if demand.is_capped else None, []
    for window, num_inputs in ((None, 3), (_PROBE_WINDOW, 3), (None, 4)):
        inputs, halves = exact[:num_inputs], rounded[:num_inputs]
        wanted = attention_per_sequence(
            *inputs[:3],
            lengths,
            scale,
            window,
            softcap,
            (*inputs, None)[3],
            key_lengths,  # type: ignore[call-arg]
        )
        wanted_grads = torch.autograd.grad(wanted.square().sum(), inputs)
        heads_last = [t[0].transpose(0, 1) for t in halves[:3]]
        sinks = (*halves, None)[3]
        out_THE = attend(use, heads_last, boundaries, scale, window, softcap, sinks)
        got = out_THE.transpose(0, 1).unsqueeze(0)
        grads = torch.autograd.grad(got.float().square().sum(), halves)
        pairs = zip((got, *grads), (wanted, *wanted_grads), strict=True)
        errors += [((a.float() - b).norm() / b.norm()).detach() for a, b in pairs]
    return float(torch.stack(errors).max())  # which is no number where any is none


def head_widths(config: Any) -> set[tuple[int, int]]:
    """Widths of queries and values that the attention of the model of `config` may have."""

    def get(name: str) -> int:
        value = getattr(config, name, None)
        return value if isinstance(value, int) else 0

    heads = get("num_attention_heads")
    plain = get("head_dim") or (get("hidden_size") // heads if heads else 0)
    latent = get("qk_nope_head_dim") + get("qk_rope_head_dim")
    found = {(latent, get("v_head_dim") or plain)} if latent else {(plain, plain)}
    if wide := get("global_head_dim"):  # of layers without a window
        found.add((wide, wide))
    return {widths for widths in found if min(widths) > 0}


def demands_of(config: Any, dtype: torch.dtype) -> Iterator[Demand]:
    """What the attention of the model of `config` asks of kernels in `dtype`."""
    is_capped = bool(getattr(config, "attn_logit_softcapping", None))
    for widths in sorted(head_widths(config)):
        yield Demand(*widths, dtype, is_capped)


def select_kernels(
    config: Any,
    device: torch.device,
    dtype: torch.dtype,
    *,
    request: str = AUTO,
    asked_by_model: str | None = None,
) -> list[Choice]:
    """Choose what runs the attention of the model of `config` on `device` from now on, and try it
    there: `request` (`hydra.attention`), else what the model was loaded with, else the fastest.

    Raises HydraConfigError where `request` cannot run, UnsupportedModelError where a kernel
    computes something else, or where a sequence's scores would all be held on an accelerator,
    because no kernel caps them.
    """
    _in_use.clear()
    if device.type not in _KERNEL_DEVICES:
        if request not in (AUTO, PER_SEQUENCE):
            raise HydraConfigError(
                f'hydra.attention is "{request}", which runs on GPUs, and ranks compute on {device.type}; '
                f'leave it at "auto", or set it to "{PER_SEQUENCE}"'
            )
        return []
    is_ordered = torch.are_deterministic_algorithms_enabled()
    choices = []
    for demand in demands_of(config, dtype):
        choice = _choose_for_model(demand, device, request, asked_by_model, is_ordered)
        if choice.kernel is None and (problem := find_softcap_problem(config, dtype)):
            raise UnsupportedModelError(problem)
        _in_use[tuple(demand)] = choice.kernel and KernelUse.of(choice.kernel, demand)
        choices.append(choice)
        if choice.kernel is None and request != PER_SEQUENCE and dtype in kernels.HALVES:
            logger.warning(
                "attention is one call for each sequence for %s: %s", demand, choice.reasons()
            )
    used = {choice.kernel.implementation for choice in choices if choice.kernel}
    kernels.activate(next(iter(used - {None}), None))
    return choices


def _choose_for_model(
    demand: Demand, device: torch.device, request: str, asked: str | None, is_ordered: bool
) -> Choice:
    known = request != AUTO or not _names_a_kernel(asked)
    if known:
        return choose(demand, device, request=request, is_ordered=is_ordered)
    assert asked is not None
    try:
        return choose(demand, device, request=asked, is_ordered=is_ordered)
    except HydraConfigError as error:
        if isinstance(error, WrongKernelError):
            raise
        choice = choose(demand, device, is_ordered=is_ordered)
        reason = str(error).partition("it cannot run: ")[2].partition("; set it to")[0]
        logger.warning(
            "the model's attn_implementation, %s, does not run: %s; %s takes its place",
            asked,
            reason,
            choice,
        )
        return choice


def _names_a_kernel(asked: str | None) -> bool:
    """Whether an `attn_implementation` of transformers is one that it does not choose by itself."""
    if asked is None:
        return False
    return asked.startswith("flash_attention") or asked == "flex_attention" or is_of_hub(asked)


def is_of_hub(name: str) -> bool:
    """Whether `name` is that of a kernel of the Hugging Face hub: "owner/repository@revision"."""
    return re.fullmatch(r"[^/:@]+/[^/:@]+(@[^/:@]+)?", name) is not None


def kernel_for(
    query_width: int, value_width: int, dtype: torch.dtype, is_capped: bool
) -> KernelUse | None:
    """What runs such heads on a device with kernels; None: each sequence alone."""
    key = (query_width, value_width, dtype, is_capped)
    return _in_use[key] if key in _in_use else _choose_late(key)


@torch.compiler.disable
def _choose_late(key: tuple[int, int, torch.dtype, bool]) -> KernelUse | None:
    """For heads that the model's config did not tell of."""
    demand = Demand(*key)
    kernel = choose(demand).kernel
    _in_use[key] = kernel and KernelUse.of(kernel, demand)
    return _in_use[key]


def has_kernels(device: torch.device) -> bool:
    """Whether kernels run on devices of this type."""
    return device.type in _KERNEL_DEVICES


def keeps_copies(request: str) -> bool:
    """Whether attention's backward may keep copies of the gradient of queries where sums have one
    order: as the kernels in use do, before a start as `hydra.attention` lets expect.
    """
    if _in_use:
        used = [use for use in _in_use.values() if use is not None]
        return any(load_kernel(use.name).copies_when_ordered for use in used)
    return request != PER_SEQUENCE and not request.partition("@")[0].endswith(("3", "4"))


def find_softcap_problem(config: Any, dtype: torch.dtype) -> str:
    """Why no kernel of an accelerator computes the attention of `config` in `dtype` with the
    packages installed here; "" where one does.
    """
    softcap = getattr(config, "attn_logit_softcapping", None)
    if not softcap or all(choose(d).kernel is not None for d in demands_of(config, dtype)):
        return ""
    return (
        f"attn_logit_softcapping is {softcap}, which flash-attn alone computes, in 16 bit: without it the scores "
        f"of a sequence would take heads x length^2 numbers. pip install flash-attn and enable bf16 (now {dtype}), "
        "or set attn_logit_softcapping to null in the model's config"
    )

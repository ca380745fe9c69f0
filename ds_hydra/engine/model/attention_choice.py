"""Choice of the kernel that runs a model's attention: the requested one, or the fastest installed
one that takes the model's heads and dtype and computes on this device what each sequence alone
gives.
"""

from __future__ import annotations

import itertools
import logging
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_hydra.engine.model import attention_contract
from ds_hydra.engine.model import attention_kernels as kernels
from ds_hydra.engine.model.attention_contract import (
    HALVES,
    Demand,
    Kernel,
    LongSegment,
    MissingKernelError,
    Scoring,
    first_line,
)
from ds_hydra.engine.model.attention_kernels import PER_SEQUENCE, load_kernel
from ds_hydra.engine.model.attention_operator import (
    KernelUse,
    attend,
    attention_per_sequence,
    count_on_host,
)
from ds_hydra.errors import HydraConfigError, UnsupportedModelError

logger = logging.getLogger(__name__)

AUTO = "auto"
_KERNEL_DEVICES = ("cuda",)
_MOST_DIFFERENCE = 2e-2
"""Largest relative error of a 16-bit kernel against fp32: the mantissa of bf16 has 8 bits."""
_PROBE_LENGTHS, _PROBE_KEY_LENGTHS = (5, 64, 1, 90), (5, 100, 7, 90)
"""Whole sequences, and ends of others."""
_PROBE_BESIDE_LONG = (5, 90)
"""Whole sequences beside one that is long."""
_PARTS_OF_LONG = 64
"""Number of parts of the trial's rows, each compared by its own size. A right kernel was off by
0.6% at most where its roundings were emulated on a CPU.
"""
_PROBE_WINDOW = 9
_PROBE_SOFTCAP = 5.0

_in_use: dict[tuple[int, int, torch.dtype, bool], KernelUse | None] = {}
"""Kernel chosen for each demand since the last start; None: each sequence alone."""


class WrongKernelError(UnsupportedModelError):
    """A kernel computes something else on this device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The kernel chosen for a demand; None: each sequence alone."""

    demand: Demand
    kernel: Kernel | None
    passed_over: tuple[tuple[str, str], ...] = ()
    """Faster kernels, and why each does not run."""
    failed: tuple[str, ...] = ()
    """Names of passed-over kernels that the trial on the device found wrong, or that raised in it.
    """
    error: float | None = None
    """Largest relative error that the trial has shown."""

    @property
    def name(self) -> str:
        """Name of the kernel, as a value of `hydra.attention`."""
        return PER_SEQUENCE if self.kernel is None else self.kernel.name

    def __str__(self) -> str:
        package = f" ({self.kernel.package})" if self.kernel else " (one call for each sequence)"
        return f"{self.name}{package} for {self.demand}"

    def reasons(self, of: Sequence[str] | None = None) -> str:
        """Reasons that faster kernels, or those `of` them, do not run, as part of a sentence. ""
        where there are none.
        """
        return "; ".join(
            f"not {name}: {reason}" for name, reason in self.passed_over if not of or name in of
        )

    def describe(self) -> str:
        """The kernel that runs, and the reasons that no faster one does."""
        return "; ".join(filter(None, (str(self), self.reasons())))


def choose(
    demand: Demand,
    device: torch.device | None = None,
    *,
    request: str = AUTO,
    is_ordered: bool = False,
) -> Choice:
    """Choose the kernel for `demand`: `request`, or the fastest there is. A `device` has it tried
    first; None asks what the packages installed here would take on any.

    A kernel that raises there, or computes something else, is passed over. Where it is what
    `request` names, the first is a HydraConfigError, as whatever keeps it from running, and the
    second a WrongKernelError.
    """
    generation = _generation(device)
    passed_over: list[tuple[str, str]] = []
    failed: list[str] = []
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
            problem, difference = _try(kernel, device, demand)
            # Apart from packages that are missing: what fails on the device is worth a warning
            failed += [name] if problem else []
            # Asked for by name, a kernel that is wrong is no reason to take another in silence
            if problem and difference is not None and request != AUTO:
                raise WrongKernelError(
                    f"the attention kernel {name} ({kernel.package}) is off by {difference:.1e} for {demand}, at most "
                    f"{_MOST_DIFFERENCE:g} is expected; reinstall it for this version of torch and CUDA, or set "
                    f"hydra.attention to {_others(demand, device, name, is_ordered)}"
                )
        if problem:
            passed_over.append((name, problem))
            continue
        if kernel.runs_long_apart and device is not None:
            kernel = load_kernel(name, anew=True)  # heads of the trial are none of the model's
        return Choice(
            demand=demand, kernel=kernel, passed_over=tuple(passed_over), failed=tuple(failed),
            error=difference,
        )  # fmt: skip
    if request != AUTO:
        raise HydraConfigError(
            f'hydra.attention is "{request}", and for {demand} it cannot run: {passed_over[0][1]}; set it to '
            f'{_others(demand, device, request, is_ordered)}, or to "auto"'
        )
    return Choice(demand=demand, kernel=None, passed_over=tuple(passed_over), failed=tuple(failed))


def _try(kernel: Kernel, device: torch.device, demand: Demand) -> tuple[str, float | None]:
    """Run the trial of `kernel`. Returns the reason that it does not run `demand` on `device`, ""
    where it does, and its relative error, None where it raised.
    """
    try:
        difference = kernel_error(kernel, device, demand)
    except Exception as refusal:  # packages raise what they like
        return f"it refuses: {first_line(refusal)}", None
    if difference <= _MOST_DIFFERENCE:
        return "", difference
    # NaN, too
    return f"it is off by {difference:.1e}, at most {_MOST_DIFFERENCE:g} is expected", difference


def _others(demand: Demand, device: torch.device | None, but: str, is_ordered: bool) -> str:
    """Names of the kernels that work in place of `but`, the fastest first."""
    found = kernels_here(demand, device, is_ordered=is_ordered)
    names = [f'"{kernel.name}"' for kernel in found if kernel.name != but]
    return " or ".join([*names, f'"{PER_SEQUENCE}"'])


def kernels_here(
    demand: Demand, device: torch.device | None, *, is_ordered: bool = False, tries: bool = True
) -> Iterator[Kernel]:
    """All kernels that are right for `demand` on `device`, the fastest first; without one, or where
    none is to be tried, all that may be.
    """
    if device is not None and not has_kernels(device):
        return
    generation = _generation(device)
    for name in kernels.KERNELS:
        try:
            kernel = load_kernel(name)
            if kernel.refusal(demand, generation, is_ordered=is_ordered):
                continue
            if device is None or not tries or not _try(kernel, device, demand)[0]:
                yield kernel
        except MissingKernelError:
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
    sequences and ends of others, causal, with a window and with sinks, against fp32; of a kernel
    that runs long segments apart also of these, which have to be padded, beside others: a whole
    sequence, and the end of one.
    """
    pieces = (_PROBE_LENGTHS, _PROBE_KEY_LENGTHS)
    cases = (pieces, None, False), (pieces, _PROBE_WINDOW, False), (pieces, None, True)
    errors = [_errors(kernel, device, demand, *case) for case in cases]
    if kernel.runs_long_apart:
        whole = (*_PROBE_BESIDE_LONG, attention_contract.LONG_TOKENS + 5)
        # Few queries for a long segment, with as many keys as make it one
        queries = attention_contract.LONG_TOKENS // 4 + 5
        keys = attention_contract.LONG_TOKENS**2 // (2 * queries) + queries
        first, last = _PROBE_BESIDE_LONG
        for case in ((whole, whole), ((first, queries, last), (first, keys, last + 10))):
            # The last rows of a long segment are small: beside the first ones none would see them.
            errors.append(_errors(kernel, device, demand, case, None, False, _PARTS_OF_LONG))
    return float(torch.cat(errors).max())  # which is no number where any is none


def _errors(
    kernel: Kernel,
    device: torch.device,
    demand: Demand,
    of_segments: tuple[Sequence[int], Sequence[int]],
    window: int | None,
    has_sinks: bool,
    num_parts: int = 1,
) -> Tensor:
    """Relative errors of outputs and gradients, each cut into parts of its rows, which then get
    gradients of one size.
    """
    generator = torch.Generator(device=device).manual_seed(0)
    lengths, key_lengths = of_segments
    widths = (demand.query_width, demand.value_width)
    # Fewer key-value heads than query heads, which every kernel has promised to take.
    shapes = ((8, lengths, widths[0]), (4, key_lengths, widths[0]), (4, key_lengths, widths[1]))
    exact = [
        torch.randn((1, heads, sum(of), width), generator=generator, device=device).requires_grad_()
        for heads, of, width in shapes
    ]
    if has_sinks:
        exact.append(torch.randn(8, generator=generator, device=device).requires_grad_())
    # The reference is of exact numbers, so the error has that of rounding inputs in it
    rounded = [t.detach().to(demand.dtype).requires_grad_() for t in exact]
    ends = [
        torch.tensor([0, *of], device=device).cumsum(0, dtype=torch.int32)
        for of in (lengths, key_lengths)
    ]
    boundaries = (*ends, count_on_host(lengths, key_lengths))
    use = KernelUse.of(kernel, demand)
    softcap = _PROBE_SOFTCAP if demand.is_capped else None
    scoring = Scoring(widths[0] ** -0.5, window, softcap)
    of_exact, of_rounded = (scoring._replace(sinks_H=(*t, None)[3]) for t in (exact, rounded))
    wanted = attention_per_sequence(*exact[:3], of_exact, lengths, key_lengths)  # type: ignore[call-arg]
    # Rounded as the kernel gets it, so that both backward passes begin with the same numbers.
    noise = torch.randn(wanted.shape, generator=generator, device=device).to(demand.dtype).float()

    def loss(out: Tensor) -> Tensor:
        # The last rows of a long segment are small: by squares they would have next to no gradient.
        return (out * noise).sum() if num_parts > 1 else out.square().sum()

    wanted_grads = torch.autograd.grad(loss(wanted), exact)
    heads_last = [t[0].transpose(0, 1) for t in rounded[:3]]
    for _ in range(1 + kernel.runs_long_apart):  # by the first one it knows the heads
        out_THE = attend(use, heads_last, boundaries, of_rounded)
        kernel.prepare(LongSegment.of(lengths, key_lengths), math.inf)
    got = out_THE.transpose(0, 1).unsqueeze(0)
    grads = torch.autograd.grad(loss(got.float()), rounded)
    pairs = zip((got, *grads), (wanted, *wanted_grads), strict=True)
    parts = [
        zip(*(t.chunk(num_parts, max(0, t.dim() - 2)) for t in pair), strict=True) for pair in pairs
    ]
    compared = itertools.chain.from_iterable(parts)
    return torch.stack([((a.float() - b).norm() / b.norm()).detach() for a, b in compared])


def layer_configs(config: Any) -> list[Any]:
    """The configurations of a model's layers where these differ in sizes; else its own."""
    return config.per_layer_config[:] if getattr(config, "is_heterogeneous", False) else [config]


def head_widths(config: Any) -> set[tuple[int, int]]:
    """Widths of queries and values that the attention of the model of `config` may have."""
    return {widths for layer in layer_configs(config) for widths in _widths_of(layer)}


def _widths_of(config: Any) -> set[tuple[int, int]]:
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
    """Demands of the attention of the model of `config` in `dtype`, one for each head width."""
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
    """Choose the attention kernel of the model of `config` on `device` from now on, and try it
    there: `request` (`hydra.attention`), else the one that the model was loaded with, else the
    fastest.

    Raises HydraConfigError where `request` cannot run, UnsupportedModelError where it computes
    something else, or where a sequence's scores would all be held on an accelerator, because no
    kernel caps them.
    """
    _in_use.clear()
    # After the clearing: a choice of another device must not stay
    if not has_kernels(device):
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
        # One call for each sequence would hold all of its scores there
        if choice.kernel is None and (problem := find_softcap_problem(config, dtype)):
            raise UnsupportedModelError(problem)
        _in_use[tuple(demand)] = choice.kernel and KernelUse.of(choice.kernel, demand)
        choices.append(choice)
        if choice.kernel is not None and choice.failed:
            logger.warning("attention runs by %s; %s", choice.name, choice.reasons(choice.failed))
        if choice.kernel is None and request != PER_SEQUENCE and dtype in HALVES:
            logger.warning(
                "attention is one call for each sequence for %s: %s", demand, choice.reasons()
            )
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
        # A model's wish may be passed over where a package is missing, not where it is wrong
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
    """The kernel that runs such heads on an accelerator; None: each sequence alone."""
    key = (query_width, value_width, dtype, is_capped)
    return _in_use[key] if key in _in_use else _choose_late(key)


@torch.compiler.disable
def _choose_late(key: tuple[int, int, torch.dtype, bool]) -> KernelUse | None:
    """Choose a kernel for heads unknown from the model's config, too late for a trial."""
    demand = Demand(*key)
    is_ordered = torch.are_deterministic_algorithms_enabled()
    device = torch.device("cuda") if torch.cuda.is_available() else None
    known = kernels_here(demand, device, is_ordered=is_ordered, tries=False)
    kernel = next((k for k in known if not k.runs_long_apart), None)
    _in_use[key] = kernel and KernelUse.of(kernel, demand)
    return _in_use[key]


def _kernels_in_use() -> list[Kernel]:
    names = dict.fromkeys(use.name for use in _in_use.values() if use is not None)
    return [*map(load_kernel, names)]


def prepare_kernels(segments: Iterable[LongSegment], flops_of_pair: float) -> None:
    """Let the kernels in use do what they do before an iteration (`Kernel.prepare`)."""
    for kernel in _kernels_in_use():
        kernel.prepare(segments, flops_of_pair)


def has_kernels(device: torch.device) -> bool:
    """Whether kernels run on devices of this type."""
    return device.type in _KERNEL_DEVICES


def keeps_copies(request: str) -> bool:
    """Whether attention's backward may keep copies of the gradient of queries where sums have one
    order: as the kernels in use do, before a start as `hydra.attention` lets expect.
    """
    if _in_use:
        return any(kernel.copies_when_ordered for kernel in _kernels_in_use())
    # Generations 3 and 4 of flash attention take turns in place of copies.
    return request != PER_SEQUENCE and not request.partition("@")[0].endswith(("3", "4"))


def find_softcap_problem(config: Any, dtype: torch.dtype) -> str:
    """Reason that no kernel of an accelerator computes the attention of `config` in `dtype` with
    the packages installed here. "" where one does.
    """
    softcap = getattr(config, "attn_logit_softcapping", None)
    if not softcap or all(choose(d).kernel is not None for d in demands_of(config, dtype)):
        return ""
    return (
        f"attn_logit_softcapping is {softcap}, which flash-attn alone computes, in 16 bit: without it the scores "
        f"of a sequence would take heads x length^2 numbers. pip install flash-attn and enable bf16 (now {dtype}), "
        "or set attn_logit_softcapping to null in the model's config"
    )

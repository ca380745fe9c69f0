"""Linear layers that multiply in 8 bits (`hydra.float8`, or a model that torchao has converted),
and the obstacles: sizes, devices, a missing package.

The products themselves are in `parallel/float8_products.py`, which imports torchao.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ds_hydra.engine.model.adapters import is_converted, is_linear, is_lora
from ds_hydra.engine.parallel.tensor_parallel import TensorParallel
from ds_hydra.errors import HydraConfigError, UnsupportedModelError
from ds_hydra.strategy import Scheme
from ds_hydra.zero_link import ParamSpec

logger = logging.getLogger(__name__)

_EMULATED = "_emulated"
_MULTIPLE = 16
"""Divisor of the numbers of features that 8-bit products take."""
_LEAST_CAPABILITY = (8, 9)
_AMD = ("gfx94", "gfx95")


class Float8Layers:
    """The linear layers of a stage model that multiply in 8 bits; none where nobody asked for it.

    `layers`: the decoder layers. `spec_of`: what the link knows of (module,
    attribute). `sides`: COLUMN or ROW of modules that TP cuts. Raises HydraConfigError where
    torchao is missing, a size is no multiple of 16, or `exclude` names nothing or has no `request`,
    UnsupportedModelError for a converted model that cannot be trained.
    """

    def __init__(
        self,
        layers: Iterable[nn.Module],
        spec_of: Mapping[tuple[nn.Module, str], ParamSpec],
        sides: Mapping[nn.Module, str],
        tp: TensorParallel,
        *,
        request: str | None,
        exclude: Sequence[str],
        is_compiled: bool = False,
    ):
        self.request = request
        """Value of `hydra.float8`, or "converted" of a model that torchao has converted."""
        self._specs: list[ParamSpec] = []
        self._num_whole = sum(
            len(spec.shape) == 3 and not isinstance(module, nn.Conv1d)
            for (module, _), spec in spec_of.items()
        )
        found = [(m, side, spec_of[m, "weight"]) for m, side in _linears(layers, sides)]
        converted = [spec for linear, _, spec in found if is_converted(linear)]
        if exclude and request is None:
            instead = (
                "torchao has converted the model: leave layers out by module_filter_fn of convert_to_float8_training, "
                "and take hydra.float8_exclude away"
                if converted
                else 'set that, as "rowwise", or leave out hydra.float8_exclude'
            )
            raise HydraConfigError(
                f"hydra.float8_exclude is {list(exclude)}, and hydra.float8, whose layers it leaves out, is null; "
                f"{instead}"
            )
        if converted:
            _check_converted(converted[0], request)
            self.request = "converted"
            used = [item for item in found if is_converted(item[0])]
        elif request is not None:
            used = list(_kept(found, exclude))
        else:
            return
        self._specs = [spec for _, _, spec in used]
        self._check_sizes((spec.fqn, spec.shape) for spec in self._specs)
        products = _import_products(request)
        config = None if request is None else _config_of(request)
        self.is_emulated = True
        for linear, side, spec in used:
            linear.casts = own = config or linear.config
            _check_config(own)
            linear.__class__ = products.EightBitLinear
            linear.tp, linear.side, linear.is_compiled = tp, side, is_compiled
            linear.num_heads = spec.num_blocks
            self.is_emulated = self.is_emulated and own.emulate

    def __bool__(self) -> bool:
        """Whether any layer multiplies in 8 bits."""
        return bool(self._specs)

    def describe(self) -> str:
        """Text for the engine's first lines."""
        how = "as torchao converted them" if self.request == "converted" else self.request
        whole = f"; {self._num_whole} weights of experts stay in 16 bit" if self._num_whole else ""
        return f"float8: {len(self._specs)} linear layers, {how}{whole}"

    def check_scheme(self, scheme: Scheme) -> None:
        """Raise HydraConfigError where TP leaves a rank features that are no multiple of 16."""
        if scheme.tp == 1:
            return
        for rank in range(scheme.tp):
            slices = ((s.fqn, s.slice_shape(s.slice_region(scheme.tp, rank))) for s in self._specs)
            self._check_sizes(
                slices, f"scheme {scheme}: ", f", or use a smaller TP than {scheme.tp}"
            )

    def _check_sizes(
        self, shapes: Iterable[tuple[str, tuple[int, ...]]], where: str = "", instead: str = ""
    ) -> None:
        for fqn, shape in shapes:
            if any(size % _MULTIPLE for size in shape):
                name = fqn.removesuffix(".weight")
                last = name.removesuffix(".base_layer").rsplit(".", 1)[-1]
                advice = (
                    f"leave {last!r} out by module_filter_fn of convert_to_float8_training"
                    if self.request == "converted"
                    else f"add {last!r} to hydra.float8_exclude"
                )
                raise HydraConfigError(
                    f"{where}8-bit products want features in multiples of {_MULTIPLE}, and {name} has a weight of "
                    f"{' x '.join(map(str, shape))}; {advice}{instead}"
                )

    def check_device(self, device: torch.device) -> None:
        """Raise HydraConfigError where `device` has no 8-bit products and nobody asked for their
        emulation.
        """
        if not self or self.is_emulated or device.type == "meta":
            return
        if device.type == "cuda":
            if torch.version.hip:
                name = torch.cuda.get_device_properties(device).gcnArchName
                has_products = name.startswith(_AMD)
            else:
                capability = torch.cuda.get_device_capability(device)
                has_products, name = capability >= _LEAST_CAPABILITY, "sm{}{}".format(*capability)
        else:
            has_products, name = False, device.type
        if has_products:
            return
        advice = (
            "Float8LinearConfig(emulate=True)"
            if self.request == "converted"
            else f'hydra.float8 "{self.request}{_EMULATED}"'
        )
        raise HydraConfigError(
            f"linear layers are to multiply in 8 bits, which {device} ({name}) cannot: that takes sm89 or later "
            f"(Ada, Hopper, Blackwell), or gfx94x (MI300) or later; leave out hydra.float8, or compute the same "
            f"numbers slowly with {advice}"
        )


def use_plain_head(head: nn.Module, model: nn.Module) -> None:
    """Make of `head`, which torchao may have converted, a linear layer; say so on the first rank.
    `model`: the one that it is of.
    """
    if not is_converted(head):
        return
    head.__class__ = nn.Linear
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.warning(
            "torchao has converted the output head of %s, whose products with the loss stay in the model's dtype here; "
            "leave it out of convert_to_float8_training by module_filter_fn",
            type(model).__name__,
        )


def _linears(
    layers: Iterable[nn.Module], sides: Mapping[nn.Module, str]
) -> Iterator[tuple[Any, str]]:
    """(linear layer, its side or "") of `layers`, without those of adapters."""
    for layer in layers:
        adapters: set[nn.Module] = set()
        of_base: dict[nn.Module, str] = {}
        for module in layer.modules():
            if is_lora(module):
                base = module.base_layer
                adapters |= set(module.modules()) - set(base.modules()) - {module}
                of_base[base] = sides.get(module, "")
            elif is_linear(module) and module not in adapters:
                yield module, of_base.get(module, sides.get(module, ""))


def _kept(
    found: Sequence[tuple[Any, str, ParamSpec]], exclude: Sequence[str]
) -> Iterator[tuple[Any, str, ParamSpec]]:
    names = [spec.fqn.removesuffix(".weight") for _, _, spec in found]
    for part in exclude:
        if not any(part in name for name in names):
            raise HydraConfigError(
                f"hydra.float8_exclude has {part!r}, which is in no name of a linear layer; names are as "
                f"{', '.join(names[:3])}"
            )
    kept = [x for x, name in zip(found, names) if not any(part in name for part in exclude)]
    if not kept:
        raise HydraConfigError(
            f"hydra.float8: no linear layer is left in the decoder layers ({len(found)} before hydra.float8_exclude); "
            "leave out hydra.float8"
        )
    yield from kept


def _check_converted(spec: ParamSpec, request: str | None) -> None:
    if request is not None:
        raise HydraConfigError(
            f"hydra.float8 is {request!r}, and torchao has converted the model already "
            f"({spec.fqn.removesuffix('.weight')}); leave out one of both"
        )


def _check_config(config: Any) -> None:
    if config.enable_fsdp_float8_all_gather:
        raise UnsupportedModelError(
            "torchao has converted the model with enable_fsdp_float8_all_gather, whose weights are FSDP's; convert it "
            "without"
        )


def _import_products(request: str | None) -> Any:
    try:
        from torchao.float8 import convert_to_float8_training

        from ds_hydra.engine.parallel import float8_products
    except ImportError as error:
        raise HydraConfigError(
            f"hydra.float8 is {request!r}, and torchao cannot be imported ({error}); pip install 'ds_hydra[float8]', "
            "or leave hydra.float8 out"
        ) from error
    convert_to_float8_training(nn.Identity())  # mends what torch's compiler makes of 8-bit stores
    return float8_products


def _config_of(request: str) -> Any:
    """torchao's recipe of that name, with scales of powers of two ([Note: Scales of 8-bit
    products]).
    """
    from torchao.float8 import Float8LinearConfig

    return dataclasses.replace(
        Float8LinearConfig.from_recipe_name(request.removesuffix(_EMULATED)),
        round_scales_to_power_of_2=True,
        emulate=request.endswith(_EMULATED),
    )

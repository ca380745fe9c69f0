"""The device type "standin" for torch and DeepSpeed: `install()` in a process of its own."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils import backend_registration

from standin import process_group, streams

NAME = "standin"
MEMORY_BYTES = 80 << 30
COMMUNICATOR_BYTES = 600 << 20


@functools.cache
def extension() -> ModuleType:
    """The compiled half; built once for each environment, in about a minute."""
    from torch.utils.cpp_extension import load

    source = Path(__file__).with_name("device.cpp")
    return load("ds_hydra_standin", [str(source)], extra_cflags=["-O1", "-w"])


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return True

    def has_primary_context(self, device: int) -> bool:
        return True

    def is_built(self) -> bool:
        return True


def synchronize() -> None:
    """Wait for the whole device, collectives included."""
    streams.observer.wait("synchronize of the device")
    process_group.drain()


class _Module:
    """`torch.standin`."""

    Stream, Event, stream = streams.Stream, streams.Event, streams.stream
    current_stream = staticmethod(streams.current_stream)
    default_stream = staticmethod(streams.default_stream)
    set_stream = staticmethod(streams.set_stream)

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def set_device(self, device: Any) -> None:
        index = device.index if isinstance(device, torch.device) else device
        assert index is not None, f"set_device({device!r})"

    def synchronize(self, device: Any = None) -> None:
        synchronize()

    def manual_seed(self, seed: int) -> None:
        pass

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def memory_allocated(self, device: Any = None) -> int:
        return extension().allocated_bytes()

    def max_memory_allocated(self, device: Any = None) -> int:
        return extension().peak_bytes()

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        extension().reset_peak()

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """Free and total bytes; the communicators of a process take a part of it each."""
        used = extension().allocated_bytes() + len(process_group.sizes) * COMMUNICATOR_BYTES
        return MEMORY_BYTES - used, MEMORY_BYTES

    class device:
        def __init__(self, device: Any):
            pass

        def __enter__(self) -> None:
            pass

        def __exit__(self, *error: Any) -> None:
            pass


def _accelerator() -> Any:
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    def tensor_of(dtype: torch.dtype) -> property:
        return property(lambda self: functools.partial(torch.tensor, dtype=dtype, device=NAME))

    def read(function: Any) -> Any:
        return lambda self, device_index=None: function()

    class Accelerator(CPU_Accelerator):
        def __init__(self) -> None:
            super().__init__()
            self._name, self._communication_backend_name = NAME, NAME

        is_synchronized_device = use_host_timers = read(lambda: False)
        resolves_data_dependency = handles_memory_backpressure = read(lambda: False)
        is_fp16_supported = read(lambda: True)
        device = read(lambda: torch.device(NAME, 0))
        current_device = read(lambda: 0)
        current_device_name = read(lambda: f"{NAME}:0")
        device_count = read(lambda: int(os.environ.get("LOCAL_SIZE", 1)))
        current_stream = read(streams.current_stream)
        default_stream = read(streams.default_stream)
        synchronize = read(lambda: synchronize())
        memory_allocated = memory_reserved = read(lambda: extension().allocated_bytes())
        max_memory_allocated = max_memory_reserved = read(lambda: extension().peak_bytes())
        reset_peak_memory_stats = reset_max_memory_allocated = read(
            lambda: extension().reset_peak()
        )
        memory_stats = read(dict)
        total_memory = available_memory = read(lambda: MEMORY_BYTES)
        Stream = property(lambda self: streams.Stream)
        Event = property(lambda self: streams.Event)
        BFloat16Tensor, HalfTensor = tensor_of(torch.bfloat16), tensor_of(torch.float16)
        FloatTensor, DoubleTensor = tensor_of(torch.float32), tensor_of(torch.float64)
        IntTensor, LongTensor = tensor_of(torch.int32), tensor_of(torch.int64)
        ByteTensor = tensor_of(torch.uint8)

        def device_name(self, device_index: int | None = None) -> str:
            return NAME if device_index is None else f"{NAME}:0"

        def set_device(self, device_index: Any) -> None:
            torch.standin.set_device(device_index)

        def stream(self, stream: streams.Stream) -> streams.stream:
            return streams.stream(stream)

        def create_op_builder(self, name: str) -> None:
            return None

        def get_op_builder(self, name: str) -> None:
            return None

        def on_accelerator(self, tensor: torch.Tensor) -> bool:
            return tensor.device.type == NAME

    return Accelerator()


@functools.cache
def install() -> None:
    """Make torch, DeepSpeed and torch.distributed of this process know the device."""
    from deepspeed.accelerator import real_accelerator, set_accelerator

    backend_registration._setup_privateuseone_for_python_backend(
        NAME, backend_module=_Module(), hook=_Hooks()
    )
    extension().set_observer(streams.observer)
    torch.Tensor.record_stream = lambda tensor, stream: streams.observer.record_stream(
        tensor.untyped_storage().data_ptr(), stream.id
    )
    real_accelerator.SUPPORTED_ACCELERATOR_LIST.append(NAME)
    set_accelerator(_accelerator())
    process_group.register(NAME, extension().as_host)

"""Triton's kernels on CPU ranks: its interpreter, which runs them with numpy."""

from __future__ import annotations

import os
from typing import Any

import pytest


def use() -> None:
    """Let kernels of Triton run in this process; skips the test where it is not installed.

    The variable TRITON_INTERPRET has to be set before anything imports triton (conftest.py).
    """
    assert os.environ["TRITON_INTERPRET"] == "1"
    pytest.importorskip("triton", reason="kernels need triton")
    import numpy as np
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt
    if getattr(convert, "takes_floats", False):
        return

    def as_compiled(value: Any) -> Any:
        """Compiled kernels see numbers as fp32 scalars, the interpreter hands them on as floats."""
        if not isinstance(value, float):
            return convert(value)
        handle = interpreter.TensorHandle(np.array([value], dtype=np.float32), tl.float32)
        return tl.tensor(handle, tl.float32)

    as_compiled.takes_floats = True  # type: ignore[attr-defined]
    interpreter._implicit_cvt = as_compiled
    # Functions of a device's own library are empty there
    libdevice.rsqrt = lambda x: 1.0 / tl.sqrt(x)
    # Which of several configurations is the fastest is asked of a device
    tune = triton.autotune
    triton.autotune = lambda configs, *args, **kwargs: tune(configs[:1], *args, **kwargs)

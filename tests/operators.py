"""Which operators of torch run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Watching(TorchDispatchMode):
    """While open, `note` gets each operator that has run, and its result."""

    def __init__(self, note: Callable[[Any, Any], object]):
        super().__init__()
        self._note = note

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self._note(function, result)
        return result

"""Runs of ds_hydra beside the same runs of stock DeepSpeed, Trainer and TRL: one comparison of
whatever a front end returns of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

RELATIVE = 1e-5
TIMED = ("runtime", "per_second", "flos", "flops", "imbalance", "step_time")
"""Parts of the names of what a log has of times, whose values differ."""


def assert_as_stock(
    mine: Any,
    stock: Any,
    relative: float = RELATIVE,
    *,
    absolute: Mapping[str, float] | None = None,
    exact: Collection[str] = (),
    added: Mapping[str, Collection[str]] | None = None,
    where: str = "",
) -> None:
    """Assert that `mine` is `stock`: losses, norms, parameters, states, logs, events, files.

    Numbers agree to `relative`, tensors by their norms; the rest is equal. By the last key on the
    way there: `absolute` tolerances, `exact` numbers. `added`: keys that an entry of mine has more
    where one of stock has that key.
    """
    key = where.rpartition(".")[2].partition("[")[0]
    assert type(mine) is type(stock), f"{where}: {mine!r}, expected {stock!r}"
    more = {"absolute": absolute, "exact": exact, "added": added}
    if isinstance(stock, Mapping):
        wanted = set(stock).union(*(keys for of, keys in (added or {}).items() if of in stock))
        assert set(mine) == wanted, f"{where}: {set(mine) ^ wanted} in one of them alone"
        for name, value in stock.items():
            if not any(part in str(name) for part in TIMED):
                assert_as_stock(mine[name], value, relative, **more, where=f"{where}.{name}")
    elif isinstance(stock, list | tuple):
        assert len(mine) == len(stock), f"{where}: {len(mine)}, expected {len(stock)}"
        for index, pair in enumerate(zip(mine, stock, strict=True)):
            assert_as_stock(*pair, relative, **more, where=f"{where}[{index}]")
    elif isinstance(stock, torch.Tensor):
        error = float((mine - stock).norm()) / max(float(stock.norm()), 1e-12)
        assert error <= relative, f"{where}: off by {error:.1e}"
    elif isinstance(stock, float) and key not in exact:
        tolerance = (absolute or {}).get(key, relative * abs(stock))
        assert abs(mine - stock) <= tolerance, f"{where}: {mine}, expected {stock}"
    else:
        assert mine == stock, f"{where}: {mine!r}, expected {stock!r}"

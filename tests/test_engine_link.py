"""Pull and push inside an iteration: what is sent, what stays in memory, and what runs beside computation."""

from __future__ import annotations

import pytest
from distributed import run_distributed
from test_engine_parity import RELATIVE_TOLERANCE, check_gradients

BF16_TOLERANCE = 2**-8
"""bf16 rounds to 8 bits, an error of 2^-9 in each contribution; the sums themselves are fp32."""


def gradients_sent_in_bf16():
    strategies = ("4x<1,1>", "1x<2,1> + 1x<1,2>", "1x<2,2>")
    return check_gradients("llama", strategies, {"link": {"gradient_dtype": "bf16"}})


@pytest.mark.distributed
def test_gradients_sent_in_bf16_differ_by_rounding_only():
    worst = run_distributed(gradients_sent_in_bf16, 4)[0]
    for case, (error, name, loss_error) in worst.items():
        assert RELATIVE_TOLERANCE < error < BF16_TOLERANCE, (
            f"{case}: gradient of {name} is off by {error:.1e}"
        )
        assert loss_error <= RELATIVE_TOLERANCE, case

"""Rows of a micro-batch on several ranks compute what the whole micro-batch does on one: attention,
gradients, training.
"""

from __future__ import annotations

import pytest
from distributed import run_distributed
from test_engine_parity import LENGTHS, assert_parity
from test_sequence_parallel import LAYER_BY_LAYER, SHORT_ROWS, check_families

PARITY = {
    "what placement has to know": [
        (
            "llama_tied",
            (
                "1x<cp2,1>",
                "1x<cp4,1>",
                "1x<sp2,cp2,1>",
                "1x<cp2,2,1>",
                "1x<cp2,1,2>",
                "1x<cp2,1> + 2x<1,1>",
                "1x<cp2,1> + 1x<sp2,1>",
            ),
            {},
            LENGTHS,
        ),
    ],
}


@pytest.mark.distributed
@pytest.mark.parametrize("what", PARITY)
def test_gradients_equal_one_process(what):
    assert_parity(run_distributed(check_families, 4, PARITY[what])[0])

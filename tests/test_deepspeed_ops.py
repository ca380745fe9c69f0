"""What DeepSpeed compiles at the start, and does not."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest


@pytest.mark.slow
def test_no_shared_memory_is_compiled_for_scripts_that_start_deepspeed_themselves():
    script = """
        import deepspeed, ds_hydra, sys
        assert sys.modules["deepspeed.comm.torch"].build_shm_op() is None
    """
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": "/nowhere"}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    subprocess.run(command, env=environment, check=True, timeout=300)

"""Settings for all tests: one thread per process, so that forked ranks neither hang nor fight for
cores.

hypothesis draws the same examples in every run; `pytest --hypothesis-profile=other` draws others.
"""

from __future__ import annotations

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels of Triton run on a CPU
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
import distributed
from hypothesis import HealthCheck, Phase, settings

settings.register_profile(
    "other",
    deadline=None,
    derandomize=False,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.register_profile("ds_hydra", parent=settings.get_profile("other"), derandomize=True)
settings.register_profile(  # of faults put in by hand, where the first example is enough
    "first", parent=settings.get_profile("ds_hydra"), phases=[Phase.explicit, Phase.generate]
)
settings.load_profile("ds_hydra")

OF_A_LAUNCHER = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
for variable in OF_A_LAUNCHER:  # which may have started the tests
    os.environ.pop(variable, None)


def pytest_runtest_setup(item):
    distributed.may_start_ranks = item.get_closest_marker("distributed") is not None


def pytest_collection():
    gc.disable()  # nothing of what tests import is garbage


def pytest_collection_modifyitems(items):
    """Files whose tests start ranks come first, and so no process is left with one of them at the
    end.
    """
    items.sort(key=lambda item: item.get_closest_marker("distributed") is None)


def pytest_collection_finish():
    gc.collect()
    gc.enable()
    gc.freeze()  # modules stay: nobody needs to look for garbage in them

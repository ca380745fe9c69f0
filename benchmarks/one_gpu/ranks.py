"""Several ranks on one GPU, over real NCCL where that goes.

    python -m benchmarks.one_gpu.ranks --way hostid 2 -m benchmarks.one_gpu.probe

hostid     every rank tells NCCL another NCCL_HOSTID, which takes them for hosts of one GPU each and
           joins them by sockets on `lo`: it looks for two ranks on a device only inside a host
multirank  NCCL 2.30 or later lets ranks share a device; --nccl is preloaded in place of torch's own
staged     no NCCL: gloo, through pinned memory of the host (`staged.py`)
cpu        ranks without a device, over gloo
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

WAYS = ("hostid", "multirank", "staged", "cpu")
COMMON = {
    "LOCAL_RANK": "0",  # all on the one device
    "MASTER_ADDR": "127.0.0.1",
    "OMP_NUM_THREADS": "2",
    "PYTHONFAULTHANDLER": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_MAX_CTAS": "4",  # kernels of all ranks wait for each other on the same multiprocessors
}


def environment(rank: int, world: int, port: int, way: str, nccl: str = "") -> dict[str, str]:
    """What a rank gets beside what this process has; that of the user wins."""
    own = {**COMMON, "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(world)}
    own |= {"LOCAL_WORLD_SIZE": str(world), "LOCAL_SIZE": str(world), "DS_HYDRA_ONE_GPU": way}
    if way == "hostid":
        own["NCCL_HOSTID"] = f"rank{rank}"
    elif way == "multirank":
        own["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        if nccl:
            own["LD_PRELOAD"] = nccl
    elif way == "cpu":
        own |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
    return own


def run(world: int, arguments: Sequence[str], way: str, limit_s: float, nccl: str = "") -> int:
    """Exit code of the first rank that fails, 124 after `limit_s`; only rank 0 writes to stdout."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(world):
        given: Mapping[str, str] = os.environ
        # The port is drawn, and whoever starts this may be a rank itself.
        more = environment(rank, world, port, way, nccl)
        ranks.append(
            subprocess.Popen(
                [sys.executable, *arguments],
                env={**more, **given, **{name: more[name] for name in _OURS if name in more}},
                stdout=None if rank == 0 else subprocess.DEVNULL,
            )
        )
    end, code = time.monotonic() + limit_s, 0
    try:
        while any(rank.poll() is None for rank in ranks) and not code:
            code = next((rank.returncode for rank in ranks if rank.returncode), 0)
            if time.monotonic() > end:
                print(f"no end within {limit_s:.0f} s", file=sys.stderr)
                code = 124
                for process in ranks:  # Python's fault handler says where it is
                    process.send_signal(signal.SIGABRT)
            time.sleep(0.05)
        time.sleep(1.0 if code else 0.0)  # for the others' own words
    finally:
        for process in ranks:
            process.kill()
    return code or next((rank.returncode for rank in ranks if rank.wait()), 0)


_OURS = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "DS_HYDRA_ONE_GPU", "NCCL_HOSTID", "LD_PRELOAD",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--way", choices=WAYS, default="hostid")
    parser.add_argument("--nccl", default="", help="library to preload with multirank")
    parser.add_argument("--limit", type=float, default=300)
    parser.add_argument("num_ranks", type=int)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of python")
    options = parser.parse_args()
    # Whoever ends this one ends its ranks
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(run(options.num_ranks, options.arguments, options.way, options.limit, options.nccl))


if __name__ == "__main__":
    main()

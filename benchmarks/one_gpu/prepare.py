"""Downloads what a machine with a GPU and no network needs beside what it has, as wheels.

    python -m benchmarks.one_gpu.prepare [--nccl]

The machine has Python 3.12 with torch, an older transformers, numba and what these need (`THERE`).
Wheels of the versions in requirements/constraints.txt go to .cache/one_gpu, which git ignores and
which is carried beside the files of the project. No integer programs are solved there ("solver":
"none"), so mip and its solvers stay out.
"""

from __future__ import annotations

import argparse
import email
import lzma
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".cache" / "one_gpu"
MOST_BYTES = 60 << 20
"""Of all files; the machine takes 64 MiB with those of the project."""
CARRIED = (
    "deepspeed", "hjson", "transformers", "datasets", "dill", "multiprocess", "pydantic",
    "pydantic-core", "annotated-types", "typing-inspection", "py-spy",
)  # fmt: skip
LAYERS = ("liger-kernel", "torchao")
"""Whose layers and products are timed; left out beside NCCL, for which there is no room then."""
THERE = (
    "accelerate", "einops", "filelock", "fsspec", "huggingface-hub", "jinja2", "llvmlite", "markupsafe",
    "matplotlib", "msgpack", "ninja", "numba", "numpy", "packaging", "pandas", "peft", "psutil",
    "py-cpuinfo", "pyarrow", "pyyaml", "regex", "requests", "rich", "safetensors", "tokenizers", "torch",
    "tqdm", "triton", "typer", "typing-extensions", "xxhash",
)  # fmt: skip
LAZY = ("mip",)
"""Imported where an integer program is to be solved."""
PYTHON, PLATFORMS = "3.12", ("manylinux_2_28", "manylinux_2_17", "manylinux2014", "manylinux1")
NCCL, NCCL_FILE, ARCHITECTURE = "nvidia-nccl-cu13==2.30.7", "libnccl.so.2.xz", 90
"""The first NCCL that lets ranks share a device. Device code of other architectures is blanked."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument(
        "--nccl", action="store_true", help="also a NCCL that lets ranks share a device (38 MB)"
    )
    options = parser.parse_args()
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    versions = read_versions(ROOT / "requirements" / "constraints.txt")
    for name in CARRIED if options.nccl else (*CARRIED, *LAYERS):
        download(name, versions[name], options.out)
    check_requirements(options.out)
    if options.nccl:
        pack_nccl(options.out)
    print(describe(options.out))


def read_versions(constraints: Path) -> dict[str, str]:
    """`name==version` of every line.

    >>> read_versions(ROOT / "requirements" / "constraints.txt")["deepspeed"][:5]
    '0.19.'
    """
    pairs = (line.split("==") for line in constraints.read_text().splitlines() if "==" in line)
    return {canonical(name): version.strip() for name, version in pairs}


def canonical(name: str) -> str:
    """The name by which a package index knows a package."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pip(*arguments: str) -> None:
    quiet = ("--quiet", "--disable-pip-version-check")
    # DeepSpeed builds a wheel without compiled operations, whatever the shell has said.
    environment = {**os.environ, "DS_BUILD_OPS": "0"}
    command = [sys.executable, "-m", "pip", arguments[0], *quiet, *arguments[1:]]
    subprocess.run(command, check=True, env=environment)


def download(name: str, version: str, folder: Path) -> None:
    """The wheel of a package; one is built where the index has the source alone."""
    wanted = f"{name}=={version}"
    if name == "deepspeed":
        pip("wheel", "--no-deps", "--wheel-dir", str(folder), wanted)
        return
    of_machine = ["--implementation", "cp", "--python-version", PYTHON]
    of_machine += [word for p in PLATFORMS for word in ("--platform", f"{p}_x86_64")]
    pip("download", "--no-deps", "--only-binary=:all:", *of_machine, "-d", str(folder), wanted)


def check_requirements(folder: Path) -> None:
    """Raise SystemExit where a wheel, or the project, needs what is neither carried nor there."""
    known = {*CARRIED, *THERE, *LAZY, *LAYERS}
    needed = dict.fromkeys(project_requirements(), "ds_hydra")
    for wheel in folder.glob("*.whl"):
        needed |= dict.fromkeys(wheel_requirements(wheel), wheel.name)
    if missing := sorted(needed.keys() - known):
        text = ", ".join(f"{name} ({needed[name]})" for name in missing)
        raise SystemExit(
            f"needed and neither carried nor known to be there: {text}; add them to CARRIED or THERE"
        )


def wheel_requirements(wheel: Path) -> set[str]:
    """Names of what a wheel needs on the machine."""
    with zipfile.ZipFile(wheel) as archive:
        path = next(name for name in archive.namelist() if name.endswith("dist-info/METADATA"))
        metadata = email.message_from_string(archive.read(path).decode())
    lines = metadata.get_all("Requires-Dist") or []
    return {requirement_name(line) for line in lines if "extra ==" not in line}


def project_requirements() -> set[str]:
    """Names in `install_requires` of setup.cfg."""
    text = (ROOT / "setup.cfg").read_text()
    block = text.split("install_requires =\n")[1].split("\n\n")[0]
    return {requirement_name(line.strip()) for line in block.splitlines()}


def requirement_name(line: str) -> str:
    """
    >>> requirement_name("huggingface_hub<3.0,>=1.31; python_version > '3.9'")
    'huggingface-hub'
    """
    found = re.match(r"[A-Za-z0-9._-]+", line)
    assert found is not None, line
    return canonical(found[0])


def pack_nccl(folder: Path) -> None:
    """The library of `NCCL` with the device code of one architecture, compressed."""
    from benchmarks.one_gpu.trim_fatbin import trim

    with tempfile.TemporaryDirectory() as temporary:
        pip("download", "--no-deps", "--only-binary=:all:", "-d", temporary, NCCL)
        (wheel,) = Path(temporary).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (n for n in archive.namelist() if n.endswith("libnccl.so.2"))
            archive.extract(member, temporary)
        trim(Path(temporary) / member, Path(temporary) / "trimmed", {ARCHITECTURE})
        with (
            open(Path(temporary) / "trimmed", "rb") as library,
            lzma.open(folder / NCCL_FILE, "wb", preset=6) as packed,
        ):
            shutil.copyfileobj(library, packed)


def describe(folder: Path) -> str:
    """Sizes of all files; raises SystemExit where they are too large to be carried."""
    sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    total = sum(sizes.values())
    lines = [f"{size:>12,}  {name}" for name, size in sizes.items()]
    lines.append(f"{total:>12,}  in {len(sizes)} files, {total / 2**20:.1f} MiB, in {folder}")
    if total > MOST_BYTES:
        raise SystemExit("\n".join([*lines, f"more than {MOST_BYTES / 2**20:.0f} MiB"]))
    return "\n".join(lines)


if __name__ == "__main__":
    main()

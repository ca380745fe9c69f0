"""Blanks the device code of all architectures but those wanted in a library with CUDA fat binaries.

Sizes and offsets stay, so that the library still loads; what is blank compresses to nothing.
"""

from __future__ import annotations

import mmap
import shutil
import struct
from collections.abc import Collection
from pathlib import Path

MAGIC = 0xBA55ED50
_PTX, _ELF = 1, 2


def trim(library: Path, out: Path, keep: Collection[int]) -> dict[tuple[int, bool], int]:
    """Write `library` to `out` with the code of architectures `keep` (90: Hopper); PTX goes, too.
    Returns bytes by architecture and whether they were kept.
    """
    shutil.copyfile(library, out)
    found: dict[tuple[int, bool], int] = {}
    with open(out, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        at, key = 0, struct.pack("<I", MAGIC)
        while (at := memory.find(key, at)) >= 0:
            version, header, size = struct.unpack_from("<HHQ", memory, at + 4)
            place, end = at + header, at + header + size
            if version != 1 or header != 16 or end > len(memory):
                at += 4
                continue
            while place < end:
                kind, _, entry_header, entry_size = struct.unpack_from("<HHIQ", memory, place)
                begin = place + entry_header
                if kind not in (_PTX, _ELF) or entry_header < 32 or begin + entry_size > end:
                    break
                (architecture,) = struct.unpack_from("<I", memory, place + 28)
                is_kept = kind == _ELF and architecture in keep
                case = (architecture, is_kept)
                found[case] = found.get(case, 0) + entry_size
                if not is_kept:
                    memory[begin : begin + entry_size] = bytes(entry_size)
                place = begin + entry_size
            at = end
    return found

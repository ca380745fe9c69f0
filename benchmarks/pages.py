"""Pages of docs/ that benchmarks write: Markdown tables, and one section at a time."""

from __future__ import annotations

import os
import textwrap
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

WIDTH = 120


def table(head: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    """A Markdown table; what is no text is written as `str` has it."""
    lines = ["| " + " | ".join(map(str, line)) + " |" for line in (head, *rows)]
    lines.insert(1, "|---" * len(head) + "|")
    return "\n".join(lines)


def paragraphs(*texts: str) -> str:
    """Texts and tables with an empty line between them."""
    return "\n\n".join(texts)


def how(command: str) -> str:
    """When and where `command` measures what follows."""
    return (
        f"`{command}` on {time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores of {processor()}, "
        f"load {os.getloadavg()[0]:.1f} at the start."
    )


def processor() -> str:
    """Name of the processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown processor"


def wrapped(text: str) -> str:
    """`text` with paragraphs of one line in lines as long as those of docs/; all else stays."""
    return "\n\n".join(
        block
        if "\n" in block or block.startswith(("|", "#", "<", "!", "- "))
        else textwrap.fill(block, WIDTH, break_long_words=False, break_on_hyphens=False)
        for block in text.split("\n\n")
    )


def put_section(page: Path, title: str, text: str) -> None:
    """Replace what stands under `## title` in `page`, or add it at the end; the rest stays."""
    head, *sections = page.read_text(encoding="utf-8").split("\n## ")
    new = f"{title}\n\n{wrapped(text)}\n"
    titles = [section.partition("\n")[0] for section in sections]
    if title in titles:
        sections[titles.index(title)] = new
    else:
        sections.append(new)
    body = "\n\n## ".join(section.strip("\n") for section in (head, *sections))
    page.write_text(body + "\n", encoding="utf-8")

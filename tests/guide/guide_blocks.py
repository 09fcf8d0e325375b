"""The code blocks of a page, by the machine on which they run."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r'^```(\w+)(?: title="([^"\n]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
CONTROLLER, EACH_HOST, USER, BUILDER = "controller", "each GPU host", "user", "build machine"
EACH_MACHINE = ("each machine", "Debian 13")
OTHERS = ("Ubuntu 24.04", "Rocky 9")
"""Systems whose blocks are not run."""
OUTPUT = "output"
"""Title of lines that the block before prints."""
HOSTS = ("gpu1", "gpu2")


@dataclass(frozen=True)
class Block:
    """One fenced block with its title: a machine or, for other languages than bash, a file."""

    page: str
    number: int
    language: str
    title: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.number} {self.title}"

    @property
    def machines(self) -> tuple[str, ...]:
        """The machines of the site that run it, in their order."""
        if self.title in EACH_MACHINE:
            return ("ctl", *HOSTS)
        return HOSTS if self.title == EACH_HOST else ("ctl",) if self.title in (CONTROLLER, USER) else (self.title,)


def blocks_of(page: Path) -> list[Block]:
    """Return all fenced blocks of a page in their order."""
    found = FENCE.findall(page.read_text(encoding="utf-8"))
    return [Block(page.name, number, *words) for number, words in enumerate(found, 1)]


def executed(pages: list[Path]) -> list[Block]:
    """Return the blocks that are executed or written, those with a title."""
    return [block for page in pages for block in blocks_of(page) if block.title and block.title not in OTHERS]


def by_wheels(install: Path, wheels: Path) -> list[Block]:
    """Return the blocks of Install with those of the page on wheels in place of each ``apt-get install``."""
    rest = []
    for block in executed([install]):
        text = re.sub(r"^apt-get install .*\n", "", block.text)
        if text and block.title != BUILDER:
            rest.append(replace(block, text=text.replace("python3 ", "env/bin/python ")))
    return [*executed([wheels]), *rest]

"""Pages of the documentation: their code blocks, with the comments that say which test runs each."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from support.paths import DOCS, ROOT

PAGES: Final = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
_BLOCK: Final = re.compile(r"(?:^<!-- ([^\n]*) -->\n)?^```(console|sh|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """A code block of a page.

    Attributes:
        where: Page and line.
        mark: The comment above: `tested: FILE` or `not run: REASON`; empty if there is none.
        language: console, sh or python.
        text: The code.
    """

    where: str
    mark: str
    language: str
    text: str

    @property
    def commands(self) -> list[str]:
        """The commands of a console block, without their output; the whole of an sh block."""
        if self.language != "console":
            return [self.text] if self.language == "sh" else []
        return re.findall(r"^\$ ((?:.*\\\n)*.*)$", self.text, re.MULTILINE)


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of a page in their order."""
    text = page.read_text(encoding="utf-8")
    for found in _BLOCK.finditer(text):
        line = text.count("\n", 0, found.start(2)) + 1
        yield Block(f"{page.relative_to(ROOT)}:{line}", found[1] or "", found[2], found[3])

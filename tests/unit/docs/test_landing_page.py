"""The landing page quotes figures of the pages that it links to."""

import re
from pathlib import Path
from typing import Final

from support.paths import DOCS

INDEX: Final = DOCS / "index.md"
FIGURE: Final = re.compile(r"(?<![\w.,])\d+(?:[.,]\d+)*")
LINK: Final = re.compile(r"\]\(([^)#]+\.md)#([^)]+)\) \|$")


def section(page: Path, anchor: str) -> str:
    """The text below a heading, up to the next one of its level or above."""
    sections = re.split(r"^(#+) (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    found = ""
    level = 0
    for marks, title, text in zip(sections[::3], sections[1::3], sections[2::3], strict=True):
        if level and len(marks) <= level:
            return found
        if re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") == anchor:
            level = len(marks)
        if level:
            found += text
    assert found, f"{page} has no heading {anchor}"
    return found


def test_figures_are_those_of_the_linked_sections() -> None:
    rows = re.findall(r"^\| (?!situation|---).*\|$", INDEX.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) == 6
    for row in rows:
        ((page, anchor),) = LINK.findall(row)
        figures = set(FIGURE.findall(LINK.sub("", row)))
        assert figures <= set(FIGURE.findall(section(INDEX.parent / page, anchor))), row


def test_ratios_of_a_step_are_those_of_the_performance_page() -> None:
    text = INDEX.read_text(encoding="utf-8")
    (ratios,) = re.findall(r"takes ([\d.]+), ([\d.]+), ([\d.]+) and ([\d.]+) times as long", text)
    source = section(DOCS / "explanation" / "performance.md", "in-a-vllm-engine")
    assert ratios == tuple(re.findall(r"^\| \d+ \| .* \| ([\d.]+) \([\d.]+\) \|$", source, re.MULTILINE))

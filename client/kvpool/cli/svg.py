"""Pictures as SVG files, for `--plot`."""

from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Final

import click

from kvpool.cli.text import clean

_STYLE: Final = """\
text { font: 12px sans-serif; fill: #202124; text-anchor: middle; }
.title { font-weight: bold; }
.start { text-anchor: start; }
.end { text-anchor: end; }
.grid { stroke: #e0e0e0; }
.axis { fill: none; stroke: #5f6368; }
.curve { fill: none; stroke: #1b6ca8; stroke-width: 2; }
.point { fill: #1b6ca8; }
.pool { fill: #d1495b; }"""


def picture(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    """Returns an SVG document with a title above its parts, whose classes are those of the style."""
    body, title = "\n".join(parts), escape(clean(title))
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"
    width="{width}" height="{height}">
<title>{title}</title>
<style>
{_STYLE}
</style>
<rect width="{width}" height="{height}" fill="#ffffff"/>
<text x="{width // 2}" y="22" class="title">{title}</text>
{body}
</svg>
"""


def write_plot(path: Path, document: str) -> None:
    """Writes the file of `--plot`.

    Raises:
        click.UsageError: The file cannot be written.
    """
    try:
        path.write_text(document, encoding="utf-8")
    except OSError as error:
        raise click.UsageError(f"--plot: {path}: {error.strerror}") from error

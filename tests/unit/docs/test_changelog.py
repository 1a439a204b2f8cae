"""What the code takes from CHANGELOG.md."""

import re
from datetime import UTC, datetime

from kvpool.cli.serve import RELEASED_SECONDS
from support.paths import ROOT


def test_the_clock_is_compared_with_the_newest_release() -> None:
    newest = max(re.findall(r"^## \[.+\] - ([0-9-]+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE))
    assert datetime.fromtimestamp(RELEASED_SECONDS, UTC).isoformat() == f"{newest}T00:00:00+00:00"

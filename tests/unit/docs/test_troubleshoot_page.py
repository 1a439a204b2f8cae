"""docs/how-to/troubleshoot.md names reasons and messages that the code has."""

import re

from kvpool.wire import unreachable
from support.paths import DOCS, ROOT

PAGE = (DOCS / "how-to" / "troubleshoot.md").read_text()
SOURCES = [
    path.read_text() for part in ("server", "client", "gpu_worker", "proto") for path in (ROOT / part).rglob("*.py")
]
OTHERS = {"PERMISSION_DENIED", "KVPOOL_MEMORY", "KVPOOL_MEMORY_TOKEN_FILE", "KVPOOL_TLS_CA", "VLLM_PLUGINS"}


def test_reasons_exist() -> None:
    named = set(re.findall(r"\b[A-Z]+(?:_[A-Z]+)+\b", PAGE)) - OTHERS
    assert len(named) > 30
    assert not {reason for reason in named if not any(f'"{reason}"' in source for source in SOURCES)}


def test_messages_of_unreachable_servers_exist() -> None:
    table = PAGE.partition("## The server cannot be reached")[2].partition("\n## ")[0]
    words = " ".join(words for _, words in unreachable._WORDS)
    messages: list[str] = re.findall(r"^\| `([a-z][A-Za-z' ,]+)` \|", table, re.MULTILINE)
    assert len(messages) > 5
    assert not [message for message in messages if message not in words]

"""Server-sent events, read as a browser reads them."""

import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from support.waiting import DEADLINE_SECONDS

ServerSentEvent = tuple[str, Any]
"""Name and data."""


@contextmanager
def server_sent_events(url: str) -> Iterator[Iterator[ServerSentEvent]]:
    """Opens a stream; yields its events, with data of JSON."""
    with urllib.request.urlopen(url, timeout=DEADLINE_SECONDS) as answer:  # noqa: S310 - our own server
        assert answer.headers["Content-Type"] == "text/event-stream"
        yield _events(answer)


def _events(lines: Iterator[bytes]) -> Iterator[ServerSentEvent]:
    name = ""
    for line in lines:
        field, _, value = line.decode().rstrip("\n").partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            yield name, json.loads(value)

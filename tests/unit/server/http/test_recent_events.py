"""The newest events of the log, for the status page."""

import logging
from collections.abc import Iterator

import pytest

from kvpool.server.http.recent_events import KEPT_EVENTS, RecentEvents

LOG = logging.getLogger("kvpool.server.ranks")


@pytest.fixture
def events() -> Iterator[RecentEvents]:
    kept = RecentEvents()
    kept.start()
    LOG.setLevel(logging.DEBUG)
    yield kept
    LOG.setLevel(logging.NOTSET)
    kept.stop()


def test_events_are_kept_with_their_fields_the_newest_first(events: RecentEvents) -> None:
    LOG.warning("epoch passed", extra={"pool": "m", "epoch": 7, "absent_ranks": [1, 2]})
    LOG.info("session opened", extra={"session": 1})
    LOG.debug("call refused")
    LOG.error("bug", extra={"method": "x" * 1000})
    newest, first = events.as_json()
    assert (first["event"], first["level"]) == ("epoch passed", "warning")
    assert first["fields"] == {"pool": "m", "epoch": "7", "absent_ranks": "1, 2"}
    assert len(newest["fields"]["method"]) < 400


def test_events_are_bounded_and_end_with_the_server(events: RecentEvents) -> None:
    for i in range(2 * KEPT_EVENTS):
        LOG.info("rank back", extra={"rank": i})
    kept = events.as_json()
    assert (len(kept), kept[0]["fields"]["rank"]) == (KEPT_EVENTS, str(2 * KEPT_EVENTS - 1))
    events.stop()
    LOG.info("rank left")
    assert events.as_json() == kept

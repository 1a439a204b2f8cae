"""The time for which a lease is certain to last, which never exceeds the server's count."""

import pytest

from kvpool.client import lease as lease_module
from kvpool.client.lease import LeaseTimer


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(lease_module, "now_seconds", lambda: now[0])
    return now


def test_the_lease_counts_from_when_the_answered_call_was_sent(clock: list[float]) -> None:
    lease = LeaseTimer(10.0, 98.0)
    assert lease.left_seconds == 8.0
    lease.renew(100.0)
    assert lease.left_seconds == 10.0
    lease.renew(99.0)  # an older call, answered later
    assert lease.left_seconds == 10.0
    clock[0] = 111.0
    assert lease.left_seconds == 0.0


def test_an_ended_lease_is_not_renewed(clock: list[float]) -> None:
    lease = LeaseTimer(10.0, clock[0])
    lease.end()
    lease.renew(clock[0])
    assert lease.left_seconds == 0.0

"""Rules of attentive_clock."""

from kvpool.core.pause_tolerant_clock import READ_INTERVAL_SECONDS, PauseTolerantClock


def test_a_clock_that_is_read_often_shows_the_source_time() -> None:
    clock = PauseTolerantClock(100.0)
    shown = [100.0 + READ_INTERVAL_SECONDS * n for n in range(40)]
    assert [clock.read(seconds) for seconds in shown] == shown
    assert clock.read(shown[-1] + 2 * READ_INTERVAL_SECONDS) == shown[-1] + 2 * READ_INTERVAL_SECONDS


def test_a_pause_of_any_length_counts_as_one_read_interval() -> None:
    clock = PauseTolerantClock(0.0)
    assert clock.read(3600.0) == READ_INTERVAL_SECONDS
    assert clock.read(3600.1) - READ_INTERVAL_SECONDS < 0.2
    before = clock.read(3600.2)
    assert clock.read(7200.0) == before + READ_INTERVAL_SECONDS


def test_leases_still_expire_on_a_server_that_always_reads_late() -> None:
    clock = PauseTolerantClock(0.0)
    assert clock.read(1.0) < clock.read(2.0) < clock.read(3.0)

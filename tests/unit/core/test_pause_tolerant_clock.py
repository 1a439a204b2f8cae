"""Rules of pause_tolerant_clock."""

from kvpool.core.pause_tolerant_clock import MAX_RUN_SECONDS, PauseTolerantClock


def test_a_clock_that_is_started_in_time_shows_the_source_time() -> None:
    clock = PauseTolerantClock(100.0)
    for seconds in [100.0 + MAX_RUN_SECONDS * n for n in range(40)]:
        assert clock.read(seconds) == seconds
        clock.start(seconds)
        assert clock.read(seconds + MAX_RUN_SECONDS / 2) == seconds + MAX_RUN_SECONDS / 2


def test_a_pause_of_any_length_counts_only_until_the_clock_stops() -> None:
    clock = PauseTolerantClock(0.0)
    assert clock.read(3600.0) == 0.0, "the clock does not run yet"
    clock.start(3600.0)
    assert clock.read(3600.0625) == 0.0625
    assert clock.read(7200.0) == clock.read(7300.0) == MAX_RUN_SECONDS
    clock.start(7300.0)
    assert clock.read(7300.0) == MAX_RUN_SECONDS
    assert clock.read(7400.0) == 2 * MAX_RUN_SECONDS


def test_leases_still_expire_on_a_server_that_is_always_late() -> None:
    clock = PauseTolerantClock(0.0)
    for late in range(1, 4):
        clock.start(10.0 * late)
        assert clock.read(10.0 * late + 9.0) == late * MAX_RUN_SECONDS

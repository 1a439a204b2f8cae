"""Rules of pause_tolerant_clock."""

from kvpool.core.pause_tolerant_clock import MAX_RUN_SECONDS, PauseTolerantClock


class _Source:
    """The source clock, and the clock that reads it."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.clock = PauseTolerantClock(lambda: self.seconds)

    def start(self, seconds: float) -> None:
        self.seconds = seconds
        self.clock.start()

    def read(self, seconds: float) -> float:
        self.seconds = seconds
        return self.clock.now_seconds()


def test_a_clock_that_is_started_in_time_shows_the_source_time() -> None:
    clock = _Source(100.0)
    for seconds in [100.0 + MAX_RUN_SECONDS * n for n in range(40)]:
        assert clock.read(seconds) == seconds
        clock.start(seconds)
        assert clock.read(seconds + MAX_RUN_SECONDS / 2) == seconds + MAX_RUN_SECONDS / 2


def test_a_pause_of_any_length_counts_only_until_the_clock_stops() -> None:
    clock = _Source(0.0)
    assert clock.read(3600.0) == 0.0, "the clock does not run yet"
    clock.start(3600.0)
    assert clock.read(3600.0625) == 0.0625
    assert clock.read(7200.0) == clock.read(7300.0) == MAX_RUN_SECONDS
    clock.start(7300.0)
    assert clock.read(7300.0) == MAX_RUN_SECONDS
    assert clock.read(7400.0) == 2 * MAX_RUN_SECONDS


def test_leases_still_expire_on_a_server_that_is_always_late() -> None:
    clock = _Source(0.0)
    for late in range(1, 4):
        clock.start(10.0 * late)
        assert clock.read(10.0 * late + 9.0) == late * MAX_RUN_SECONDS


def test_a_clock_continues_from_a_later_one() -> None:
    clock = _Source(100.0)
    clock.start(100.0)
    clock.clock.advance_to(50.0)
    assert clock.read(100.25) == 100.25
    clock.clock.advance_to(200.0)
    assert clock.read(100.5) == 200.25

"""Rules of pauses between attempts."""

from kvpool.wire.backoff import Backoff


def test_pauses_double_up_to_the_maximum_until_a_success() -> None:
    backoff = Backoff(0.1, 0.5, draw=lambda: 0.0)
    assert [backoff.next() for _ in range(5)] == [0.1, 0.2, 0.4, 0.5, 0.5]
    backoff.reset()
    assert backoff.next() == 0.1


def test_a_pause_is_extended_by_a_random_share() -> None:
    assert Backoff(0.2, 1.0, draw=lambda: 0.5).next() == 0.2 * 1.5
    assert Backoff(0.2, 1.0, jitter=0.1, draw=lambda: 0.5).next() == 0.2 * 1.05
    assert Backoff(0.2, 1.0, jitter=0.0, draw=lambda: 0.5).next() == 0.2


def test_a_requested_pause_is_a_minimum_and_lengthens_no_later_one() -> None:
    backoff = Backoff(0.1, 0.5, draw=lambda: 0.5)
    assert [backoff.next(5.0), backoff.next(0.0)] == [5.0 * 1.05, 0.0]
    assert backoff.next() == 0.1 * 1.5


def test_pauses_differ_by_default() -> None:
    assert len({Backoff(0.1, 0.5).next() for _ in range(20)}) > 1

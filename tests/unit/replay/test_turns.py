"""Schedulers that play in turn."""

import threading

from kvpool.replay.processes import _Turns
from support.waiting import DEADLINE_SECONDS


def test_rounds_are_played_in_order_until_all_have_left() -> None:
    turns, played = _Turns(3), list[int]()

    def play(index: int, rounds: int) -> None:
        for number in range(rounds):
            if number:
                turns.pass_on(index)
            turns.wait(index)
            played.append(index)
        turns.leave(index)

    players = [threading.Thread(target=play, args=(i, rounds)) for i, rounds in enumerate((2, 4, 1))]
    for player in reversed(players):
        player.start()
    for player in players:
        player.join(DEADLINE_SECONDS)
    assert played == [0, 1, 2, 0, 1, 1, 1]


def test_the_others_continue_after_one_died() -> None:
    turns = _Turns(2)
    turns.is_broken.set()
    turns.wait(1)  # number 0 has the turn, and does not pass it on

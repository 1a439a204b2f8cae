"""The checks of a run find each kind of broken promise in logs that are forged to show it, and none in a sound one."""

from typing import Any

import pytest

from crash.ownership import Session, sessions_of
from crash.records import Record
from crash.scheduler import RANKED_POOL
from crash.verdict import Story, Verdict, judge_sessions

CELL, OTHER_CELL = "00aa", "00bb"
LEASE = 2.0


def at(seconds: float, kind: str, **fields: Any) -> Record:
    return {"kind": kind, "at": seconds, **fields}


def opened(seconds: float, **fields: Any) -> Record:
    return at(seconds, "opened", **{"pool": "p", "incarnation": "1", "sent": seconds - 0.1, "lease": LEASE, **fields})


def told(seconds: float, seq: int, **fields: Any) -> list[Record]:
    """A step that was sent a tenth of a second before."""
    record = {"seq": seq, "sent": seconds - 0.1, "new": [], "hit": [], "gone": [], **fields}
    return [at(seconds - 0.1, "ask", seq=seq), at(seconds, "told", **record)]


def log(*records: Record | list[Record]) -> list[Record]:
    flat: list[Record] = []
    for record in records:
        flat += record if isinstance(record, list) else [record]
    return flat


def violations(*logs: list[Record], run: tuple[Record, ...] = (), journaled: bool = False) -> list[str]:
    """The kinds of what is found."""
    verdict = Verdict()
    sessions: list[Session] = []
    for i, records in enumerate(logs):
        sessions += sessions_of(f"scheduler-{i}", records)
    judge_sessions(verdict, sessions, Story(run, journaled=journaled))
    return [line.partition(":")[0] for line in verdict.violations]


def test_a_block_that_goes_from_one_to_the_other_is_sound() -> None:
    first = log(opened(1), told(2, 1, new=[5]), told(3, 2, gone=[5]), at(4, "closed"))
    second = log(opened(1), told(3.2, 1, new=[5]), at(4, "closed"))
    assert not violations(first, second)


def test_a_block_given_to_two() -> None:
    first = log(opened(1), told(2, 1, new=[5]), told(4, 2, gone=[5]))
    second = log(opened(1), told(3, 1, new=[5]), told(5, 2))
    assert violations(first, second) == ["TWO_OWNERS"]


def test_a_block_given_anew_while_another_holds_it_as_a_hit() -> None:
    first = log(opened(1), told(2, 1, hit=[[5, CELL]]), told(4, 2))
    second = log(opened(1), told(3, 1, new=[5]), told(5, 2))
    assert violations(first, second) == ["TWO_OWNERS"]


@pytest.mark.parametrize(("cell", "found"), [(CELL, []), (OTHER_CELL, ["TWO_OWNERS"])])
def test_a_hit_is_held_with_its_owner_if_it_is_what_he_computed(cell: str, found: list[str]) -> None:
    first = log(opened(1), told(2, 1, new=[5]), at(2.1, "full", blocks=[[5, CELL]]), told(4, 2))
    second = log(opened(1), told(3, 1, hit=[[5, cell]]), told(5, 2))
    assert violations(first, second) == found


def test_a_hit_on_what_its_owner_never_filled() -> None:
    first = log(opened(1), told(2, 1, new=[5]), told(4, 2))
    second = log(opened(1), told(3, 1, hit=[[5, CELL]]), told(5, 2))
    assert violations(first, second) == ["TWO_OWNERS"]


@pytest.mark.parametrize(("cell", "found"), [(CELL, []), (OTHER_CELL, ["TWO_OWNERS"])])
def test_two_hits_agree(cell: str, found: list[str]) -> None:
    first = log(opened(1), told(2, 1, hit=[[5, CELL]]), told(4, 2))
    second = log(opened(1), told(3, 1, hit=[[5, cell]]), told(5, 2))
    assert violations(first, second) == found


def test_another_incarnation_of_the_pool_has_other_blocks() -> None:
    first = log(opened(1), told(2, 1, new=[5]), told(4, 2))
    second = log(opened(1, incarnation="2"), told(3, 1, new=[5]), told(5, 2))
    assert not violations(first, second)


def test_a_block_is_not_surely_held_once_a_message_was_not_answered() -> None:
    first = log(opened(1), told(2, 1, new=[5]), at(2.5, "ask", seq=2), at(9, "start"))
    second = log(opened(1), told(3, 1, new=[5]), told(4, 2))
    assert not violations(first, second)


def test_a_dead_scheduler_holds_its_blocks_until_its_last_sign_of_life() -> None:
    first = log(opened(1), told(2, 1, new=[5]), told(3.5, 2), at(9, "start"))
    second = log(opened(1), told(3, 1, new=[5]), told(4, 2))
    assert violations(first, second) == ["TWO_OWNERS"]


def test_a_lease_that_is_over_holds_nothing() -> None:
    lost = at(9, "lost", reason="LEASE_EXPIRED")
    first = log(opened(1), told(2, 1, new=[5]), at(8, "full", blocks=[]), lost)
    second = log(opened(1), told(5, 1, new=[5]), told(6, 2))
    assert not violations(first, second, run=(at(0, "starting", target="server"),))


def test_an_answer_that_is_read_when_the_lease_is_over_gives_nothing() -> None:
    """Its scheduler was stopped: what it is told was another's by then, and it cannot use it."""
    answer = at(20, "told", seq=2, sent=3, new=[5], hit=[], gone=[])
    lost = at(21, "lost", reason="LEASE_EXPIRED")
    first = log(opened(1), told(2, 1, new=[4]), at(3, "ask", seq=2), answer, at(20.5, "ask", seq=3), lost)
    second = log(opened(1), told(18, 1, new=[5]), told(22, 2))
    assert not violations(first, second, run=(at(0, "starting", target="server"),))


def test_a_gap_in_the_numbers() -> None:
    assert violations(log(opened(1), told(2, 1), told(3, 3))) == ["SEQUENCE_GAP"]


def test_what_a_scheduler_noticed_itself() -> None:
    assert violations(log(opened(1), at(2, "violation", what="WRONG_CONTENT"))) == ["WRONG_CONTENT"]


@pytest.mark.parametrize(
    ("reason", "lost_at", "found"),
    [
        ("LEASE_EXPIRED", 4.0, []),
        ("LEASE_EXPIRED", 3.8, ["LOST"]),
        ("SESSION_NOT_FOUND", 3.5, ["LOST"]),
        ("EPOCH_PASSED", 3.5, ["LOST"]),
        ("SESSION_EVICTED", 3.5, ["LOST"]),
        ("UNAVAILABLE", 60.0, ["LOST"]),
    ],
)
def test_a_session_is_lost_for_a_good_reason_only(reason: str, lost_at: float, found: list[str]) -> None:
    run = (at(0, "starting", target="server"),)
    assert violations(log(opened(1), told(2, 1), at(lost_at, "lost", reason=reason)), run=run) == found


def test_an_epoch_passes_only_where_there_are_ranks() -> None:
    assert not violations(log(opened(1, pool=RANKED_POOL), told(2, 1), at(3, "lost", reason="EPOCH_PASSED")))


@pytest.mark.parametrize(("journaled", "found"), [(False, []), (True, ["LOST"])])
def test_a_new_server_forgets_sessions_only_without_a_journal(*, journaled: bool, found: list[str]) -> None:
    run = (at(0, "starting", target="server"), at(2.5, "starting", target="server"))
    records = log(opened(1), told(2, 1), at(3, "lost", reason="SESSION_NOT_FOUND"))
    assert violations(records, run=run, journaled=journaled) == found


@pytest.mark.parametrize("came_back", [at(3.9, "starting", target="server"), at(3.9, "cont", target="server")])
def test_the_servers_own_absence_ends_no_lease(came_back: Record) -> None:
    gone = at(3.0, "kill" if came_back["kind"] == "starting" else "stop", target="server", how="SIGKILL")
    run = (at(0, "starting", target="server"), gone, came_back)
    records = log(opened(1), told(2, 1), at(5.5, "lost", reason="LEASE_EXPIRED"))
    assert violations(records, run=run, journaled=True) == ["LOST"]
    assert not violations([*records[:-1], at(6.0, "lost", reason="LEASE_EXPIRED")], run=run, journaled=True)


def test_a_lease_may_have_run_out_before_the_server_was_killed() -> None:
    run = (
        at(0, "starting", target="server"),
        at(4.5, "kill", target="server", how="SIGKILL"),
        at(4.6, "starting", target="server"),
    )
    records = log(opened(1), told(2, 1), at(5, "lost", reason="LEASE_EXPIRED"))
    assert not violations(records, run=run, journaled=True)

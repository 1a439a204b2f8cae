"""The checks of a run find each kind of violation in forged logs, and none in a correct log."""

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


def answered(seconds: float, seq: int, **fields: Any) -> list[Record]:
    """Records of a step that was sent 0.1 seconds before its answer."""
    record = {"seq": seq, "sent": seconds - 0.1, "new": [], "hit": [], "gone": [], **fields}
    return [at(seconds - 0.1, "ask", seq=seq), at(seconds, "answered", **record)]


def log(*records: Record | list[Record]) -> list[Record]:
    flat: list[Record] = []
    for record in records:
        flat += record if isinstance(record, list) else [record]
    return flat


def violations(
    *logs: list[Record], run: tuple[Record, ...] = (), journaled: bool = False, is_cluster: bool = False
) -> list[str]:
    """Kinds of the violations found."""
    verdict = Verdict()
    sessions: list[Session] = []
    for i, records in enumerate(logs):
        sessions += sessions_of(f"scheduler-{i}", records)
    judge_sessions(verdict, sessions, Story(run, journaled=journaled, is_cluster=is_cluster))
    return [line.partition(":")[0] for line in verdict.violations]


def test_a_block_passed_between_sessions_is_no_violation() -> None:
    first = log(opened(1), answered(2, 1, new=[5]), answered(3, 2, gone=[5]), at(4, "closed"))
    second = log(opened(1), answered(3.2, 1, new=[5]), at(4, "closed"))
    assert not violations(first, second)


def test_a_block_held_by_two_sessions_is_a_violation() -> None:
    first = log(opened(1), answered(2, 1, new=[5]), answered(4, 2, gone=[5]))
    second = log(opened(1), answered(3, 1, new=[5]), answered(5, 2))
    assert violations(first, second) == ["TWO_OWNERS"]


def test_a_block_allocated_while_held_as_a_hit_is_a_violation() -> None:
    first = log(opened(1), answered(2, 1, hit=[[5, CELL]]), answered(4, 2))
    second = log(opened(1), answered(3, 1, new=[5]), answered(5, 2))
    assert violations(first, second) == ["TWO_OWNERS"]


@pytest.mark.parametrize(("cell", "found"), [(CELL, []), (OTHER_CELL, ["TWO_OWNERS"])])
def test_a_hit_on_computed_contents_is_no_violation(cell: str, found: list[str]) -> None:
    first = log(opened(1), answered(2, 1, new=[5]), at(2.1, "full", blocks=[[5, CELL]]), answered(4, 2))
    second = log(opened(1), answered(3, 1, hit=[[5, cell]]), answered(5, 2))
    assert violations(first, second) == found


def test_of_two_messages_the_second_may_hit_what_the_first_freed() -> None:
    """The step was refused blocks, and asked again; another session filled the block between its messages."""
    again = answered(4, 3, first=2, sent=2.1, hit=[[5, CELL]])
    first = log(opened(1), answered(2, 1, new=[5]), again, answered(5, 4))
    second = log(opened(1), answered(3, 1, new=[5]), at(3.1, "full", blocks=[[5, CELL]]), answered(6, 2))
    assert not violations(first, second)


def test_a_hit_on_an_unfilled_block_is_a_violation() -> None:
    first = log(opened(1), answered(2, 1, new=[5]), answered(4, 2))
    second = log(opened(1), answered(3, 1, hit=[[5, CELL]]), answered(5, 2))
    assert violations(first, second) == ["TWO_OWNERS"]


@pytest.mark.parametrize(("cell", "found"), [(CELL, []), (OTHER_CELL, ["TWO_OWNERS"])])
def test_two_hits_on_one_block_are_no_violation(cell: str, found: list[str]) -> None:
    first = log(opened(1), answered(2, 1, hit=[[5, CELL]]), answered(4, 2))
    second = log(opened(1), answered(3, 1, hit=[[5, cell]]), answered(5, 2))
    assert violations(first, second) == found


def test_blocks_of_another_incarnation_are_different() -> None:
    first = log(opened(1), answered(2, 1, new=[5]), answered(4, 2))
    second = log(opened(1, incarnation="2"), answered(3, 1, new=[5]), answered(5, 2))
    assert not violations(first, second)


def test_a_block_is_not_surely_held_after_an_unanswered_message() -> None:
    first = log(opened(1), answered(2, 1, new=[5]), at(2.5, "ask", seq=2), at(9, "start"))
    second = log(opened(1), answered(3, 1, new=[5]), answered(4, 2))
    assert not violations(first, second)


def test_a_dead_scheduler_holds_its_blocks_until_its_last_message() -> None:
    first = log(opened(1), answered(2, 1, new=[5]), answered(3.5, 2), at(9, "start"))
    second = log(opened(1), answered(3, 1, new=[5]), answered(4, 2))
    assert violations(first, second) == ["TWO_OWNERS"]


def test_an_expired_lease_holds_nothing() -> None:
    lost = at(9, "lost", reason="LEASE_EXPIRED")
    first = log(opened(1), answered(2, 1, new=[5]), at(8, "full", blocks=[]), lost)
    second = log(opened(1), answered(5, 1, new=[5]), answered(6, 2))
    assert not violations(first, second, run=(at(0, "starting", target="server"),))


def test_an_answer_read_after_the_lease_gives_nothing() -> None:
    """The scheduler was stopped; the block was reallocated before it read the answer."""
    answer = at(20, "answered", seq=2, sent=3, new=[5], hit=[], gone=[])
    lost = at(21, "lost", reason="LEASE_EXPIRED")
    first = log(opened(1), answered(2, 1, new=[4]), at(3, "ask", seq=2), answer, at(20.5, "ask", seq=3), lost)
    second = log(opened(1), answered(18, 1, new=[5]), answered(22, 2))
    assert not violations(first, second, run=(at(0, "starting", target="server"),))


def test_a_gap_in_the_numbers_is_a_violation() -> None:
    assert violations(log(opened(1), answered(2, 1), answered(3, 3))) == ["SEQUENCE_GAP"]


def test_violations_found_by_a_scheduler_are_reported() -> None:
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
def test_a_session_may_be_lost_for_a_valid_reason_only(reason: str, lost_at: float, found: list[str]) -> None:
    run = (at(0, "starting", target="server"),)
    assert violations(log(opened(1), answered(2, 1), at(lost_at, "lost", reason=reason)), run=run) == found


def test_an_epoch_may_pass_only_in_a_pool_of_ranks() -> None:
    assert not violations(log(opened(1, pool=RANKED_POOL), answered(2, 1), at(3, "lost", reason="EPOCH_PASSED")))


@pytest.mark.parametrize(("struck_at", "found"), [(22.5, []), (20.5, []), (10.5, ["LOST"]), (23.5, ["LOST"])])
def test_in_a_cluster_an_epoch_may_pass_only_if_a_rank_was_struck(struck_at: float, found: list[str]) -> None:
    """A session may be opened before the rank is missed."""
    run = (at(struck_at, "kill", target="rank", how="SIGKILL"),)
    records = log(opened(21, pool=RANKED_POOL), answered(22, 1), at(23, "lost", reason="EPOCH_PASSED"))
    assert violations(records, run=run, is_cluster=True) == found


def in_cluster(lost_at: float, *run: Record) -> list[str]:
    """Kinds of the violations if a session expires whose last message is sent at 2.9. The first primary is a."""
    records = log(opened(1), answered(3, 1), at(lost_at, "lost", reason="LEASE_EXPIRED"))
    became = at(0, "became primary", server="a")
    return violations(records, run=(became, *run), journaled=True, is_cluster=True)


@pytest.mark.parametrize(("lost_at", "found"), [(6.1, []), (5.9, ["LOST"])])
def test_a_takeover_renews_leases(lost_at: float, found: list[str]) -> None:
    """The times of takeovers are added to the log at its end."""
    struck = at(3.9, "kill", target="server", how="SIGKILL of the primary", servers=["a"])
    later = at(9, "kill", target="server", how="SIGKILL of the primary", servers=["b"])
    assert in_cluster(lost_at, struck, later, at(4, "became primary", server="b")) == found


@pytest.mark.parametrize(("lost_at", "found"), [(5.0, []), (4.8, ["LOST"])])
@pytest.mark.parametrize("kind", ["kill", "stop"])
def test_a_strike_without_a_takeover_renews_no_lease(kind: str, lost_at: float, found: list[str]) -> None:
    struck = (at(seconds, kind, target="server", how="of the standby", servers=["b"]) for seconds in (2.5, 3.5, 4.5))
    assert in_cluster(lost_at, *struck) == found


@pytest.mark.parametrize(
    ("server", "lost_at", "found"), [("a", 6.0, []), ("a", 5.8, ["LOST"]), ("b", 5.0, []), ("b", 4.8, ["LOST"])]
)
def test_leases_run_for_half_a_second_of_a_pause_of_the_primary(server: str, lost_at: float, found: list[str]) -> None:
    """Server a is paused for 1.5 s, of which leases do not run for 1 s. A pause of the standby does not matter."""
    pause = (at(3, "paused", server=server), at(4.5, "continued", server=server))
    assert in_cluster(lost_at, at(3, "stop", target="server", how="SIGSTOP", servers=[server]), *pause) == found


@pytest.mark.parametrize(("lost_at", "found"), [(10.1, []), (9.9, ["LOST"])])
def test_leases_do_not_run_while_both_servers_are_dead(lost_at: float, found: list[str]) -> None:
    struck = at(3, "kill", target="server", how="SIGKILL of both", servers=["a", "b"])
    assert in_cluster(lost_at, struck, at(8, "became primary", server="a")) == found


@pytest.mark.parametrize(("journaled", "found"), [(False, []), (True, ["LOST"])])
def test_a_new_server_may_forget_sessions_only_without_a_journal(*, journaled: bool, found: list[str]) -> None:
    run = (at(0, "starting", target="server"), at(2.5, "starting", target="server"))
    records = log(opened(1), answered(2, 1), at(3, "lost", reason="SESSION_NOT_FOUND"))
    assert violations(records, run=run, journaled=journaled) == found


def test_the_absence_of_the_server_expires_no_lease() -> None:
    run = (
        at(0, "starting", target="server"),
        at(3.0, "kill", target="server", how="SIGKILL"),
        at(3.9, "starting", target="server"),
    )
    records = log(opened(1), answered(2, 1), at(5.5, "lost", reason="LEASE_EXPIRED"))
    assert violations(records, run=run, journaled=True) == ["LOST"]
    assert not violations([*records[:-1], at(6.0, "lost", reason="LEASE_EXPIRED")], run=run, journaled=True)


@pytest.mark.parametrize(("lost_at", "found"), [(4.4, []), (4.2, ["LOST"])])
def test_leases_run_for_half_a_second_of_a_pause_of_the_server(lost_at: float, found: list[str]) -> None:
    """The session's last message is sent at 1.9; of the pause, leases do not run for 0.4 s."""
    run = (
        at(0, "starting", target="server"),
        at(3.0, "stop", target="server", how="SIGSTOP"),
        at(3.9, "cont", target="server"),
    )
    assert violations(log(opened(1), answered(2, 1), at(lost_at, "lost", reason="LEASE_EXPIRED")), run=run) == found


def test_a_lease_may_expire_before_the_server_is_killed() -> None:
    run = (
        at(0, "starting", target="server"),
        at(4.5, "kill", target="server", how="SIGKILL"),
        at(4.6, "starting", target="server"),
    )
    records = log(opened(1), answered(2, 1), at(5, "lost", reason="LEASE_EXPIRED"))
    assert not violations(records, run=run, journaled=True)

"""Ranks do what their transcripts show; numbers of rules are those of gpu_worker/rank_protocol.py."""

from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from kvpool.core import errors
from kvpool.core.ids import SessionNumber, TableLease
from kvpool.core.ranks.messages import MAX_NAMED_SESSIONS, FenceSet, Ready
from kvpool.gpu_worker.rank_effects import Allocation, Failed, Fenced, JoinLater, OpenStream, Send, SessionsGone
from kvpool.gpu_worker.rank_protocol import RankProtocol
from kvpool.lending.fence import Fence
from kvpool.wire.errors import DeadlineError, ServerError
from support.rank_protocol_transcript import ERRORS, RankTranscript
from support.rank_server import plan_config
from support.ranks import declaring, registration
from support.transcripts import check

PATHS: Final = sorted(Path(__file__).with_name("transcripts").glob("*.txt"))
NOW: Final = 1000.0


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_ranks_do_what_the_transcript_shows(path: Path) -> None:
    check(path, RankTranscript(continued_epoch=int(path.stem == "continued_epoch")).execute)


def test_rule_5_the_search_chooses_the_server_and_the_pause_before_the_next_stream() -> None:
    rank = RankProtocol(registration(), ("g:1", "h:1"), Fence(), draw=lambda: 0.5)
    for error, target, pause_seconds in (
        (errors.NotPrimaryError(("i:1",), 1), "i:1", 0.0),
        (ERRORS["UNAVAILABLE"], "h:1", 0.0),
        (ERRORS["UNAVAILABLE"], "g:1", 0.05 * 1.05),
        (errors.AbortedError("RANK_GIVEN_UP", ""), "g:1", 0.1 * 1.5),
    ):
        rank.tick(rank.next_due_seconds)
        (later,) = rank.stream_ended(error, NOW)
        assert isinstance(later, JoinLater)
        assert rank.target == target
        assert later.pause_seconds == pytest.approx(pause_seconds)
        assert rank.next_due_seconds == pytest.approx(NOW + pause_seconds)


def test_a_pool_with_more_blocks_in_host_memory_than_the_rank_stated_is_not_as_planned() -> None:
    rank = RankProtocol(
        replace(declaring(), num_host_blocks=20), ("g:1",), Fence(), Allocation(plan_config(100), 100, 1)
    )
    rank.tick(rank.next_due_seconds)
    (later,) = rank.received(Ready(0, 100, 1024, 21), NOW)
    assert isinstance(later, JoinLater)
    assert (later.error.reason, "21 blocks in host memory" in str(later.error)) == ("NOT_AS_PLANNED", True)


@pytest.mark.parametrize(
    "error",
    [
        ERRORS["UNAVAILABLE"],
        errors.AbortedError("RANK_GIVEN_UP", ""),
        DeadlineError("DEADLINE_EXCEEDED", ""),
        ServerError("INTERNAL", ""),
        errors.UnavailableError("CANCELLED", ""),
        ServerError("UNKNOWN", ""),
        errors.ExhaustedError("TOO_MANY", "", retry_seconds=1.0),
    ],
    ids=lambda error: error.reason,
)
def test_rule_5_these_errors_are_retried_indefinitely(error: errors.KvpoolError) -> None:
    rank, pauses = RankTranscript().rank, []
    for _ in range(50):
        assert isinstance(rank.tick(rank.next_due_seconds)[0], OpenStream)
        (later,) = rank.stream_ended(error, NOW)
        assert isinstance(later, JoinLater)
        pauses.append(later.pause_seconds)
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == ((0.1, 3.0) if error.retry_seconds is None else (1.0, 1.0))


@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidArgumentError("register.rank", "5"),
        errors.WrongStateError("RANK_TAKEN", ""),
        errors.NotFoundError("NOT_FOUND", ""),
        ServerError("UNIMPLEMENTED", ""),
        errors.DeniedError("POOL", ""),
        errors.UnauthenticatedError("NO_TOKEN", ""),
        errors.ExhaustedError("RESOURCE_EXHAUSTED", "the message is too large"),
    ],
    ids=lambda error: error.reason,
)
def test_rule_5_these_errors_end_the_rank(error: errors.KvpoolError) -> None:
    rank = RankTranscript().rank
    rank.tick(NOW)
    assert rank.stream_ended(error, NOW) == [Failed(error)]
    assert rank.is_over
    assert rank.tick(NOW + 1e9) == []
    assert rank.next_due_seconds == float("inf")


def test_more_sessions_than_a_message_may_name_are_reported_in_parts_and_answer_no_fence() -> None:
    played = RankTranscript()
    for command in ("join", "open 1"):
        played.execute(*command.split())
    size = MAX_NAMED_SESSIONS
    numbers = tuple(map(SessionNumber, range(1, 2 * size + 2)))
    parts = numbers[:size], numbers[size : 2 * size], numbers[2 * size :]
    reported = played.rank.sessions_gone([TableLease(1, number) for number in numbers])
    assert reported == [Send(SessionsGone(part)) for part in parts]
    steps = [played.fence.step(TableLease(1, number)) for number in numbers[: size + 1]]
    assert played.rank.received(FenceSet(1, 1, numbers[-1], ()), NOW) == []
    steps[0].done()
    assert played.rank.steps_ended() == [Send(Fenced(1, numbers[1 : size + 1]))]

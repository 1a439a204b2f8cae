"""The state that a session keeps: nothing counts as sent until it is answered."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kvpool.client import (
    Allocation,
    Client,
    ExhaustedError,
    FullAttentionSpec,
    KVCacheGroup,
    PoolConfig,
    PoolInfo,
    Request,
    Session,
    SlidingWindowSpec,
    WrongStateError,
    connect,
)
from kvpool.client.blocking import run
from kvpool.core.ids import PoolName
from support.server import pool_config
from support.session_transcript import RecordingTransport, SessionTranscript
from support.transcripts import check

PATHS = sorted(Path(__file__).with_name("transcripts").glob("*.txt"))
PROMPT = list(range(13))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_session_does_what_the_transcript_shows(path: Path) -> None:
    check(path, SessionTranscript().execute)


@pytest.fixture
def transport() -> RecordingTransport:
    transport = RecordingTransport()
    run(transport.create_pool(pool_config()))
    return transport


@pytest.fixture
def session(transport: RecordingTransport) -> Session:
    return Client(transport).open_session("m")


def info(transport: RecordingTransport) -> PoolInfo:
    return run(transport.get_pool("m"))


@pytest.mark.parametrize("address", ["", "host", "host:port", "host:99999", "unix:relative", ":1"])
def test_addresses_are_checked(address: str) -> None:
    with pytest.raises(ValueError, match="address"):
        connect(address)


def test_blocks_outside_a_window_are_null_in_the_sessions_table() -> None:
    groups = tuple(map(KVCacheGroup, (FullAttentionSpec(4), SlidingWindowSpec(4, sliding_window=6))))
    with connect("embedded:") as client:
        client.create_pool(PoolConfig(PoolName("w"), 16, 64, groups, allow_too_few_blocks=True))
        session = client.open_session("w")
        request = session.request("r", range(24))
        session.allocate_slots(request, 20)
        assert request.block_ids == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
        with pytest.raises(ExhaustedError) as caught:
            session.allocate_slots(request, 40)
        assert caught.value.reason == "REQUEST_NEVER_FITS"
        assert request.block_ids == [[1, 2, 3, 4, 5], [0, 0, 0, 9, 10]]
        allocated = session.allocate_slots(request, 4)
        assert isinstance(allocated, Allocation)
        assert request.block_ids == [[1, 2, 3, 4, 5, 11], [0, 0, 0, 9, 10, 12]]
        other = session.request("s", range(24))
        computed = session.get_computed_blocks(other)
        assert [list(blocks) for blocks in computed.block_ids] == [[1, 2, 3, 4, 5], [0, 0, 0, 9, 10]]
        session.allocate_slots(other, 4, computed=computed)
        assert other.block_ids == [[1, 2, 3, 4, 5, 13], [0, 0, 0, 9, 10, 14]]


def hit_tokens(transport: RecordingTransport, session: Session) -> int:
    with Client(transport).open_session("m") as other:
        hits = [each.get_computed_blocks(each.request("q", PROMPT)).num_tokens for each in (session, other)]
    assert hits[1] <= hits[0]
    return hits[0] * 100 + hits[1]


@pytest.mark.parametrize("leave", [Session.preempt, Session.free])
@pytest.mark.parametrize("reports", [True, False])
def test_blocks_freed_before_their_step_ran_stay_hidden_from_other_sessions(
    transport: RecordingTransport, session: Session, leave: Callable[[Session, Request], None], *, reports: bool
) -> None:
    """As after an admission and a preemption before the step was executed."""
    if reports:
        session.admit(session.request("before", [7]))
        session.mark_executed()
    request = session.request("r", PROMPT)
    session.admit(request)
    leave(session, request)
    session.admit(session.request("another", [8, 9]))
    session.mark_executed()
    assert hit_tokens(transport, session) == (0 if reports else 1200), (
        "a session that never reports hits its own blocks"
    )


@pytest.mark.parametrize("leave", [Session.preempt, Session.free])
def test_blocks_executed_before_a_free_are_hit_by_all_sessions(
    transport: RecordingTransport, session: Session, leave: Callable[[Session, Request], None]
) -> None:
    request = session.request("r", PROMPT)
    session.admit(request)
    session.mark_executed()
    leave(session, request)
    assert hit_tokens(transport, session) == 1212


def test_an_answer_cannot_be_read_before_its_step_was_answered(session: Session) -> None:
    running = session.request("running", PROMPT)
    session.admit(running)
    builder = session.new_step()
    admitted, decodes = builder.admit(session.request("r", PROMPT)), builder.decode([running], [7])
    assert (admitted.outcome, repr(admitted), decodes.is_answered, repr(decodes)) == (
        None,
        "<Answer: None>",
        False,
        "<Decodes>",
    )
    names = ("ok", "computed", "num_hit_tokens", "num_shared_hit_tokens", "num_host_hit_tokens", "num_new_tokens")
    reads = [(admitted, name) for name in (*names, "hit_blocks", "new_blocks", "num_common_blocks")]
    for answer, name in (*reads, (decodes, "new_blocks"), (decodes, "refused")):
        with pytest.raises(WrongStateError, match="send or settle it first") as caught:
            getattr(answer, name)
        assert caught.value.reason == "STEP_NOT_ANSWERED"
    with pytest.raises(AttributeError, match="no_such"):
        admitted.no_such  # type: ignore[attr-defined]  # noqa: B018
    session.send(builder)
    assert (admitted.ok, admitted.num_new_tokens, decodes.new_blocks, decodes.refused) == (True, 1, [[[]]], {})

"""Slots in reserve over a link, and over gRPC, which does not tell whether an answer has come."""

from collections.abc import Iterator

import pytest

from kvpool.client import Client, Request, Session, connect
from kvpool.client.reserves import REPORT_STEPS
from kvpool.wire import link as wire_link
from support.server import free_port, pool_config, running_server
from support.waiting import DEADLINE_SECONDS


@pytest.fixture(name="client", params=["link", "grpc"])
def fixture_client(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    if request.param == "grpc":
        monkeypatch.setattr(wire_link, "listener_address", lambda *_: f"127.0.0.1:{free_port()}")
    with running_server() as address, connect(address, deadline_seconds=DEADLINE_SECONDS) as client:
        yield client


def decode(session: Session, request: Request) -> None:
    with session.step(executed_sequence=session.sequence) as step:
        step.decode([request], [request.num_tokens])


def test_a_reserve_is_reported_and_given_back_to_another_session(client: Client) -> None:
    client.create_pool(pool_config(num_blocks=20))
    with client.open_session("m", reserve_tokens=16) as session, client.open_session("m") as other:
        assert (session.reserve_tokens, other.reserve_tokens) == (16, 0)
        request = session.request("r", range(5))
        assert session.admit(request)
        for _ in range(16):
            decode(session, request)
        session.settle()
        assert other.get_computed_blocks(other.request("o", range(13))).num_tokens == 12
        large = other.request("l", range(100, 140))
        assert any(request.reserve_ids)
        assert other.admit(large) is None
        decode(session, request)  # its answer says so, if none since the refusal did
        while any(request.reserve_ids):
            decode(session, request)
            session.settle()
        assert request.num_computed_tokens < 21 + 3 * REPORT_STEPS
        assert other.admit(large)

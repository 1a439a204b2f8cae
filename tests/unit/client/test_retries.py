"""Rules of retries, with pauses that are recorded instead of waited for."""

from collections.abc import Coroutine
from math import inf
from types import SimpleNamespace

import pytest

from kvpool.client import (
    AbortedError,
    DeadlineError,
    ExhaustedError,
    InvalidArgumentError,
    KvpoolError,
    NotFoundError,
    UnavailableError,
    WrongStateError,
)
from kvpool.client.blocking import run
from kvpool.client.primary_connection import PrimaryConnection
from kvpool.client.retries import LOGGED_AFTER_SECONDS
from kvpool.client.server_link import ServerLink
from kvpool.core.errors import NotPrimaryError
from kvpool.wire.channels import ClientCredentials
from kvpool.wire.errors import not_sent_error

GONE = UnavailableError("UNAVAILABLE", "no server")


class Link(ServerLink):
    """A connection to nothing."""

    def __init__(self, address: str) -> None:
        self.address = address

    async def close(self) -> None: ...


class Attempts:
    """A call that fails with each of the given errors before it is answered."""

    def __init__(self, *errors: KvpoolError) -> None:
        self._errors = list(errors)
        self.called: list[str] = []
        self.left_seconds: list[float] = []
        self.pauses: list[float] = []

    async def attempt(self, link: ServerLink, left_seconds: float) -> str:
        self.called.append(link.address)
        self.left_seconds.append(left_seconds)
        if self._errors:
            raise self._errors.pop(0)
        return "answer"

    async def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)

    def call(
        self,
        deadline_seconds: float,
        try_seconds: float = inf,
        address: str = "a:1",
        *,
        is_patient: bool = True,
        is_any: bool = False,
    ) -> Coroutine[None, None, str]:
        connection = PrimaryConnection(address, ClientCredentials(), Link, is_patient=is_patient)
        return connection.call(self.attempt, deadline_seconds, self.pause, is_any=is_any, try_seconds=try_seconds)


def test_a_call_is_repeated_until_it_is_answered() -> None:
    attempts = Attempts(*[GONE] * 6)
    assert run(attempts.call(30.0)) == "answer"
    assert len(attempts.pauses) == 6
    assert all(0.02 <= pause <= 1.02 for pause in attempts.pauses)
    assert attempts.left_seconds == sorted(attempts.left_seconds, reverse=True)


@pytest.mark.parametrize("error", [GONE, ExhaustedError("BUSY", "")], ids=["unavailable", "exhausted"])
def test_the_servers_retry_time_is_the_minimum_pause(error: KvpoolError) -> None:
    attempts = Attempts(type(error)("BUSY", "", retry_seconds=5.0))
    assert run(attempts.call(30.0)) == "answer"
    (pause,) = attempts.pauses
    assert 5.0 <= pause <= 5.5


def test_a_retry_time_past_the_deadline_is_not_waited_for() -> None:
    attempts = Attempts(UnavailableError("DRAINED", "", retry_seconds=5.0))
    with pytest.raises(UnavailableError):
        run(attempts.call(4.0))
    assert attempts.pauses == []


@pytest.mark.parametrize(
    "error",
    [
        InvalidArgumentError("f", ""),
        NotFoundError("N", ""),
        WrongStateError("W", ""),
        AbortedError("LEASE_EXPIRED", ""),
        ExhaustedError("TOO_LARGE", ""),
    ],
    ids=lambda error: type(error).__name__,
)
def test_other_errors_are_raised_at_once_also_after_a_retry(error: KvpoolError) -> None:
    for before in ([], [GONE]):
        attempts = Attempts(*before, error)
        with pytest.raises(type(error)) as caught:
            run(attempts.call(30.0))
        assert caught.value is error
        assert len(attempts.pauses) == len(before)


def test_a_deadline_error_of_the_first_attempt_is_raised() -> None:
    with pytest.raises(DeadlineError):
        run(Attempts(DeadlineError("DEADLINE", "")).call(30.0))


def test_if_a_retry_gets_no_answer_in_time_the_answer_before_is_raised() -> None:
    refusal = UnavailableError("RANK_LOST", "", retry_seconds=0.01)
    attempts = Attempts(GONE, refusal, DeadlineError("DEADLINE", ""))
    with pytest.raises(UnavailableError) as caught:
        run(attempts.call(30.0))
    assert caught.value is refusal
    assert len(attempts.left_seconds) == 3


def test_a_first_attempt_that_was_cut_is_logged_and_repeated(caplog: pytest.LogCaptureFixture) -> None:
    attempts = Attempts(DeadlineError("DEADLINE", "host:1: no answer in time"), GONE)
    assert run(attempts.call(30.0, LOGGED_AFTER_SECONDS)) == "answer"
    assert attempts.left_seconds[0] == LOGGED_AFTER_SECONDS
    (record,) = caplog.records
    assert (record.name, record.levelname, record.msg) == ("kvpool.client", "WARNING", "no answer yet, trying again")
    assert vars(record)["error"] == "host:1: no answer in time"


def test_a_call_that_is_answered_soon_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert run(Attempts(GONE, GONE).call(30.0)) == "answer"
    assert not caplog.records


def test_a_refusal_leads_to_the_primary_without_a_pause() -> None:
    attempts = Attempts(NotPrimaryError(("b:1",), 1))
    assert run(attempts.call(30.0, address="a:1,b:1")) == "answer"
    assert (attempts.called, attempts.pauses) == (["a:1", "b:1"], [])


def test_a_round_without_a_primary_ends_with_a_pause() -> None:
    attempts = Attempts(*[NotPrimaryError((), 0)] * 2)
    assert run(attempts.call(30.0, address="a:1,b:1")) == "answer"
    assert attempts.called == ["a:1", "b:1", "a:1"]
    (pause,) = attempts.pauses
    assert 0.05 <= pause <= 0.055


def test_one_round_ends_without_a_pause() -> None:
    attempts = Attempts(*[NotPrimaryError((), 0)] * 2)
    connection = PrimaryConnection("a:1,b:1", ClientCredentials(), Link)
    with pytest.raises(UnavailableError, match="no server is the primary"):
        run(connection.call(attempts.attempt, 30.0, None))
    assert attempts.called == ["a:1", "b:1"]


@pytest.mark.parametrize(
    "error", [GONE, DeadlineError("DEADLINE", ""), UnavailableError("DRAINED", "", retry_seconds=1)]
)
def test_rule_5_a_call_of_an_operator_that_may_have_been_sent_is_not_repeated(error: KvpoolError) -> None:
    attempts = Attempts(error)
    with pytest.raises(type(error)) as caught:
        run(attempts.call(30.0, LOGGED_AFTER_SECONDS, "a:1,b:1", is_patient=False))
    assert caught.value is error
    assert (attempts.called, attempts.pauses, attempts.left_seconds) == (["a:1"], [], [30.0])


def test_rule_5_a_call_of_an_operator_that_was_not_sent_goes_to_the_next_server() -> None:
    attempts = Attempts(not_sent_error("UNAVAILABLE", ""), NotPrimaryError(("c:1",), 1))
    assert run(attempts.call(30.0, address="a:1,b:1", is_patient=False)) == "answer"
    assert (attempts.called, attempts.pauses) == (["a:1", "b:1", "c:1"], [])


def test_rule_5_an_operator_waits_for_a_primary_of_several_servers(caplog: pytest.LogCaptureFixture) -> None:
    attempts = Attempts(*[not_sent_error("UNAVAILABLE", "")] * 4)
    assert run(attempts.call(30.0, address="a:1,b:1", is_patient=False)) == "answer"
    assert (len(attempts.called), len(attempts.pauses)) == (5, 2)
    assert not caplog.records


def test_rule_5_an_operator_does_not_wait_for_one_server() -> None:
    attempts = Attempts(not_sent_error("UNAVAILABLE", ""))
    with pytest.raises(UnavailableError):
        run(attempts.call(30.0, is_patient=False))
    assert (attempts.called, attempts.pauses) == (["a:1"], [])


def test_rule_5_a_question_of_an_operator_goes_to_the_next_server() -> None:
    attempts = Attempts(DeadlineError("DEADLINE", ""))
    assert run(attempts.call(30.0, address="a:1,b:1", is_patient=False, is_any=True)) == "answer"
    assert attempts.called == ["a:1", "b:1"]


def test_the_error_at_the_end_of_the_time_states_what_each_server_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = Attempts(*[NotPrimaryError((), 0)] * 9)
    clock = SimpleNamespace(monotonic=lambda: 99.0 if len(attempts.called) > 2 else 0.0)  # over in the second round
    monkeypatch.setattr("kvpool.client.primary_connection.time", clock)
    monkeypatch.setattr("kvpool.client.retries.time", clock)
    with pytest.raises(UnavailableError, match=r"no server is the primary: a:1: .*; b:1: "):
        run(attempts.call(30.0, address="a:1,b:1"))
    assert len(attempts.called) == 3

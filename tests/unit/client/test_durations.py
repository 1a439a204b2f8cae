"""Durations that a client is given are checked before anything is sent."""

from collections.abc import Callable
from math import inf, nan

import pytest

from kvpool.client import InvalidArgumentError, aio, connect
from kvpool.client.admin import AdminClient
from support.server import pool_config

NOWHERE = "unix:/nonexistent/socket"


@pytest.fixture(params=["embedded:", NOWHERE])
def address(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("seconds", [nan, inf, -inf, -1.0, 0.0, 1e9])
@pytest.mark.parametrize("make", [connect, aio.connect, AdminClient])
def test_a_deadline_is_a_finite_positive_number(make: Callable[..., object], address: str, seconds: float) -> None:
    with pytest.raises(ValueError, match=r"deadline_seconds: .* is not in \(0, 86400\]"):
        make(NOWHERE if make is AdminClient else address, deadline_seconds=seconds)


@pytest.mark.parametrize("seconds", [nan, inf, -1.0, 3601.0])
def test_the_time_to_wait_for_a_pool_is_checked(address: str, seconds: float) -> None:
    with connect(address) as client, pytest.raises(InvalidArgumentError, match="timeout_seconds"):
        client.wait_until_ready("m", timeout_seconds=seconds)


@pytest.mark.parametrize("seconds", [nan, inf, -1.0, 0.01, 3601.0])
def test_the_interval_of_heartbeats_is_checked(address: str, seconds: float) -> None:
    with connect(address) as client, pytest.raises(InvalidArgumentError, match="heartbeat_seconds"):
        client.watch("m", snapshot=True, heartbeat_seconds=seconds)


@pytest.mark.parametrize("seconds", [nan, inf, -1.0])
def test_a_lease_is_checked(address: str, seconds: float) -> None:
    with connect(address) as client, pytest.raises(InvalidArgumentError, match="lease_seconds"):
        client.open_session("m", lease_seconds=seconds)


@pytest.mark.parametrize("seconds", [nan, inf, -1.0, 86401.0])
def test_the_time_limit_of_a_stop_is_checked(seconds: float) -> None:
    with AdminClient(NOWHERE) as admin, pytest.raises(InvalidArgumentError, match="timeout_seconds"):
        admin.stop(seconds)


def test_zero_keeps_its_documented_meaning() -> None:
    with connect("embedded:") as client:
        client.create_pool(pool_config())
        assert client.wait_until_ready("m", timeout_seconds=0).config.name == "m"
        assert client.open_session("m", lease_seconds=0).lease_seconds == 10
        assert list(client.watch("m", heartbeat_seconds=0)) == []

"""Limits: refused steps and sessions leave the state unchanged."""

import pytest

from kvpool.cli.serve_options import LIMITS_HELP
from kvpool.core.blocks.quota import Quota
from kvpool.core.errors import ExhaustedError
from kvpool.server.limits.config import Limits


def test_every_limit_has_help() -> None:
    assert LIMITS_HELP.keys() == set(Limits.__slots__)


@pytest.mark.parametrize(("num_sessions", "num_pool_sessions", "field"), [(4, 0, ""), (3, 2, "pool_name")])
def test_one_session_too_many(num_sessions: int, num_pool_sessions: int, field: str) -> None:
    limits = Limits(max_sessions=4, max_pool_sessions=2)
    limits.check_sessions(3, 1)
    with pytest.raises(ExhaustedError, match="the maximum") as caught:
        limits.check_sessions(num_sessions, num_pool_sessions)
    assert (caught.value.reason, caught.value.field) == ("TOO_MANY_SESSIONS", field)
    assert caught.value.retry_seconds


def test_blocks_of_a_session() -> None:
    assert Limits().quota(3, 0) == Quota(3, 0)
    limits = Limits(max_session_blocks=10)
    assert [limits.quota(0, 0), limits.quota(2, 5), limits.quota(10, 10)] == [Quota(0, 10), Quota(2, 5), Quota(10, 10)]
    for requested, field in (((11, 0), "min_blocks"), ((0, 11), "max_blocks")):
        with pytest.raises(ExhaustedError, match="the server's maximum per session is 10") as caught:
            limits.quota(*requested)
        assert (caught.value.reason, caught.value.field) == ("TOO_MANY_BLOCKS", field)

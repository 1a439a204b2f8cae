import pytest

from kvpool.core.errors import WrongStateError
from kvpool.wire.errors import ServerError
from kvpool.wire.protocol_version import PROTOCOL_VERSION, UNSTATED, check_client, check_server

BOTH = f"speaks protocol version 9, .* version {PROTOCOL_VERSION}; use the same release"


def test_equal_versions_work_together() -> None:
    check_client(PROTOCOL_VERSION)
    check_server(PROTOCOL_VERSION)


def test_a_server_refuses_another_version_and_names_both() -> None:
    with pytest.raises(WrongStateError, match=BOTH) as caught:
        check_client(9)
    assert (caught.value.reason, caught.value.field) == ("PROTOCOL_VERSION", "protocol_version")


def test_a_client_refuses_another_version_and_names_both() -> None:
    with pytest.raises(ServerError, match=BOTH) as caught:
        check_server(9)
    assert caught.value.reason == "PROTOCOL_VERSION"


def test_only_a_caller_may_leave_the_version_unstated() -> None:
    check_client(UNSTATED)
    with pytest.raises(ServerError, match="speaks no protocol version"):
        check_server(UNSTATED)

"""The protocol version: who refuses whom, and what the protos say about it."""

import re
from pathlib import Path

import pytest

import kvpool.v1
from kvpool.core.errors import WrongStateError
from kvpool.wire.errors import ServerError
from kvpool.wire.protocol_version import PROTOCOL_VERSION, UNSTATED, check_client, check_server

PROTOS = sorted(path for folder in kvpool.v1.__path__ for path in Path(folder).glob("*.proto"))
FIELD = re.compile(r"((?: *//.*\n)+) *uint32 protocol_version = ")
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


@pytest.mark.parametrize("path", PROTOS, ids=lambda path: path.stem)
def test_the_comment_of_each_field_states_the_version_of_this_release(path: Path) -> None:
    text = path.read_text()
    comments = FIELD.findall(text)
    assert len(comments) == text.count(" protocol_version = ")
    for comment in comments:
        assert f" {PROTOCOL_VERSION} in this release" in comment


def test_protos_have_such_fields() -> None:
    assert sum(" protocol_version = " in path.read_text() for path in PROTOS) >= 4

"""gRPC's reasons why a server cannot be reached, in plain words."""

import pytest

from kvpool.wire.unreachable import explained

PREFIX = "failed to connect to all addresses; last error: "


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        ("UNKNOWN: ipv4:127.0.0.1:1: Failed to connect to remote host: Connection refused", "nothing listens there"),
        ("UNKNOWN: Tls handshake failed: WRONG_VERSION_NUMBER", "the server does not use TLS"),
        ("UNAVAILABLE: ipv4:127.0.0.1:1: Socket closed", "it may require TLS"),
        ("UNKNOWN: Hostname Verification Check failed.", "the server's certificate is for another name"),
    ],
)
def test_a_reason_is_explained_and_kept(cause: str, words: str) -> None:
    text = explained(PREFIX + cause)
    assert words in text
    assert cause in text


@pytest.mark.parametrize("text", ["Socket closed", "the server stops", PREFIX + "something new"])
def test_another_text_stays_as_it_is(text: str) -> None:
    assert explained(text) == text

"""Plain words for gRPC's reasons why a server cannot be reached. Cheap to import."""

from typing import Final

_LAST_ERROR: Final = "last error: "
_CLOSED: Final = "the server closed the connection: it may require TLS, or a client certificate"
_WORDS: Final = (
    ("Connection refused", "nothing listens there"),
    ("No such file or directory", "there is no such socket"),
    ("Permission denied", "this user may not use the socket"),
    ("errors resolving", "the host name is unknown"),
    ("Hostname Verification Check failed", "the server's certificate is for another name"),
    ("CERTIFICATE_VERIFY_FAILED", "the server's certificate is not trusted"),
    ("WRONG_VERSION_NUMBER", "the server does not use TLS: it answered in plaintext"),
    ("Expected SETTINGS frame", "it is no gRPC server"),
    ("before receiving SETTINGS", "the connection was accepted, but nothing was answered"),
    ("Handshake read failed", "the connection was accepted, but not the TLS handshake"),
    ("timed out", "the connection attempt got no answer"),
    ("Socket closed", _CLOSED),
    ("Connection reset", _CLOSED),
)
"""A part of gRPC's text for a connection that could not be made, and what it means. The first that is found counts."""


def is_connecting(text: str) -> bool:
    """Whether gRPC's text is of a connection that could not be made, so that the call was not sent."""
    return text.startswith(("failed to connect to all addresses", "errors resolving"))


def explained(text: str) -> str:
    """Explains gRPC's text of a failed call, if that is of a connection that could not be made; keeps the text."""
    cause = text.rpartition(_LAST_ERROR)[2]
    words = next((words for part, words in _WORDS if part in cause), "") if is_connecting(text) else ""
    return f"{words} ({cause})" if words else text

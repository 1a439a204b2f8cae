"""Configuration of TLS, tokens and plaintext, validated when it is made."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvpool.wire.address import DEFAULT_SOCKET_MODE

PLAINTEXT_KINDS: Final = ("grpc", "metrics", "replication")


@dataclass(frozen=True, slots=True)
class AuthConfig:
    """Authentication and encryption of a server. Files are read when the server starts, and again when they change.

    Attributes:
        tls_cert: PEM file of the server's certificate chain; None: TCP is plaintext.
        tls_key: PEM file of the private key, without a passphrase.
        tls_client_ca: PEM file of the authorities for client certificates. If set, each client must present one.
        tokens: TOML file of the accepted tokens; None: every client that can connect has all permissions.
        allow_plaintext: Which of `grpc`, `metrics` and `replication` may be served without TLS over TCP beyond
            loopback.
        socket_mode: File mode of unix sockets. A process with write permission can connect.
    """

    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    tokens: Path | None = None
    allow_plaintext: frozenset[str] = frozenset()
    socket_mode: int = DEFAULT_SOCKET_MODE

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert, tls_key: each requires the other")
        if self.tls_client_ca and not self.tls_cert:
            raise ValueError("tls_client_ca: requires tls_cert and tls_key")
        unknown = sorted(self.allow_plaintext - set(PLAINTEXT_KINDS))
        if unknown:
            raise ValueError(f"allow_plaintext: {unknown[0]!r} is not one of {', '.join(PLAINTEXT_KINDS)}")
        if not 0 <= self.socket_mode <= 0o777:  # noqa: PLR2004 - the message states it
            raise ValueError(f"socket_mode: {self.socket_mode:o} is not in [000, 777]")

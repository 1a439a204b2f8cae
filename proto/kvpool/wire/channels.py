"""Channels and channel options: TLS, tokens, keepalive and message sizes.

1. A token is sent only over TLS, a unix socket or loopback, unless the configuration explicitly allows plaintext.
2. A token file is read again for each call and stream that starts. While it cannot be read, for example because it is
   being replaced, the last token is used.
3. TLS applies to TCP only. ClientCredentials to a unix socket is controlled by its file mode.
"""

import contextlib
import os
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self, TypeVar, cast

import grpc

from kvpool.wire.address import is_loopback

Options = Sequence[tuple[str, int | str]]
_ChannelT = TypeVar("_ChannelT", grpc.Channel, grpc.aio.Channel)
_Metadata = Sequence[tuple[str, str | bytes]]

MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024
_WITHOUT_PROXY: Final = ("grpc.enable_http_proxy", 0)
"""Ignores proxies of the environment: a proxy would receive a token that is meant for this machine."""

CHANNEL_OPTIONS: Final[list[tuple[str, int | str]]] = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_retries", 0),  # the client retries itself: gRPC's deadlines do not outlast a server restart
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.min_reconnect_backoff_ms", 5000),  # timeout of one connection attempt
]
"""Options of every client channel."""

SESSION_CHANNEL_OPTIONS: Final = [
    *CHANNEL_OPTIONS,
    # While a call waits, an unanswered ping detects a broken connection.
    ("grpc.keepalive_time_ms", 3000),
    ("grpc.keepalive_timeout_ms", 3000),
    ("grpc.http2.ping_timeout_ms", 3000),
    ("grpc.http2.max_pings_without_data", 0),
]
"""Options of a channel for sessions."""


ACCESS_VARIABLES: Final = (
    *("KVPOOL_TLS_CA", "KVPOOL_TLS_CERT", "KVPOOL_TLS_KEY", "KVPOOL_TLS_SERVER_NAME"),
    *("KVPOOL_TOKEN_FILE", "KVPOOL_TOKEN"),
)
"""The variables of a client's credentials, in the order in which `ClientCredentials.of` takes them."""

IDLE_SECONDS: Final = 60.0
"""Time without a call after which a server closes a connection. A client's next call connects again."""


def server_channel_options(
    max_message_bytes: int, dead_peer_seconds: float, max_connections: int, handshake_seconds: float
) -> list[tuple[str, int]]:
    """Options of a server.

    Args:
        max_message_bytes: Maximum size of a received message.
        dead_peer_seconds: Time after which an unresponsive connection counts as broken.
        max_connections: Maximum number of connections per listener. Further ones are closed at once.
        handshake_seconds: Time for the handshakes of TLS and HTTP/2.
    """
    keepalive_ms = int(dead_peer_seconds * 1000 / 2)
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        # The result of an applied step must reach the client; MAX_STEP_WORK in the core bounds its size.
        ("grpc.max_send_message_length", -1),
        # None but "identity": 16 MiB of zeros would arrive as 15 KiB. gRPC ends such calls with UNIMPLEMENTED.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        ("grpc.so_reuseport", 0),  # binding an address twice fails instead of sharing connections at random
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", keepalive_ms),
        ("grpc.http2.ping_timeout_ms", keepalive_ms),  # default: one minute
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 1000),  # clients send a ping every 3 s
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.server_handshake_timeout_ms", int(handshake_seconds * 1000)),
        ("grpc.max_connection_idle_ms", int(IDLE_SECONDS * 1000)),
    ]


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """TLS settings of a client. The files are in PEM format and are read for each connection.

    Attributes:
        ca: Certificate authorities for the server's certificate; None for gRPC's default roots.
        cert: Certificate chain of the client, for servers that require one.
        key: Private key of the client.
        server_name: Name that the server's certificate must have; empty for the host of the address.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    server_name: str = ""

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise ValueError("tls_cert, tls_key: each requires the other")

    def context(self) -> ssl.SSLContext:
        """Reads the files for a connection without gRPC. Raises as `credentials`."""
        self.credentials()
        try:
            context = ssl.create_default_context(cafile=self.ca)
            context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # as gRPC: authorities may lack what it demands
            if self.cert:
                context.load_cert_chain(self.cert, self.key)
        except (OSError, ssl.SSLError) as error:
            raise ValueError(f"tls_ca, tls_cert, tls_key: {error}") from error
        return context

    def credentials(self) -> grpc.ChannelCredentials:
        """Reads the files.

        Raises:
            ValueError: A file cannot be read, or holds something else; the message names it.
        """
        files = {"tls_ca": self.ca, "tls_key": self.key, "tls_cert": self.cert}
        return grpc.ssl_channel_credentials(*(_read_pem(name, path) if path else None for name, path in files.items()))


@dataclass(frozen=True, slots=True)
class ClientCredentials:
    """Credentials of a client.

    Attributes:
        tls: TLS settings for TCP; None for plaintext.
        token: The token, or the path of a file that contains it; None for none.
        allow_plaintext: Whether to send the token even where others on the network can read it.
    """

    tls: TlsConfig | None = None
    token: str | Path | None = field(default=None, repr=False)
    allow_plaintext: bool = False

    @classmethod
    def of(
        cls,
        tls: TlsConfig | None,
        token: str | Path | None,
        *,
        allow_plaintext: bool,
        environment: Mapping[str, str] = os.environ,
    ) -> Self:
        """Makes credentials; arguments that are None come from KVPOOL_TLS_CA, KVPOOL_TOKEN_FILE and so on."""
        *tls_files, server_name, file, value = (environment.get(name, "") for name in ACCESS_VARIABLES)
        ca, certificate, key = (Path(each) if each else None for each in tls_files)
        if tls is None and (ca or certificate):
            tls = TlsConfig(ca, certificate, key, server_name)
        if token is None:
            token = Path(file) if file else value or None
        return cls(tls, token, allow_plaintext)

    @property
    def token_source(self) -> str:
        """Says where the token comes from, without its value."""
        if isinstance(self.token, Path):
            return f"token file: {self.token}"
        return "the token was given as text, not as a file" if self.token else "no token was given"

    def check(self, address: str) -> None:
        """Raises ValueError if others could read the token, or a file cannot be read."""
        self._for(address, ())
        if self.token is not None:
            _read_token(self.token)

    def sends_openly(self, address: str) -> bool:
        """Whether others could read a token that is sent to an address, although the configuration does not allow it.

        On loopback a call may reach another program of this machine, such as one that forwards a port.
        """
        is_private = bool(self.tls) or address.startswith("unix:")
        return self.token is not None and not (is_private or self.allow_plaintext)

    def token_reader(self) -> Callable[[], str]:
        """Makes a function that reads the current token; "" for none. Raises ValueError if a file cannot be read."""
        return _token_reader(self.token) if self.token is not None else str

    def channel(self, address: str, options: Options) -> grpc.Channel:
        """Makes a synchronous channel. It connects at the first call.

        Raises:
            ValueError: Others could read the token, or a file cannot be read.
        """
        credentials, options = self._for(address, options)
        if credentials:
            return self._with_token(grpc.secure_channel(address, credentials, options=options))
        return self._with_token(grpc.insecure_channel(address, options=options))

    def aio_channel(self, address: str, options: Options) -> grpc.aio.Channel:
        """Makes an asyncio channel; see `channel`."""
        credentials, options = self._for(address, options)
        if credentials:
            return self._with_token(grpc.aio.secure_channel(address, credentials, options=options))
        return self._with_token(grpc.aio.insecure_channel(address, options=options))

    def _for(self, address: str, options: Options) -> tuple[grpc.ChannelCredentials | None, Options]:
        if address.startswith("unix:"):
            return None, options
        if self.tls:
            if self.tls.server_name:
                options = (*options, ("grpc.ssl_target_name_override", self.tls.server_name))
            return self.tls.credentials(), options
        if self.token is None or self.allow_plaintext:
            return None, options
        if not is_loopback(address):
            raise ValueError(
                f"token: {address} is not on this machine and does not use TLS; others could read the token"
            )
        return None, (*options, _WITHOUT_PROXY)

    def _with_token(self, channel: "_ChannelT") -> "_ChannelT":
        if self.token is None:
            return channel
        return cast("_ChannelT", _TokenChannel(channel, _token_reader(self.token)))


class _TokenChannel:
    """A channel that adds a token to each call. Supports only the call form that generated stubs use."""

    def __init__(self, channel: Any, read_token: Callable[[], str]) -> None:  # noqa: ANN401 - of either kind
        self._channel = channel
        self._read_token = read_token
        self.close = channel.close

    def __enter__(self) -> Self:
        self._channel.__enter__()
        return self

    def __exit__(self, *args: object) -> None:
        self._channel.__exit__(*args)

    def __getattr__(self, kind: str) -> Callable[..., Any]:
        if kind not in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            raise AttributeError(kind)
        make = getattr(self._channel, kind)

        def with_token(*args: Any, **options: Any) -> Callable[..., Any]:  # noqa: ANN401 - as grpc has it
            call = make(*args, **options)

            def start(*request: Any, metadata: _Metadata | None = None, **how: Any) -> Any:  # noqa: ANN401 - as grpc has it
                return call(*request, metadata=(*(metadata or ()), self._token()), **how)

            return start

        return with_token

    def _token(self) -> tuple[str, str]:
        return "authorization", f"Bearer {self._read_token()}"


def _token_reader(token: str | Path) -> Callable[[], str]:
    """Returns a function that reads the current token. Raises ValueError if there is none now."""
    last = _read_token(token)

    def read() -> str:
        nonlocal last
        with contextlib.suppress(ValueError):  # being replaced, or deleted: use the last token
            last = _read_token(token)
        return last

    return read


def _read_token(source: str | Path) -> str:
    text = source if isinstance(source, str) else _read("token_file", source).decode("utf-8", "replace")
    token = text.strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError("token: needs one line of printable ASCII characters without spaces")
    return token


def _read(name: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{name}: {path}: {error.strerror}") from error


def _read_pem(name: str, path: Path) -> bytes:
    """Reads a certificate or a key. gRPC would report another content as an untrusted server, if at all."""
    content = _read(name, path)
    has_key, has_certificate = b"PRIVATE KEY-----" in content, b"-----BEGIN CERTIFICATE-----" in content
    if not (has_key if name == "tls_key" else has_certificate):
        wanted, other = ("private key", "certificate") if name == "tls_key" else ("certificate", "private key")
        found = f"a {other}" if has_key or has_certificate else "no PEM data of one"
        raise ValueError(f"{name}: {path}: needs a {wanted}, and the file holds {found}")
    return content

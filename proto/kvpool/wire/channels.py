"""How a client gets in: certificates, a token, and the one place that makes channels.

1. A token goes nowhere but over TLS, a unix socket or loopback, unless its owner says otherwise.
2. A token's file is read anew for each call and stream that begins; while it cannot be read, as when it is being
   replaced, the token is as it was.
3. TLS is for TCP: on a unix socket the file's mode says who gets in.
"""

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self, TypeVar, cast

import grpc

from kvpool.wire.address import is_loopback

Options = Sequence[tuple[str, int | str]]
_ChannelT = TypeVar("_ChannelT", grpc.Channel, grpc.aio.Channel)
_Metadata = Sequence[tuple[str, str | bytes]]

_WITHOUT_PROXY: Final = ("grpc.enable_http_proxy", 0)
MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024

CHANNEL_OPTIONS: Final[list[tuple[str, int | str]]] = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_retries", 0),  # `retries` does it: grpc's own know nothing of deadlines that outlast a restart
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.min_reconnect_backoff_ms", 5000),  # how long a connection that gets no answer is waited for
]

SESSION_CHANNEL_OPTIONS: Final = [
    *CHANNEL_OPTIONS,
    # While a call waits, an unanswered ping tells of a connection on which nobody is any more.
    ("grpc.keepalive_time_ms", 3000),
    ("grpc.keepalive_timeout_ms", 3000),
    ("grpc.http2.ping_timeout_ms", 3000),
    ("grpc.http2.max_pings_without_data", 0),
]
"""A proxy of the environment would be told what is meant for this machine."""


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """What a client speaks TLS with; files in PEM form, read when a connection is made.

    Attributes:
        ca: Authorities that the server's certificate is checked against; None for those that gRPC comes with.
        cert: The client's own certificate and those up to its authority, for a server that asks for one.
        key: Its key.
        server_name: Name that the server's certificate must have; empty for the address's host.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    server_name: str = ""

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise ValueError("tls_cert, tls_key: one needs the other")

    def credentials(self) -> grpc.ChannelCredentials:
        """Reads the files.

        Raises:
            ValueError: One cannot be read; names it.
        """
        files = {"tls_ca": self.ca, "tls_key": self.key, "tls_cert": self.cert}
        return grpc.ssl_channel_credentials(*(_read(name, path) if path else None for name, path in files.items()))


@dataclass(frozen=True, slots=True)
class Access:
    """What a client shows at a server's door.

    Attributes:
        tls: For TCP; None for plaintext.
        token: The token, or the file that holds it; None for none.
        allow_plaintext: Send the token even where others on the network can read it.
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
        """Takes what is left open from the environment: KVPOOL_TLS_CA, KVPOOL_TOKEN_FILE and so on."""
        if tls is None and any(environment.get(name) for name in ("KVPOOL_TLS_CA", "KVPOOL_TLS_CERT")):

            def path(name: str) -> Path | None:
                return Path(environment[name]) if environment.get(name) else None

            name = environment.get("KVPOOL_TLS_SERVER_NAME", "")
            tls = TlsConfig(path("KVPOOL_TLS_CA"), path("KVPOOL_TLS_CERT"), path("KVPOOL_TLS_KEY"), name)
        if token is None:
            file = environment.get("KVPOOL_TOKEN_FILE")
            token = Path(file) if file else environment.get("KVPOOL_TOKEN") or None
        return cls(tls, token, allow_plaintext)

    def check(self, address: str) -> None:
        """Raises ValueError if the token would go where others can read it, or a file cannot be read."""
        self._for(address, ())
        if self.token is not None:
            _read_token(self.token)

    def channel(self, address: str, options: Options) -> grpc.Channel:
        """Makes a synchronous channel; connects when the first call is made.

        Raises:
            ValueError: The token would go where others can read it, or a file cannot be read.
        """
        credentials, options = self._for(address, options)
        if credentials:
            return self._with_token(grpc.secure_channel(address, credentials, options=options))
        return self._with_token(grpc.insecure_channel(address, options=options))

    def aio_channel(self, address: str, options: Options) -> grpc.aio.Channel:
        """The same for asyncio."""
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
            raise ValueError(f"token: {address} is beyond this machine and not TLS, so others could read the token")
        return None, (*options, _WITHOUT_PROXY)

    def _with_token(self, channel: "_ChannelT") -> "_ChannelT":
        return channel if self.token is None else cast("_ChannelT", _TokenChannel(channel, _token_reader(self.token)))


class _TokenChannel:
    """A channel whose calls all carry a token. Of calls only the plain form is there, which is all that stubs make."""

    def __init__(self, channel: Any, read: Callable[[], str]) -> None:  # noqa: ANN401 - of either kind
        self._channel = channel
        self._read = read
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

            def begin(*request: Any, metadata: _Metadata | None = None, **how: Any) -> Any:  # noqa: ANN401 - likewise
                shown = ("authorization", f"Bearer {self._read()}")
                return call(*request, metadata=(*(metadata or ()), shown), **how)

            return begin

        return with_token


def _token_reader(token: str | Path) -> Callable[[], str]:
    """What tells the token now; raises ValueError at once if there is none."""
    last = _read_token(token)

    def read() -> str:
        nonlocal last
        with contextlib.suppress(ValueError):  # it is being replaced, or gone: the server judges the last one
            last = _read_token(token)
        return last

    return read


def _read_token(source: str | Path) -> str:
    text = source if isinstance(source, str) else _read("token_file", source).decode("utf-8", "replace")
    token = text.strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError("token: needs one line of ASCII letters, digits and signs")
    return token


def _read(name: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{name}: {path}: {error.strerror}") from error

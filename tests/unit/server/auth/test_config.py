"""Validation of the settings of TLS, tokens and plaintext."""

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from kvpool.server.auth.config import AuthConfig
from kvpool.server.config import MetricsConfig, ServerConfig
from kvpool.wire.address import BoundSocket

TLS = AuthConfig(Path("cert"), Path("key"))


@pytest.mark.parametrize(
    ("auth", "words"),
    [
        ({"tls_cert": Path("c")}, "tls_cert, tls_key: each requires the other"),
        ({"tls_client_ca": Path("c")}, "tls_client_ca: requires tls_cert"),
        ({"allow_plaintext": frozenset(["http"])}, "allow_plaintext: 'http' is not one of grpc, metrics, replication"),
        ({"socket_mode": 0o1777}, r"socket_mode: 1777 is not in \[000, 777\]"),
    ],
)
def test_invalid_combinations_are_refused(auth: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        AuthConfig(**auth)


@pytest.mark.parametrize("address", ["0.0.0.0:1", "[::]:1", "192.0.2.1:1", "no-such-host.invalid:1"])
def test_plaintext_beyond_loopback_requires_permission(address: str) -> None:
    with pytest.raises(ValueError, match=r"^listen: .* allow_plaintext grpc$"):
        ServerConfig(addresses=(address,))
    ServerConfig(addresses=(address,), auth=TLS)
    ServerConfig(addresses=(address,), auth=AuthConfig(allow_plaintext=frozenset(["grpc"])))
    metrics = MetricsConfig(address)
    with pytest.raises(ValueError, match=r"^metrics_listen: .* allow_plaintext metrics$"):
        ServerConfig(metrics=metrics, auth=TLS)
    ServerConfig(metrics=metrics, auth=AuthConfig(allow_plaintext=frozenset(["metrics"])))


@pytest.mark.parametrize(
    "address", ["127.0.0.1:1", "127.8.9.1:1", "[::1]:1", "[::ffff:127.0.0.1]:1", "localhost:1", "unix:/s"]
)
def test_loopback_and_unix_sockets_may_be_plaintext(address: str) -> None:
    ServerConfig(addresses=(address,))


def test_a_socket_has_its_mode_regardless_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        bound = BoundSocket(f"unix:{tmp_path / 's'}")
        with bound.made(0o640):
            part = Path(bound.address.removeprefix("unix:"))
            part.touch(0o666)
            assert stat.S_IMODE(part.stat().st_mode) & ~0o640 == 0
        assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o640
        assert os.umask(0) == 0
    finally:
        os.umask(before)

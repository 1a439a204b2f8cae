"""TLS with real handshakes: accepted and refused clients, and certificates that are reloaded."""

import asyncio
import shutil
import socket
import ssl
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvpool.client import TlsConfig, aio, connect
from kvpool.client.admin import AdminClient
from support.auth import Authority, Pair, channel, secret_of, write_tokens
from support.command import kvpool
from support.server import ServerProcess, pool_config, server_process
from support.waiting import DEADLINE_SECONDS
from support.workers import ready, worker_processes


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"), "ours")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"), "theirs")


@contextmanager
def serving(pair: Pair, address: str = "127.0.0.1:0", **auth: str) -> Iterator[str]:
    with server_process(address, auth={"tls_cert": str(pair.cert), "tls_key": str(pair.key), **auth}) as server:
        yield server.addresses[0]


@pytest.fixture(scope="module")
def plain_tls(authority: Authority) -> Iterator[str]:
    with serving(authority.issue("localhost", "127.0.0.1")) as address:
        yield address


@pytest.fixture(scope="module")
def mutual(authority: Authority) -> Iterator[str]:
    with serving(authority.issue("127.0.0.1"), tls_client_ca=str(authority.path)) as address:
        yield address


def is_let_in(address: str, tls: TlsConfig | None) -> bool:
    """Whether the server answers a client with these certificates. Otherwise the connection must have failed."""
    with channel(address, tls=tls) as opened:
        try:
            health_pb2_grpc.HealthStub(opened).Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_SECONDS)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return False
        return True


def test_every_client_supports_tls(plain_tls: str, authority: Authority) -> None:
    tls = authority.trusted_by()
    with connect(plain_tls, tls=tls) as client:
        client.create_pool(pool_config())
        with client.open_session("m") as session:
            assert session.admit(session.request("r", token_ids=range(8)))
    with AdminClient(plain_tls, tls=tls) as admin:
        assert [pool.config.name for pool in admin.overview().pools] == ["m"]

    async def asynchronous() -> None:
        async with aio.connect(plain_tls, tls=tls) as client:
            session = await client.open_session("m")
            assert await session.admit(session.request("r", token_ids=range(8)))
            await session.close()

    asyncio.run(asynchronous())


def test_a_client_refuses_an_untrusted_server(plain_tls: str, authority: Authority, stranger: Authority) -> None:
    assert is_let_in(plain_tls, authority.trusted_by())
    assert not is_let_in(plain_tls, stranger.trusted_by())
    assert not is_let_in(plain_tls, authority.trusted_by(server_name="elsewhere.example"))
    assert is_let_in(plain_tls, authority.trusted_by(server_name="localhost"))
    assert not is_let_in(plain_tls, None), "plaintext to a TLS port"


def test_mutual_tls_requires_a_valid_client_certificate(mutual: str, authority: Authority, stranger: Authority) -> None:
    assert is_let_in(mutual, authority.trusted_by(authority.issue("client")))
    assert not is_let_in(mutual, authority.trusted_by()), "none"
    assert not is_let_in(mutual, authority.trusted_by(stranger.issue("client"))), "of another authority"
    assert not is_let_in(mutual, authority.trusted_by(authority.issue("client", days=-1))), "expired"


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated")
def test_versions_below_tls_1_2_are_refused(plain_tls: str, authority: Authority) -> None:
    def handshake(version: ssl.TLSVersion) -> str | None:
        context = ssl.create_default_context(cafile=authority.path)
        context.set_ciphers("ALL:@SECLEVEL=0")
        context.set_alpn_protocols(["h2"])
        context.minimum_version = context.maximum_version = version
        host, _, port = plain_tls.rpartition(":")
        address = (host, int(port))
        with (
            socket.create_connection(address, timeout=DEADLINE_SECONDS) as raw,
            context.wrap_socket(raw, server_hostname="localhost") as spoken,
        ):
            return spoken.version()

    assert handshake(ssl.TLSVersion.TLSv1_2) == "TLSv1.2"
    with pytest.raises((ssl.SSLError, ConnectionError)):
        handshake(ssl.TLSVersion.TLSv1_1)


def test_new_connections_get_new_certificates_and_old_ones_live_on(
    tmp_path: Path, authority: Authority, stranger: Authority
) -> None:
    used = Pair(tmp_path / "cert.pem", tmp_path / "cert.key")
    authority.issue("127.0.0.1").copy_over(used)
    ours, theirs = authority.trusted_by(), stranger.trusted_by()
    with serving(used) as address, connect(address, tls=ours) as client:
        client.create_pool(pool_config())
        with client.open_session("m") as session:
            session.admit(session.request("r1", token_ids=range(8)))
            used.cert.write_text("half of a cert")
            assert is_let_in(address, ours), "what is no pair changes nothing"
            shutil.copy(stranger.issue("127.0.0.1").cert, used.cert)
            assert is_let_in(address, ours), "a certificate without its key neither"
            stranger.issue("127.0.0.1").copy_over(used)
            assert is_let_in(address, theirs)
            assert not is_let_in(address, ours)
            session.admit(session.request("r2", token_ids=range(8)))  # on the stream opened before
            assert client.get_pool("m").sessions == 1


def test_every_port_gets_the_new_certificates(tmp_path: Path, authority: Authority, stranger: Authority) -> None:
    used = Pair(tmp_path / "cert.pem", tmp_path / "cert.key")
    authority.issue("127.0.0.1").copy_over(used)
    auth = {"tls_cert": str(used.cert), "tls_key": str(used.key)}
    with server_process("127.0.0.1:0", "127.0.0.1:0", auth=auth) as server:
        assert [is_let_in(address, authority.trusted_by()) for address in server.addresses] == [True] * 2
        stranger.issue("127.0.0.1").copy_over(used)
        assert [is_let_in(address, stranger.trusted_by()) for address in server.addresses] == [True] * 2


def test_a_server_does_not_start_with_a_key_of_another_certificate(authority: Authority) -> None:
    auth = {"tls_cert": str(authority.issue("a").cert), "tls_key": str(authority.issue("a").key)}
    with pytest.raises(AssertionError, match="--tls-cert, --tls-key: not a matching pair, or not PEM"):
        ServerProcess("127.0.0.1:0", auth=auth)


def test_tls_and_tokens_over_the_command_line(tmp_path: Path, authority: Authority) -> None:
    pair, tokens = authority.issue("127.0.0.1"), tmp_path / "tokens.toml"
    write_tokens(tokens, [{"name": "ops", "role": "admin", "pools": ["*"]}])
    secret = tmp_path / "token"
    secret.write_text(secret_of("ops") + "\n")
    with serving(pair, tls_client_ca=str(authority.path), tokens=str(tokens)) as address:
        mine = authority.issue("ops")
        flags = ("--tls-ca", authority.path, "--tls-cert", mine.cert, "--tls-key", mine.key)
        environment = {
            "KVPOOL_TLS_CA": str(authority.path),
            "KVPOOL_TLS_CERT": str(mine.cert),
            "KVPOOL_TLS_KEY": str(mine.key),
            "KVPOOL_TOKEN_FILE": str(secret),
        }
        assert kvpool("health", address, *flags).stdout == f"{address}: SERVING\n"
        assert kvpool("health", address, **environment).returncode == 0
        assert kvpool("health", address).returncode == 1
        assert kvpool("pools", "--address", address, *flags, "--token-file", secret).returncode == 0
        refused = kvpool("pools", "--address", address, *flags)
        assert (refused.returncode, refused.stderr.startswith("Error: NO_TOKEN: ")) == (1, True), refused
        trace = tmp_path / "trace.jsonl"
        trace.write_text('{"prompt_token_ids": [1, 2, 3]}')
        replayed = (trace, "--num-blocks", "300", "--block-size", "16")
        assert kvpool("replay", "--address", address, *replayed, **environment).returncode == 0


def test_a_worker_joins_with_its_token_and_switches_when_it_is_revoked(tmp_path: Path, authority: Authority) -> None:
    tokens, secret = tmp_path / "tokens.toml", tmp_path / "token"
    entries = [{"name": name, "role": "worker", "pools": ["m"]} for name in ("first", "second")]
    write_tokens(tokens, entries)
    secret.write_text(secret_of("first"))
    pair = authority.issue("127.0.0.1")
    with serving(pair, tokens=str(tokens)) as address, worker_processes(tmp_path) as workers:
        flags = ("--tls-ca", str(authority.path), "--token-file", str(secret), "--num-blocks", "50")
        rank = workers.start(address, 0, 1, *flags)
        rank.wait_for(ready(1))
        secret.write_text(secret_of("second"))
        write_tokens(tokens, entries[1:])
        rank.wait_for("TOKEN_REVOKED")
        rank.wait_for("server back")
        assert rank.is_alive


def test_a_unix_socket_is_private_from_its_creation(tmp_path: Path) -> None:
    path = tmp_path / "s"
    server = ServerProcess(f"unix:{path}")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    server.stop()

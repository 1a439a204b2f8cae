"""TLS with real handshakes: accepted and refused clients, and certificates that are reloaded."""

import asyncio
import shutil
import socket
import ssl
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvpool.client import KvpoolError, TlsConfig, aio, connect
from kvpool.client.admin import AdminClient
from kvpool.client.blocking import run
from kvpool.client.transports.link_calls import AsyncioCall, SocketCall, open_protocol, open_socket
from kvpool.client.transports.step_stream import LinkCall
from kvpool.wire import link
from kvpool.wire.address import host_and_port
from kvpool.wire.channels import ClientCredentials
from support.auth import Authority, Pair, channel, secret_of, write_tokens
from support.command import kvpool
from support.raw_link import steps_hello
from support.server import ServerProcess, free_port, pool_config, server_process
from support.waiting import DEADLINE_SECONDS
from support.workers import ready, worker_processes


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"), "ours")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"), "theirs")


@contextmanager
def serving(pair: Pair, **auth: str) -> Iterator[str]:
    """Runs a server that takes steps at the next port."""
    auth = {"tls_cert": str(pair.cert), "tls_key": str(pair.key), **auth}
    with server_process(f"127.0.0.1:{free_port(2)}", auth=auth) as server:
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
    """Whether the server answers a client with these certificates: over gRPC, and on a link of each kind."""
    steps, access = link.steps_address(address), ClientCredentials(tls)
    due_seconds = time.monotonic() + DEADLINE_SECONDS

    async def asynchronous() -> bool:
        call = AsyncioCall(link.read_refusal)
        with suppress(OSError):
            await open_protocol(steps, access, call)
            return await is_answered(call)
        return False

    def synchronous() -> bool:
        with suppress(OSError):
            return run(is_answered(SocketCall(open_socket(steps, access, due_seconds), link.read_refusal)))
        return False

    is_answered_over_grpc = answers_over_grpc(address, tls)
    assert [synchronous(), asyncio.run(asynchronous())] == [is_answered_over_grpc] * 2
    return is_answered_over_grpc


async def is_answered(call: LinkCall) -> bool:
    """Whether a server answers a hello on a link."""
    due_seconds = time.monotonic() + DEADLINE_SECONDS
    try:
        call.write(steps_hello("another one"), due_seconds)
        await call.receive(due_seconds)
    except KvpoolError as error:
        return error.reason == link.OTHER_SERVER  # or it is no answer, but an alert of TLS
    finally:
        call.cancel()
    raise AssertionError("a server with another id")


def answers_over_grpc(address: str, tls: TlsConfig | None) -> bool:
    """Whether the server answers over gRPC. Otherwise the connection must have failed."""
    with channel(address, tls=tls) as opened:
        try:
            health_pb2_grpc.HealthStub(opened).Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_SECONDS)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return False
        return True


def test_every_client_supports_tls(plain_tls: str, authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
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
    assert "using gRPC" not in caplog.text


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
    def handshake(listener: str, version: ssl.TLSVersion) -> str | None:
        context = ssl.create_default_context(cafile=authority.path)
        context.set_ciphers("ALL:@SECLEVEL=0")
        context.set_alpn_protocols(["h2"])
        context.minimum_version = context.maximum_version = version
        with (
            socket.create_connection(host_and_port("", listener), timeout=DEADLINE_SECONDS) as raw,
            context.wrap_socket(raw, server_hostname="localhost") as spoken,
        ):
            return spoken.version()

    for listener in (plain_tls, link.steps_address(plain_tls)):
        assert handshake(listener, ssl.TLSVersion.TLSv1_2) == "TLSv1.2"
        with pytest.raises((ssl.SSLError, ConnectionError)):
            handshake(listener, ssl.TLSVersion.TLSv1_1)


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
            session.admit(session.request("r2", token_ids=range(8)))  # on the link opened before
            assert client.get_pool("m").sessions == 1


def test_every_port_gets_the_new_certificates(tmp_path: Path, authority: Authority, stranger: Authority) -> None:
    used = Pair(tmp_path / "cert.pem", tmp_path / "cert.key")
    authority.issue("127.0.0.1").copy_over(used)
    auth = {"tls_cert": str(used.cert), "tls_key": str(used.key)}
    port = free_port(4)
    with server_process(f"127.0.0.1:{port}", f"127.0.0.1:{port + 2}", auth=auth) as server:
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
    assert [stat.S_IMODE(each.stat().st_mode) for each in (path, tmp_path / "s.steps")] == [0o600] * 2
    server.stop()

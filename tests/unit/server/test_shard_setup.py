"""A server's part in its shard, made from its settings."""

import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvpool.core.errors import DeniedError, KvpoolError, UnauthenticatedError
from kvpool.server.auth.certificates import Certificates
from kvpool.server.auth.config import AuthConfig
from kvpool.server.auth.token_file import TokenFile
from kvpool.server.cluster.config import ClusterConfig
from kvpool.server.cluster.replicated_state import ReplicatedState
from kvpool.server.cluster.shard_member import ShardMember
from kvpool.server.config import ServerConfig
from kvpool.server.journal.config import JournalConfig
from kvpool.server.services.clock import ServerClock
from kvpool.server.shard_setup import make_member
from support.auth import Authority, secret_of, write_tokens
from support.journal import journal_in, kill
from support.replicas import NoServer
from support.state import DrivenState

CLUSTER = ClusterConfig("etcd://127.0.0.1:1/c", replication_listen="127.0.0.1:7000")
NO_AUTH = AuthConfig()
Make = Callable[..., ShardMember]


@pytest.fixture(name="make")
async def fixture_make(tmp_path: Path) -> AsyncIterator[Make]:
    folder = tmp_path / "journal"
    journal, made = journal_in(folder), list[ShardMember]()

    def make(
        auth: AuthConfig = NO_AUTH, addresses: tuple[str, ...] = ("127.0.0.1:50051",), **settings: Any
    ) -> ShardMember:
        config = ServerConfig(
            addresses,
            journal=JournalConfig(str(folder)),
            auth=replace(auth, allow_plaintext=frozenset({"grpc", "replication"})),
            cluster=replace(CLUSTER, **settings),
        )
        shard = make_member(
            config,
            ReplicatedState(journal, DrivenState, ServerClock()),
            NoServer(),
            certificates=Certificates(auth) if auth.tls_cert else None,
            tokens=TokenFile(auth.tokens) if auth.tokens else None,
        )
        made.append(shard)
        return shard

    yield make
    for shard in made:
        await shard.stop()
    kill(journal)


async def test_a_server_is_a_member_with_its_addresses(make: Make) -> None:
    shard = make(addresses=("127.0.0.1:50051", "unix:/tmp/s"))
    assert (shard.me.addresses, shard.me.replication_address) == (("127.0.0.1:50051",), "127.0.0.1:7000")
    assert repr(shard).startswith("<ShardMember c")
    advertised = make(advertise=("a:1", "b:2"), replication_advertise="a:3", replication_listen="0.0.0.0:7000")
    assert (advertised.me.addresses, advertised.me.replication_address) == (("a:1", "b:2"), "a:3")
    assert advertised.me.member_id == shard.me.member_id


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("advertise", {"addresses": ("0.0.0.0:50051",)}),
        ("advertise", {"addresses": ("127.0.0.1:0",)}),
        ("advertise", {"addresses": ("[::]:50051",)}),
        ("advertise", {"addresses": ("unix:/tmp/s",)}),
        ("advertise", {"advertise": ("a:0",)}),
        ("advertise", {"advertise": (f"{'a' * 300}:1",)}),
        ("advertise", {"advertise": tuple(f"{'a' * 40}{number}:1" for number in range(10))}),
        ("replication_advertise", {"replication_advertise": f"{'a' * 300}:1"}),
        ("replication_advertise", {"replication_listen": "127.0.0.1:0"}),
        ("replication_advertise", {"replication_listen": "0.0.0.0:7000"}),
    ],
)
async def test_addresses_that_others_cannot_use_are_refused(make: Make, name: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{name}: "):
        make(**settings)


async def test_standbys_connect_with_tls_as_clients_do(make: Make, tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ours")
    pair = authority.issue("127.0.0.1")
    plain, secure = make(), make(AuthConfig(pair.cert, pair.key), replication_tls_ca=authority.path)
    assert plain._settings.server_tls is None
    assert plain._settings.client_tls is None
    assert isinstance(secure._settings.server_tls, ssl.SSLContext)
    client_tls = secure._settings.client_tls
    assert client_tls
    assert client_tls.verify_mode is ssl.CERT_REQUIRED
    assert client_tls.check_hostname


TOKENS: list[dict[str, Any]] = [
    {"name": "standby", "role": "standby", "pools": ["*"]},
    {"name": "past", "role": "standby", "pools": ["*"], "expires": "2020-01-01"},
    {"name": "some", "role": "standby", "pools": ["a*"]},
    {"name": "admin", "role": "admin", "pools": ["*"]},
    {"name": "scheduler", "role": "scheduler", "pools": ["*"]},
]


@pytest.fixture(name="check")
async def fixture_check(make: Make, tmp_path: Path) -> Callable[[str], None]:
    write_tokens(tmp_path / "tokens.toml", TOKENS)
    tokens = make(AuthConfig(tokens=tmp_path / "tokens.toml"))._settings.tokens
    assert tokens
    return tokens.check_standby


async def test_a_token_of_the_role_standby_for_all_pools_may_have_the_state(check: Callable[[str], None]) -> None:
    check(secret_of("standby"))


@pytest.mark.parametrize(
    ("token", "kind"),
    [
        ("", UnauthenticatedError),
        ("kvp_unknown", UnauthenticatedError),
        ("\ud800", UnauthenticatedError),
        (secret_of("past"), UnauthenticatedError),
        (secret_of("some"), DeniedError),
        (secret_of("admin"), DeniedError),
        (secret_of("scheduler"), DeniedError),
    ],
)
async def test_another_token_is_refused(check: Callable[[str], None], token: str, kind: type[KvpoolError]) -> None:
    with pytest.raises(kind):
        check(token)


async def test_a_revoked_token_is_refused(check: Callable[[str], None], tmp_path: Path) -> None:
    write_tokens(tmp_path / "tokens.toml", TOKENS[1:])
    with pytest.raises(UnauthenticatedError):
        check(secret_of("standby"))


async def test_while_the_tokens_are_invalid_the_last_valid_ones_count(
    check: Callable[[str], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    invalid = tmp_path / "invalid"
    invalid.write_text("no TOML")
    invalid.replace(tmp_path / "tokens.toml")
    check(secret_of("standby"))
    with pytest.raises(DeniedError):
        check(secret_of("scheduler"))
    assert caplog.messages == ["tokens not reloaded"]


async def test_without_tokens_none_is_checked(make: Make) -> None:
    assert make()._settings.tokens is None

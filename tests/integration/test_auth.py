"""Unauthorized calls are refused with the right code and change nothing."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvpool.client import DeniedError, KvpoolError, Session, UnauthenticatedError, aio, connect
from kvpool.client.admin import AdminClient
from kvpool.server.app import Server
from kvpool.server.auth.config import AuthConfig
from kvpool.server.auth.permissions import RULES, Scope
from kvpool.server.auth.tokens import Role
from kvpool.server.config import ServerConfig
from kvpool.server.guard.token_check import TokenCheck
from kvpool.v1 import admin_pb2, allocator_pb2, directory_pb2, event_pb2, worker_pb2
from kvpool.wire.errors import from_rpc_error
from support.auth import Entry, channel, secret_of, write_tokens
from support.server import ServerProcess, pool_config
from support.waiting import DEADLINE_SECONDS

METHODS: dict[str, MethodDescriptor] = {
    f"{service.full_name}/{method.name}": method
    for file in (admin_pb2, allocator_pb2, directory_pb2, event_pb2, worker_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
TOKENS: list[Entry] = [
    {"name": "scheduler-a", "role": "scheduler", "pools": ["a*"]},
    {"name": "other-a", "role": "scheduler", "pools": ["a*"]},
    *({"name": f"{role}-b", "role": str(role), "pools": ["b*"]} for role in Role),
    *({"name": f"{role}-all", "role": str(role), "pools": ["*"]} for role in Role),
    {"name": "old", "role": "admin", "pools": ["*"], "expires": "2020-01-01"},
]


class House:
    """A server with tokens, a pool and a session."""

    def __init__(self, folder: Path) -> None:
        self.tokens = folder / "tokens.toml"
        write_tokens(self.tokens, TOKENS)
        self.server = ServerProcess(f"unix:{folder / 's'}", "127.0.0.1:0", auth={"tokens": str(self.tokens)})
        self.address = self.server.addresses[0]
        self.client = connect(self.address, token=secret_of("scheduler-a"))
        self.client.create_pool(pool_config("a-pool", enable_events=True))
        self.session: Session = self.client.open_session("a-pool", lease_seconds=600)

    def without(self, *names: str) -> None:
        """Revokes tokens, or accepts all again."""
        write_tokens(self.tokens, [entry for entry in TOKENS if entry["name"] not in names])

    def state(self) -> list[object]:
        """Everything that AdminService returns, except times."""
        with AdminClient(self.address, token=secret_of("admin-all")) as admin:
            pools = admin.overview().pools
            return [*pools, *((info.session_number, info.sequence, info.requests) for info in admin.sessions())]


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    found = House(tmp_path_factory.mktemp("house"))
    yield found
    found.client.close()
    errors = found.server.stop_cleanly()
    for token in TOKENS:
        assert secret_of(token["name"]) not in errors
    assert found.session.session_id not in errors


@pytest.fixture
def own_house(tmp_path: Path) -> Iterator[House]:
    """A house for a test that changes its tokens."""
    house = House(tmp_path)
    yield house
    house.client.close()
    house.server.stop_cleanly()


@contextmanager
def nothing_changed(house: House) -> Iterator[None]:
    before = house.state()
    yield
    assert house.state() == before


def call(address: str, method: str, request: Message, token: str | None) -> Any:
    """Makes a call and returns the first response."""
    described = METHODS[method]
    kinds = {True: "stream", False: "unary"}
    kind = f"{kinds[described.client_streaming]}_{kinds[described.server_streaming]}"
    with channel(address, token) as opened:
        begin = getattr(opened, kind)(
            f"/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=GetMessageClass(described.output_type).FromString,
        )
        answer = begin(iter([request]) if described.client_streaming else request, timeout=DEADLINE_SECONDS)
        return next(answer) if described.server_streaming else answer


def request_of(method: str, pool: str, session_id: str) -> Message:
    """A request of a method, with the pool or session in the field of the method's scope."""
    message = GetMessageClass(METHODS[method].input_type)()
    request: Any = message
    match RULES[method].scope:
        case Scope.POOL | Scope.POOL_OR_SERVER | Scope.POOL_OR_VISIBLE:
            request.pool_name = pool
        case Scope.CONFIG:
            request.config.name = pool
        case Scope.SESSION:
            request.session_id = session_id
        case Scope.FIRST_MESSAGE if method.endswith("/Join"):
            request.register.pool_name = pool
            request.register.world_size = 1
        case Scope.FIRST_MESSAGE:
            request.session_id = session_id
    return message


def refusal(address: str, method: str, request: Message, token: str | None) -> KvpoolError:
    with pytest.raises(grpc.RpcError) as caught:
        call(address, method, request, token)
    return from_rpc_error(caught.value)


def test_every_method_has_a_rule_and_every_rule_a_method() -> None:
    assert {name for name in RULES if name.startswith("kvpool.")} == set(METHODS)


@pytest.mark.parametrize("method", METHODS)
def test_every_call_requires_a_token(house: House, method: str) -> None:
    request = request_of(method, "a-pool", house.session.session_id)
    with nothing_changed(house):
        for token, reason in {
            None: "NO_TOKEN",
            "kvp_guess": "UNKNOWN_TOKEN",
            secret_of("old"): "TOKEN_EXPIRED",
        }.items():
            error = refusal(house.address, method, request, token)
            assert (type(error), error.reason) == (UnauthenticatedError, reason)


@pytest.mark.parametrize("method", [name for name in METHODS if RULES[name].roles != set(Role)])
def test_every_call_requires_its_role(house: House, method: str) -> None:
    request = request_of(method, "a-pool", house.session.session_id)
    others = set(Role) - RULES[method].roles
    with nothing_changed(house):
        for role in others:
            error = refusal(house.address, method, request, secret_of(f"{role}-all"))
            assert (type(error), error.reason) == (DeniedError, "ROLE")


@pytest.mark.parametrize(
    "method", [name for name in METHODS if RULES[name].scope not in (Scope.VISIBLE, Scope.NOTHING)]
)
def test_every_call_requires_its_pool_and_reveals_no_others(house: House, method: str) -> None:
    session_id = house.session.session_id
    with nothing_changed(house):
        for role in RULES[method].roles:
            token = secret_of(f"{role}-b")
            error = refusal(house.address, method, request_of(method, "a-pool", session_id), token)
            scoped_by_session = RULES[method].scope is Scope.SESSION or method.endswith("/Schedule")
            assert (type(error), error.reason) == (DeniedError, "SESSION" if scoped_by_session else "POOL")
            assert "a-pool" not in str(error)
            if not scoped_by_session:
                unknown = refusal(house.address, method, request_of(method, "a-nothing", session_id), token)
                assert (str(unknown), unknown.reason) == (str(error), error.reason)


@pytest.mark.parametrize("method", [name for name, rule in RULES.items() if rule.scope is Scope.POOL_OR_SERVER])
def test_the_whole_server_requires_a_token_for_all_pools(house: House, method: str) -> None:
    with nothing_changed(house):
        error = refusal(house.address, method, request_of(method, "", ""), secret_of("admin-b"))
        assert (type(error), error.reason, error.field) == (DeniedError, "POOL", "pool_name")


def test_lists_show_the_pools_of_the_token(house: House) -> None:
    with AdminClient(house.address, token=secret_of("admin-b")) as admin:
        assert [*admin.overview().pools, *admin.sessions()] == []
    with AdminClient(house.address, token=secret_of("admin-all")) as admin:
        assert [pool.config.name for pool in admin.overview().pools] == ["a-pool"]
        assert len(list(admin.sessions())) == 1


def test_a_session_belongs_to_its_token(house: House) -> None:
    keep = "kvpool.v1.AllocatorService/KeepAlive"
    request = request_of(keep, "", house.session.session_id)
    for name in ("other-a", "scheduler-all", "admin-all"):
        assert refusal(house.address, keep, request, secret_of(name)).reason == "SESSION"
    assert call(house.address, keep, request, secret_of("scheduler-a")).lease_seconds == 600


def test_health_needs_no_token_and_reflection_any_token(house: House) -> None:
    with channel(house.address) as opened:
        checked = health_pb2_grpc.HealthStub(opened).Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_SECONDS)
        assert checked.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as caught:
            services(opened)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    with channel(house.address, secret_of("watcher-b")) as opened:
        assert "kvpool.v1.AllocatorService" in services(opened)


def services(opened: grpc.Channel) -> list[str]:
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    answers = reflection_pb2_grpc.ServerReflectionStub(opened).ServerReflectionInfo(
        iter([asked]), timeout=DEADLINE_SECONDS
    )
    return [service.name for service in next(answers).list_services_response.service]


def test_a_revoked_token_loses_its_streams_and_calls_and_a_broken_file_changes_nothing(own_house: House) -> None:
    own_house.tokens.write_text("[[token]")
    with connect(own_house.address, token=secret_of("watcher-all")) as watcher:
        watch = watcher.watch("a-pool", heartbeat_seconds=0.2)
        assert next(watch).sequence == 0  # a heartbeat: authorized by the earlier file
        with own_house.session.step():
            pass
        own_house.without("watcher-all", "scheduler-a")
        with pytest.raises(UnauthenticatedError) as caught:
            for _ in watch:
                pass
        assert caught.value.reason == "TOKEN_REVOKED"
        with pytest.raises(UnauthenticatedError) as caught:
            own_house.client.get_pool("a-pool")
        assert caught.value.reason == "UNKNOWN_TOKEN"
        own_house.without()
        assert own_house.client.get_pool("a-pool").sessions == 1, "the session lives on for its lease"


async def test_a_bug_in_one_check_of_the_credentials_does_not_end_the_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recheck, errors = TokenCheck.recheck, [RuntimeError("planted")]

    def fail_once(check: TokenCheck) -> None:
        if errors:
            raise errors.pop()
        recheck(check)

    monkeypatch.setattr(TokenCheck, "recheck", fail_once)
    tokens, address = tmp_path / "tokens.toml", f"unix:{tmp_path / 's'}"
    write_tokens(tokens, TOKENS)
    server = Server(ServerConfig(addresses=(address,), auth=AuthConfig(tokens=tokens)))
    await server.start()
    async with aio.connect(address, token=secret_of("scheduler-all")) as client:
        await client.create_pool(pool_config(enable_events=True))
        async with aio.connect(address, token=secret_of("watcher-all")) as watcher:
            watch = watcher.watch("m", heartbeat_seconds=0.1)
            await anext(watch)
            write_tokens(tokens, [entry for entry in TOKENS if entry["name"] != "watcher-all"])
            async with asyncio.timeout(DEADLINE_SECONDS):
                with pytest.raises(UnauthenticatedError, match="revoked"):
                    [_ async for _ in watch]
    await server.stop()
    assert ("bug", "watch_credentials") in [(record.msg, record.__dict__.get("method")) for record in caplog.records]


def test_only_sessions_with_the_same_salt_share_hits(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.toml"
    salts = {"one": "s" * 16, "same": "s" * 16, "two": "t" * 16, "none": ""}
    entries: list[Entry] = [
        {"name": name, "role": "scheduler", "pools": ["*"], **({"salt": salt} if salt else {})}
        for name, salt in salts.items()
    ]
    write_tokens(tokens, entries)
    server = ServerProcess(f"unix:{tmp_path / 's'}", auth={"tokens": str(tokens)})
    prompt, address = list(range(40)), server.addresses[0]
    found, seeds = {}, {}
    for name in salts:
        with connect(address, token=secret_of(name)) as client:
            client.create_pool(pool_config())
            with client.open_session("m") as session:
                seeds[name] = session.config.hash_scheme.none_hash
                request = session.request("r", token_ids=prompt)
                hit = session.get_computed_blocks(request)
                found[name] = hit.num_tokens
                session.allocate_slots(request, len(prompt) - hit.num_tokens, computed=hit)
                session.mark_executed()
                session.free(request)
    assert found == {"one": 0, "same": 36, "two": 0, "none": 0}
    assert seeds["one"] == seeds["same"]
    assert len(set(seeds.values())) == 3
    assert {len(seed) for seed in seeds.values()} == {32}
    server.stop_cleanly()


def test_a_step_whose_token_was_refused_is_settled_when_the_token_is_accepted_again(
    own_house: House, tmp_path: Path
) -> None:
    file = tmp_path / "a.token"
    file.write_text(secret_of("scheduler-a"))
    with connect(own_house.address, token=file, deadline_seconds=3.0) as client:
        session = client.open_session("a-pool", lease_seconds=600)
        request = session.request("r", range(8))
        session.admit(request)
        own_house.without("scheduler-a")

        def until_refused() -> None:
            while True:  # the server looks at the tokens of open links every second
                session.cache_blocks(request, 0)

        with pytest.raises(UnauthenticatedError) as caught:
            until_refused()
        sequence = session.sequence
        for words in (str(file), own_house.address):
            assert words in str(caught.value)
        assert secret_of("scheduler-a") not in str(caught.value)
        assert "settle()" in caught.value.__notes__[0]
        own_house.without()
        session.settle()
        assert session.sequence == sequence + 1


async def test_a_step_waits_for_its_token_to_be_accepted_again(own_house: House) -> None:
    token = secret_of("scheduler-a")
    async with aio.connect(own_house.address, token=token, deadline_seconds=DEADLINE_SECONDS) as client:
        session = await client.open_session("a-pool", lease_seconds=600)
        own_house.without("scheduler-a")
        request = session.request("r", range(8))
        await session.admit(request)
        while True:  # the server looks at the tokens of open links every second
            step = asyncio.create_task(session.cache_blocks(request, 0))
            done, _ = await asyncio.wait({step}, timeout=1.0)
            if not done:
                break
        sequence = session.sequence
        own_house.without()
        await step
        assert session.sequence == sequence + 1

"""A tenant learns nothing of the prompts of another: whatever the other one has cached, all answers are equal."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from kvpool.client import FullAttentionSpec, SlidingWindowSpec
from kvpool.client.admin import AdminClient
from kvpool.core.ids import PoolName
from kvpool.server.auth.permissions import RULES
from kvpool.server.auth.tokens import Role
from kvpool.v1 import allocator_pb2, allocator_pb2_grpc, pool_pb2, step_pb2
from kvpool.wire import pools as wire_pools
from kvpool.wire.errors import from_rpc_error
from kvpool.wire.protocol_version import PROTOCOL_VERSION
from support.auth import Entry, channel, secret_of, write_tokens
from support.core import BLOCK_SIZE, block_hashes, config
from support.server import server_process
from support.waiting import DEADLINE_SECONDS

TOKENS: list[Entry] = [
    {"name": "victim", "role": "scheduler", "pools": ["*"], "salt": "the salt of the victim"},
    {"name": "spy", "role": "scheduler", "pools": ["*"], "salt": "the salt of the spy"},
    {"name": "operator", "role": "admin", "pools": ["*"]},
]
LEAKED = ("abcd", "mnop")
"""Contents whose hashes the spy knows. A window at the end of the first is in the maps of one who has cached it."""
SEQUENCED = (
    "GetComputedBlocks", "AllocateSlots", "CacheBlocks", "Free", "EvictBlocks", "ResetPrefixCache",
    "GetCommonPrefixBlocks", "Schedule",
)  # fmt: skip
SECRETS = ("session_id", "session_number", "epoch", "name", "pool_name", "none_hash")
"""Fields that differ between any two pools and sessions."""


def update(number: int, content: str) -> allocator_pb2.RequestUpdate:
    """A new request with the hashes of a content."""
    num_tokens = BLOCK_SIZE * len(content) + 1
    return allocator_pb2.RequestUpdate(
        request_id=f"r{number}",
        num_appended_tokens=num_tokens,
        block_hashes=block_hashes(content, len(content)),
    )


class Tenant:
    """A scheduler that records every answer.

    Attributes:
        answers: The answers, without what differs between any two pools and sessions.
        called: The methods that it called.
        sequence: Number of its last step.
    """

    def __init__(self, address: str, name: str, pool: str) -> None:
        self.answers: list[tuple[str, str]] = []
        self.called: set[str] = set()
        self._opened = channel(address, secret_of(name))
        self._stub: Any = allocator_pb2_grpc.AllocatorServiceStub(self._opened)
        self._pool, self._session_id, self.sequence = pool, "", 0

    def call(self, method: str, **fields: Any) -> Any:
        """Makes a call, and lets the spy look at the pool after it."""
        self.called.add(method)
        message_type = step_pb2.Step if method == "Schedule" else getattr(allocator_pb2, f"{method}Request")
        named = message_type.DESCRIPTOR.fields_by_name
        fields |= {"session_id": self._session_id} if "session_id" in named else {}
        fields |= {"pool_name": self._pool} if "pool_name" in named else {}
        self.sequence += method in SEQUENCED
        fields |= {"sequence": self.sequence} if "sequence" in named else {}
        request = message_type(**fields)
        try:
            if method == "Schedule":
                answer = next(self._stub.Schedule(iter([request]), timeout=DEADLINE_SECONDS))
            else:
                answer = getattr(self._stub, method)(request, timeout=DEADLINE_SECONDS)
        except grpc.RpcError as error:
            self.answers.append((method, repr(from_rpc_error(error))))
            raise
        if method == "OpenSession":
            self._session_id = answer.session.session_id
        self.answers.append((method, str(without_secrets(answer))))
        if method != "GetPool":
            self.call("GetPool")
        return answer

    def cache(self, number: int, content: str) -> list[int]:
        """Caches a content: admitted, executed and freed. Returns the blocks."""
        new = self.call("AllocateSlots", request=update(number, content), num_new_tokens=BLOCK_SIZE * len(content) + 1)
        self.call("MarkExecuted", executed_sequence=self.sequence)
        self.call("Free", request={"request_id": f"r{number}"})
        return [block_id for group in new.new_blocks for block_id in group.block_ids]

    def probe(self, number: int, content: str) -> None:
        """Looks a content up, with a count of the look-up."""
        self.call("GetComputedBlocks", request=update(number, content), counted_at_once=True)
        self.call("Free", request={"request_id": f"r{number}"})

    def close(self) -> None:
        self._opened.close()


def without_secrets(message: Message) -> Message:
    """Clears the fields that differ between any two pools and sessions, at each level."""
    for field, value in message.ListFields():
        if field.name in SECRETS:
            message.ClearField(field.name)
        elif isinstance(value, Message):
            without_secrets(value)
    return message


@pytest.fixture(scope="module", name="address")
def fixture_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    tokens = tmp_path_factory.mktemp("tokens") / "tokens.toml"
    write_tokens(tokens, TOKENS)
    with server_process(auth={"tokens": str(tokens)}) as server:
        yield server.addresses[0]


def pool_message(name: str) -> pool_pb2.PoolConfig:
    specs = (FullAttentionSpec(BLOCK_SIZE), SlidingWindowSpec(BLOCK_SIZE, sliding_window=5))
    declared = replace(config(80, specs=specs, retention_tokens=0), name=PoolName(name))
    return wire_pools.config_to_proto(declared, with_none_hash=False)


def spied(address: str, name: str, contents: tuple[str, ...], version: str) -> Tenant:
    """A spy's whole life in a pool in which a victim has cached contents, under its weights version."""
    victim, spy = Tenant(address, "victim", name), Tenant(address, "spy", name)
    victim.call("CreatePool", config=pool_message(name))
    victim.call("OpenSession", protocol_version=PROTOCOL_VERSION, weights_version=version)
    blocks = [block_id for i, content in enumerate(contents) for block_id in victim.cache(i, content)]
    try:
        spy.call("CreatePool", config=pool_message(name))
        spy.call("WaitUntilReady")
        spy.call("OpenSession", protocol_version=PROTOCOL_VERSION)
        for i, content in enumerate(LEAKED, 1):
            spy.probe(i, content)
        step = {"request_numbers": [3], "request_ids": ["r3"], "num_appended_tokens": [17], "declares": [True]}
        spy.call(
            "Schedule",
            operations=[step_pb2.OPERATION_LOOKUP_COUNTED_AT_ONCE],
            block_hashes=block_hashes(LEAKED[0], 4),
            **step,
        )
        # Names the victim's blocks as a hit.
        hit = {"num_tokens": 16, "groups": [{"block_ids": blocks[10:14]}, {"block_ids": [0, 0, 0, blocks[18]]}]}
        spy.call("AllocateSlots", request=update(4, LEAKED[1]), num_new_tokens=1, computed=hit)
        spy.call("AllocateSlots", request={"request_id": "r4"}, num_new_tokens=17)
        spy.call("CacheBlocks", request={"request_id": "r4"}, num_computed_tokens=17)
        spy.call("GetCommonPrefixBlocks", request={"request_id": "r4"})
        spy.call("Free", request={"request_id": "r4"}, preempted=True)
        spy.cache(5, "abcdefgh")
        spy.probe(6, "abcdXYZW")  # its own full attention has the prefix, and no window at its end
        spy.call("SetWeightsVersion", weights_version="victim-1")
        spy.probe(7, LEAKED[0])
        spy.call("EvictBlocks", block_ids=blocks)
        spy.call("ResetPrefixCache")
        spy.probe(8, LEAKED[0])
        spy.call("KeepAlive")
        spy.call("CloseSession")
    finally:
        victim.close()
        spy.close()
    return spy


def test_a_tenant_cannot_tell_which_prompts_and_weights_another_has(address: str) -> None:
    with_it = spied(address, "with", LEAKED, "victim-1")
    without = spied(address, "without", ("stuv", "wxyz"), "victim-2")
    for one, other in zip(with_it.answers, without.answers, strict=True):
        assert one == other
    methods = {name for name, rule in RULES.items() if Role.SCHEDULER in rule.roles and "AllocatorService" in name}
    assert {f"kvpool.v1.AllocatorService/{name}" for name in with_it.called} == methods


def test_an_operator_sees_what_others_have(address: str) -> None:
    spied(address, "seen", LEAKED, "victim-1")
    with AdminClient(address, token=secret_of("operator")) as admin:
        (seen,) = [info for info in admin.overview().pools if info.config.name == "seen"]
    reasons = {each.reason for group in seen.groups for each in group.misses}
    assert reasons >= {pool_pb2.MISS_REASON_OTHER_SCOPE, pool_pb2.MISS_REASON_NOT_KEPT}
    assert seen.weights_versions == ["victim-1"]

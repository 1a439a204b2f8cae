"""A look-up counts once, when its request gets slots, however often the request is tried."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import grpc
import pytest

from kvpool.client import BlockHasher, HitChanged, PoolInfo, Request, Session, connect
from kvpool.client.transports import messages
from kvpool.client.transports.transport import SessionOptions
from kvpool.replay.result import Counts
from kvpool.replay.scheduler import Scheduler as Player
from kvpool.replay.workload import ChatShare
from kvpool.v1 import allocator_pb2, allocator_pb2_grpc, step_pb2
from support.command import kvpool
from support.scrape import scrape
from support.server import free_port, pool_config, running_server

POOL = "waits"
CONFIG = pool_config(POOL, num_blocks=12)
SHARED = list(range(16))
PROMPTS = {"a": [*SHARED, 1, 1, 1, 1], "b": [*SHARED, 2, 2, 2, 2], "c": [*SHARED[:8], *[3] * 32]}
REFUSALS = 25
QUERIES, HITS = 80, 24
"""`b` hits 4 blocks of `a`; `c` hits 2, and waits until both are freed."""


class Scheduler(Protocol):
    """How a scheduler looks up and allocates in two calls."""

    def try_to_admit(self, name: str) -> bool:
        """Looks up a request, and allocates its other tokens; whether there were enough blocks."""

    def free(self, name: str) -> None: ...

    def preempt(self, name: str) -> None: ...


class _Sessions:
    """The calls of a session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._requests = {name: session.request(name, prompt) for name, prompt in PROMPTS.items()}

    def try_to_admit(self, name: str) -> bool:
        request = self._requests[name]
        hit = self._session.get_computed_blocks(request)
        got = self._session.allocate_slots(request, request.num_tokens - hit.num_tokens, computed=hit)
        assert not isinstance(got, HitChanged)
        return got is not None

    def free(self, name: str) -> None:
        self._session.free(self._requests[name])

    def preempt(self, name: str) -> None:
        self._session.preempt(self._requests[name])


class _Steps(_Sessions):
    """The same in steps that a scheduler collects."""

    def try_to_admit(self, name: str) -> bool:
        request = self._requests[name]
        with self._session.step() as step:
            found = step.get_computed_blocks(request)
        with self._session.step() as step:
            answer = step.allocate_slots(request, request.num_tokens - found.num_hit_tokens, computed=found.computed)
        return answer.ok


class _Unary:
    """Unary calls, as a client in another language makes them."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._stub = allocator_pb2_grpc.AllocatorServiceStub(channel)
        opened = self._stub.OpenSession(messages.open_session_request(SessionOptions(POOL)))
        self.session_id = opened.session.session_id
        self._sequence = 0
        self._sent: set[str] = set()

    def _call(self, method: Callable[[Any], Any], kind: Callable[..., Any], name: str, **fields: Any) -> Any:
        self._sequence += 1
        update = allocator_pb2.RequestUpdate(request_id=name)
        if name not in self._sent:
            self._sent.add(name)
            hasher = BlockHasher(CONFIG.hash_scheme, CONFIG.hash_block_size)
            request = Request(name, 0, PROMPTS[name], 1, hasher)  # type: ignore[arg-type]  # ids are numbers and text
            update.num_appended_tokens, update.block_hashes = request.num_tokens, b"".join(request.hashes)
        return method(kind(session_id=self.session_id, sequence=self._sequence, request=update, **fields))

    def try_to_admit(self, name: str) -> bool:
        found = self._call(self._stub.GetComputedBlocks, allocator_pb2.GetComputedBlocksRequest, name)
        num_new_tokens = len(PROMPTS[name]) - found.computed.num_tokens
        answer = self._call(
            self._stub.AllocateSlots,
            allocator_pb2.AllocateSlotsRequest,
            name,
            num_new_tokens=num_new_tokens,
            computed=found.computed,
        )
        return bool(answer.outcome == step_pb2.OUTCOME_UNSPECIFIED)

    def free(self, name: str) -> None:
        self._call(self._stub.Free, allocator_pb2.FreeRequest, name)

    def preempt(self, name: str) -> None:
        self._call(self._stub.Free, allocator_pb2.FreeRequest, name, preempted=True)


def schedule(scheduler: Scheduler) -> None:
    """Admits three requests, the last of which waits for the blocks of the others."""
    assert scheduler.try_to_admit("a")
    assert scheduler.try_to_admit("b")
    for _ in range(REFUSALS):
        assert not scheduler.try_to_admit("c")
    scheduler.free("b")
    for _ in range(REFUSALS):
        assert not scheduler.try_to_admit("c")
    scheduler.free("a")
    assert scheduler.try_to_admit("c")
    scheduler.preempt("c")
    assert scheduler.try_to_admit("c")
    scheduler.free("c")


def check(info: PoolInfo) -> None:
    cache = info.prefix_cache
    assert (cache.requests, cache.queries_tokens, cache.hits_tokens) == (3, QUERIES, HITS)
    assert (cache.preempted_requests, cache.preempted_queries_tokens) == (1, len(PROMPTS["c"]))
    assert info.recent_hit_rate == HITS / QUERIES
    assert info.activity.refusals == 2 * REFUSALS


@pytest.mark.parametrize("kind", ["calls", "steps", "unary"])
def test_a_request_that_waits_counts_once_in_every_figure(kind: str) -> None:
    port = free_port()
    with running_server(metrics={"address": f"127.0.0.1:{port}"}) as address, connect(address) as client:
        client.create_pool(CONFIG)
        if kind == "unary":
            with grpc.insecure_channel(address) as channel:
                schedule(_Unary(channel))
        else:
            with client.open_session(POOL) as session:
                schedule((_Steps if kind == "steps" else _Sessions)(session))
        check(client.get_pool(POOL))
        exported = scrape(port)
        listed = json.loads(kvpool("pools", "--address", address, "--json").stdout)["pools"]
    of_pool = frozenset({("pool", POOL)})
    assert exported["kvpool_prefix_cache_lookups_total", of_pool] == 3
    assert exported["kvpool_prefix_cache_queried_tokens_total", of_pool] == QUERIES
    assert exported["kvpool_prefix_cache_hit_tokens_total", of_pool] == HITS
    assert exported["kvpool_prefix_cache_recent_hit_ratio", of_pool] == HITS / QUERIES
    assert [pool["recent_hit_rate"] for pool in listed] == [HITS / QUERIES]


def test_schedulers_and_their_pool_count_the_same() -> None:
    with running_server() as address, connect(address) as client:
        client.create_pool(replace(pool_config(POOL, num_blocks=800), max_model_len=2048))
        with client.open_session(POOL) as first, client.open_session(POOL) as second:
            chats = [ChatShare(1, index, num_conversations=4, num_turns=2) for index in range(2)]
            players = [Player(session, share) for session, share in zip((first, second), chats, strict=True)]
            while playing := [player for player in players if not player.is_done]:
                for player in playing:
                    player.play_round()
        info = client.get_pool(POOL)
    total, cache = Counts(), info.prefix_cache
    for player in players:
        total.add(player.counts)
    assert total.preemptions > 0
    assert cache.preempted_requests > 0
    assert total.requests == cache.requests == 16
    assert (total.input_tokens, total.hit_tokens) == (cache.queries_tokens, cache.hits_tokens)
    assert total.hit_rate == info.recent_hit_rate > 0
    assert total.readmitted_hit_tokens == cache.preempted_hits_tokens

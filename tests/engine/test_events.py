"""What an engine on the service publishes of its blocks is what vLLM publishes, as its consumers read it."""

import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
)
from vllm.v1.core.sched.scheduler import Scheduler as Plain

from engine.driving import Driver, Setup, make_scheduler
from engine.host_pools import give_host_memory
from engine.service import service
from kvpool.client import Medium, PrefixIndex, connect
from kvpool.client.vllm import Scheduler
from support.router import Router

pytestmark = pytest.mark.complete

WAIT_SECONDS = 20.0
SETUPS = {"plain": Setup(num_blocks=40), "windows": Setup(num_blocks=80, windows=(0, 40), retention_tokens=None)}


def published(endpoint: str) -> list[Any]:
    """All events so far, by the publisher's replay, as a consumer asks for it."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.rcvtimeo = int(WAIT_SECONDS * 1000)
        socket.connect(f"{endpoint}.replay")
        socket.send_multipart([b"", (0).to_bytes(8, "big")])
        events: list[Any] = []
        expected = 0
        while True:
            *_, number, payload = socket.recv_multipart()
            if not payload:
                return events
            assert int.from_bytes(number, "big") == expected
            expected += 1
            events += msgspec.msgpack.decode(payload, type=KVEventBatch).events


def stored(events: list[Any]) -> list[tuple[Any, ...]]:
    """Each published block, in order; without the tokens of windows, which vLLM publishes for more blocks."""
    found: list[tuple[Any, ...]] = []
    for event in events:
        if isinstance(event, BlockStored):
            parents = [event.parent_block_hash, *event.block_hashes]
            group, *spec = event.group_idx, event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window
            found += [(each, group, *spec, event.block_size, event.lora_name) for each in event.block_hashes]
            if not group:
                tokens = event.token_ids
                assert len(tokens) == len(event.block_hashes) * event.block_size
                size = event.block_size
                found += [
                    (each, parents[i], tuple(tokens[i * size : (i + 1) * size]))
                    for i, each in enumerate(event.block_hashes)
                ]
    return found


def held(events: list[Any], *, by_copy: bool) -> set[Any]:
    """What a consumer thinks is cached, after all of them."""
    copies: Counter[Any] = Counter()
    for event in events:
        if isinstance(event, AllBlocksCleared):
            copies.clear()
            continue
        for each in event.block_hashes:
            key = (event.medium, event.group_idx, each)
            if isinstance(event, BlockRemoved):
                copies[key] = copies[key] - 1 if by_copy else 0
            else:
                copies[key] += 1
    return {key for key, count in copies.items() if count > 0}


def both(setup: Setup, on_service: Setup) -> tuple[list[Any], list[Any]]:
    """What each has published, once it comes to the same, or is not going to."""
    due = time.monotonic() + WAIT_SECONDS
    while True:
        plain, served = published(setup.events_endpoint), published(on_service.events_endpoint)
        is_same = len(stored(plain)) == len(stored(served))
        is_same = is_same and held(plain, by_copy=True) == held(served, by_copy=False)
        if is_same or time.monotonic() > due:
            return plain, served
        time.sleep(0.05)  # the last of them may be under way


def play(scheduler_class: Any, setup: Setup, folder: Path) -> Driver:
    """Requests that share prefixes, in a pool that must give most of what it caches up."""
    driver = Driver(make_scheduler(scheduler_class, setup, folder), setup)
    for i in range(24):
        values: dict[str, Any] = {"cache_salt": "s"} if i % 7 == 3 else {}
        if i % 3 == 1:
            values["sampling"] = {"prompt_logprobs": 1}  # reads no cache, and so stores copies
        driver.add(f"r{i}", [(i // 3 * 11 + j) % 512 for j in range(60 + 20 * (i % 3))], 20, **values)
        if i % 3 == 2:
            driver.finish()
    return driver


@pytest.mark.parametrize("name", SETUPS)
def test_the_events_are_those_of_vllm(name: str, address: str, tmp_path: Path) -> None:
    setup = replace(SETUPS[name], events_endpoint=f"ipc://{tmp_path}/plain")
    attached = {"kvpool": {"address": address, "pool": f"events.{name}"}}
    on_service = replace(setup, events_endpoint=f"ipc://{tmp_path}/served", additional_config=attached)
    drivers = [play(Plain, setup, tmp_path), play(Scheduler, on_service, tmp_path)]
    plain, served = both(setup, on_service)
    assert stored(served) == stored(plain)
    assert held(served, by_copy=False) == held(plain, by_copy=True)
    assert any(isinstance(event, BlockRemoved) for event in plain)

    for driver in drivers:
        assert driver.scheduler.reset_prefix_cache()
        driver.add("again", [5] * 40, 4)
        driver.finish()
    plain, served = both(setup, on_service)
    assert held(served, by_copy=False) == held(plain, by_copy=True)
    assert len(held(plain, by_copy=True)) <= 2 * len(setup.windows)


class Subscriber:
    """A connected subscriber without replay, which may outlive engines.

    Attributes:
        events: The events since the newest AllBlocksCleared.
        num_starts: How often the sequence went back.
        router: A router on the same events.
    """

    def __init__(self, endpoint: str) -> None:
        self.events: list[Any] = []
        self.num_starts = 0
        self.router = Router(16)
        self._last = -1
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.rcvtimeo = int(1000 * WAIT_SECONDS)
        self._socket.subscribe(b"")
        self._socket.connect(endpoint)

    @property
    def map(self) -> set[Any]:
        """What it thinks is cached."""
        return held(self.events, by_copy=False)

    def read_until(self, pool: set[Any], num_starts: int) -> None:
        """Reads until the map is the pool's, and the sequence went back that often. Fails if nothing comes any more."""
        while (self.map, self.num_starts) != (pool, num_starts):
            _, number, payload = self._socket.recv_multipart()
            sequence = int.from_bytes(number, "big")
            self.num_starts += sequence <= self._last
            self._last = sequence
            for event in msgspec.msgpack.decode(payload, type=KVEventBatch).events:
                self._apply(event)
        assert not self.router.num_lost

    def _apply(self, event: Any) -> None:
        self.events.append(event)
        if isinstance(event, AllBlocksCleared):
            self.events.clear()
            self.router = Router(16)  # it may have begun amid the events before
        elif isinstance(event, BlockStored):
            self.router.store(_place(event), event.block_hashes, event.parent_block_hash, tuple(event.token_ids))
        else:
            self.router.remove(_place(event), event.block_hashes)

    def close(self) -> None:
        """Disconnects."""
        self._context.destroy(linger=0)


def _place(event: Any) -> int:
    """The group of an event, which counts as another one in each tier."""
    place: int = 2 * event.group_idx + (event.medium == MEDIUM_CPU)
    return place


def pools_map(address: str, pool: str) -> set[Any]:
    """What a pool has cached, as `held` has it."""
    index = PrefixIndex()
    with connect(address) as client:
        for batch in client.watch(pool, snapshot=True):
            index.apply(batch)
            if index.is_whole:
                return {
                    (name, group, int.from_bytes(each[-8:], "big"))
                    for medium, name in ((Medium.FIRST_TIER, MEDIUM_GPU), (Medium.HOST_MEMORY, MEDIUM_CPU))
                    for group, each in index.entries(medium)
                }
    raise AssertionError


@pytest.mark.parametrize("memory_id", ["", "kept"])
def test_a_subscriber_has_the_pools_map_whenever_it_connects(memory_id: str, address: str, tmp_path: Path) -> None:
    """Before the engine, across a restart of it, and after, without a request. With a memory id the pool stays warm."""
    endpoint, pool = f"ipc://{tmp_path}/events", f"events.restart{memory_id}"
    settings = {"address": address, "pool": pool, "memory_id": memory_id}
    sizes = (32, 16) if memory_id else ()
    setup = replace(
        SETUPS["windows"], block_sizes=sizes, events_endpoint=endpoint, additional_config={"kvpool": settings}
    )
    subscribers = [Subscriber(endpoint)]
    driver = play(Scheduler, setup, tmp_path)
    subscribers[0].read_until(pools_map(address, pool), 0)
    assert subscribers[0].map
    subscribers.append(Subscriber(endpoint))
    subscribers[1].read_until(pools_map(address, pool), 0)
    driver.scheduler.shutdown()
    make_scheduler(Scheduler, setup, tmp_path)
    held = pools_map(address, pool)
    assert bool(held) == bool(memory_id)
    for each in subscribers:
        each.read_until(held, 1)
        each.close()


@pytest.mark.parametrize("name", SETUPS)
def test_a_subscriber_learns_which_tier_has_a_block(
    name: str, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_host_memory(monkeypatch, 60)
    endpoint, pool = f"ipc://{tmp_path}/events", f"events.tiers.{name}"
    attached = {"kvpool": {"address": address, "pool": pool}}
    subscriber = Subscriber(endpoint)
    driver = play(Scheduler, replace(SETUPS[name], events_endpoint=endpoint, additional_config=attached), tmp_path)
    subscriber.read_until(pools_map(address, pool), 0)
    assert {medium for medium, *_ in subscriber.map} == {MEDIUM_GPU, MEDIUM_CPU}
    removed = [event.medium for event in published(endpoint) if isinstance(event, BlockRemoved)]
    assert set(removed) == {MEDIUM_GPU, MEDIUM_CPU}
    assert driver.scheduler.reset_prefix_cache()
    subscriber.read_until(set(), 0)
    subscriber.close()
    driver.scheduler.shutdown()


def test_a_subscriber_learns_that_the_service_has_lost_the_pool(tmp_path: Path) -> None:
    """The engine is idle: it opens another session with the next request."""
    endpoint = f"ipc://{tmp_path}/events"
    with service(tmp_path) as started:
        attached = {"kvpool": {"address": started.address, "pool": "events.lost"}}
        setup = replace(SETUPS["windows"], events_endpoint=endpoint, additional_config=attached)
        subscriber = Subscriber(endpoint)
        driver = play(Scheduler, setup, tmp_path)
        subscriber.read_until(pools_map(started.address, "events.lost"), 0)
        started.restart()
        subscriber.read_until(set(), 0)
        driver.add("next", [5] * 40, 4)
        driver.finish()
        subscriber.read_until(pools_map(started.address, "events.lost"), 0)
        assert subscriber.map
        subscriber.close()
        driver.scheduler.shutdown()


def test_a_request_may_enable_the_report_of_its_hit(address: str, tmp_path: Path) -> None:
    setup = Setup(events_endpoint=f"ipc://{tmp_path}/plain")
    attached = {"kvpool": {"address": address, "pool": "events.found"}}
    on_service = replace(setup, events_endpoint=f"ipc://{tmp_path}/served", additional_config=attached)
    found = []
    for kind, each in ((Plain, setup), (Scheduler, on_service)):
        driver = Driver(make_scheduler(kind, each, tmp_path), each)
        for i in range(2):
            driver.add(f"r{i}", [7] * 50, 2, sampling={"extra_args": {"kv_cache_report_mode": "full"}})
            driver.finish()
        due = time.monotonic() + WAIT_SECONDS
        while len(stored(published(each.events_endpoint))) < 12 and time.monotonic() < due:
            time.sleep(0.05)  # the publisher has a thread of its own
        found.append(stored(published(each.events_endpoint)))
        driver.scheduler.shutdown()
    assert sorted(found[0], key=repr) == sorted(found[1], key=repr)
    assert len(found[0]) == 12  # three blocks stored, and found, each with its tokens

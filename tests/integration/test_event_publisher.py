"""The ZeroMQ transport on real sockets: late, dropping and lagging subscribers, restarts, and both framings."""

import asyncio
import contextlib
import json
import logging
import random
import subprocess
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from kvpool.client import connect
from kvpool.client.admin import AdminClient
from kvpool.server.app import Server
from kvpool.server.auth.config import AuthConfig
from kvpool.server.config import ServerConfig
from kvpool.server.events import publisher, publishers
from kvpool.server.events.config import EventsConfig, ReplayFraming
from support import processes
from support.events import END, Subscriber, truth
from support.publisher import Site
from support.server import CommandLineServer, free_port, pool_config, running_server
from support.waiting import DEADLINE_SECONDS, until


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Callable[..., Site]]:
    sites: list[Site] = []

    def make(**options: object) -> Site:
        sites.append(Site(tmp_path, **options))
        return sites[-1]

    yield make
    for made in sites:
        await made.stop()


class Router:
    """A subscriber on real sockets."""

    def __init__(self, site: Site, *, lossy: bool = False) -> None:
        self.state = Subscriber()
        self.is_paused = False
        self._lossy = random.Random(3) if lossy else None  # noqa: S311 - a network
        self._context = zmq.asyncio.Context()
        self._live = self._context.socket(zmq.SUB)
        self._live.rcvhwm = 1
        self._live.rcvbuf = 4096
        self._live.subscribe(b"kv@m@")
        self._live.connect(site.events.endpoint)
        self._asks = self._context.socket(zmq.DEALER)
        self._asks.connect(site.events.replay_endpoint)
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        poller = zmq.asyncio.Poller()
        poller.register(self._asks, zmq.POLLIN)
        poller.register(self._live, zmq.POLLIN)
        silent = 0
        while True:
            while self.state.asks:
                await self._asks.send_multipart([b"", self.state.asks.popleft()])
            ready = dict(await poller.poll(50))
            if self._asks in ready:
                self.state.answer((await self._asks.recv_multipart())[1:])
            if self._live in ready and not self.is_paused:
                frames = await self._live.recv_multipart()
                if not (self._lossy and self._lossy.random() < 0.2):
                    self.state.live(frames)
            silent = 0 if self._asks in ready else silent + (not ready)
            if silent >= 20 and not self.state.is_settled:
                self.state.ask_again()
                silent = 0
            if self.is_paused:
                await asyncio.sleep(0.01)

    async def settled(self, site: Site) -> None:
        """Waits until the map has caught up with the server, and compares both."""
        while not (self.state.is_settled and self.state.next == site.publisher.counts.messages):
            assert not self._task.done(), self._task
            if self.state.is_settled and site.publisher._next > site.publisher._log.last_sequence:
                await site.work(1)  # the next message reveals the last dropped one
            await asyncio.sleep(0.02)
        assert self.state.known == truth(site.pool) != set()
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._context.destroy(linger=0)


async def test_a_router_that_joins_late_gets_the_complete_map(site: Callable[..., Site]) -> None:
    place = site()
    await place.start()
    await place.work(30)
    router = Router(place)
    await place.work(30)
    await router.settled(place)
    assert router.state.num_snapshots == 1


async def test_a_router_that_drops_messages_requests_them(site: Callable[..., Site]) -> None:
    place = site()
    await place.start()
    router = Router(place, lossy=True)
    for _ in range(40):
        await place.work(2)
        await asyncio.sleep(0.01)
    await router.settled(place)
    assert router.state.num_replays > 0
    assert place.publisher.counts.replays == router.state.num_replays


@pytest.mark.slow
async def test_a_router_that_lags_behind_the_buffer_takes_another_snapshot(site: Callable[..., Site]) -> None:
    place = site(buffer_batches=20)
    await place.start()
    router = Router(place)
    await until(lambda: router.state.num_snapshots > 0)
    router.is_paused = True
    await place.work(1500)
    router.is_paused = False
    await router.settled(place)
    assert router.state.num_snapshots > 1


async def test_a_router_follows_a_restarted_server(site: Callable[..., Site]) -> None:
    place = site()
    await place.start()
    router = Router(place)
    await place.work(20)
    await until(lambda: router.state.next == place.publisher.counts.messages)
    boot_id = router.state.boot_id
    await place.stop()
    await place.start()
    await place.work(10)
    await router.settled(place)
    assert boot_id != router.state.boot_id == place.server.components.boot_id


async def test_subscribers_are_dropped_when_descriptors_are_short_and_catch_up(
    site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(publishers, "_REFUSAL_SECONDS", 0.2)
    place = site()
    await place.start()
    router = Router(place)
    await place.work(20)
    await until(lambda: router.state.next == place.publisher.counts.messages)
    with monkeypatch.context() as patch:
        patch.setattr(publishers, "has_free_files", lambda _: False)
        await until(lambda: "event subscribers dropped" in caplog.messages)
    await place.work(20)
    await router.settled(place)
    assert router.state.num_replays + router.state.num_snapshots > 1


async def ask(site: Site, request: bytes, endpoint: str = "") -> list[list[bytes]]:
    """Sends a request as vLLM's clients do; returns all replies."""
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(endpoint or site.events.replay_endpoint)
        await socket.send_multipart([b"", request])
        answers: list[list[bytes]] = []
        while not answers or answers[-1][-1] != b"":
            async with asyncio.timeout(DEADLINE_SECONDS):
                answers.append(await socket.recv_multipart())
            if answers[-1][1] == publisher.STATUS:
                break
        return answers


@pytest.mark.parametrize("framing", ReplayFraming)
async def test_a_replay_has_the_frames_of_the_configured_vllm(
    framing: ReplayFraming, site: Callable[..., Site]
) -> None:
    place = site(replay_framing=framing)
    await place.start()
    await place.work(3)
    await until(lambda: place.publisher.counts.messages >= 4)
    newest = place.publisher.counts.messages - 1
    *batches, end = await ask(place, (1).to_bytes(8, "big"))
    topic = [b"kv@m@m"] if framing is ReplayFraming.TOPIC else []
    assert [frames[:-1] for frames in batches] == [[b"", *topic, i.to_bytes(8, "big")] for i in range(1, newest + 1)]
    assert end == ([b"", b"", END, b""] if framing is ReplayFraming.TOPIC else [b"", END, b""])
    assert msgspec.msgpack.decode(batches[0][-1])[1][0]["type"] == "BlockStored"
    assert await ask(place, (10**6).to_bytes(8, "big")) == [end]


async def test_the_first_message_clears_the_map_and_the_status_has_the_boot_id(
    site: Callable[..., Site],
) -> None:
    place = site()
    await place.start()
    first, *_ = await ask(place, bytes(8))
    _, events, rank = msgspec.msgpack.decode(first[-1])
    assert (events, rank) == ([{"type": "AllBlocksCleared"}], 0)
    ((_, kind, header),) = await ask(place, publisher.STATUS_REQUEST)
    boot_id = place.server.components.boot_id
    expected = {"pool": "m", "boot_id": boot_id, "epoch": 1, "sequence": 1, "oldest_sequence": 0}
    assert (kind, msgspec.msgpack.decode(header)) == (publisher.STATUS, expected)


async def test_malformed_requests_are_ignored(site: Callable[..., Site]) -> None:
    place = site()
    await place.start()
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(place.events.replay_endpoint)
        await socket.send(b"")
        for frames in ([b"", b""], [b"", b"short"], [b"x", bytes(8)], [b"", b"", bytes(8)], [b"", b"9" * 100_000]):
            await socket.send_multipart(frames)
    assert len(await ask(place, bytes(8))) == 2


async def test_a_request_of_no_known_kind_is_logged(
    site: Callable[..., Site], caplog: pytest.LogCaptureFixture
) -> None:
    place = site()
    await place.start()
    with (
        caplog.at_level(logging.DEBUG, "kvpool.server"),
        zmq.asyncio.Context() as context,
        context.socket(zmq.DEALER) as socket,
    ):
        socket.connect(place.events.replay_endpoint)
        await socket.send_multipart([b"", b"short"])
        await socket.send_multipart([b"", publisher.STATUS_REQUEST])
        await socket.recv_multipart()  # requests are started in order
    assert [record.message for record in caplog.records].count("event request malformed") == 1


async def test_heartbeats_are_numbered_empty_batches(site: Callable[..., Site]) -> None:
    place = site(heartbeat_seconds=0.1)
    await place.start()
    with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as socket:
        socket.subscribe(b"kv@m@m")
        socket.connect(place.events.endpoint)
        messages = [await socket.recv_multipart() for _ in range(3)]
    numbers = [int.from_bytes(number, "big") for _, number, _ in messages]
    assert numbers == list(range(numbers[0], numbers[0] + 3))
    assert [msgspec.msgpack.decode(payload)[1:] for *_, payload in messages] == [[[], 0]] * 3
    assert place.publisher.counts.messages > numbers[-1] - numbers[0]


async def test_each_pool_has_its_own_port_and_numbers(tmp_path: Path) -> None:
    place = Site(tmp_path)
    place.events = replace(place.events, pools=("other", "m"))
    await place.start(("m", "other", "third"))
    try:
        publishers = place.server.components.publishers
        assert publishers
        assert set(publishers.by_pool) == {"m", "other"}
        await place.work(2)
        own = await ask(place, bytes(8), place.events.replay_endpoint + ".1")
        others = await ask(place, bytes(8))
        assert {frames[1] for frames in own[:-1]} == {b"kv@m@m"}
        assert [frames[1:3] for frames in others[:-1]] == [[b"kv@other@other", bytes(8)]]
        assert len(own) > 2
    finally:
        await place.stop()


async def test_a_pool_works_even_if_its_endpoint_is_in_use(
    site: Callable[..., Site], caplog: pytest.LogCaptureFixture
) -> None:
    place = site()
    port = free_port() + 1
    with zmq.Context() as context, context.socket(zmq.PUB) as taken:
        taken.bind(f"tcp://127.0.0.1:{port}")
        place.events = replace(place.events, endpoint=f"tcp://[::ffff:127.0.0.1]:{port - 1}", replay_endpoint="")
        with caplog.at_level(logging.ERROR, "kvpool.server"):
            await place.start(("a", "m"))
    refused = [record for record in caplog.records if record.message == "events not published"]
    assert [vars(record)["pool"] for record in refused] == ["m"]
    assert f"cannot publish on tcp://[::ffff:127.0.0.1]:{port}" in vars(refused[0])["error"]
    await place.work(1)


def serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [processes.KVPOOL, "serve", "--listen", "127.0.0.1:0", *arguments]
    return processes.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False)


def test_serve_reports_invalid_endpoints() -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as taken:
        taken.bind("tcp://*:*")
        port = taken.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
        refused = serve("--events-endpoint", f"tcp://*:{port}", "--allow-plaintext", "events")
    assert refused.returncode == 1
    assert refused.stderr == f"Error: cannot publish on tcp://*:{port}: Address already in use\n"
    odd = serve("--events-endpoint", "5557")
    assert odd.returncode == 2
    assert "--events-endpoint: '5557': needs tcp://HOST:PORT" in odd.stderr


def test_serve_reads_event_settings_from_a_file(tmp_path: Path) -> None:
    """Every setting is known by the name of its flag; the last one is invalid here."""
    settings = {
        "events_endpoint": "tcp://*:5557",
        "events_replay_endpoint": "tcp://*:5657",
        "events_pool": ["a", "b"],
        "events_topic": "kv@{host}@{pool}",
        "replay_framing": "legacy",
        "events_hashes": "bytes",
        "events_removed": "every-copy",
        "events_buffer_batches": 100,
        "events_heartbeat_seconds": 0.01,
    }
    file = tmp_path / "kvpool.toml"
    file.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items()))
    refused = serve("--config", str(file))
    assert refused.returncode == 2
    assert "events_heartbeat_seconds: 0.01 is neither 0 nor in [0.1, 3600]" in refused.stderr


def test_a_server_that_publishes_starts_and_stops_from_the_command_line(tmp_path: Path) -> None:
    address, endpoint = f"unix:{tmp_path / 's'}", f"ipc://{tmp_path / 'e'}"
    with CommandLineServer(address, options=("--events-endpoint", endpoint)) as server:
        with connect(address) as client:
            client.create_pool(pool_config(enable_events=True))
        server.wait_for(f"events published pool=m addresses={endpoint}")


def test_recreated_pools_reuse_one_pair_of_endpoints(tmp_path: Path) -> None:
    """The number of endpoints must not grow with the names that clients choose."""
    endpoints = {"endpoint": f"ipc://{tmp_path / 'e'}", "replay_endpoint": f"ipc://{tmp_path / 'r'}"}
    with running_server(events=endpoints) as address, connect(address) as client, AdminClient(address) as admin:
        for number in range(20):
            client.create_pool(pool_config(f"pool{number}", enable_events=True))
            admin.remove_pool(f"pool{number}")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["e", "r"]


def test_a_recreated_pool_gets_its_former_endpoints(tmp_path: Path) -> None:
    endpoints = {"endpoint": f"ipc://{tmp_path / 'e'}"}
    with running_server(events=endpoints) as address, connect(address) as client, AdminClient(address) as admin:
        for name in ("a", "b"):
            client.create_pool(pool_config(name, enable_events=True))
        for name in ("a", "b"):
            admin.remove_pool(name)
        with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
            subscriber.subscribe(b"")
            with subscriber.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED) as connections:
                subscriber.connect(f"ipc://{tmp_path / 'e.1'}")
                assert connections.poll(10_000)
                subscriber.disable_monitor()
            client.create_pool(pool_config("b", enable_events=True))
            assert subscriber.poll(10_000)
            assert subscriber.recv_multipart()[0] == b"kv@b@b"


async def test_an_endpoint_that_cannot_be_connected_to_is_reported(tmp_path: Path) -> None:
    events, auth = EventsConfig("tcp://no host:5557"), AuthConfig(allow_plaintext=frozenset(["events"]))
    server = Server(ServerConfig(addresses=(f"unix:{tmp_path / 's'}",), events=events, auth=auth))
    with pytest.raises(OSError, match="no host:5557"):
        await server.start()
    await server.stop()

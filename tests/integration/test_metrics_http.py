"""The metrics port with peers that abort, stay silent or send garbage, and with a busy event loop."""

import asyncio
import contextlib
import errno
import gzip
import http.client
import json
import logging
import os
import select
import socket
import struct
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, GCCollector, Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from kvpool.client import connect
from kvpool.client.admin import AdminClient
from kvpool.server.app import Server
from kvpool.server.config import MetricsConfig, ServerConfig
from kvpool.server.journal.config import JournalConfig
from kvpool.server.metrics import server_metrics
from kvpool.server.metrics.server_metrics import LoopCollector
from kvpool.wire import http_server, metrics_pages
from kvpool.wire.acceptor import bound_listeners
from kvpool.wire.http_server import HttpServer
from kvpool.wire.metrics_pages import MetricsPages, Readiness
from support.open_files import no_free_files
from support.server import CommandLineServer, ServerProcess, free_port, pool_config, running_server
from support.waiting import DEADLINE_SECONDS, wait_until


@contextlib.contextmanager
def metrics_of(
    collector: Collector,
    readiness: Callable[[], Readiness] = lambda: Readiness(is_ready=True),
    host: str = "127.0.0.1",
) -> Iterator[int]:
    server = HttpServer(host, 0, MetricsPages(collector, readiness).handlers)
    try:
        yield server.port
    finally:
        server.stop()


def test_aborted_connections_are_logged_as_json_only(tmp_path: Path) -> None:
    port = free_port()
    options = ("--metrics-listen", f"127.0.0.1:{port}", "--log-format", "json")
    server = CommandLineServer(f"unix:{tmp_path / 's'}", options=options)
    for said in (b"GET /metrics HT", b"garbage\r\n\r\n", b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", port)) as peer:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close with a reset
            peer.sendall(said)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=DEADLINE_SECONDS) as answer:
        assert b"kvpool_build_info" in answer.read()
    server.stop_cleanly()
    assert [json.loads(line)["message"] for line in server.lines][-1] == "server stopped"


def test_a_silent_peer_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "REQUEST_SECONDS", 0.05)
    with metrics_of(CollectorRegistry()) as port, socket.create_connection(("127.0.0.1", port)) as peer:
        peer.settimeout(DEADLINE_SECONDS)
        assert peer.recv(1) == b"", "closed"


async def test_a_busy_loop_fails_the_scrape_with_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(server_metrics, "SCRAPE_SECONDS", 0.05)
    registry = CollectorRegistry()
    registry.register(LoopCollector(asyncio.get_running_loop(), lambda: tuple))
    failures: list[int] = []

    def scrape(port: int) -> None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=DEADLINE_SECONDS)
        except urllib.error.HTTPError as error:
            failures.append(error.code)

    with metrics_of(registry) as port, caplog.at_level(logging.DEBUG, "kvpool.metrics"):
        scraper = threading.Thread(target=scrape, args=(port,))
        scraper.start()
        scraper.join(DEADLINE_SECONDS)  # blocks the loop, like a bug
    assert failures == [503]
    assert [record.message for record in caplog.records] == ["scrape failed"]
    assert capfd.readouterr().err == ""


def fetch(port: int, path: str) -> tuple[int, str]:
    """Status and text of a page."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=DEADLINE_SECONDS) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def threads_and_descriptors(process_id: int) -> tuple[int, int]:
    process = Path("/proc", str(process_id))
    return len(list((process / "task").iterdir())), len(list((process / "fd").iterdir()))


@pytest.mark.parametrize("said", [b"", b"GET /metrics HT", b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"])
def test_a_flood_of_connections_is_bounded_and_a_scrape_succeeds(said: bytes) -> None:
    port = free_port()
    with ServerProcess("127.0.0.1:0", metrics={"address": f"127.0.0.1:{port}"}) as server:
        fetch(port, "/metrics")
        threads, descriptors = threads_and_descriptors(server.pid)
        with contextlib.ExitStack() as peers:
            for _ in range(3 * http_server.MAX_CONNECTIONS):  # of those above the maximum, one each 0.02 s
                peer = peers.enter_context(socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_SECONDS))
                with contextlib.suppress(ConnectionError):  # displaced already
                    peer.sendall(said)
            status, page = fetch(port, "/metrics")
            during = threads_and_descriptors(server.pid)
        assert (status, "kvpool_build_info" in page) == (200, True)
        assert during[0] <= threads + 4
        assert during[1] <= descriptors + 2 * http_server.MAX_CONNECTIONS
        assert fetch(port, "/metrics")[0] == 200


REQUEST = b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n"


def connected(stack: contextlib.ExitStack, port: int, said: bytes) -> socket.socket:
    """A peer that has sent something."""
    peer = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_SECONDS))
    peer.sendall(said)
    return peer


def test_requests_whose_answers_are_made_are_answered_however_many() -> None:
    """While the process is busy, all connections wait for its answers, and further ones wait to be accepted."""
    is_busy, num_peers = threading.Event(), 2 * http_server.MAX_CONNECTIONS

    def wait() -> Readiness:
        is_busy.wait(DEADLINE_SECONDS)
        return Readiness(is_ready=True)

    with metrics_of(CollectorRegistry(), wait) as port, contextlib.ExitStack() as stack:
        peers = [connected(stack, port, REQUEST % b"/readyz") for _ in range(num_peers)]
        assert select.select(peers, [], [], 0.2)[0] == [], "none is closed"
        is_busy.set()
        assert [peer.recv(100)[:15] for peer in peers] == [b"HTTP/1.1 200 OK"] * num_peers


def test_a_connection_is_kept_for_further_requests() -> None:
    with metrics_of(CollectorRegistry()) as port, contextlib.ExitStack() as stack:
        peer = connected(stack, port, REQUEST % b"/healthz" * 3)
        received = b""
        while received.count(b"HTTP/1.1 200 OK") < 3:
            received += peer.recv(4096)


@pytest.mark.parametrize("said", [b"garbage\r\n\r\n", b"GET /metrics HTTP/1.1\r\n\r\n", b"GET / FTP/9\r\n\r\n"])
def test_what_is_no_request_is_refused_and_not_logged(said: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with (
        metrics_of(CollectorRegistry()) as port,
        contextlib.ExitStack() as stack,
        caplog.at_level(logging.DEBUG),
    ):
        answer = b""
        peer = connected(stack, port, said)
        while part := peer.recv(4096):
            answer += part
    assert answer.startswith((b"HTTP/1.1 400 Bad Request", b"HTTP/1.0 400 Bad Request"))
    assert [record for record in caplog.records if record.name != "asyncio"] == []


def num_open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_peer_that_does_not_read_its_answer_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "ANSWER_SECONDS", 0.05)
    with metrics_of(Large()) as port, contextlib.ExitStack() as stack:
        fetch(port, "/healthz")  # imports modules
        before = num_open_files()
        peer = connected(stack, port, REQUEST % b"/metrics")
        assert peer.recv(1) == b"H"
        wait_until(lambda: num_open_files() == before + 1, "the server closes its end, that of the peer stays")


class Large(Collector):
    """Metrics that do not fit into the buffers of a connection."""

    def collect(self) -> Iterator[Metric]:
        yield Metric("large", "x" * 2**24, "gauge")


def test_silent_peers_displace_none_that_has_sent_a_request() -> None:
    with metrics_of(Large()) as port, contextlib.ExitStack() as stack:
        reader = connected(stack, port, REQUEST % b"/metrics")
        page = reader.recv(1)
        silent = [connected(stack, port, b"") for _ in range(2 * http_server.MAX_CONNECTIONS)]
        assert silent[0].recv(1) == b"", "displaced"
        while part := reader.recv(2**20):
            page += part
        assert len(page) > 2**24


def test_a_process_without_descriptors_answers() -> None:
    with metrics_of(CollectorRegistry()) as port, contextlib.ExitStack() as stack:
        fetch(port, "/healthz")  # imports modules
        peers = [stack.enter_context(socket.socket()) for _ in range(4)]  # each is answered after a second
        stack.enter_context(no_free_files())
        for peer in peers:
            peer.settimeout(DEADLINE_SECONDS)
            peer.connect(("127.0.0.1", port))
            peer.sendall(REQUEST % b"/healthz")
        assert {peer.recv(100)[:15] for peer in peers} == {b"HTTP/1.1 200 OK"}


FORMATS = [
    {"Accept": accept, "Accept-Encoding": encoding}
    for accept in ("text/plain", "application/openmetrics-text")
    for encoding in ("identity", "gzip")
]


class CountedScrapes(Collector):
    """Metrics of which the newest value is the number of scrapes, while time passes as a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.now_seconds = 0, 0.0
        monkeypatch.setattr(metrics_pages, "time", SimpleNamespace(monotonic=lambda: self.now_seconds))

    def describe(self) -> Iterator[Metric]:
        yield from ()

    def collect(self) -> Iterator[Metric]:
        self.count += 1
        yield GaugeMetricFamily("scrapes", "", self.count)


def answer_to(port: int, path: str, headers: dict[str, str]) -> tuple[int, bytes, str]:
    """Status, content and encoding of the answer to a request with headers."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_SECONDS)) as peer:
        peer.request("GET", path, headers=headers)
        answer = peer.getresponse()
        return answer.status, answer.read(), answer.headers.get("Content-Encoding", "")


def scrape(port: int, headers: dict[str, str]) -> float:
    """The number of the scrape in a page of a format."""
    status, page, encoding = answer_to(port, "/metrics", headers)
    assert status == 200
    is_zipped = encoding == "gzip"
    assert is_zipped == (headers["Accept-Encoding"] == "gzip")
    text = (gzip.decompress(page) if is_zipped else page).decode()
    return float(text.partition("\nscrapes ")[2].split()[0])


def test_all_formats_share_one_budget_of_scrapes(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = CountedScrapes(monkeypatch)
    budget = int(metrics_pages.SCRAPES_PER_SECOND)
    with metrics_of(counted) as port:
        for _ in range(2 * budget):
            for headers in FORMATS:
                scrape(port, headers)
        assert counted.count == len(FORMATS) + budget, "the first page of each format, and a second's budget"
        for _ in range(10 * budget):
            counted.now_seconds += 0.1
            for headers in FORMATS:
                scrape(port, headers)
        assert counted.count <= len(FORMATS) + budget * (1 + budget) + len(FORMATS)


def test_a_flood_in_one_format_leaves_the_pages_of_others_new(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = CountedScrapes(monkeypatch)
    flooded, *others = FORMATS
    with metrics_of(counted) as port:
        for headers in FORMATS:
            scrape(port, headers)
        for _ in range(5):
            counted.now_seconds += metrics_pages.MAX_AGE_SECONDS
            before = counted.count
            for _ in range(2 * int(metrics_pages.SCRAPES_PER_SECOND)):
                scrape(port, flooded)
            assert all(scrape(port, headers) > before for headers in others)


OWN_HOSTS = [
    "localhost",
    "LOCALHOST:9464",
    "localhost.:9464",
    "kvpool.localhost",
    "127.0.0.1",
    "127.0.0.1:9464",
    "[::1]:9464",
    "10.0.0.1",
    f"{socket.gethostname()}:9464",
]
OTHER_HOSTS = [
    "attacker.example",
    "attacker.example:9464",
    "127.0.0.1.attacker.example",
    "localhost.attacker.example",
    "notlocalhost",
    "localhost@attacker.example",
    "2130706433",
    "[::1",
    "",
]


@pytest.mark.parametrize("host", OWN_HOSTS)
def test_a_request_over_loopback_may_give_a_name_of_this_machine(host: str) -> None:
    with metrics_of(CollectorRegistry()) as port:
        assert answer_to(port, "/healthz", {"Host": host})[:2] == (200, b"ok\n")


@pytest.mark.parametrize("host", OTHER_HOSTS)
def test_another_host_is_refused_over_loopback_and_takes_no_scrape(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A web page can let a name of its own stand for 127.0.0.1, and reads what is served under it."""
    counted, asked = CountedScrapes(monkeypatch), list[Readiness]()

    def readiness() -> Readiness:
        asked.append(Readiness(is_ready=True))
        return asked[-1]

    with metrics_of(counted, readiness) as port:
        for path in ("/metrics", "/healthz", "/readyz", "/nothing"):
            for _ in range(2 * int(metrics_pages.SCRAPES_PER_SECOND)):
                status, page, _ = answer_to(port, path, {"Host": host})
                assert (status, page.count(b"\n")) == (421, 1)
        assert (counted.count, asked) == (0, [])
        for _ in range(2 * int(metrics_pages.SCRAPES_PER_SECOND)):
            scrape(port, FORMATS[0])
        assert counted.count == 1 + metrics_pages.SCRAPES_PER_SECOND


def test_no_page_of_a_server_answers_to_another_host() -> None:
    port = free_port()
    with ServerProcess("127.0.0.1:0", metrics={"address": f"127.0.0.1:{port}"}):
        for path in ("/", "/status.js", "/api/v2/pools.json", "/api/v2/stream", "/metrics"):
            assert answer_to(port, path, {"Host": "attacker.example"})[0] == 421


def test_the_name_that_an_operator_listens_on_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "bound_listeners", lambda _, port: bound_listeners("127.0.0.1", port))
    with metrics_of(CollectorRegistry(), host="KVpool.internal") as port:
        assert answer_to(port, "/healthz", {"Host": "kvpool.internal:9464"})[0] == 200
        assert answer_to(port, "/healthz", {"Host": "internal"})[0] == 421


def test_any_host_is_served_to_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prometheus and services of Kubernetes give the name that they know the server by."""
    monkeypatch.setattr(http_server, "is_loopback_ip", lambda _: False)
    with metrics_of(CollectorRegistry()) as port:
        assert answer_to(port, "/healthz", {"Host": "kvpool.default.svc:9464"})[0] == 200


def test_a_request_without_a_host_is_served() -> None:
    with metrics_of(CollectorRegistry()) as port, socket.create_connection(("127.0.0.1", port)) as peer:
        peer.settimeout(DEADLINE_SECONDS)
        peer.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert b" 200 OK" in peer.recv(100)


@pytest.mark.parametrize("accept", ["application/openmetrics-text;version=x", "a/b;q=x, \xff", "," * 9000])
def test_any_accept_header_gets_one_of_the_formats(accept: str) -> None:
    with metrics_of(GCCollector(registry=CollectorRegistry())) as port:
        request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept})
        with urllib.request.urlopen(request, timeout=DEADLINE_SECONDS) as answer:  # noqa: S310 - our own server
            assert answer.headers["Content-Type"].split(";")[0] in ("text/plain", "application/openmetrics-text")


def test_a_process_that_does_not_answer_is_neither_healthy_nor_ready() -> None:
    def hang() -> Readiness:
        raise TimeoutError("the event loop was busy for 5 s")

    with metrics_of(CollectorRegistry(), hang) as port:
        for path in ("/healthz", "/readyz"):
            assert fetch(port, path) == (503, "the event loop was busy for 5 s\n")
        assert fetch(port, "/elsewhere")[0] == 404


async def test_a_server_without_its_journal_is_ready_and_reports_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("kvpool.server.journal.journal.RETRY_SECONDS", 0.01)
    with monkeypatch.context() as failing:
        failing.setattr("kvpool.server.journal.folder.write_whole", refuse)
        port = free_port()
        addresses, journal = (f"unix:{tmp_path / 's'}",), JournalConfig(str(tmp_path / "journal"))
        server = Server(ServerConfig(addresses, metrics=MetricsConfig(f"127.0.0.1:{port}"), journal=journal))
        await server.start()
        pages = [await asyncio.to_thread(fetch, port, path) for path in ("/readyz", "/healthz")]
        reason = "the journal is down: WRITE_FAILED: No space left on device"
        assert pages == [(200, f"ok; {reason}\n"), (200, "ok\n")]
    while await asyncio.to_thread(fetch, port, "/readyz") != (200, "ok\n"):  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(0.01)
    await server.stop()


def test_a_drained_server_is_healthy_but_not_ready() -> None:
    port = free_port()
    with running_server(metrics={"address": f"127.0.0.1:{port}"}) as address, connect(address) as client:
        assert (fetch(port, "/healthz"), fetch(port, "/readyz")) == ((200, "ok\n"), (200, "ok\n"))
        client.create_pool(pool_config())
        client.open_session("m", lease_seconds=60)
        with AdminClient(address) as admin:
            admin.drain()
            assert (fetch(port, "/healthz"), fetch(port, "/readyz")) == (
                (200, "ok\n"),
                (503, "the server is drained\n"),
            )
            admin.stop(60.0)
            assert fetch(port, "/readyz") == (503, "the server is stopping\n")

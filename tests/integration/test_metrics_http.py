"""The metrics port with peers that abort, stay silent or send garbage, and with a busy event loop."""

import asyncio
import contextlib
import json
import logging
import signal
import socket
import struct
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from kvpool.server.metrics import server_metrics
from kvpool.server.metrics.server_metrics import LoopCollector
from kvpool.wire import metrics_http as wire_metrics_http
from kvpool.wire.metrics_http import MetricsServer
from support.server import free_port

KVPOOL = str(Path(sys.executable).with_name("kvpool"))


@contextlib.contextmanager
def metrics_of(registry: CollectorRegistry) -> Iterator[int]:
    server = MetricsServer(registry, "127.0.0.1", 0)
    try:
        yield server.port
    finally:
        server.stop()


def test_aborted_connections_are_logged_as_json_only(tmp_path: Path) -> None:
    port = free_port()
    command = [KVPOOL, "serve", "--listen", f"unix:{tmp_path / 's'}", "--metrics-listen", f"127.0.0.1:{port}"]
    process = subprocess.Popen([*command, "--log-format", "json"], stderr=subprocess.PIPE, text=True)
    assert process.stderr
    first = [process.stderr.readline() for _ in range(2)]
    for said in (b"GET /metrics HT", b"garbage\r\n\r\n", b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", port)) as peer:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close with a reset
            peer.sendall(said)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        assert b"kvpool_build_info" in answer.read()
    process.send_signal(signal.SIGTERM)
    rest = process.communicate(timeout=30)[1].splitlines()
    assert [json.loads(line)["message"] for line in [*first, *rest]][-1] == "server stopped"


def test_a_silent_peer_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_metrics_http._Handler, "timeout", 0.05)
    with metrics_of(CollectorRegistry()) as port, socket.create_connection(("127.0.0.1", port)) as peer:
        peer.settimeout(10)
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
            urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10)
        except urllib.error.HTTPError as error:
            failures.append(error.code)

    with metrics_of(registry) as port, caplog.at_level(logging.DEBUG, "kvpool.metrics"):
        scraper = threading.Thread(target=scrape, args=(port,))
        scraper.start()
        scraper.join(30)  # blocks the loop, like a bug
    assert failures == [503]
    assert [record.message for record in caplog.records] == ["scrape failed"]
    assert capfd.readouterr().err == ""

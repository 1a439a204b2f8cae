"""`kvpool top` on a pseudo terminal, with real sessions, and while the server stops and returns."""

import contextlib
import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpool.client import connect
from support import processes
from support.command import kvpool
from support.server import ServerProcess, pool_config
from support.terminal import Terminal
from support.waiting import DEADLINE_SECONDS, wait_until


@pytest.fixture(name="address")
def fixture_address(tmp_path: Path) -> Iterator[str]:
    server = ServerProcess(f"unix:{tmp_path / 's'}")
    yield server.addresses[0]
    server.stop()


@pytest.fixture(name="show")
def fixture_show() -> Iterator[Callable[..., Terminal]]:
    """A function that starts `kvpool top` on a terminal."""
    with contextlib.ExitStack() as stack:

        def start(address: str, *arguments: str, **options: Any) -> Terminal:
            command = (processes.KVPOOL, "top", "--address", address, "--interval", "0.2", *arguments)
            terminal = Terminal(*command, **options)
            stack.callback(terminal.close)
            return terminal

        yield start


@contextlib.contextmanager
def schedulers_at_work(address: str) -> Iterator[None]:
    """Runs two sessions that admit and free requests with the same prompts."""
    ending = threading.Event()
    failures: list[BaseException] = []

    def work(name: str) -> None:
        try:
            with connect(address) as client, client.open_session("m", client_name=name) as session:
                number = 0
                while not ending.is_set():
                    number += 1
                    request = session.request(f"r{number}", [number % 7] * 41)
                    session.admit(request)
                    session.mark_executed()
                    ending.wait(0.002)
                    session.free(request)
        except BaseException as error:  # noqa: BLE001 - checked by the test
            failures.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in ("front-end", "模型-replica")]
    for thread in threads:
        thread.start()
    try:
        with connect(address) as client:
            wait_until(lambda: failures or client.get_pool("m").sessions == len(threads), "both are open")
        yield
    finally:
        ending.set()
        for thread in threads:
            thread.join()
    assert failures == []


def test_top_shows_pools_and_sessions_and_q_restores_the_terminal(address: str, show: Callable[..., Terminal]) -> None:
    with connect(address) as client:
        client.create_pool(pool_config())
        terminal = show(address)
        before = terminal.before
        with schedulers_at_work(address):
            text = terminal.wait_for(
                lambda text: "front-end" in text and re.search(r"now +[1-9][0-9.]*%", text) and "2 sessions" in text
            )
            lines = text.splitlines()
            assert re.match(r"kvpool \S+ at unix:/", lines[0])
            assert re.search(r"^m +ready +e1 ", text, re.MULTILINE)
            assert re.search(r"\d% used +\d+\.\d% cached$", text, re.MULTILINE)
            assert re.search(r"[1-9][0-9.]*k? steps/s", text)
            assert "模 型 -replica" in text or "模型-replica" in text.replace(" ", "")
            assert "  99 blocks, 2 sessions" in text
            assert terminal.attributes != before
        terminal.wait_for("0 sessions")
        terminal.press("q")
        assert terminal.wait_ended() == 0
    assert terminal.attributes == before
    assert terminal.raw.count(b"\x1b[?1049h") == terminal.raw.count(b"\x1b[?1049l") == 1
    assert terminal.raw.rindex(b"\x1b[?25h") > terminal.raw.rindex(b"\x1b[?25l")
    assert b"Traceback" not in terminal.raw


@pytest.mark.parametrize("end", ["\x03", signal.SIGTERM, signal.SIGHUP])
def test_ctrl_c_and_signals_restore_the_terminal(
    end: str | signal.Signals, address: str, show: Callable[..., Terminal]
) -> None:
    terminal = show(address)
    before = terminal.before
    terminal.wait_for("no pools")
    if isinstance(end, str):
        terminal.press(end)
    else:
        terminal.process.send_signal(end)
    assert terminal.wait_ended() == 0
    assert terminal.attributes == before
    assert b"\x1b[?1049l" in terminal.raw
    assert b"Traceback" not in terminal.raw


@pytest.mark.slow  # no answer for seconds
def test_top_continues_when_the_server_is_killed_and_returns(tmp_path: Path, show: Callable[..., Terminal]) -> None:
    address = f"unix:{tmp_path / 's'}"
    server = ServerProcess(address)
    with connect(address) as client:
        client.create_pool(pool_config("first"))
    terminal = show(address)
    terminal.wait_for("first")
    server.kill()
    text = terminal.wait_for("no answer since 2 s: UNAVAILABLE")
    assert "first" in text
    with ServerProcess(address) as server:
        assert "no answer" not in terminal.wait_for("no pools")
        with connect(address) as client:
            client.create_pool(pool_config("second"))
        terminal.wait_for("second")
        server.pause()
        terminal.wait_for("no answer since 3 s: the last call has not returned")
        server.resume()
        assert "second" in terminal.wait_for(lambda text: "no answer" not in text)
        terminal.press("q")
        assert terminal.wait_ended() == 0


def test_top_follows_the_size_of_the_terminal(address: str, show: Callable[..., Terminal]) -> None:
    with connect(address) as client:
        for i in range(12):
            client.create_pool(pool_config(f"pool-{i:02}"))
        terminal = show(address, lines=50)
        terminal.wait_for(lambda text: text.count("99 blocks") == 12)
        terminal.resize(80, 8)
        text = terminal.wait_for("and 8 more pools")
        assert (text.count("pool-"), text.count("99 blocks")) == (4, 0)
        terminal.resize(40, 24)
        terminal.wait_for(lambda text: text.count("pool-") == 12 and "more pools" not in text)


def test_once_prints_a_view_or_a_json_object(address: str) -> None:
    with connect(address) as client:
        client.create_pool(pool_config())
        with schedulers_at_work(address):
            json_done = kvpool("top", "--once", "--json", KVPOOL_ADDRESS=address)
            done = kvpool("top", "--once", "--address", address)
    assert (done.returncode, done.stderr, json_done.returncode, json_done.stderr) == (0, "", 0, "")
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "2 sessions" in done.stdout
    (line,) = json_done.stdout.splitlines()
    answer = json.loads(line)
    assert list(answer) == [
        *("address", "server", "interval_seconds", "pools", "per_second", "sessions", "session_steps_per_second")
    ]
    assert answer["interval_seconds"] >= 1
    (pool,) = answer["pools"]
    assert (pool["config"]["name"], pool["config"]["num_blocks"], pool["sessions"]) == ("m", 100, 2)
    assert answer["per_second"]["m"]["steps"] > 0
    assert 0 < answer["per_second"]["m"]["hit_ratio"] <= 1
    assert {session["client_name"] for session in answer["sessions"]} == {"front-end", "模型-replica"}
    assert all(answer["session_steps_per_second"][each["session_number"]] > 0 for each in answer["sessions"])


def test_once_reports_an_unreachable_server_on_one_line(tmp_path: Path) -> None:
    done = kvpool("top", "--once", "--address", f"unix:{tmp_path}/no-server")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "UNAVAILABLE" in done.stderr


def test_without_a_terminal_top_prints_a_view_per_sample(address: str) -> None:
    for arguments, first in (((), "kvpool "), (("--json",), '{"address"')):
        process = processes.start(
            [processes.KVPOOL, "top", "--address", address, "--interval", "0.1", *arguments], stdout=processes.PIPE,
            stdin=processes.DEVNULL, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        assert process.stdout
        views = 0
        for line in process.stdout:
            views += line.startswith(first)
            if views == 3:
                break
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=DEADLINE_SECONDS)
        assert process.returncode == 0
        assert "Traceback" not in rest


def test_a_dumb_terminal_gets_no_escape_sequences(address: str, show: Callable[..., Terminal]) -> None:
    terminal = show(address, TERM="dumb")
    terminal.wait_for(lambda text: text.count("no pools") >= 2)
    assert b"\x1b" not in terminal.raw
    terminal.press("\x03")
    assert terminal.wait_ended() == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("--interval", "0"), "0.1<=x<=3600"), (("--address", "nowhere"), "needs host:port or unix:/path")],
)
def test_bad_options_are_refused_on_one_line(arguments: tuple[str, ...], message: str) -> None:
    done = kvpool("top", "--once", *arguments)
    assert (done.returncode, message in done.stderr) == (2, True)

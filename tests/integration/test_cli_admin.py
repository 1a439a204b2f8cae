"""The operator's commands against a real server with open sessions."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest

from kvpool.cli import main
from kvpool.client import (
    Client,
    FullAttentionSpec,
    KVCacheGroup,
    PoolName,
    Session,
    UnavailableError,
    connect,
)
from support import processes
from support.command import Done, kvpool
from support.paths import DOCS
from support.server import pool_config, running_server
from support.terminal import Terminal
from support.waiting import DEADLINE_SECONDS, wait_until

PROMPT = list(range(41))  # ten full blocks and one token


@pytest.fixture(name="address")
def fixture_address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with running_server(quarantine_seconds=0.2) as address:
        monkeypatch.setenv("KVPOOL_ADDRESS", address)
        yield address


@pytest.fixture(name="client")
def fixture_client(address: str) -> Iterator[Client]:
    with connect(address, deadline_seconds=5.0) as client:
        client.create_pool(pool_config())
        yield client


@pytest.fixture(name="session")
def fixture_session(client: Client) -> Iterator[Session]:
    """A session with one running and one waiting request."""
    with client.open_session("m", client_name="front-end \x1b[2J模", lease_seconds=60) as session:
        session.admit(session.request("r1", PROMPT))
        with session.step() as step:
            step.admit(session.request("r2", list(range(500))))
        yield session


def run(*arguments: str, **environment: str) -> Done:
    return kvpool(*arguments, **environment)


def refusal(*arguments: str) -> str:
    """Returns the error of a refused command: one line, with status 1."""
    done = run(*arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), done
    assert done.stderr.startswith("Error: ")
    return done.stderr


def output_of(*arguments: str) -> str:
    done = run(*arguments)
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout


def answer(*arguments: str) -> dict[str, Any]:
    (line,) = output_of(*arguments, "--json").splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


def words(line: str) -> list[str]:
    return line.split()


@pytest.mark.usefixtures("session")
def test_lists_for_people_and_for_scripts() -> None:
    heading, row = output_of("pools").splitlines()
    assert words(heading)[:4] == ["POOL", "STATE", "EPOCH", "BLOCKS"]
    assert words(row) == ["m", "ready", "1", "99", "11.1%", "0.0%", "88.9%", "0.0%", "1", "1", "1", "-"]
    pools = answer("pools")
    assert pools["server"]["draining"] is False
    (pool,) = pools["pools"]
    assert (pool["config"]["name"], pool["free_blocks"], pool["requests"]) == ("m", 88, 2)

    _, row = output_of("sessions").splitlines()
    assert "\x1b" not in row
    assert words(row)[:9] == ["1", "m", "front-end", "?[2J模", "1", "1", "11", "0", "2"]
    (session,) = answer("sessions", "--pool", "m")["sessions"]
    assert (session["client_name"], session["held_blocks"]) == ("front-end \x1b[2J模", [11])
    assert "session_id" not in session

    _, *rows = output_of("requests").splitlines()
    assert [words(row)[:6] for row in rows] == [["1", "m", "r1", "41", "41", "11"], ["1", "m", "r2", "500", "0", "0"]]
    requests = answer("requests", "--pool", "m", "--session", "1", "--limit", "1")["requests"]
    assert [(request["request_id"], request["pool_name"]) for request in requests] == [("r1", "m")]

    _, *rows = output_of("blocks", "--pool", "m", "--state", "used").splitlines()
    assert len(rows) == 11
    assert re.fullmatch(r" *1 used +1 +0 +1 +yes +[0-9a-f]{64}", rows[0].rstrip())
    blocks = answer("blocks", "--pool", "m", "--limit", "12")["blocks"]
    assert [block["state"] for block in blocks] == ["BLOCK_STATE_USED"] * 11 + ["BLOCK_STATE_FREE"]


def test_host_memory_is_listed_where_a_pool_has_some(client: Client) -> None:
    assert "TIER" not in output_of("blocks", "--pool", "m")
    client.create_pool(pool_config("two-tiers", num_blocks=18, num_host_blocks=32))
    with client.open_session("two-tiers") as session:
        for number in range(4):
            request = session.request(f"r{number}", [number] * 20)
            session.admit(request)
            session.mark_executed()
            session.free(request)
        again = session.request("again", [0] * 24)  # three of the five blocks of its hit are in host memory
        session.admit(again)
        heading, _, row = output_of("pools").splitlines()
        assert words(heading)[-4:] == ["HOST", "CACHED", "OF", "HITS"]
        assert words(row)[-4:] == ["15", "of", "32", "60.0%"]
        assert words(output_of("pools").splitlines()[1])[-2:] == ["-", "-"]
        titles, *rows = map(words, output_of("blocks", "--pool", "two-tiers").splitlines())
        assert titles == ["BLOCK", "TIER", "STATE", "REFS", "GROUP", "SESSION", "PENDING", "HASH"]
        assert rows[0][:3] == ["1", "device", "used"]
        assert len(rows) == 17 + 32
        assert {row[2] for row in rows if row[1] == "host"} == {"used", "cached", "empty"}
        top = output_of("top", "--once", "--interval", "0.1")
        assert re.search(r"host memory: \d+ of 32 blocks cached, \d+.\d% of hits, +0 out/s +0 in/s", top)
        rates = answer("top", "--once", "--interval", "0.1")["per_second"]
        assert (rates["two-tiers"]["copied_out"], "copied_out" in rates["m"]) == (0.0, False)


def test_pools_whose_prefixes_are_hit_rarely_are_named(client: Client) -> None:
    groups = tuple(KVCacheGroup(FullAttentionSpec(block_size), (f"l{block_size}",)) for block_size in (6, 4))
    client.create_pool(replace(pool_config(), name=PoolName("uneven"), groups=groups))
    done = run("pools")
    (warning,) = done.stderr.splitlines()
    assert warning.startswith("warning: pool uneven: groups have blocks of 4, 6 tokens, so prefixes are hit in")
    assert "multiples of 12 tokens only" in warning


@pytest.mark.usefixtures("session")
def test_an_unknown_pool_gets_a_close_match(client: Client) -> None:
    client.create_pool(replace(pool_config(), name=PoolName("llama")))
    assert refusal("reset", "--pool", "lama") == (
        "Error: POOL_NOT_FOUND: --pool: no pool 'lama'; did you mean llama?\n"
    )
    assert refusal("sessions", "--pool", "x").endswith("--pool: no pool 'x'; known: llama, m\n")
    assert refusal("evict-session", "--pool", "m", "99").startswith("Error: SESSION_NOT_FOUND: NUMBER: ")


@pytest.mark.usefixtures("session")
def test_on_a_terminal_lists_fit_eighty_columns() -> None:
    terminal = Terminal(processes.KVPOOL, "sessions", lines=200)
    try:
        assert terminal.wait_ended() == 0
        lines = re.sub(rb"\x1b\[[0-9;]*m", b"", terminal.raw).decode().splitlines()
        assert 2 <= len(lines) <= 100
        assert max(map(len, lines)) <= 80
    finally:
        terminal.close()


def test_reset_lists_holders_or_resets(client: Client, session: Session) -> None:
    done = run("reset", "--pool", "m")
    assert (done.returncode, "front-end" in done.stdout) == (1, True)
    assert done.stderr == "pool m is in use, nothing was dropped; these hold blocks:\n"
    done = run("reset", "--pool", "m", "--json")
    refused = json.loads(done.stdout)
    assert (done.returncode, refused["reset"], len(refused["holders"])) == (1, False, 1)
    assert client.get_pool("m").cached_blocks == 10
    session.mark_executed()
    session.close()
    assert client.get_pool("m").cached_blocks == 10
    assert output_of("reset", "--pool", "m") == "pool m: prefix cache reset\n"
    assert client.get_pool("m").cached_blocks == 0
    assert answer("reset", "--pool", "m") == {"reset": True, "holders": []}


def test_evict_session_frees_its_blocks(client: Client) -> None:
    session = client.open_session("m", client_name="hangs", lease_seconds=3600)
    session.admit(session.request("r", PROMPT))
    refused = refusal("evict-session", "--pool", "m", "7")
    assert refused == "Error: SESSION_NOT_FOUND: NUMBER: pool 'm' has no session 7\n"
    assert client.get_pool("m").free_blocks == 88
    assert "NOT_LENT" in refusal("evict-session", "--pool", "m", "1", "--kill")
    assert client.get_pool("m").sessions == 1
    sentence = output_of("evict-session", "--pool", "m", "1")
    assert sentence == "session 1 ('hangs') of pool m ended: 1 request, 11 blocks\n"
    wait_until(lambda: client.get_pool("m").free_blocks == 99, "its blocks leave the quarantine")
    assert "SESSION_NOT_FOUND" in refusal("evict-session", "--pool", "m", "1")


def test_set_weights_version_of_one_session_or_of_all(client: Client) -> None:
    assert "WEIGHTS" not in output_of("pools") + output_of("sessions")
    session, other = client.open_session("m"), client.open_session("m")
    number = str(session.session_number)
    sentence = output_of("set-weights-version", "step 7\n", "--pool", "m", "--session", number)
    assert sentence == "weights version 'step 7\\n' set in 1 session of pool m\n"
    heading, row = output_of("pools").splitlines()
    assert (heading.split()[-1], row.rstrip().endswith(" -, step 7?")) == ("WEIGHTS", True)
    heading, *rows = output_of("sessions").splitlines()
    assert (heading.split()[-1], rows[0].rstrip()[-7:], rows[1].split()[-1]) == ("WEIGHTS", "step 7?", "-")
    assert [each["weights_version"] for each in answer("sessions")["sessions"]] == ["step 7\n", ""]
    numbers = [session.session_number, other.session_number]
    assert answer("set-weights-version", "8", "--pool", "m") == {"weights_version": "8", "sessions": numbers}
    assert ", weights 8\n" in output_of("top", "--once", "--interval", "0.1")
    assert answer("set-weights-version", "", "--pool", "m") == {"weights_version": "", "sessions": numbers}


def test_drain_waits_until_the_last_session_is_closed(client: Client, session: Session) -> None:
    done = run("drain", "--pool", "m", "--wait", "--timeout-seconds", "0.5")
    assert (done.returncode, done.stdout) == (1, "pool m takes no new sessions; 1 session still open\n")
    with pytest.raises(UnavailableError, match="drained"):
        client.open_session("m")
    assert answer("pools")["pools"][0]["state"] == "POOL_STATE_DRAINING"
    waiting = processes.start([processes.KVPOOL, "drain", "--wait"], stdout=processes.PIPE, text=True)
    wait_until(lambda: answer("pools")["server"]["draining"], "the server is drained")
    assert waiting.poll() is None
    session.close()
    assert (
        waiting.communicate(timeout=DEADLINE_SECONDS)[0] == "the server takes no new sessions; 0 sessions still open\n"
    )
    assert waiting.returncode == 0
    done = run("pools")
    assert done.stderr == "the server takes no new sessions: it is drained, or stops\n"
    assert answer("drain", "--undo") == {"still_drained": ["m"]}
    assert output_of("drain", "--undo", "--pool", "m") == "pool m takes new sessions again\n"
    with client.open_session("m"):
        pass


def test_a_server_without_a_cluster_is_the_only_one_of_its_shard(address: str) -> None:
    assert run("shard", "status").stdout.splitlines() == [
        "shard: -, term 0",
        f"primary: {address}",
        "standbys in sync: -",
    ]
    found = json.loads(run("shard", "status", "--json").stdout)
    assert found["primary_serves"] is True
    assert (found["shard"]["term"], found["shard"]["primary_addresses"]) == ("0", [address])
    assert [member["is_primary"] for member in found["shard"]["members"]] == [True]
    assert "NO_SHARD: the server belongs to no shard" in refusal("shard", "hand-over")


def test_remove_pool_frees_the_name(client: Client) -> None:
    with client.open_session("m"):
        assert "POOL_IN_USE: --pool: sessions are open: 1" in refusal("remove-pool", "--pool", "m")
        assert client.get_pool("m").sessions == 1
    assert output_of("remove-pool", "--pool", "m") == "pool m removed\n"
    assert "POOL_NOT_FOUND" in refusal("remove-pool", "--pool", "m")
    assert answer("pools")["pools"] == []
    assert client.create_pool(pool_config(num_blocks=7)).free_blocks == 6


def test_an_unreachable_server_is_reported_on_one_line(tmp_path: Path) -> None:
    assert "UNAVAILABLE" in refusal("pools", "--address", f"unix:{tmp_path}/no-server")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("pools", "--address", "nowhere"), "--address: address 'nowhere': needs host:port or unix:/path"),
        (("requests", "--session", "1"), "--session needs --pool"),
        (("drain", "--undo", "--wait"), "--undo: cannot be combined with --wait or --stop"),
        (("drain", "--stop", "--pool", "m"), "--stop: stops the whole server, leave out --pool"),
        (("set-weights-version", "1"), "Missing option '--pool'"),
    ],
)
def test_usage_errors_are_reported_before_a_connection(arguments: tuple[str, ...], message: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.usefixtures("client")
@pytest.mark.parametrize(
    "command",
    [("sessions", "--pool", "x"), ("requests", "--pool", "x"), ("blocks", "--pool", "x"), ("drain", "--pool", "x"),
     ("drain", "--undo", "--pool", "x"), ("reset", "--pool", "x")],
)  # fmt: skip
def test_an_unknown_pool_is_refused_on_one_line(command: tuple[str, ...]) -> None:
    assert "POOL_NOT_FOUND: --pool: no pool 'x'" in refusal(*command)


PAGE = DOCS / "how-to/operate.md"


@pytest.mark.usefixtures("session")
def test_the_page_names_every_command_and_every_key() -> None:
    text = PAGE.read_text()
    listed = set(re.findall(r"^\| `kvpool ([a-z-]+)", text, re.MULTILINE))
    context = click.Context(main)
    named = {name: main.get_command(context, name) for name in main.list_commands(context)}
    with_address = {
        name
        for name, command in named.items()
        if command
        and any("--address" in option.opts and option.envvar == "KVPOOL_ADDRESS" for option in command.params)
    }
    assert listed == with_address
    for found in (
        answer("pools"), answer("sessions"), answer("requests"), answer("blocks", "--pool", "m"),
        answer("top", "--once", "--interval", "0.1"),
    ):  # fmt: skip
        unnamed = [key for key in found if f"`{key}`" not in text]
        assert unnamed == []


def test_the_pages_example(address: str, client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    with client.open_session("m") as session:
        session.admit(session.request("r", PROMPT))
        exec(compile(code.replace("unix:/run/kvpool/kvpool.sock", address), "docs", "exec"), {})  # noqa: S102 - our documentation
        assert client.get_pool("m").sessions == 1
    assert capsys.readouterr().out == "m POOL_STATE_READY 11%\n"

"""The status page of a real server over HTTP: its files, its JSON against its description, and its stream."""

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from email.message import Message
from typing import Any

import jsonschema
import pytest

from kvpool.client import Client, ExhaustedError, connect
from kvpool.client.admin import AdminClient
from kvpool.client.session import Session
from kvpool.server.http.collector import MAX_SESSIONS
from kvpool.server.http.pages import MAX_VIEWERS, PARTS
from kvpool.v1.pool_pb2 import PoolConfig
from kvpool.wire.readable import message_json
from support.lending import engine, lender_process
from support.ranks import registration
from support.server import free_port, pool_config, running_server
from support.streams import server_sent_events
from support.waiting import DEADLINE_SECONDS, wait_until
from support.wire_ranks import WireRank

FILES = ("/", "/status.css", "/status.js", "/figures.js", "/icon.svg", "/api/v2/openapi.json")
SECRET = "a-secret-prompt"  # noqa: S105 - no password


class Page:
    """The pages of one server."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def read(self, path: str, method: str = "GET", **headers: str) -> tuple[int, Message, bytes]:
        request = urllib.request.Request(f"{self.url}{path}", headers=headers, method=method)  # noqa: S310 - our own
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_SECONDS) as answer:  # noqa: S310 - our own server
                return answer.status, answer.headers, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.headers, error.read()

    def part(self, name: str) -> Any:
        status, _, content = self.read(f"/api/v2/{name}.json")
        assert status == 200, content
        return json.loads(content)

    def parts(self) -> dict[str, Any]:
        """All parts, as they are now or later: the server shares a copy for some seconds."""
        now_seconds = time.time()
        wait_until(lambda: self.part("server")["taken_seconds"] > now_seconds)
        return {name: self.part(name) for name in PARTS}


@contextmanager
def server_with_page(**settings: Any) -> Iterator[tuple[str, Page]]:
    port = free_port()
    with running_server(metrics={"address": f"127.0.0.1:{port}"}, **settings) as address:
        yield address, Page(port)


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, Page]]:
    with server_with_page(quarantine_seconds=3600) as served:
        yield served


@pytest.fixture
def address(served: tuple[str, Page]) -> str:
    return served[0]


@pytest.fixture
def page(served: tuple[str, Page]) -> Page:
    return served[1]


def of_pool(entries: list[dict[str, Any]], pool: str) -> dict[str, Any]:
    (found,) = (entry for entry in entries if pool_of(entry) == pool)
    return found


def pool_of(entry: dict[str, Any]) -> Any:
    """The name of the pool that an entry is about."""
    info = entry.get("info", {})
    return entry.get("pool") or info.get("pool_name") or info["config"]["name"]


def check_described(page: Page) -> dict[str, Any]:
    """Checks all parts against the description, which names each field and no other. Returns them."""
    described = json.loads(page.read("/api/v2/openapi.json")[2])
    parts = page.parts()
    for name, part in parts.items():
        answer = described["paths"][f"/api/v2/{name}.json"]["get"]["responses"]["200"]
        schema = {**answer["content"]["application/json"]["schema"], "components": described["components"]}
        jsonschema.validate(part, schema, cls=jsonschema.Draft202012Validator)
    return parts


def worked(client: Client, pool: str, name: str = "scheduler", **options: object) -> Session:
    """A session with a held request, a cached prefix, and one request that waits."""
    client.create_pool(pool_config(pool, num_blocks=41, **options))
    session = client.open_session(pool, client_name=name)
    held, freed = (session.request(f"{SECRET}-{i}", [i] * 40) for i in range(2))
    assert session.admit(held)
    assert session.admit(freed)
    session.mark_executed()
    session.free(freed)
    assert session.admit(session.request("pending", [9] * 20))
    with pytest.raises(ExhaustedError, match="more blocks"):
        session.admit(session.request("large", [7] * 400))
    return session


def test_the_parts_match_their_description_and_the_state(client: Client, page: Page, address: str) -> None:
    session = worked(client, "figures", "schéduler")
    parts = check_described(page)
    info, shown = client.get_pool("figures"), of_pool(parts["pools"]["pools"], "figures")
    info.config.CopyFrom(PoolConfig(name="figures", num_blocks=41, max_model_len=info.config.max_model_len))
    assert shown["info"] == message_json(info)
    assert (shown["is_lent"], shown["free_cached_blocks"], shown["pending_blocks"]) == (False, 10, 5)
    blocks = of_pool(parts["blocks"]["pools"], "figures")
    sums = {state: sum(blocks[state]) for state in ("in_use", "pending", "quarantined", "cached")}
    assert sums == {"in_use": 10, "pending": 5, "quarantined": 0, "cached": 10}
    held = of_pool(parts["sessions"]["sessions"], "figures")
    assert held["quarantine"] is None
    with AdminClient(address) as admin:
        (listed,) = admin.sessions("figures")
    changing = {"age_seconds", "idle_seconds"}
    assert {key for key, value in message_json(listed).items() if held["info"][key] != value} <= changing
    session.close()


def test_copies_to_host_memory_are_no_pending_blocks_of_the_map(client: Client, page: Page) -> None:
    session = worked(client, "two-tiers", num_host_blocks=20)
    assert session.admit(session.request("more", [8] * 20))
    parts = check_described(page)
    shown = of_pool(parts["pools"]["pools"], "two-tiers")
    assert shown["pending_blocks"] == sum(of_pool(parts["blocks"]["pools"], "two-tiers")["pending"]) == 10
    assert int(shown["info"]["host_memory"]["copied_out_blocks"]) > 0
    assert shown["info"]["config"]["num_host_blocks"] == 20
    session.close()


def test_an_evicted_session_is_in_quarantine_and_among_the_events(client: Client, page: Page, address: str) -> None:
    worked(client, "evicted")
    with AdminClient(address) as admin:
        (number,) = (each.session_number for each in admin.sessions() if each.pool_name == "evicted")
        admin.evict_session("evicted", number)
    parts = check_described(page)
    held = of_pool(parts["sessions"]["sessions"], "evicted")
    assert held["info"]["session_number"] == str(number)
    assert 3000 < held["quarantine"]["ends_in_seconds"] <= 3600
    assert sum(of_pool(parts["blocks"]["pools"], "evicted")["quarantined"]) == 15
    events = {event["event"]: event for event in parts["events"]["events"] if event["fields"].get("pool") == "evicted"}
    assert events["session evicted by an operator"]["fields"]["session"] == str(number)
    assert "pool created" in events


def test_nothing_that_lets_a_reader_act_or_names_contents_or_memory_is_shown(client: Client, page: Page) -> None:
    """The number of a session is public; its id, with which a client drives it, is not."""
    client.create_pool(pool_config("p"), memory_id="memory-of-p")
    assert client.get_pool("p").memory_id == "memory-of-p"
    session = worked(client, "secrets")
    shown = json.dumps(page.parts())
    assert '"secrets"' in shown
    for secret in (session.session_id, SECRET, "memory-of-p"):
        assert secret not in shown
    session.close()


def test_ranks_that_lend_memory_are_shown_with_their_processes() -> None:
    with (
        server_with_page() as (address, page),
        lender_process(address) as lender,
        engine(address, lender.address) as process,
    ):

        def ranks() -> list[dict[str, Any]]:
            return [rank for pool in page.part("pools")["pools"] for rank in pool["info"]["ranks"]]

        wait_until(lambda: [len(rank["mapping_processes"]) for rank in ranks()] == [1])
        (pool,) = check_described(page)["pools"]["pools"]
        (rank,) = pool["info"]["ranks"]
        assert (pool_of(pool), pool["is_lent"], rank["rank"], rank["state"]) == ("m", True, 0, "RANK_STATE_READY")
        assert int(rank["allocated_bytes"]) > 0
        assert rank["mapping_processes"][0]["pid"] == process.pid
        with connect(address) as client:
            assert client.get_pool("m").fingerprint
        assert pool["info"]["fingerprint"] == {}, "it names the model"


def test_a_pool_that_waits_for_ranks_has_all_figures(page: Page, address: str) -> None:
    rank = WireRank(address).register(registration(0, world_size=2), "forming")
    rank.wait_for("registered")
    info = of_pool(check_described(page)["pools"]["pools"], "forming")["info"]
    assert (info["state"], info["world_size"], len(info["ranks"])) == ("POOL_STATE_FORMING", 2, 2)
    assert info["prefix_cache"]["hits_tokens"] == info["activity"]["steps"] == "0"


def test_a_stream_begins_with_all_parts_and_goes_on_with_those_that_change(client: Client, page: Page) -> None:
    client.create_pool(pool_config("watched"))
    with server_sent_events(f"{page.url}/api/v2/stream") as events:
        assert {next(events)[0] for _ in PARTS} == set(PARTS)
        with client.open_session("watched") as session:
            assert session.admit(session.request("r", [1] * 40))
            for name, part in events:
                if name == "pools" and any(
                    each["info"]["usage"] for each in part["pools"] if pool_of(each) == "watched"
                ):
                    break
    assert page.read("/healthz")[0] == 200


def test_streams_are_bounded_and_leave_room_for_scrapes(page: Page) -> None:
    with ExitStack() as stack:
        streams = [stack.enter_context(server_sent_events(f"{page.url}/api/v2/stream")) for _ in range(MAX_VIEWERS)]
        assert all(next(stream)[0] in PARTS for stream in streams)
        status, _, text = page.read("/api/v2/stream")
        assert (status, text) == (503, f"{MAX_VIEWERS} streams are open, the maximum\n".encode())
        for _ in range(MAX_VIEWERS):
            assert page.read("/metrics")[0] == 200


def test_files_load_nothing_from_elsewhere_and_are_kept_by_the_browser(page: Page) -> None:
    for path in FILES:
        status, headers, content = page.read(path)
        assert status == 200
        assert headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'self'")
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert not re.search(rb"(https?:)?//(?!www\.w3\.org/2000/svg)[a-z]+\.", content)
        assert page.read(path, **{"If-None-Match": headers["ETag"]})[0] == 304
    assert page.read("/status.css/../../etc/passwd")[0] == 404


@pytest.mark.parametrize("path", ["/", "/api/v2/pools.json", "/api/v2/stream", "/metrics"])
def test_pages_are_read_only(page: Page, path: str) -> None:
    status, headers, content = page.read(path, "HEAD")
    assert (status, content) == (200, b"")
    assert headers["Content-Type"]
    for method in ("POST", "DELETE"):
        status, headers, _ = page.read(path, method)
        assert (status, headers["Allow"]) == (405, "GET, HEAD")


def test_sessions_beyond_the_maximum_are_counted() -> None:
    with server_with_page() as (address, page), connect(address) as client, ExitStack() as stack:
        client.create_pool(pool_config("many"))
        for _ in range(MAX_SESSIONS + 1):
            stack.enter_context(client.open_session("many"))
        part = page.part("sessions")
        assert (len(part["sessions"]), part["num_sessions"]) == (MAX_SESSIONS, MAX_SESSIONS + 1)

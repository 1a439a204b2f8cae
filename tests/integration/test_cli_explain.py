"""`kvpool explain` against a real server: a pool, and prompts as sessions look them up."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpool.client import (
    Client,
    ExtraKeys,
    FullAttentionSpec,
    KVCacheGroup,
    MambaSpec,
    PoolConfig,
    PoolName,
    Session,
    SlidingWindowSpec,
    connect,
)
from kvpool.client.admin import AdminClient
from support.auth import Entry, secret_of, write_tokens
from support.command import Done, kvpool
from support.paths import DOCS
from support.server import ServerProcess, running_server

FULL = KVCacheGroup(FullAttentionSpec(16))
PROMPT = list(range(1000, 1400))
PAGE = DOCS / "how-to/explain-misses.md"


@pytest.fixture(name="address")
def fixture_address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with running_server() as address:
        monkeypatch.setenv("KVPOOL_ADDRESS", address)
        yield address


@pytest.fixture(name="client")
def fixture_client(address: str) -> Iterator[Client]:
    with connect(address, deadline_seconds=5.0) as client:
        yield client


@pytest.fixture(name="sessions")
def fixture_sessions(client: Client) -> Iterator[tuple[Session, Session]]:
    """Two sessions with different weights; a prompt of theirs was hit, evicted, and computed under both versions."""
    client.create_pool(PoolConfig(PoolName("llama"), 120, 1800, (FULL,)))
    a = client.open_session("llama", client_name="a")
    b = client.open_session("llama", client_name="b", weights_version="v2")
    with a, b:
        cache(a, PROMPT, "r0")
        cache(a, PROMPT, "r1")
        cache(a, list(range(5000, 6700)), "large")
        assert a.admit(a.request("again", PROMPT))
        assert b.admit(b.request("r2", PROMPT))
        yield a, b


def cache(session: Session, prompt: list[int], name: str, lora_name: str | None = None) -> None:
    request = session.request(name, prompt, extra_keys=ExtraKeys(lora_name))
    assert session.admit(request)
    session.mark_executed()
    session.free(request)


def output_of(*arguments: str) -> str:
    done = kvpool("explain", *arguments)
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout


def answer(*arguments: str) -> dict[str, Any]:
    (line,) = output_of(*arguments, "--json").splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


def refused(*arguments: str) -> Done:
    done = kvpool("explain", *arguments)
    assert done.returncode in {1, 2}, done
    assert done.stdout == ""
    return done


@pytest.fixture(name="tokens")
def fixture_tokens(tmp_path: Path) -> Path:
    path = tmp_path / "prompt.json"
    path.write_text(json.dumps(PROMPT + [1, 2, 3] * 20))
    return path


@pytest.mark.usefixtures("sessions")
def test_a_pool_is_explained_as_the_page_shows(tokens: Path) -> None:
    page = PAGE.read_text()
    for arguments in ("--pool llama", f"--pool llama --tokens {tokens} --salt x"):
        printed = [line.rstrip() for line in output_of(*arguments.split()).splitlines()]
        shown = page.partition(f"$ kvpool explain {arguments.replace(str(tokens), 'prompt.json')}\n")[2]
        lines = [line for line in shown.partition("\n```")[0].splitlines() if "epoch" not in line]
        assert len(lines) > 5
        assert [line for line in lines if line not in printed] == []


@pytest.mark.usefixtures("sessions")
def test_a_pool_is_explained_as_json() -> None:
    found = answer("--pool", "llama")
    (group,) = found["pool"]["groups"]
    assert [(miss["reason"], miss["lookups"], miss["tokens"]) for miss in group["misses"]] == [
        ("MISS_REASON_UNSEEN", "2", "2080"),
        ("MISS_REASON_EVICTED", "1", "192"),
        ("MISS_REASON_OTHER_SCOPE", "1", "384"),
    ]
    misses = found["misses"]
    assert [(scope["weights_version"], scope["sessions"]) for scope in misses["scopes"]] == [("", 1), ("v2", 1)]
    assert [(each["client_name"], each["blocks"]) for each in misses["unexecuted"]] == [("a", 13), ("b", 25)]
    assert found["pool"]["config"]["hash_scheme"]["none_hash"] == misses["hash_scheme"]["none_hash"] == ""


def test_what_is_in_host_memory_and_what_has_left_it_is_explained(client: Client, tmp_path: Path) -> None:
    client.create_pool(PoolConfig(PoolName("two-tiers"), 38, 560, (FULL,), num_host_blocks=36))
    prompts = [list(range(start, start + 160)) for start in range(0, 2000, 160)]
    path = tmp_path / "prompt.json"
    path.write_text(json.dumps([*prompts[0], 1]))
    with client.open_session("two-tiers") as session:
        for number, prompt in enumerate(prompts[:4]):
            cache(session, prompt, f"r{number}")
        explain = ("--pool", "two-tiers", "--tokens", str(path))
        assert "- 48 tokens of the hit would be copied from host memory" in output_of(*explain).splitlines()
        assert answer(*explain)["end"]["host_tokens"] == 48
        for number, prompt in enumerate(prompts[4:]):
            cache(session, prompt, f"s{number}")
        assert "- an evicted block is not in host memory, either" in output_of(*explain)
    evicted = r"\d+ of 37 blocks evicted so far, 0 of them without a copy in host memory, where \d+ were replaced$"
    assert re.search(evicted, output_of("--pool", "two-tiers"), re.MULTILINE)


def test_a_prompt_is_explained_and_other_keys_are_tried(sessions: tuple[Session, Session], tokens: Path) -> None:
    a, b = sessions
    pool = ("--pool", "llama", "--tokens", str(tokens))
    found = answer(*pool, "--session", str(b.session_number))
    end = found["end"]
    assert (end["hit_tokens"], end["miss"]["num_tokens"], end["miss"]["reason"]) == (400, 48, "MISS_REASON_UNSEEN")
    assert end["groups"][0]["missing_block"] == 25
    cache(a, list(range(300)), "lora", "adapter")
    tokens.write_text(json.dumps(list(range(300))))
    with_lora = answer(*pool, "--lora-name", "adapter")
    assert (with_lora["end"]["hit_tokens"], "miss" in with_lora["end"], with_lora["others"]) == (288, False, [])
    assert a.admit(a.request("running", [7], extra_keys=ExtraKeys(lora_name="adapter")))
    without = answer(*pool)
    assert (without["end"]["hit_tokens"], without["others"]) == (0, [{"with": "with LoRA adapter", "hit_tokens": 288}])
    as_b = answer(*pool, "--session", str(b.session_number), "--lora-name", "adapter")
    (group,) = as_b["end"]["groups"]
    assert (as_b["end"]["miss"]["reason"], group["weights_versions"]) == ("MISS_REASON_OTHER_SCOPE", [""])
    assert as_b["others"] == [{"with": f"as session {a.session_number}", "hit_tokens": 288}]


def test_explaining_changes_and_counts_nothing(
    client: Client, sessions: tuple[Session, Session], address: str, tokens: Path
) -> None:
    with AdminClient(address) as admin:
        before = (client.get_pool("llama"), list(admin.blocks("llama")), list(admin.requests("llama")))
        output_of("--pool", "llama")
        output_of("--pool", "llama", "--tokens", str(tokens), "--session", str(sessions[1].session_number))
        assert (client.get_pool("llama"), list(admin.blocks("llama")), list(admin.requests("llama"))) == before


def test_a_prompt_in_a_pool_with_windows_names_the_group_that_ends_its_hit(client: Client, tokens: Path) -> None:
    window = KVCacheGroup(SlidingWindowSpec(64, sliding_window=128))
    client.create_pool(PoolConfig(PoolName("mixed"), 1000, 4096, (FULL, window), retention_tokens=1024))
    with client.open_session("mixed") as session:
        cache(session, list(range(700)), "long")
        cache(session, list(range(300)), "short")
        tokens.write_text(json.dumps(list(range(600))))
        found = answer("--pool", "mixed", "--tokens", str(tokens))
        end = found["end"]
        miss = {"group_id": 1, "reason": "MISS_REASON_NOT_KEPT", "num_tokens": 320}
        assert (end["hit_tokens"], end["miss"]) == (256, miss)
        assert [(group["num_tokens"], group["max_tokens"]) for group in end["groups"]] == [(592, 592), (256, 576)]


@pytest.mark.parametrize("spec", [SlidingWindowSpec(16, sliding_window=128), MambaSpec(16)])
def test_a_prompt_that_leaves_a_cached_one_before_what_is_kept_says_so(
    client: Client, tokens: Path, spec: SlidingWindowSpec | MambaSpec
) -> None:
    """It equals a cached prompt up to its last multiple of the larger blocks, at which its window or state is kept."""
    groups = (KVCacheGroup(FullAttentionSpec(32)), KVCacheGroup(spec))
    client.create_pool(PoolConfig(PoolName("sparse"), 1000, 4096, groups, retention_tokens=256))
    with client.open_session("sparse") as session:
        cache(session, list(range(200)), "short")
        cache(session, list(range(1000, 1450)), "long")
        for first, count, leaves, hit, kept in (
            (0, 200, 190, 0, "none is kept up to there"),
            (1000, 450, 447, 256, "the last one that is kept ends at 256"),
        ):
            equal = leaves // 32 * 32
            tokens.write_text(json.dumps([*range(first, first + leaves), *range(count)]))
            text = output_of("--pool", "sparse", "--tokens", str(tokens))
            assert f"a hit of {hit} tokens" in text
            assert f"the prompt equals a cached prefix up to {equal} tokens; of its windows or states {kept}" in text


def test_wrong_input_is_refused_by_name(client: Client, tokens: Path, tmp_path: Path) -> None:
    client.create_pool(PoolConfig(PoolName("llama"), 120, 1800, (FULL,)))
    client.create_pool(PoolConfig(PoolName("plain"), 120, 1800, (FULL,), enable_caching=False))
    assert "no pool 'other'" in refused("--pool", "other").stderr
    assert "--tokens" in refused("--pool", "llama", "--salt", "x").stderr
    for content, named in (("{}", "no JSON list"), ("[1, -1]", "token_ids[1]"), ("[", "cannot read")):
        tokens.write_text(content)
        assert named in refused("--pool", "llama", "--tokens", str(tokens)).stderr
    assert "cannot read" in refused("--pool", "llama", "--tokens", str(tmp_path / "none")).stderr
    tokens.write_text(json.dumps([1] * 1801))
    assert "num_tokens" in refused("--pool", "llama", "--tokens", str(tokens)).stderr
    tokens.write_text("[1]")
    assert "session" in refused("--pool", "llama", "--tokens", str(tokens), "--session", "99").stderr
    assert "NOT_CACHING" in refused("--pool", "plain", "--tokens", str(tokens)).stderr


def test_the_hashes_of_a_session_with_a_salt_stay_secret(tmp_path: Path) -> None:
    tokens, prompt = tmp_path / "tokens.toml", tmp_path / "prompt.json"
    entries: list[Entry] = [
        {"name": "ops", "role": "admin", "pools": ["*"]},
        {"name": "tenant", "role": "scheduler", "pools": ["*"], "salt": "s" * 16},
    ]
    write_tokens(tokens, entries)
    prompt.write_text(json.dumps(PROMPT))
    server = ServerProcess(f"unix:{tmp_path / 's'}", auth={"tokens": str(tokens)})
    address = server.addresses[0]
    config = PoolConfig(PoolName("llama"), 120, 1800, (FULL,))
    with connect(address, token=secret_of("tenant")) as client, AdminClient(address, token=secret_of("ops")) as admin:
        client.create_pool(config)
        with client.open_session("llama") as session:
            cache(session, PROMPT, "r")
            assert admin.explain_misses("llama", session.session_number).hash_scheme.none_hash == b""
            assert session.config.hash_scheme.none_hash != admin.explain_misses("llama").hash_scheme.none_hash
            scopes = admin.explain_misses("llama").scopes
            assert [(scope.has_namespace, scope.is_own) for scope in scopes] == [(False, True), (True, False)]
            command = ("explain", "--pool", "llama", "--tokens", str(prompt), "--address", address)
            done = kvpool(*command, KVPOOL_TOKEN=secret_of("ops"))
            assert done.returncode == 2
            assert "has a salt, so its hashes are secret" in done.stderr
    server.stop_cleanly()

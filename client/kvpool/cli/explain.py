"""`kvpool explain`."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final

import click

from kvpool.cli.connection import connected, server_options
from kvpool.cli.json_file import read_json
from kvpool.cli.options import file_option, usage_errors
from kvpool.cli.tables import Column, print_json, print_table
from kvpool.cli.text import counted, percent, print_line
from kvpool.client import BlockHasher, ExtraKeys, NotFoundError, PoolInfo
from kvpool.client.admin import AdminClient
from kvpool.client.request import checked_token_ids
from kvpool.core.errors import InvalidArgumentError
from kvpool.core.ids import GroupId
from kvpool.v1 import admin_pb2
from kvpool.v1.pool_pb2 import KEY_FORM_PLAIN, MissCount, MissReason
from kvpool.wire.pools import config_from_proto, hash_scheme_from_proto
from kvpool.wire.readable import word

_MAX_TRIED: Final = 8
"""Maximum number of sessions, and of LoRAs, with which a prompt is tried besides its own."""

MEANINGS: Final = {
    MissReason.MISS_REASON_UNSEEN: "never cached, or lost too long ago to be known",
    MissReason.MISS_REASON_EVICTED: "evicted",
    MissReason.MISS_REASON_RESET: "lost by a reset or a new epoch",
    MissReason.MISS_REASON_OTHER_SCOPE: "cached under another weights version or namespace",
    MissReason.MISS_REASON_NOT_EXECUTED: "cached, but its step is not reported as executed",
    MissReason.MISS_REASON_NOT_KEPT: "the group keeps nothing at this length",
    MissReason.MISS_REASON_ALIGNMENT: "shorter than a block of the group with the largest blocks",
    MissReason.MISS_REASON_SEARCH_LIMIT: "the search reached its maximum number of tries",
}


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt that is explained.

    Attributes:
        token_ids: Its tokens.
        keys: Its extra keys.
        session_number: Session that looks it up; 0 for one without namespace and weights version.
    """

    token_ids: list[int]
    keys: ExtraKeys
    session_number: int


_MISS_COLUMNS: Final[tuple[Column[tuple[int, str, MissCount]], ...]] = (
    Column("GROUP", lambda row: str(row[0])),
    Column("KIND", lambda row: row[1], is_text=True),
    Column("REASON", lambda row: word(MissReason, row[2].reason), is_text=True),
    Column("LOOK-UPS", lambda row: f"{row[2].lookups:,}"),
    Column("TOKENS", lambda row: f"{row[2].tokens:,}"),
    Column("MEANING", lambda row: _meaning(row[2].reason), is_text=True),
)
_SCOPE_COLUMNS: Final[tuple[Column[admin_pb2.ScopeInfo], ...]] = (
    Column("WEIGHTS VERSION", lambda scope: scope.weights_version or "none", is_text=True),
    Column("NAMESPACE", lambda scope: "yes" if scope.has_namespace else "none", is_text=True),
    Column("SESSIONS", lambda scope: f"{scope.sessions:,}"),
    Column("CACHED", lambda scope: f"{scope.cached_blocks:,}"),
)
_UNEXECUTED_COLUMNS: Final[tuple[Column[admin_pb2.UnexecutedBlocks], ...]] = (
    Column("SESSION", lambda each: str(each.session_number)),
    Column("CLIENT", lambda each: each.client_name, is_text=True),
    Column("NOT EXECUTED", lambda each: f"{each.blocks:,}"),
    Column("OLDEST STEP", lambda each: str(each.oldest_sequence or "never")),
    Column("EXECUTED STEP", lambda each: str(each.executed_sequence)),
)
_END_COLUMNS: Final[tuple[Column[tuple[int, str, admin_pb2.GroupEnd]], ...]] = (
    Column("GROUP", lambda row: str(row[0])),
    Column("KIND", lambda row: row[1], is_text=True),
    Column("BLOCK", lambda row: f"{row[2].span_tokens:,}"),
    Column("HIT", lambda row: f"{row[2].num_tokens:,}"),
    Column("OF", lambda row: f"{row[2].max_tokens:,}"),
    Column("REASON", lambda row: word(MissReason, row[2].reason) if row[2].reason else "-", is_text=True),
)


@click.command()
@click.option("--pool", required=True, metavar="NAME", help="The pool.")
@file_option("--tokens", "Explain this prompt: a JSON list of token ids.")
@click.option("--session", type=click.IntRange(1), help="Session that looks it up; by default the oldest of the pool.")
@click.option("--salt", metavar="TEXT", help="Cache salt of the prompt.")
@click.option("--lora-name", metavar="NAME", help="LoRA of the prompt.")
@click.option("--lora-path", default="", metavar="PATH", help="Path of the LoRA, which is part of tagged keys.")
@server_options
def explain(  # noqa: PLR0913 - one per option
    *,
    pool: str,
    tokens: Path | None,
    session: int | None,
    salt: str | None,
    lora_name: str | None,
    lora_path: str,
    address: str,
    as_json: bool,
) -> None:
    """Say why prefixes were not hit: all look-ups of a pool, or a prompt."""
    keys = ExtraKeys(lora_name, lora_path, salt)
    if tokens is None and (session or keys != ExtraKeys()):
        raise click.UsageError("--session, --salt and --lora-... need --tokens")
    token_ids = [] if tokens is None else _read_tokens(tokens)
    with connected(address) as client:
        info = _find(client, pool)
        if tokens is None:
            _explain_pool(info, client.explain_misses(pool), as_json=as_json)
            return
        oldest = next(client.sessions(pool), None)
        number = session or (oldest.session_number if oldest else 0)
        with usage_errors():
            _explain_prompt(client, info, _Prompt(token_ids, keys, number), as_json=as_json)


def _find(client: AdminClient, pool: str) -> PoolInfo:
    info = next((info for info in client.overview().pools if info.config.name == pool), None)
    if info is None:
        raise NotFoundError("POOL_NOT_FOUND", f"no pool {pool!r}", field="pool_name")
    return info


def _read_tokens(path: Path) -> list[int]:
    try:
        found = read_json(path)
        if not isinstance(found, list) or not found:
            raise click.BadParameter(f"{path} contains no JSON list of token ids", param_hint="--tokens")
        return checked_token_ids(found)
    except (OSError, ValueError) as error:
        raise click.BadParameter(f"cannot read {path}: {error}", param_hint="--tokens") from None
    except InvalidArgumentError as error:
        raise click.BadParameter(f"{path}: {error}", param_hint="--tokens") from None


def _explain_pool(info: PoolInfo, facts: admin_pb2.ExplainMissesResponse, *, as_json: bool) -> None:
    if as_json:
        facts.hash_scheme.ClearField("none_hash")
        print_json({"pool": info, "misses": facts})
        return
    rows = [(i, group.kind, miss) for i, group in enumerate(info.groups) for miss in group.misses]
    missed_tokens = sum(miss.tokens for _, _, miss in rows)
    counters = info.prefix_cache
    lookups, queried = counters.requests + counters.preempted_requests, counters.queries_tokens
    share = percent(counters.hits_tokens / queried) if queried else "-"
    host, gone = info.host_memory, ""
    if info.HasField("host_memory"):
        gone = (
            f", {host.lost_blocks:,} of them without a copy in host memory, where {host.evicted_blocks:,} were replaced"
        )
    print_line(
        f"pool {info.config.name}: {counted(lookups, 'look-up')}, {share} of the tokens hit, "
        f"{missed_tokens:,} tokens missed; epoch {info.epoch}, {counted(counters.resets, 'reset')}, "
        f"{info.evicted_blocks:,} of {info.config.num_blocks - 1:,} blocks evicted so far{gone}"
    )
    _print_tables((_MISS_COLUMNS, rows), (_SCOPE_COLUMNS, facts.scopes), (_UNEXECUTED_COLUMNS, facts.unexecuted))


def _print_tables(*tables: tuple[Sequence[Column[Any]], Sequence[object]]) -> None:
    """Prints the tables that have rows, each with an empty line around it."""
    for columns, rows in tables:
        if rows:
            print_line()
            print_table(columns, rows)
    print_line()


def _explain_prompt(client: AdminClient, info: PoolInfo, prompt: _Prompt, *, as_json: bool) -> None:
    end = _look_up(client, info, prompt)
    longest = end.hit_tokens + end.miss.num_tokens
    better = list(_others_that_hit(client, info, prompt, end.hit_tokens)) if end.hit_tokens < longest else []
    if as_json:
        print_json(
            {
                "pool_name": info.config.name,
                "session_number": prompt.session_number,
                "num_tokens": len(prompt.token_ids),
                "end": end,
                "others": [{"with": label, "hit_tokens": hit_tokens} for label, hit_tokens in better],
            }
        )
        return
    reader = f"session {prompt.session_number}" if prompt.session_number else "a session without namespace"
    length = counted(len(prompt.token_ids), "token")
    print_line(f"{length} as {reader}: a hit of {end.hit_tokens:,} tokens; a hit can cover {longest:,}")
    _print_tables((_END_COLUMNS, [(i, info.groups[i].kind, each) for i, each in enumerate(end.groups)]))
    if end.host_tokens:
        print_line(f"- {end.host_tokens:,} tokens of the hit would be copied from host memory")
    if end.HasField("miss"):
        miss = end.miss
        print_line(f"- group {miss.group_id} ends the hit, {miss.num_tokens:,} tokens early: {_meaning(miss.reason)}")
    shared_tokens = max(each.num_tokens for each in end.groups)
    for i, each in enumerate(end.groups):
        print_line(f"- {end_sentence(GroupId(i), each, shared_tokens)}")
    if info.HasField("host_memory") and MissReason.MISS_REASON_EVICTED in [each.reason for each in end.groups]:
        print_line("- an evicted block is not in host memory, either: others replaced it there, or it was not copied")
    for label, hit_tokens in better:
        print_line(f"- {label}, the same tokens hit {hit_tokens:,}")


def _look_up(client: AdminClient, info: PoolInfo, prompt: _Prompt) -> admin_pb2.ExplainPromptResponse:
    """Hashes the prompt as its session does, and looks it up.

    Raises:
        ValueError: The hash algorithm is not known here, or the hashes of the session are secret.
    """
    name, number = info.config.name, prompt.session_number
    scheme = hash_scheme_from_proto("hash_scheme", client.explain_misses(name, number).hash_scheme)
    config = config_from_proto(info.config)
    if config.enable_caching and not scheme.none_hash:
        raise ValueError(f"the token of session {number} has a salt, so its hashes are secret; name another --session")
    hasher = BlockHasher(scheme, config.hash_block_size)
    hashes: list[Any] = []
    hasher.extend(hashes, prompt.token_ids, prompt.keys)
    return client.explain_prompt(name, len(prompt.token_ids), hashes, number)


def _others_that_hit(
    client: AdminClient, info: PoolInfo, prompt: _Prompt, hit_tokens: int
) -> Iterator[tuple[str, int]]:
    """Yields with what else the same tokens hit more, and how much: other extra keys, other sessions."""
    name = info.config.name
    others = list(islice(client.sessions(name), _MAX_TRIED + 1))
    loras = {request.lora_name for request in islice(client.requests(name), 500)}
    for label, other in _variants(prompt, others, sorted(loras), info.config.hash_scheme.key_form):
        try:
            found = _look_up(client, info, other).hit_tokens
        except (NotFoundError, ValueError):  # the session has ended meanwhile, or its hashes are secret
            continue
        if found > hit_tokens:
            yield label, found


def _variants(
    prompt: _Prompt, sessions: Iterable[admin_pb2.SessionInfo], loras: Iterable[str], key_form: int
) -> Iterator[tuple[str, _Prompt]]:
    keys = prompt.keys
    if keys.cache_salt is not None:
        yield "without the salt", replace(prompt, keys=replace(keys, cache_salt=None))
    if keys.lora_name is not None:
        yield "without the LoRA", replace(prompt, keys=replace(keys, lora_name=None, lora_path=""))
    paths = ("",) if key_form == KEY_FORM_PLAIN else dict.fromkeys(("", keys.lora_path))
    for lora in islice((lora for lora in loras if lora and lora != keys.lora_name), _MAX_TRIED):
        for path in paths:
            yield f"with LoRA {lora}", replace(prompt, keys=replace(keys, lora_name=lora, lora_path=path))
    for session in sessions:
        if session.session_number != prompt.session_number:
            version = f" (weights version {session.weights_version})" if session.weights_version else ""
            label = f"as session {session.session_number}{version}"
            yield label, replace(prompt, session_number=session.session_number)


def _meaning(reason: MissReason.ValueType) -> str:
    return MEANINGS.get(reason, "for a reason of a newer server")


def end_sentence(group_id: GroupId, end: admin_pb2.GroupEnd, shared_tokens: int = 0) -> str:
    """Says why a group ends a look-up, with what is known of the block that it lacks.

    Of a window or state that is not kept this also says up to where it is; another group has `shared_tokens`.
    """
    if not end.HasField("missing_block"):
        return f"group {group_id} has all {end.max_tokens:,} tokens that a hit can cover"
    first = end.missing_block * end.span_tokens
    lacks = f"group {group_id} lacks block {end.missing_block:,}, tokens {first:,} to {first + end.span_tokens - 1:,}"
    details = []
    if end.reason == MissReason.MISS_REASON_NOT_KEPT:
        kept = f"the last one that is kept ends at {end.num_tokens:,}" if end.num_tokens else "none is kept up to there"
        details.append(
            f"the prompt equals a cached prefix up to {shared_tokens:,} tokens; of its windows or states {kept}"
        )
    if end.weights_versions:
        details.append(f"weights versions {', '.join(version or 'none' for version in end.weights_versions)} have it")
    if end.is_in_other_namespace:
        details.append("another namespace has it")
    if end.filling_session_number:
        details.append(f"session {end.filling_session_number} fills it")
    return f"{lacks}: {'; '.join([_meaning(end.reason), *details])}"

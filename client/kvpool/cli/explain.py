"""`kvpool explain`."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final

import click

from kvpool.cli.connection import connected, server_options
from kvpool.cli.explain_hints import MEANINGS, end_sentence, hints, missed_tokens
from kvpool.cli.options import file_option, usage_errors
from kvpool.cli.tables import Column, print_json, print_table
from kvpool.cli.text import counted, percent
from kvpool.client import BlockHasher, ExtraKeys, KeyForm, NotFoundError, PoolInfo
from kvpool.client.admin import (
    AdminClient,
    GroupEnd,
    MissCount,
    MissesInfo,
    PromptEnd,
    ScopeInfo,
    SessionInfo,
    UnexecutedBlocks,
)
from kvpool.client.request import checked_token_ids
from kvpool.core.errors import InvalidArgumentError
from kvpool.core.ids import GroupId

_MAX_TRIED: Final = 8
"""Maximum number of sessions, and of LoRAs, with which a prompt is tried besides its own."""


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
    Column("REASON", lambda row: row[2].reason.value, is_text=True),
    Column("LOOK-UPS", lambda row: f"{row[2].lookups:,}"),
    Column("TOKENS", lambda row: f"{row[2].tokens:,}"),
    Column("MEANING", lambda row: MEANINGS[row[2].reason], is_text=True),
)
_SCOPE_COLUMNS: Final[tuple[Column[ScopeInfo], ...]] = (
    Column("WEIGHTS VERSION", lambda scope: scope.weights_version or "none", is_text=True),
    Column("NAMESPACE", lambda scope: "yes" if scope.has_namespace else "none", is_text=True),
    Column("SESSIONS", lambda scope: f"{scope.sessions:,}"),
    Column("CACHED", lambda scope: f"{scope.cached_blocks:,}"),
)
_UNEXECUTED_COLUMNS: Final[tuple[Column[UnexecutedBlocks], ...]] = (
    Column("SESSION", lambda each: str(each.session_number)),
    Column("CLIENT", lambda each: each.client_name, is_text=True),
    Column("NOT EXECUTED", lambda each: f"{each.blocks:,}"),
    Column("OLDEST STEP", lambda each: str(each.oldest_sequence or "never")),
    Column("EXECUTED STEP", lambda each: str(each.executed_sequence)),
)
_END_COLUMNS: Final[tuple[Column[tuple[int, str, GroupEnd]], ...]] = (
    Column("GROUP", lambda row: str(row[0])),
    Column("KIND", lambda row: row[1], is_text=True),
    Column("BLOCK", lambda row: f"{row[2].span_tokens:,}"),
    Column("HIT", lambda row: f"{row[2].num_tokens:,}"),
    Column("OF", lambda row: f"{row[2].max_tokens:,}"),
    Column("REASON", lambda row: row[2].reason.value if row[2].reason else "-", is_text=True),
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
    info = next((info for info in client.overview(pool).pools if info.config.name == pool), None)
    if info is None:
        raise NotFoundError("POOL_NOT_FOUND", f"no pool {pool!r}", field="pool_name")
    return info


def _read_tokens(path: Path) -> list[int]:
    try:
        found = json.loads(path.read_bytes())
        if not isinstance(found, list) or not found:
            raise click.BadParameter(f"{path} contains no JSON list of token ids", param_hint="--tokens")
        return checked_token_ids(found)
    except (OSError, ValueError) as error:
        raise click.BadParameter(f"cannot read {path}: {error}", param_hint="--tokens") from None
    except InvalidArgumentError as error:
        raise click.BadParameter(f"{path}: {error}", param_hint="--tokens") from None


def _explain_pool(info: PoolInfo, facts: MissesInfo, *, as_json: bool) -> None:
    rows = [(i, group.kind, miss) for i, group in enumerate(info.groups) for miss in group.misses]
    counters = info.prefix_cache
    if as_json:
        groups = [
            {"kind": group.kind, "span_tokens": span, "misses": [asdict(miss) for miss in group.misses]}
            for group, span in zip(info.groups, info.config.spans_tokens, strict=True)
        ]
        print_json(
            {
                "pool": info.config.name,
                "epoch": info.epoch,
                "lookups": counters.requests + counters.preempted_requests,
                "missed_tokens": missed_tokens(info),
                "resets": counters.resets,
                "evicted_blocks": info.evicted_blocks,
                "remembered_evictions": facts.remembered_evictions,
                "hit_alignment_tokens": info.config.hit_alignment,
                "groups": groups,
                "scopes": facts.scopes,
                "unexecuted": facts.unexecuted,
                "hints": hints(info, facts),
            }
        )
        return
    lookups, queried = counters.requests + counters.preempted_requests, counters.queries_tokens
    share = percent(counters.hits_tokens / queried) if queried else "-"
    click.echo(
        f"pool {info.config.name}: {counted(lookups, 'look-up')}, {share} of the tokens hit, "
        f"{missed_tokens(info):,} tokens missed; epoch {info.epoch}, {counted(counters.resets, 'reset')}, "
        f"{info.evicted_blocks:,} of {info.config.num_blocks - 1:,} blocks evicted so far"
    )
    _print_tables((_MISS_COLUMNS, rows), (_SCOPE_COLUMNS, facts.scopes), (_UNEXECUTED_COLUMNS, facts.unexecuted))
    for hint in hints(info, facts):
        click.echo(f"- {hint}")


def _print_tables(*tables: tuple[Sequence[Column[Any]], Sequence[object]]) -> None:
    """Prints the tables that have rows, each with an empty line around it."""
    for columns, rows in tables:
        if rows:
            click.echo()
            print_table(columns, rows)
    click.echo()


def _explain_prompt(client: AdminClient, info: PoolInfo, prompt: _Prompt, *, as_json: bool) -> None:
    end = _look_up(client, info, prompt)
    longest = end.hit_tokens + (end.miss[2] if end.miss else 0)
    better = list(_others_that_hit(client, info, prompt, end.hit_tokens)) if end.hit_tokens < longest else []
    kinds = [group.kind for group in info.groups]
    if as_json:
        print_json(
            {
                "pool": info.config.name,
                "session_number": prompt.session_number,
                "num_tokens": len(prompt.token_ids),
                "hit_tokens": end.hit_tokens,
                "longest_hit_tokens": longest,
                "miss": None if end.miss is None else {"group_id": end.miss[0], "reason": end.miss[1]},
                "groups": [{"kind": kind, **asdict(each)} for kind, each in zip(kinds, end.groups, strict=True)],
                "others": [{"with": label, "hit_tokens": hit_tokens} for label, hit_tokens in better],
            }
        )
        return
    reader = f"session {prompt.session_number}" if prompt.session_number else "a session without namespace"
    length = counted(len(prompt.token_ids), "token")
    click.echo(f"{length} as {reader}: a hit of {end.hit_tokens:,} tokens; a hit can cover {longest:,}")
    _print_tables(
        (_END_COLUMNS, [(i, kind, each) for i, (kind, each) in enumerate(zip(kinds, end.groups, strict=True))])
    )
    if end.miss:
        group_id, reason, num_tokens = end.miss
        click.echo(f"- group {group_id} ends the hit, {num_tokens:,} tokens early: {MEANINGS[reason]}")
    for i, each in enumerate(end.groups):
        click.echo(f"- {end_sentence(GroupId(i), each)}")
    for label, hit_tokens in better:
        click.echo(f"- {label}, the same tokens hit {hit_tokens:,}")


def _look_up(client: AdminClient, info: PoolInfo, prompt: _Prompt) -> PromptEnd:
    """Hashes the prompt as its session does, and looks it up.

    Raises:
        ValueError: The hash algorithm is not known here, or the hashes of the session are secret.
    """
    name, number = info.config.name, prompt.session_number
    scheme = client.explain_misses(name, number).hash_scheme
    if info.config.enable_caching and not scheme.none_hash:
        raise ValueError(f"the token of session {number} has a salt, so its hashes are secret; name another --session")
    hasher = BlockHasher(scheme, info.config.hash_block_size)
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
    prompt: _Prompt, sessions: Iterable[SessionInfo], loras: Iterable[str], key_form: KeyForm
) -> Iterator[tuple[str, _Prompt]]:
    keys = prompt.keys
    if keys.cache_salt is not None:
        yield "without the salt", replace(prompt, keys=replace(keys, cache_salt=None))
    if keys.lora_name is not None:
        yield "without the LoRA", replace(prompt, keys=replace(keys, lora_name=None, lora_path=""))
    paths = ("",) if key_form is KeyForm.PLAIN else dict.fromkeys(("", keys.lora_path))
    for lora in islice((lora for lora in loras if lora and lora != keys.lora_name), _MAX_TRIED):
        for path in paths:
            yield f"with LoRA {lora}", replace(prompt, keys=replace(keys, lora_name=lora, lora_path=path))
    for session in sessions:
        if session.session_number != prompt.session_number:
            version = f" (weights version {session.weights_version})" if session.weights_version else ""
            label = f"as session {session.session_number}{version}"
            yield label, replace(prompt, session_number=session.session_number)

"""Executes the commands of a transcript on the core. No other module of the transcripts knows the core's interface.

A command is a JSON object. `do` names a method of `Player`, `at` is the time in quarters of a second, and the other
entries are the method's arguments. A result is a JSON value. It is the value that the method returns, or
`{"error": [class, reason, field]}`.

A step is a list of rows. A row names its request at most once per step, and declares it where it is new:

| entry | meaning |
|---|---|
| op | name of the operation |
| request | number of the request |
| declare | [request id, LoRA name, content] of a new request |
| append | [number of tokens before, number of appended tokens] |
| new, taken, rejected, lookahead, encoder, delay, options | as in `kvpool.core.steps.columns` |
| blocks | per group, the ids of a hit to allocate or of blocks to evict |

A content is [story, end, branch]: tokens before `end` are those of the story, later ones those of its branch. Requests
with equal stories share a prefix.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable
from typing import Any, Final, TypeVar

from google.protobuf import json_format

from kvpool.core import commands
from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.blocks.quota import NO_QUOTA, Quota
from kvpool.core.commands import Command, EndReason
from kvpool.core.errors import KvpoolError
from kvpool.core.ids import BlockId, PoolName, RequestNumber, SessionId, SessionNumber
from kvpool.core.sessions.session import Session
from kvpool.core.state import State
from kvpool.core.steps.allocation_options import OPTION_COLUMNS
from kvpool.core.steps.columns import Operation, Step, StepResult
from kvpool.core.views.snapshot_cursor import SnapshotCursor
from kvpool.v1 import pool_pb2
from kvpool.wire import picture
from kvpool.wire import pools as wire_pools
from kvpool.wire import steps as wire_steps
from transcripts.traffic import MUTATIONS, Json, Row

_ResultT = TypeVar("_ResultT")
NONE_HASH: Final = b"n" * 32
_INDEX: Final = re.compile(r"\[(\d+)\]$")
_PER_GROUP: Final = ("num_block_ids",)
_QUEUES: Final = ("request_ids", "lora_names", "block_ids")
_COLUMNS: Final = {
    "new": "num_new_tokens",
    "taken": "num_taken_tokens",
    "rejected": "num_rejected_tokens",
    "lookahead": "num_lookahead_tokens",
    "encoder": "num_encoder_tokens",
    "delay": "delay_cache_blocks",
}
_MUTATIONS: Final[dict[str, Callable[[Step], object]]] = dict(
    zip(
        MUTATIONS,
        (
            lambda step: setattr(step, "block_hashes", step.block_hashes + b"x"),
            lambda step: step.block_ids.append(BlockId(1)),
            lambda step: step.request_ids.append("unused"),
            lambda step: step.token_ids.append(1),
            lambda step: step.operations.__setitem__(-1, 99),
            lambda step: setattr(step, "num_lookahead_tokens", [0] * (len(step.operations) + 1)),
            lambda step: setattr(step, "sequence", step.sequence + 1),
            lambda step: setattr(step, "sequence", 0),
        ),
        strict=True,
    )
)


class Player:
    """A state that executes commands."""

    def __init__(self) -> None:
        self._state = State()
        self._now_seconds = 0.0
        self._contents: dict[tuple[str, int], list[Json]] = {}  # by session and number of the request
        self._last_steps: dict[str, list[Json]] = {}
        self._num_declared: Counter[KVCacheManager] = Counter()

    def execute(self, command: dict[str, Json]) -> Json:
        """Executes a command. A refused command must leave the state as it was, which the digests show."""
        arguments = dict(command)
        self._now_seconds = arguments.pop("at") / 4
        method = getattr(self, arguments.pop("do"))
        try:
            result = method(**arguments)
        except KvpoolError as error:
            result = {"error": [type(error).__name__, error.reason, error.field]}
        events = self._events()
        return {"result": result, "events": events} if events else result

    # Pools

    def create_pool(self, config: Json, epoch: int = 1) -> Json:
        made = _config(config)
        created = self._do(commands.CreatePool(made, NONE_HASH, epoch))
        return [self._state.pools.get(made.name).epoch, created]

    def open_epoch(self, config: Json, epoch: int, *, ranks_fence: bool) -> Json:
        self._do(commands.OpenEpoch(_config(config), NONE_HASH, epoch, ranks_fence))
        return epoch

    def pass_epoch(self, pool: str, epoch: int) -> Json:
        return [end.session_number for end in self._do(commands.PassEpoch(pool, epoch))]

    def suspend(self, pool: str) -> None:
        self._do(commands.SuspendPool(pool))

    def resume(self, pool: str) -> None:
        self._do(commands.ResumePool(pool))

    def remove_pool(self, pool: str) -> None:
        self._do(commands.RemovePool(pool))

    def drain(self, pool: str | None) -> None:
        self._do(commands.Drain(PoolName(pool) if pool else None))

    def undrain(self, pool: str | None) -> None:
        self._do(commands.Undrain(PoolName(pool) if pool else None))

    def reset_prefix_cache(self, pool: str) -> Json:
        return self._do(commands.ResetPrefixCache(pool))

    # Sessions

    def open_session(self, pool: str, session: str, **options: Json) -> Json:
        quota = options.pop("quota", None)
        lease_seconds = options.pop("lease") / 4
        opened = self._do(
            commands.OpenSession(
                pool,
                SessionId(session),
                "",
                lease_seconds,
                quota=Quota(*quota) if quota else NO_QUOTA,
                requested=tuple(quota or ()),
                **options,
            )
        )
        return [opened.session_id, self._session(opened.session_id)[1].session_number]

    def touch_session(self, session: str) -> Json:
        self._do(commands.KeepAlive(session))
        return self._session(session)[1].session_number

    def attach_stream(self, session: str) -> None:
        self._do(commands.KeepAlive(session))
        self._do(commands.AttachStream(SessionId(session)))

    def detach_stream(self, session: str) -> None:
        self._do(commands.KeepAlive(session))
        if self._session(session)[1].open_streams:
            self._do(commands.DetachStream(SessionId(session)))

    def mark_executed(self, session: str, sequence: int) -> None:
        self._do(commands.MarkExecuted(session, sequence))

    def close_session(self, session: str) -> Json:
        was_closed = self._state.sessions.ends.num_freed_by_close(session) is not None
        count = self._do(commands.CloseSession(session)).num_freed_requests
        return [count] if was_closed else count

    def evict_session(self, pool: str, number: int, quarantine: int) -> None:
        _, session = self._state.find_session(pool, number)
        self._do(commands.EndSession(session.session_id, EndReason.SESSION_EVICTED, quarantine / 4))

    def expire(self, quarantine: int) -> Json:
        """Ends what is due: leases, then quarantines. Returns both, as pairs and as numbers."""
        leases = self._state.sessions.due(self._now_seconds)
        reason = EndReason.LEASE_EXPIRED
        expired = [self._do(commands.EndSession(session_id, reason, quarantine / 4)) for session_id in leases]
        due = self._state.pools.due_quarantines(self._now_seconds)
        ended = [each for name, numbers in due for each in self._do(commands.EndQuarantine(name, numbers))]
        return [
            [[end.session_number, end.num_requests] for end in expired],
            [each.session.session_number for each in ended],
        ]

    def end_quarantine(self, pool: str, numbers: list[int]) -> Json:
        ended = self._do(commands.EndQuarantine(pool, tuple(map(SessionNumber, numbers))))
        return [each.session.session_number for each in ended]

    # Steps

    def step(self, session: str, rows: list[Row], mutate: str = "", **header: Json) -> Json:
        pool, found = self._session(session)
        step = self._columns(pool, session, rows, header)
        if mutate:
            _MUTATIONS[mutate](step)
        message = json.dumps([rows, header, mutate]).encode()
        try:
            num_steps = pool.activity.steps
            result = self._do(commands.ApplyStep(session, step, message))
            self._num_declared[pool] += sum(step.declares) * (pool.activity.steps - num_steps)
        except KvpoolError as error:
            error.rename_field(_row_field(error.field, len(pool.config.groups)))
            raise
        kept = self._last_steps.setdefault(session, [])
        kept.append((rows, header, mutate))
        del kept[:-20]
        for row in rows:
            if "declare" in row:
                self._contents[session, row["request"]] = row["declare"][2]
        return _rows(pool, found, rows, result)

    def repeat(self, session: str, back: int) -> Json:
        """Sends an earlier step again, without a change."""
        kept = self._last_steps.get(session, [])
        if back > len(kept):
            return None
        rows, header, mutate = kept[-back]
        return self.step(session, rows, mutate, **header)

    def state(self) -> Json:
        """Digests of what the service tells about each pool, its sessions and its cached blocks."""
        found = {}
        for pool in self._state.pools:
            info = picture.pool_info(pool, self._state.pools.state_of(pool), 0)
            info.activity.operations += self._num_declared[pool]  # once, a declaration was an operation of its own
            info.config.ClearField("allow_too_few_blocks")  # was not there
            info.ClearField("weights_versions")  # was not there, either
            info.activity.ClearField("waits_exact")  # nor was this
            for group in info.groups:
                group.ClearField("misses")  # nor was this
            held = [_held(each) for each in pool.sessions.values()]
            found[pool.config.name] = [_digest(info), held, _cached(pool)]
        return found

    def _do(self, command: Command[_ResultT]) -> _ResultT:
        return self._state.execute(command, self._now_seconds)

    def _session(self, session: str) -> tuple[KVCacheManager, Session]:
        return self._state.sessions.find(session, self._now_seconds)

    def _columns(self, pool: KVCacheManager, session: str, rows: list[Row], header: dict[str, Json]) -> Step:
        step = Step(**header)
        for row in rows:
            step.operations.append(int(Operation[row["op"]]))
            step.request_numbers.append(row.get("request", 0))
            step.declares.append("declare" in row)
            if "declare" in row:
                request_id, lora_name, content = row["declare"]
                step.request_ids.append(request_id)
                step.lora_names.append(lora_name)
            before, appended = row.get("append") or (0, 0)
            step.num_appended_tokens.append(appended)
            if appended > 0:
                if "declare" not in row:
                    content = self._contents[session, row["request"]]
                self._append(step, pool, content, before, appended)
        _put_columns(step, rows, len(pool.config.groups))
        return step

    def _append(self, step: Step, pool: KVCacheManager, content: list[Json], before: int, appended: int) -> None:
        config, size = pool.config, pool.config.hash_block_size
        if config.enable_caching:
            for end in range((before // size + 1) * size, before + appended + 1, size):
                step.block_hashes += _block_hash(content, end)[: config.hash_scheme.hash_size_bytes]
        if config.makes_events:
            step.token_ids += [_token(content, at) for at in range(before, before + appended)]

    def _events(self) -> Json:
        found = {}
        for pool in self._state.pools:
            events = pool.blocks.take_events()
            if events:
                found[pool.config.name] = [len(events), _digest(*map(wire_steps.event_to_proto, events))]
        return found


def _config(config: Json) -> Any:
    """Reads a configuration. The recorded core accepted pools with too few blocks for a request of maximum length."""
    message = json_format.ParseDict(config, pool_pb2.PoolConfig(allow_too_few_blocks=True))
    return wire_pools.config_from_proto(message)


def _put_columns(step: Step, rows: list[Row], num_groups: int) -> None:
    for name, column in _COLUMNS.items():
        values = [row.get(name, 0) for row in rows]
        setattr(step, column, [bool(value) for value in values] if name == "delay" else values)
    if any("options" in row for row in rows):
        for column in OPTION_COLUMNS:
            values = [row.get("options", {}).get(column, 0) for row in rows]
            setattr(step, column, [bool(value) for value in values] if "must" in column else values)
    if any("blocks" in row for row in rows):
        blocks = [ids for row in rows for ids in row.get("blocks") or [[]] * num_groups]
        step.num_block_ids = [len(ids) for ids in blocks]
        step.block_ids = [block_id for ids in blocks for block_id in ids]
    if not any(step.lora_names):
        step.lora_names = []


def _token(content: list[Json], at: int) -> int:
    story, end, branch = content
    token: int = (story * 1000 + at) % 30000 if at < end else (30000 + branch * 1000 + at) % 60000
    return token


def _block_hash(content: list[Json], end: int) -> bytes:
    story, until, branch = content
    name = f"{story}:{end}" if end <= until else f"{story}:{until}:{branch}:{end}"
    return hashlib.sha256(name.encode()).digest()


def _digest(*messages: Any) -> str:
    joined = b"".join(message.SerializeToString(deterministic=True) for message in messages)
    return hashlib.sha256(joined).hexdigest()[:8]


def _held(session: Session) -> str:
    """Digest of a session's counters, quota and requests with their tables."""
    holding = session.holding
    quota = [holding.min_blocks, holding.max_blocks] if holding else []
    held: list[Json] = [session.session_number, session.sequence, session.executed_sequence, quota]
    for request in session.requests.values():
        tables = [table.block_ids for table in request.tables]
        last_hash = request.hashes[-1].hex() if request.hashes else ""
        counts = [request.number, request.num_tokens, request.num_computed_tokens]
        held.append([request.request_id, *counts, tables, request.lora_name or "", last_hash])
    return hashlib.sha256(json.dumps(held).encode()).hexdigest()[:8]


def _cached(pool: KVCacheManager) -> str:
    """Digest of all cached blocks of a pool that makes events; of another, their number."""
    cursor = SnapshotCursor(pool)
    if cursor.is_done or not pool.config.makes_events:
        return ""
    stored = cursor.next_chunk(pool.blocks.num_blocks)
    return _digest(*map(wire_steps.event_to_proto, stored))


def _row_field(field: str, num_groups: int) -> str:
    """Names the row of an error in place of the operation."""
    found = _INDEX.search(field)
    name = field[: found.start()] if found else field
    if found is None or name in _QUEUES or field.startswith("config"):
        return field
    at = int(found[1]) // (num_groups if name in _PER_GROUP else 1)
    return f"{name}[row {at}]"


def _rows(pool: KVCacheManager, session: Session, rows: list[Row], result: StepResult) -> Json:
    """The free blocks, then one answer per row, without the zeros and empty lists at its end.

    An answer is the outcome, the tokens of the hit, those of other sessions, the new tokens, the blocks of the hit and
    the new blocks per group, and the tokens that an allocated request can still take on credit.
    """
    num_groups, ids = len(pool.config.groups), iter(result.block_ids)
    columns = (result.outcomes, result.num_hit_tokens, result.num_shared_hit_tokens, result.num_new_tokens)
    answers: list[Json] = []
    for i, row in enumerate(rows):
        prefix = result.num_prefix_blocks[i * num_groups : (i + 1) * num_groups]
        new = result.num_new_blocks[i * num_groups : (i + 1) * num_groups]
        hit = prefix if row["op"] == "COMMON_PREFIX" else [[next(ids) for _ in range(n)] for n in prefix]
        answer: list[Json] = [column[i] if column else 0 for column in columns]
        answer += [hit, [[next(ids) for _ in range(n)] for n in new], _credit(session, row)]
        while answer and _is_zero(answer[-1]):
            answer.pop()
        answers.append(answer)
    if next(ids, None) is not None:
        raise AssertionError("block ids are left over")
    return [result.free_blocks, *answers]


def _is_zero(value: Json) -> bool:
    return not any(value) if isinstance(value, list) else not value


def _credit(session: Session, row: Row) -> int:
    """How many tokens an allocated request can take on credit now."""
    request = session.by_number.get(RequestNumber(row.get("request", 0)))
    if request is None or row["op"] not in ("ADMIT", "ALLOCATE"):
        return 0
    return max(0, request.credit_tokens - request.num_computed_tokens)

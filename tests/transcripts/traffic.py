"""Random commands: several pools with their sessions and requests, as schedulers, ranks and operators use them.

The generator knows only the results of its commands. The same seed and the same results therefore make the same
commands, whatever the core looks like: a transcript needs to hold the results only. Most commands are valid.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from operator import is_
from typing import Any, Final

Json = Any
Row = dict[str, Any]

MAX_TOKENS: Final = 160
MAX_REQUESTS: Final = 10
_LOOK_UPS: Final = ("LOOKUP_COUNTED_AT_ONCE", "LOOKUP_UNCOUNTED", "LOOKUP")
_OK, _HIT_CHANGED = 0, 3
_REFUSED = ([1], [5], [6])
"""Outcomes of an operation that gets no blocks."""
_ENDED: Final = ("LEASE_EXPIRED", "SESSION_EVICTED", "SESSION_CLOSED", "EPOCH_PASSED", "SESSION_NOT_FOUND")


def _full(size: int = 4) -> Json:
    return {"full_attention": {"attention": {"block_size": size}}}


def _window(window: int, size: int = 4) -> Json:
    return {"sliding_window": {"attention": {"block_size": size}, "sliding_window": window}}


def _config(*specs: Json, num_blocks: int = 60, **options: Json) -> Json:
    groups = [{"layer_names": [f"layer.{i}"], "spec": spec} for i, spec in enumerate(specs)]
    config = {"num_blocks": num_blocks, "max_model_len": MAX_TOKENS, "groups": groups}
    return {**config, "reuse_order": "REUSE_ORDER_UNCACHED_FIRST", **options}


_MLA: Final = {"mla_attention": {"full_attention": {"attention": {"block_size": 8}}}}
_SINKS: Final = {"sink_full_attention": {"full_attention": {"attention": {"block_size": 4}}, "sink_len": 8}}
_CHUNKED: Final = {"chunked_local_attention": {"attention": {"block_size": 4}, "attention_chunk_size": 12}}
_CROSS: Final = {"cross_attention": {"attention": {"block_size": 2}}}

CONFIGS: Final = (
    _config(_full()),
    _config(_full(), num_blocks=300),
    _config(_full(), reuse_order="REUSE_ORDER_LRU"),
    _config(_full(), enable_events=True),
    _config(_full(), disable_caching=True),
    _config(_full(), use_eagle=True, num_blocks=40),
    _config(_full(), dcp_world_size=2),
    _config(_full(), hash_scheme={"algorithm": "xxhash_cbor"}),
    _config(_MLA, enable_events=True, num_blocks=30),
    _config(_full(), _window(10)),
    _config(_window(7, 2), _full(6), enable_events=True, num_blocks=120),
    _config(_window(9), retention_tokens=8, num_blocks=40),
    _config(_full(), _window(12), retention_tokens=0, use_eagle=True),
    _config(_full(), _CHUNKED, num_blocks=90),
    _config(_full(), {"mamba": {"block_size": 8, "num_speculative_blocks": 1}}, num_blocks=90),
    _config({"mamba": {"block_size": 4}}, disable_caching=True),
    _config(_SINKS, enable_events=True),
    _config(_full(2), _CROSS, disable_caching=True, num_blocks=90),
)
"""Pools, as the wire's JSON, that are small enough that blocks run out. A name is added when a pool is created."""


@dataclass
class _Request:
    """A request, as its scheduler knows it."""

    number: int
    num_tokens: int
    num_computed: int = 0
    num_blocks: int = 0
    credit: int = 0
    hit: list[list[int]] | None = None


@dataclass
class _Session:
    """A session, as its scheduler knows it."""

    session_id: str
    number: int
    sequence: int = 0
    num_kept: int = 0
    is_attached: bool = False
    is_short_of_blocks: bool = False
    requests: dict[int, _Request] = field(default_factory=dict)


@dataclass
class _Pool:
    """A pool, as an operator knows it."""

    name: str
    config: int
    epoch: int
    is_suspended: bool = False
    is_drained: bool = False
    sessions: list[_Session] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    """Numbers of sessions that were ended last."""


_Make = Callable[["Traffic", _Pool, _Session], dict[str, Json]]


class Traffic:
    """Makes commands; see `Player` for what they mean.

    Args:
        seed: Seed of all choices.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 - a workload
        self._pools: dict[str, _Pool] = {}
        self._now = 0
        self._num_opened = 0
        self._num_requests = 0
        self._past_epoch = 0

    def commands(self, execute: Callable[[dict[str, Json]], Json], count: int, state_interval: int) -> Iterator[Json]:
        """Makes commands, and yields their results.

        Args:
            execute: Returns the result of a command.
            count: Number of commands.
            state_interval: Number of commands between two digests of the state.
        """
        for i in range(count):
            self._now += self._random.choice((0, 0, 0, 0, 1))
            own = {"do": "state"} if i % state_interval == state_interval - 1 else self._command()
            result = execute({"at": self._now, **own})
            yield result
            if isinstance(result, dict) and "events" in result:
                result = result["result"]
            self._read(own, result)

    def _one_of(self, *values: Json) -> Json:
        return values[int(self._random.random() * len(values))]

    def _command(self) -> dict[str, Json]:
        if len(self._pools) < 3 or self._random.random() < 0.001:
            return self._create_pool()
        pool: _Pool = self._one_of(*self._pools.values())
        if pool.is_suspended and self._random.random() < 0.15:
            return {"do": "resume", "pool": pool.name}
        if not pool.sessions and self._random.random() < 0.4:
            return {"do": self._one_of("remove_pool", "reset_prefix_cache", "undrain", "undrain"), "pool": pool.name}
        if not pool.sessions or (len(pool.sessions) < 4 and self._random.random() < 0.01):
            return self._open_session(pool.name)
        session: _Session = self._one_of(*pool.sessions)
        if self._random.random() < 0.12:
            make: _Make = self._one_of(*self._rare)
            return make(self, pool, session)
        return self._step(pool, session)

    def _create_pool(self) -> dict[str, Json]:
        name = self._one_of("pool-1", "pool-2", "pool-3", "pool-4")
        found = self._pools.get(name)
        config = {"name": name, **CONFIGS[self._one_of(*range(len(CONFIGS)))]}
        epoch = 1 + max(self._past_epoch, found.epoch if found else 0)
        if self._random.random() < 0.2 and not (found and found.sessions):
            return {"do": "open_epoch", "config": config, "epoch": epoch, "ranks_fence": self._random.random() < 0.5}
        return {"do": "create_pool", "config": config, "epoch": epoch}

    def _open_session(self, pool: str) -> dict[str, Json]:
        self._num_opened += 1
        command: dict[str, Json] = {"do": "open_session", "pool": pool, "session": f"s{self._num_opened}"}
        command["lease"] = self._one_of(8, 40, 400, 4000)
        if self._random.random() < 0.4:
            command["quota"] = self._one_of([5, 0], [0, 20], [8, 30], [40, 40], [0, 0])
        if self._random.random() < 0.3:
            command["open_key"] = f"key-{self._one_of(1, 2, 3, 4, 5)}"
        if self._random.random() < 0.05:
            command["memory_id"] = self._one_of("one", "two")
        if self._random.random() < 0.1:
            command["owner"] = "tenant"
        return command

    # Commands that are rare

    def _mark_executed(self, _: _Pool, session: _Session) -> dict[str, Json]:
        return {"do": "mark_executed", "session": session.session_id, "sequence": self._executed(session)}

    def _touch_session(self, _: _Pool, session: _Session) -> dict[str, Json]:
        return {"do": "touch_session", "session": self._one_of(session.session_id, session.session_id, "none")}

    def _expire(self, _: _Pool, __: _Session) -> dict[str, Json]:
        return {"do": "expire", "quarantine": self._one_of(0, 12)}

    def _repeat(self, _: _Pool, session: _Session) -> dict[str, Json]:
        back = 1 + int(self._random.random() * min(max(session.num_kept, 1), 18))
        return {"do": "repeat", "session": session.session_id, "back": back}

    def _evict_session(self, pool: _Pool, session: _Session) -> dict[str, Json]:
        number = self._one_of(session.number, session.number, 999_999)
        return {"do": "evict_session", "pool": pool.name, "number": number, "quarantine": 8}

    def _close_session(self, _: _Pool, session: _Session) -> dict[str, Json]:
        return {"do": "close_session", "session": self._one_of(session.session_id, f"s{self._num_opened // 2}")}

    def _stream(self, _: _Pool, session: _Session) -> dict[str, Json]:
        return {"do": "detach_stream" if session.is_attached else "attach_stream", "session": session.session_id}

    def _end_quarantine(self, pool: _Pool, session: _Session) -> dict[str, Json]:
        return {"do": "end_quarantine", "pool": pool.name, "numbers": [self._one_of(session.number, *pool.ended)]}

    def _of_pool(self, pool: _Pool, _: _Session) -> dict[str, Json]:
        if self._random.random() < 0.3:
            return {"do": "pass_epoch", "pool": pool.name, "epoch": pool.epoch + 1}
        if self._random.random() < 0.2:
            return {"do": "undrain", "pool": None}
        return {"do": self._one_of("suspend", "drain", "remove_pool", "reset_prefix_cache"), "pool": pool.name}

    _rare: Final = (
        *(_mark_executed,) * 6,
        *(_touch_session,) * 1,
        *(_expire,) * 3,
        *(_repeat,) * 4,
        *(_stream,) * 3,
        *(_close_session,) * 2,
        _evict_session,
        _end_quarantine,
        _of_pool,
    )

    # Steps

    def _executed(self, session: _Session) -> int:
        behind: int = self._one_of(0, 0, 1, 2)
        return max(0, session.sequence - behind)

    def _step(self, pool: _Pool, session: _Session) -> dict[str, Json]:
        command: dict[str, Json] = {"do": "step", "session": session.session_id, "sequence": session.sequence + 1}
        if self._random.random() < 0.5:
            command["executed_sequence"] = self._executed(session)
        if self._random.random() < 0.2:
            command["launched_sequence"] = max(0, session.sequence - self._one_of(0, 0, 1))
        if self._random.random() < 0.1:
            command["admission_budget_tokens"] = self._one_of(3, 20, 40)
        rows: list[Row] = []
        if session.is_short_of_blocks:
            holding = [each for each in session.requests.values() if each.num_blocks]
            rows += [{"op": self._one_of("FREE", "PREEMPT"), "request": each.number} for each in holding[-2:]]
        named = {row["request"] for row in rows}
        if self._random.random() < 0.25:
            rows += self._decodes(session, named)
        for _ in range(self._one_of(0, 0, 1, 2) if rows else self._one_of(1, 1, 2, 3)):
            row = self._row(pool, session, named | {row.get("request", 0) for row in rows})
            rows.insert(self._one_of(0, len(rows), len(rows)), row)
        command["rows"] = rows
        if self._random.random() < 0.01:
            command["mutate"] = self._one_of(*MUTATIONS)
        return command

    def _decodes(self, session: _Session, named: set[int]) -> list[Row]:
        """A token for each running request, as most steps have."""
        rows = []
        for request in session.requests.values():
            if not request.num_computed or request.number in named or request.num_tokens >= MAX_TOKENS - 4:
                continue
            row: Row = {"op": "ALLOCATE", "request": request.number, "new": 1}
            taken = self._taken(request)
            if taken:
                row["taken"] = taken
            missing = request.num_computed + taken + 1 - request.num_tokens
            if missing > 0:
                row["append"] = [request.num_tokens, missing]
            rows.append(row)
        return rows

    def _taken(self, request: _Request) -> int:
        left = min(request.credit, MAX_TOKENS - 4 - request.num_computed)
        return int(self._random.random() * (left + 1)) if left > 0 and self._random.random() < 0.6 else 0

    def _row(self, pool: _Pool, session: _Session, named: set[int]) -> Row:
        requests = [each for each in session.requests.values() if each.number not in named]
        choice = self._random.random()
        if choice < 0.02:
            num_blocks, num_groups = CONFIGS[pool.config]["num_blocks"], len(CONFIGS[pool.config]["groups"])
            ids = [int(self._random.random() * num_blocks) for _ in range(self._one_of(1, 2, 3))]
            return {"op": "EVICT", "blocks": [ids, *([] for _ in range(num_groups - 1))]}
        if choice < 0.025:
            return {"op": "RESET"}
        if choice < 0.027:
            return {"op": "FREE", "request": 2_000_000_000}
        if not requests or (len(session.requests) < MAX_REQUESTS and choice < 0.35):
            return self._new_request(pool)
        request = self._one_of(*requests)
        row: Row = {"op": "", "request": request.number}
        if request.num_blocks or request.num_computed:
            self._continue(row, pool, request)
        else:
            self._begin(row, pool, request)
        if self._random.random() < 0.01:
            row[self._one_of("new", "taken", "rejected", "lookahead")] = self._one_of(-1, 1000)
        return row

    def _new_request(self, pool: _Pool) -> Row:
        self._num_requests += 1
        number = self._num_requests
        content = [self._one_of(0, 1, 2, 3), self._one_of(MAX_TOKENS, MAX_TOKENS, 16, 30, 0), number]
        row: Row = {
            "op": self._one_of("ADMIT", "ADMIT", "ADMIT", "ADMIT", "ALLOCATE", *_LOOK_UPS),
            "request": number,
            "declare": [f"r{number}", self._one_of("", "", "", "lora"), content],
            "append": [0, self._one_of(1, 4, 9, 17, 24, 31, 40, 60)],
        }
        if row["op"] == "ALLOCATE":
            row["new"] = 1 + int(self._random.random() * row["append"][1])
        self._options(row, pool)
        return row

    def _begin(self, row: Row, pool: _Pool, request: _Request) -> None:
        """An operation on a request without blocks."""
        if request.hit and self._random.random() < 0.6:
            row["op"], row["blocks"], row["new"] = "ALLOCATE", request.hit, self._one_of(1, 2, 5, 12)
        else:
            row["op"] = self._one_of("ADMIT", "ADMIT", *_LOOK_UPS, "ALLOCATE", "FREE", "APPEND")
            if row["op"] == "ALLOCATE":
                row["new"] = 1 + int(self._random.random() * request.num_tokens)
            elif row["op"] == "ADMIT" and self._random.random() < 0.3:
                row["new"] = self._one_of(1, 3, 9, 20)
            elif row["op"] == "APPEND":
                self._append(row, request, self._one_of(1, 3, 6))
        self._options(row, pool)

    def _continue(self, row: Row, pool: _Pool, request: _Request) -> None:
        """An operation on a request with blocks."""
        row["op"] = self._one_of(*["ALLOCATE"] * 6, "FREE", "FREE", "PREEMPT", "CACHE", "COMMON_PREFIX", "APPEND")
        taken = self._taken(request)
        if taken:
            row["taken"] = taken
            self._append(row, request, request.num_computed + taken - request.num_tokens)
        if row["op"] == "ALLOCATE":
            if "append" not in row and self._random.random() < 0.7:
                self._append(row, request, self._one_of(1, 1, 3, 5))
            row["new"] = self._one_of(1, 1, 2, 5, 12)
            if not taken and self._random.random() < 0.1:
                row["rejected"] = self._one_of(1, 2, 3)
            self._options(row, pool)
        elif row["op"] == "CACHE":
            row["new"] = int(self._random.random() * (request.num_computed + taken + 1))
        elif row["op"] == "APPEND" and "append" not in row:
            self._append(row, request, self._one_of(1, 3, 5))

    def _append(self, row: Row, request: _Request, count: int) -> None:
        if count > 0 and request.num_tokens < MAX_TOKENS:
            row["append"] = [request.num_tokens, min(count, MAX_TOKENS - request.num_tokens)]

    def _options(self, row: Row, pool: _Pool) -> None:
        if row["op"] not in ("ADMIT", "ALLOCATE"):
            return
        if any("cross_attention" in group["spec"] for group in CONFIGS[pool.config]["groups"]):
            row["encoder"] = 8
        choice = self._random.random()
        if choice < 0.05:
            row["lookahead"] = self._one_of(1, 2, 4)
        elif choice < 0.10:
            row["delay"] = 1
        elif choice < 0.12 and row["op"] == "ALLOCATE":
            row["options"] = {"num_external_tokens": self._one_of(4, 9)}
        elif choice < 0.22:
            row["options"] = self._one_of(
                {"num_in_flight_tokens": 5},
                {"num_reserved_blocks": 3},
                {"num_watermark_blocks": 2},
                {"full_sequence_must_fit": 1},
                {"full_sequence_must_fit": 1, "num_watermark_blocks": 4},
            )

    # Results

    def _read(self, command: dict[str, Json], result: Json) -> None:
        error = result["error"][1] if isinstance(result, dict) and "error" in result else ""
        if command["do"] == "step":
            self._read_step(command, result, error)
        elif error in _ENDED and "session" in command:
            self._end(lambda session: session.session_id == command["session"])
        elif not error and command["do"] in self._readers:
            self._readers[command["do"]](self, command, result)
        elif not error and "pool" in command:
            self._read_of_pool(command["do"], command, self._pools.get(command["pool"]))

    def _read_opening(self, command: dict[str, Json], result: Json) -> None:
        if result[0] == command["session"]:  # otherwise the key found an earlier one
            self._pools[command["pool"]].sessions.append(_Session(result[0], result[1]))

    def _read_expiry(self, _: dict[str, Json], result: Json) -> None:
        ended = [number for number, _ in result[0]]
        self._end(lambda session: session.number in ended)

    def _read_end(self, command: dict[str, Json], _: Json) -> None:
        self._end(lambda each: each.session_id == command.get("session") or each.number == command.get("number"))

    def _read_stream(self, command: dict[str, Json], _: Json) -> None:
        for session in self._named(command["session"]):
            session.is_attached = command["do"] == "attach_stream"

    def _read_pool(self, command: dict[str, Json], result: Json) -> None:
        name = command["config"]["name"]
        config = next(i for i, each in enumerate(CONFIGS) if {"name": name, **each} == command["config"])
        if command["do"] == "open_epoch":
            drained = name in self._pools and self._pools[name].is_drained
            self._pools[name] = _Pool(name, config, result, is_drained=drained)
        elif result[1]:
            self._pools[name] = _Pool(name, config, result[0])

    def _read_of_pool(self, do: str, command: dict[str, Json], pool: _Pool | None) -> None:
        if pool is None:
            for each in self._pools.values():  # undrain without a name
                each.is_drained = False
        elif do == "remove_pool":
            self._past_epoch = max(self._past_epoch, pool.epoch)
            del self._pools[pool.name]
        elif do == "pass_epoch":
            pool.epoch, pool.is_suspended, pool.sessions = command["epoch"], True, []
        elif do in ("suspend", "resume"):
            pool.is_suspended = do == "suspend"
        elif do in ("drain", "undrain"):
            pool.is_drained = do == "drain"

    _readers: Final = {
        "create_pool": _read_pool,
        "open_epoch": _read_pool,
        "open_session": _read_opening,
        "expire": _read_expiry,
        "close_session": _read_end,
        "evict_session": _read_end,
        "attach_stream": _read_stream,
        "detach_stream": _read_stream,
    }

    def _named(self, session_id: str) -> list[_Session]:
        """The session with this id; empty if it has ended."""
        sessions = [session for pool in self._pools.values() for session in pool.sessions]
        return [session for session in sessions if session.session_id == session_id]

    def _end(self, is_ended: Callable[[_Session], bool]) -> None:
        for pool in self._pools.values():
            ended = [session for session in pool.sessions if is_ended(session)]
            pool.sessions = [session for session in pool.sessions if not is_ended(session)]
            pool.ended = [*pool.ended, *(session.number for session in ended)][-3:]

    def _read_step(self, command: dict[str, Json], result: Json, error: str) -> None:
        for session in self._named(command["session"]):
            if error in _ENDED:
                self._end(partial(is_, session))
            if error:
                continue
            session.sequence += 1
            session.num_kept += 1
            session.is_short_of_blocks = any(answer[:1] in _REFUSED for answer in result[1:])
            for row, answer in zip(command["rows"], result[1:], strict=True):
                if row.get("request"):
                    self._read_row(session, row, [*answer, *(0, 0, 0, 0, [], [], 0)[len(answer) :]])

    def _read_row(self, session: _Session, row: Row, answer: list[Json]) -> None:
        outcome, num_hit, _, num_new, hit, new, credit = answer
        number = row["request"]
        request = session.requests.get(number) or _Request(number, 0)
        session.requests[number] = request
        request.num_tokens += row.get("append", [0, 0])[1]
        request.num_computed += row.get("taken", 0) - row.get("rejected", 0)
        request.credit = 0
        if row["op"] in _LOOK_UPS or outcome == _HIT_CHANGED:
            request.hit = hit or None
            return
        if row["op"] in ("ADMIT", "ALLOCATE"):
            if outcome != _OK:
                return
            request.credit = credit
            if row["op"] == "ADMIT":
                request.num_computed = num_hit + num_new
            else:
                external = row.get("options", {}).get("num_external_tokens", 0)
                request.num_computed += self._hit_tokens(session, row) + external + row["new"]
            request.num_blocks += len(hit[0] if hit else ()) + len(new[0] if new else ())
            if "blocks" in row:
                request.num_blocks += len(row["blocks"][0])
        elif row["op"] == "PREEMPT":
            request.num_computed = request.num_blocks = 0
        elif row["op"] == "FREE":
            del session.requests[number]
        request.hit = None

    def _hit_tokens(self, session: _Session, row: Row) -> int:
        """Number of tokens of the hit that a row allocates."""
        if "blocks" not in row:
            return 0
        pool = next(pool for pool in self._pools.values() if session in pool.sessions)
        config = CONFIGS[pool.config]
        (kind, spec), dcp = next(iter(config["groups"][0]["spec"].items())), config.get("dcp_world_size", 1)
        spec = spec.get("full_attention", spec)
        size = spec.get("attention", spec)["block_size"]
        num_tokens: int = len(row["blocks"][0]) * size * (1 if kind == "mamba" else dcp)
        return num_tokens


MUTATIONS: Final = (
    "a byte of hashes more",
    "a block id more",
    "a request id more",
    "a token id more",
    "an unknown operation",
    "a short column",
    "another sequence",
    "sequence zero",
)
"""Changes of a step with which it must be refused; see `Player`."""

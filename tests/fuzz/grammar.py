"""Generates valid calls, from the pools, sessions, requests and numbers that exist on the server.

The grammar reads them from the server's own objects. So most calls pass the first checks, and a mutated call is wrong
in one place only. A field has the same source in every message that has it.
"""

from collections.abc import Callable
from random import Random
from typing import Any, Final

from google.protobuf.message import Message

from fuzz.configs import POOL_NAMES, RANK_POOLS, messages
from fuzz.contract import METHODS
from fuzz.grammar_requests import RequestGrammar
from fuzz.served import Served
from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.v1 import admin_pb2, allocator_pb2

_MAX_SESSIONS: Final = 10
_LEASES_SECONDS: Final = (0.0, 5.0, 20.0, 60.0)
_WEIGHTS_VERSIONS: Final = ("", "", "1", "2")
_OF_A_REQUEST: Final = ("CacheBlocks", "Free", "GetCommonPrefixBlocks")
"""Calls about a request that the session has."""


class Grammar(RequestGrammar):
    """Generates messages for the unary calls and watches of schedulers, operators and routers.

    Attributes:
        page_tokens: The last page token of each call.
    """

    def __init__(self, rng: Random, served: Served) -> None:
        super().__init__(rng, served)
        self.page_tokens: dict[str, str] = {}
        self._key = ""
        self._writers: Final[dict[str, Callable[[], Message | None]]] = {
            "AllocatorService.CreatePool": self._create_pool,
            "AllocatorService.OpenSession": self._open_session,
            "AllocatorService.Schedule": self.step,
            "AdminService.EvictSession": self._evict_session,
            "AdminService.Drain": self._drain,
        }
        self._sources: Final[dict[str, Callable[[], Any]]] = {
            "pool_name": self._name,
            "ListSessionsRequest.pool_name": self._name_or_all,
            "UndrainRequest.pool_name": lambda: rng.choice([*filter(None, served.state.pools.drained), ""]),
            "RemovePoolRequest.pool_name": self._stray,
            "WatchRequest.pool_name": lambda: rng.choice([each.config.name for each in self._watched()] or POOL_NAMES),
            "session_id": lambda: "none",
            "session_number": self._number,
            "weights_version": lambda: rng.choice(_WEIGHTS_VERSIONS),
            "page_size": lambda: rng.choice((0, 1, 2, 7, 100, 500)),
            "page_token": lambda: self.page_tokens.get(self._key, "") if rng.random() < 0.7 else "",
            "state": lambda: rng.choice(admin_pb2.BlockState.values()),
            "num_tokens": lambda: rng.choice((0, 1, 4, 40, 2**32 - 1)),
            "block_hashes": lambda: rng.randbytes(rng.choice((0, 0, 31, 32, 320))),
            "timeout_seconds": lambda: rng.choice((0.0, 0.0, 0.001, 3600.0)),
            "heartbeat_seconds": lambda: rng.choice((0.0, 0.1, 5.0)),
            "from_sequence": self._event_sequence,
            "boot_id": lambda: rng.choice(("", served.parts.boot_id)),
            "num_lookahead_tokens": lambda: rng.choice((0, 0, 0, 3)),
            **dict.fromkeys(("snapshot", "uncounted", "counted_at_once"), lambda: rng.random() < 0.4),
            **dict.fromkeys(("delay_cache_blocks", "preempted"), lambda: rng.random() < 0.3),
        }

    def write(self, key: str) -> Message | None:
        """A valid message; None if its subject does not exist."""
        if key in self._writers:
            return self._writers[key]()
        self._key, kind = key, METHODS[key].request
        names = [field.name for field in kind.DESCRIPTOR.fields]
        of_session = self._of_session(key.partition(".")[2]) if "session_id" in names else {}
        if "sequence" in names and not of_session:
            return None
        sources = {name: self._sources.get(f"{kind.DESCRIPTOR.name}.{name}", self._sources.get(name)) for name in names}
        values = {name: source() for name, source in sources.items() if source}
        return kind(**values | {name: value for name, value in of_session.items() if name in names})

    def _of_session(self, method: str) -> dict[str, Any]:
        """The fields about any session, and one of its requests or a new one; empty if the method needs another."""
        found = self.session()
        if found is None:
            return {}
        pool, session = found
        requests = list(session.requests.values())
        if method == "GetComputedBlocks":
            requests = [request for request in requests if not request.holds_blocks]
        if method in _OF_A_REQUEST and not requests:
            return {}
        is_known = requests and (method in _OF_A_REQUEST or self.rng.random() < 0.6)
        request = self.rng.choice(requests) if is_known else None
        update = self.update_of(pool, session, request)
        num_tokens, num_computed = update.num_appended_tokens, 0
        computed = None
        if request:
            num_tokens, num_computed = num_tokens + request.num_tokens, request.num_computed_tokens
        if request and not request.holds_blocks and method == "AllocateSlots" and self.rng.random() < 0.7:
            hit = pool.find_longest_cache_hit(request)
            groups = [allocator_pb2.GroupBlocks(block_ids=block_ids) for block_ids in hit.block_ids]
            computed = allocator_pb2.ComputedBlocks(num_tokens=hit.num_tokens, groups=groups)
            num_computed = hit.num_tokens
        return {
            "session_id": session.session_id,
            "sequence": session.sequence + 1,
            "executed_sequence": max(session.sequence - self.rng.choice((0, 0, 1, 3)), 0),
            "request": update,
            "computed": computed,
            "num_computed_tokens": num_computed,
            "num_new_tokens": max(num_tokens - num_computed, 1),
            "num_encoder_tokens": 7 if self.has_encoder(pool) and not (request and request.holds_blocks) else 0,
            "block_ids": self.any_blocks(pool),
        }

    def _name(self) -> str:
        return self.rng.choice(POOL_NAMES) if self.rng.random() < 0.9 else self.rng.choice(RANK_POOLS)

    def _name_or_all(self) -> str:
        return "" if self.rng.random() < 0.1 else self._name()

    def _number(self) -> int:
        found = self.session()
        return found[1].session_number if found and self.rng.random() < 0.5 else 0

    def _stray(self) -> str:
        """A pool to remove, mostly one with a mutated name, so that these do not exhaust the limit."""
        strays = [pool.config.name for pool in self.served.pools() if pool.config.name not in POOL_NAMES]
        return self.rng.choice(strays) if strays and self.rng.random() < 0.9 else self._name()

    def _watched(self) -> list[KVCacheManager]:
        return [pool for pool in self.served.pools() if pool.config.makes_events]

    def _event_sequence(self) -> int:
        pools, logs = self._watched(), self.served.parts.event_logs
        return logs[pools[0].config.name].last_sequence if pools and self.rng.random() < 0.5 else 0

    def _create_pool(self) -> Message:
        message = allocator_pb2.CreatePoolRequest(config=self.rng.choice(messages()))
        message.config.allow_too_few_blocks = self.rng.random() < 0.8  # of these pools, p2 is refused without it
        return message

    def _open_session(self) -> Message | None:
        if sum(1 for _ in self.served.state.sessions) >= _MAX_SESSIONS:
            return None
        pools = self.served.pools()
        name = self.rng.choice(pools).config.name if pools and self.rng.random() < 0.9 else self._name()
        memories = [pool.memory_id for pool in pools if pool.config.name == name and self.rng.random() < 0.8]
        return allocator_pb2.OpenSessionRequest(
            pool_name=name,
            client_name=f"fuzz {self.rng.randrange(100)}",
            lease_seconds=self.rng.choice(_LEASES_SECONDS),
            open_key=self.rng.choice(("", "", "again", str(self.rng.random()))),
            min_blocks=self.rng.choice((0, 0, 0, 3)),
            max_blocks=self.rng.choice((0, 0, 8, 20)),
            memory_id=memories[0] if memories else self.rng.choice(("", "a", "b")),
            weights_version=self.rng.choice(_WEIGHTS_VERSIONS),
        )

    def _evict_session(self) -> Message | None:
        found = self.session()
        if found is None:
            return None
        return admin_pb2.EvictSessionRequest(pool_name=found[0].config.name, session_number=found[1].session_number)

    def _drain(self) -> Message:
        if self.rng.random() < 0.2:
            return admin_pb2.DrainRequest(stop=True, timeout_seconds=self.rng.choice((0.0, 60.0)))
        return admin_pb2.DrainRequest(pool_name=self._name_or_all())

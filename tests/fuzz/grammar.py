"""Generates valid calls, from the pools, sessions, requests and numbers that exist on the server.

The grammar reads them from the server's own objects. So most calls pass the first checks, and a mutated call is wrong
in one place only.
"""

from collections.abc import Callable
from random import Random
from typing import Final

from google.protobuf.message import Message

from fuzz.configs import POOL_NAMES, RANK_POOLS, messages
from fuzz.grammar_requests import RequestGrammar
from fuzz.served import Served
from kvpool.v1 import admin_pb2, allocator_pb2, directory_pb2, event_pb2

_MAX_SESSIONS: Final = 10
_LEASES_SECONDS: Final = (0.0, 5.0, 20.0, 60.0)
_BLOCK_STATES: Final = admin_pb2.BlockState.values()
_WEIGHTS_VERSIONS: Final = ("", "", "1", "2")
_Paged = admin_pb2.ListSessionsRequest | admin_pb2.ListRequestsRequest | admin_pb2.ListBlocksRequest


class Grammar(RequestGrammar):
    """Generates messages for the unary calls and watches of schedulers, operators and routers.

    Attributes:
        page_tokens: The last page token of each call.
    """

    def __init__(self, rng: Random, served: Served) -> None:
        super().__init__(rng, served)
        self.page_tokens: dict[str, str] = {}
        self._writers: Final[dict[str, Callable[[], Message | None]]] = {
            "AllocatorService.CreatePool": self._create_pool,
            "AllocatorService.GetPool": lambda: allocator_pb2.GetPoolRequest(pool_name=self._name()),
            "AllocatorService.WaitUntilReady": lambda: allocator_pb2.WaitUntilReadyRequest(
                pool_name=self._name(), timeout_seconds=rng.choice((0.0, 0.0, 0.001, 3600.0))
            ),
            "AllocatorService.OpenSession": self._open_session,
            "AllocatorService.KeepAlive": lambda: allocator_pb2.KeepAliveRequest(session_id=self._session_id()),
            "AllocatorService.CloseSession": self._close_session,
            "AllocatorService.GetComputedBlocks": self.get_computed_blocks,
            "AllocatorService.AllocateSlots": self.allocate_slots,
            "AllocatorService.CacheBlocks": self.cache_blocks,
            "AllocatorService.Free": self.free,
            "AllocatorService.EvictBlocks": self.evict_blocks,
            "AllocatorService.ResetPrefixCache": self.reset_prefix_cache,
            "AllocatorService.GetCommonPrefixBlocks": self.get_common_prefix_blocks,
            "AllocatorService.MarkExecuted": self.mark_executed,
            "AllocatorService.SetWeightsVersion": lambda: allocator_pb2.SetWeightsVersionRequest(
                session_id=self._session_id(), weights_version=rng.choice(_WEIGHTS_VERSIONS)
            ),
            "AllocatorService.Schedule": self.step,
            "EventService.Watch": self._watch,
            "AdminService.ListPools": admin_pb2.ListPoolsRequest,
            "AdminService.ListSessions": lambda: self._paged(
                "AdminService.ListSessions", admin_pb2.ListSessionsRequest(pool_name=self._name_or_all())
            ),
            "AdminService.ListRequests": lambda: self._paged(
                "AdminService.ListRequests",
                admin_pb2.ListRequestsRequest(pool_name=self._name(), session_number=self._number()),
            ),
            "AdminService.ListBlocks": lambda: self._paged(
                "AdminService.ListBlocks",
                admin_pb2.ListBlocksRequest(pool_name=self._name(), state=rng.choice(_BLOCK_STATES)),
            ),
            "AdminService.ExplainMisses": lambda: admin_pb2.ExplainMissesRequest(
                pool_name=self._name(), session_number=self._number()
            ),
            "AdminService.ExplainPrompt": lambda: admin_pb2.ExplainPromptRequest(
                pool_name=self._name(),
                session_number=self._number(),
                num_tokens=rng.choice((0, 1, 4, 40, 2**32 - 1)),
                block_hashes=rng.randbytes(rng.choice((0, 0, 31, 32, 320))),
            ),
            "AdminService.ResetPrefixCache": lambda: admin_pb2.AdminServiceResetPrefixCacheRequest(
                pool_name=self._name()
            ),
            "AdminService.EvictSession": self._evict_session,
            "AdminService.SetWeightsVersion": lambda: admin_pb2.AdminServiceSetWeightsVersionRequest(
                pool_name=self._name(), session_number=self._number(), weights_version=rng.choice(_WEIGHTS_VERSIONS)
            ),
            "AdminService.Drain": self._drain,
            "AdminService.Undrain": self._undrain,
            "AdminService.RemovePool": self._remove_pool,
            "AdminService.HandOver": admin_pb2.HandOverRequest,
            "DirectoryService.GetShard": directory_pb2.GetShardRequest,
            "DirectoryService.Watch": directory_pb2.DirectoryServiceWatchRequest,
        }

    def write(self, key: str) -> Message | None:
        """A valid message; None if its subject does not exist."""
        return self._writers[key]()

    def _name(self) -> str:
        return self.rng.choice(POOL_NAMES) if self.rng.random() < 0.9 else self.rng.choice(RANK_POOLS)

    def _name_or_all(self) -> str:
        return "" if self.rng.random() < 0.1 else self._name()

    def _session_id(self) -> str:
        found = self.session()
        return found[1].session_id if found else "none"

    def _number(self) -> int:
        found = self.session()
        return found[1].session_number if found and self.rng.random() < 0.5 else 0

    def _paged(self, key: str, message: _Paged) -> _Paged:
        message.page_size = self.rng.choice((0, 1, 2, 7, 100, 500))
        message.page_token = self.page_tokens.get(key, "") if self.rng.random() < 0.7 else ""
        return message

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

    def _close_session(self) -> Message:
        return allocator_pb2.CloseSessionRequest(session_id=self._session_id())

    def _evict_session(self) -> Message | None:
        found = self.session()
        if found is None:
            return None
        return admin_pb2.EvictSessionRequest(pool_name=found[0].config.name, session_number=found[1].session_number)

    def _drain(self) -> Message:
        if self.rng.random() < 0.2:
            return admin_pb2.DrainRequest(stop=True, timeout_seconds=self.rng.choice((0.0, 60.0)))
        return admin_pb2.DrainRequest(pool_name=self._name_or_all())

    def _undrain(self) -> Message:
        closed = [*self.served.state.pools.drain_state.drained_pools, ""]
        return admin_pb2.UndrainRequest(pool_name=self.rng.choice(closed))

    def _remove_pool(self) -> Message:
        """A pool to remove, mostly one with a mutated name, so that these do not exhaust the limit."""
        strays = [pool.config.name for pool in self.served.pools() if pool.config.name not in POOL_NAMES]
        name = self.rng.choice(strays) if strays and self.rng.random() < 0.9 else self._name()
        return admin_pb2.RemovePoolRequest(pool_name=name)

    def _watch(self) -> Message:
        rng = self.rng
        pools = [pool for pool in self.served.pools() if pool.config.makes_events]
        name, logs = rng.choice(pools).config.name if pools else self._name(), self.served.parts.event_logs
        has_snapshot = rng.random() < 0.5
        return event_pb2.WatchRequest(
            pool_name=name,
            from_sequence=0 if has_snapshot or not pools else logs[pools[0].config.name].last_sequence,
            heartbeat_seconds=rng.choice((0.0, 0.1, 5.0)),
            snapshot=has_snapshot,
            boot_id=rng.choice(("", self.served.parts.boot_id)),
        )

"""Invariants that must hold at every moment, checked on the server's messages and in its memory."""

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import grpc
from google.protobuf import text_format
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from kvpool.client import aio
from kvpool.core.blocks.integrity import IntegrityError
from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.errors import KvpoolError, NotFoundError
from kvpool.core.ids import GroupId
from kvpool.core.sessions.request import Request
from kvpool.core.sessions.session import Session
from kvpool.core.state import State
from kvpool.v1 import allocator_pb2, step_pb2
from simulation.grpc_call import Call, Status
from simulation.scheduler_parts import Running
from simulation.virtual_loop import Process
from support.integrity import check_integrity
from support.journal import assert_alike

_FOR_EVER = (
    "LEASE_EXPIRED",
    "EPOCH_PASSED",
    "SESSION_EVICTED",
    "PROCESS_GONE",
    "SESSION_CLOSED",
    "JOURNAL_DROPPED",
)
"""Reasons after which a session never gets an answer again."""


_UNCONFIRMED = (
    "/kvpool.v1.AdminService/ListSessions",
    "/kvpool.v1.AdminService/HandOver",
    "/kvpool.v1.DirectoryService/",
    "/kvpool.v1.WorkerService/",
)
"""Calls that a server answers without a confirmation. Messages to ranks need none that is newer than they are."""


class Checks:
    """The checks of one schedule.

    Args:
        fail: Called with each violation.
        allocator: Returns the core of the running server, or of the primary, if any.
        reported_epoch: Returns the newest epoch that a living rank knows.
        has_journal: Whether a killed server recovers its state.
        term_of: Returns the term in which a server process became the primary of its shard; 0 if it has not.
        trace: Called with each message of the server.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - what it observes
        self,
        fail: Callable[[str], None],
        allocator: Callable[[], State | None],
        reported_epoch: Callable[[], int],
        has_journal: Callable[[], bool],
        term_of: Callable[[Process], int],
        trace: Callable[..., None],
    ) -> None:
        self._fail = fail
        self._allocator = allocator
        self._reported_epoch = reported_epoch
        self._has_journal = has_journal
        self._term_of = term_of
        self._primaries: dict[int, Process] = {}
        self._may_lose_state = False
        self._trace = trace
        self._ended: dict[str, str] = {}
        self._answers: dict[tuple[str, int], bytes] = {}
        self._last_sequence: dict[str, int] = {}
        self.num_copies_out = self.num_copies_in = 0
        self.num_answers = 0
        self.num_retries = 0

    @property
    def num_terms(self) -> int:
        """Number of terms that began."""
        return len(self._primaries)

    @property
    def newest_term(self) -> int:
        """The newest term that had a primary; 0 for none."""
        return max(self._primaries, default=0)

    # On the server's messages.

    def received(self, call: Call, message: Any) -> None:
        """See `Tap`."""
        call.session_id = getattr(message, "session_id", "") or call.session_id
        call.was_ended = self._ended.get(call.session_id, "")
        call.primary_term = self.newest_term
        self._trace("%s -> %s %s", call.client, _Told(call.method), _Told(message))

    def answered(self, call: Call, message: Any) -> None:
        """See `Tap`."""
        self._trace("%s <- %s %s", call.client, _Told(call.method), _Told(message))
        self._check_term(call)
        if isinstance(message, allocator_pb2.OpenSessionResponse):
            self._check_epoch(message.session.epoch)
            self._last_sequence.setdefault(message.session.session_id, 0)
        if not call.session_id:
            return
        if call.was_ended and not call.method.endswith("CloseSession"):
            self._fail(f"{call.method} was answered after the session had ended with {call.was_ended}")
        if isinstance(message, step_pb2.StepResult):
            self._check_result(call.session_id, message)

    def _check_term(self, call: Call) -> None:
        """Checks that no server answers a call that arrived when a later one was the primary."""
        term = self._term_of(call.server.process) if call.server else 0
        if term < call.primary_term and not call.method.startswith(_UNCONFIRMED):
            self._fail(f"{call.method} was answered in term {term}, and arrived in term {call.primary_term}")

    def _check_epoch(self, epoch: int) -> None:
        if epoch < self._reported_epoch():
            self._fail(f"a session was opened in epoch {epoch}, a rank knows of {self._reported_epoch()}")

    def _check_result(self, session_id: str, result: step_pb2.StepResult) -> None:
        without_version = step_pb2.StepResult()
        without_version.CopyFrom(result)
        without_version.ClearField("protocol_version")  # the first result of each stream has it
        encoded = without_version.SerializeToString()
        last = self._last_sequence.get(session_id, 0)
        if result.sequence == last + 1:
            self._last_sequence[session_id] = result.sequence
            self._answers[session_id, result.sequence] = encoded
            self.num_answers += 1
            self._count_copies(result.copied_block_ids)
        elif self._answers.get((session_id, result.sequence)) != encoded:
            self._fail(f"step {result.sequence} after {last} was answered otherwise than before")
        else:
            self.num_retries += 1

    def _count_copies(self, copied: Sequence[int]) -> None:
        num_out = sum(map(operator.lt, copied[1::3], copied[2::3]))  # host memory has the higher ids
        self.num_copies_out += num_out
        self.num_copies_in += len(copied) // 3 - num_out

    def ended(self, call: Call, status: Status) -> None:
        """See `Tap`."""
        code, text, trailers = status
        self._trace("%s <- %s ended: %s %s", call.client, _Told(call.method), code.name, text)
        if code is grpc.StatusCode.NOT_FOUND and call.session_id and self._has_journal():
            self._fail(f"{call.method}: {text}, although there is a journal")
        if code is grpc.StatusCode.INTERNAL:
            self._fail(f"{call.method}: {text}")
        if code in (grpc.StatusCode.ABORTED, grpc.StatusCode.NOT_FOUND):
            self._check_term(call)
        if code is grpc.StatusCode.ABORTED and call.session_id:
            reason = _reason(trailers)
            if reason in _FOR_EVER:
                self._ended[call.session_id] = reason

    # At the servers of a shard.

    def became_primary(self, server: Process, term: int, state: State, *, is_state_lost: bool) -> None:
        """Checks that a server that became the primary has everything that was answered."""
        self._trace("%s: the primary of term %d", server, term)
        is_first, is_late = not self._primaries, term < self.newest_term
        if self._primaries.setdefault(term, server) is not server:
            self._fail(f"term {term} has two primaries, {self._primaries[term]} and {server}")
        if is_late:  # it can answer nothing, as the primary of the newer term acknowledges nothing
            return
        if is_state_lost and not is_first and not self._may_lose_state:  # the first may have died before it began
            self._fail(f"{server} begins term {term} without the state, although there are journals")
        self._may_lose_state = False
        self.is_complete(state, f"{server} begins term {term}")

    def is_complete(self, state: State, when: str) -> None:
        """Checks that the state of a server has everything that was answered."""
        for session_id, sequence in self._last_sequence.items():
            found = state.sessions.get(session_id)
            if found is None and isinstance(state.sessions.ends.error(session_id), NotFoundError):
                self._fail(f"{when} without a session that was opened")
            elif found and found[1].sequence < sequence:
                self._fail(f"{when} with {found[1].sequence} changes of a session, and {sequence} were answered")

    def lose_state(self) -> None:
        """Expects nothing of what was answered so far, as all servers are lost."""
        self._may_lose_state = True
        self._last_sequence.clear()
        self._answers.clear()

    def standbys_are_equal(self, primary: State, standbys: Iterable[State]) -> None:
        """Checks that standbys that have executed everything have the state of the primary."""
        for standby in standbys:
            try:
                assert_alike(standby, primary)
            except AssertionError as error:
                self._fail(f"a standby has another state than the primary: {error}")

    # At the scheduler.

    def settled(self, session: aio.AsyncSession, running: list[Running]) -> None:
        """See `Watcher`: checks that the server holds what the scheduler believes, its reserves included."""
        allocator = self._allocator()
        found = allocator.sessions.get(session.session_id) if allocator else None
        if found is None:
            return
        held = found[1]
        if held.sequence != session.sequence:
            self._fail(f"the server made {held.sequence} changes, the scheduler knows of {session.sequence}")
        self._check_quota(held)
        if session.reserve_tokens:
            self.integrity()
            self._check_reserves(*found)
        for each in running:
            request = each.request
            other = held.requests.get(request.request_id)
            tables = [list(table.block_ids) for table in other.tables] if other else None
            reserves = request.reserve_ids or [[] for _ in request.block_ids]
            known = [table + reserve for table, reserve in zip(request.block_ids, reserves, strict=True)]
            if tables != known:
                self._fail(f"{request.request_id}: the scheduler knows {known}, the server {tables}")
            if other and session.reserve_tokens:
                self._check_visible(found[0], other, each.num_run_tokens)
            if other and other.num_computed_tokens != request.num_sent_computed_tokens:
                self._fail(f"{request.request_id}: the server counts {other.num_computed_tokens} computed tokens")
            for table, given in zip(request.block_ids, each.tables, strict=False):
                if len(given) != len(table) or any(a not in (0, b) for a, b in zip(table, given, strict=True)):
                    self._fail(f"{request.request_id}: the scheduler was given {given}, and its table is {table}")

    def _check_reserves(self, pool: KVCacheManager, session: Session) -> None:
        """Checks that no other table has a block without computed tokens, and that no request can hit it."""
        for request in session.requests.values():
            for group_id, table in enumerate(request.tables):
                first = -(-request.num_computed_tokens // pool.config.span_tokens(GroupId(group_id)))
                for block in table.block_ids[first:]:
                    if pool.blocks.ref_cnt(block) != 1 or pool.blocks.prefix_map.block_hash(block) is not None:
                        self._fail(f"{request.request_id}: block {block} of the reserve is shared or cached")

    def _check_visible(self, pool: KVCacheManager, request: Request, num_run_tokens: int) -> None:
        """Checks that no other session finds blocks of a request that its steps have not filled yet."""
        hashes = pool.blocks.prefix_map
        for group_id, table in enumerate(request.tables):
            first = num_run_tokens // pool.config.span_tokens(GroupId(group_id))
            for block in table.block_ids[first:]:
                if block and hashes.block_hash(block) is not None and block not in hashes.pending.steps:
                    self._fail(f"{request.request_id}: all sessions find block {block}, which is not filled yet")

    def _check_quota(self, session: Session) -> None:
        tables = [table for request in session.requests.values() for table in request.tables]
        blocks = {block for table in tables for block in table.block_ids if block}
        most = session.holding.max_blocks if session.holding else 0
        if 0 < most < len(blocks):
            self._fail(f"a session holds {len(blocks)} blocks, and may hold {most}")

    def session_ended(self, session: aio.AsyncSession, error: KvpoolError) -> None:
        """See `Watcher`."""
        if error.reason in _FOR_EVER:
            self._ended.setdefault(session.session_id, error.reason)

    # In the server's memory.

    def integrity(self) -> None:
        """Checks the integrity of the core."""
        allocator = self._allocator()
        for pool in allocator.pools if allocator else ():
            try:
                check_integrity(pool, list(pool.sessions.values()) if allocator else ())
            except IntegrityError as error:
                self._fail(str(error))

    def has_settled(self) -> bool:
        """Whether no session is open and no block is held."""
        allocator = self._allocator()
        return allocator is not None and not any(pool.sessions or held_blocks(pool) for pool in allocator.pools)

    def nothing_held(self) -> None:
        """Checks that all sessions have ended and every block is free."""
        self.integrity()
        allocator = self._allocator()
        if allocator is None:
            self._fail("no server runs at the end")
            return
        for pool in allocator.pools:
            if pool.sessions:
                self._fail(f"{len(pool.sessions)} sessions are open at the end")
            if held_blocks(pool):
                self._fail(f"{held_blocks(pool)} blocks are lost, those of copies with host memory included")


class _Told:
    """Text of a message or a method in a trace, formatted only if a trace is written."""

    def __init__(self, what: str | Message) -> None:
        self._what = what

    def __str__(self) -> str:
        if isinstance(self._what, str):
            return self._what.rpartition("/")[2]
        return text_format.MessageToString(self._what, as_one_line=True)[:400]


def held_blocks(pool: KVCacheManager) -> int:
    """Number of blocks of both tiers that are neither free nor reserved."""
    host = pool.blocks.host
    num_copied = host.num_blocks - host.num_free if host else 0
    return pool.blocks.num_blocks - 1 - len(pool.sink_blocks) - pool.blocks.num_free_blocks + num_copied


def _reason(trailers: Any) -> str:
    info = error_details_pb2.ErrorInfo()
    for _, value in trailers:
        for detail in status_pb2.Status.FromString(value).details:
            if detail.Unpack(info):
                return str(info.reason)
    return ""

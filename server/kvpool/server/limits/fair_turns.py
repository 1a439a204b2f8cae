"""Decides which session changes a pool next, so that none gets more than its share of the server's time.

The algorithm is start-time fair queueing on two levels. Pools share the event loop's time equally, however many
sessions each has. The sessions of a pool share the pool's time equally. Each flow (a pool or a session) has a clock
that advances by the processor time of its turns: a flow does not pay for other processes on the server's cores. Among
the waiting flows, the one with the lowest clock is served next. A flow that returns after a pause starts at the clock
of the others: unused time is not saved up.

1. One turn at a time. After a millisecond of turns, or if callers wait, the event loop runs before the next turn: it
   reads the messages that have arrived, which then compete for that turn. A caller that arrives while no caller waits
   and the loop is not yielding does not wait at all.
2. The waiters of one flow are served in order of arrival.
3. The number of waiters is limited, and so are the bytes of their large messages. Beyond the limit, the newest waiter
   of the flow with the most waiters, or bytes, is rejected, so that a session that sends little is not affected by one
   that sends much.
4. A caller takes its turn before it checks the state that it changes, and awaits nothing during the turn.
"""

import asyncio
import functools
import heapq
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, Final, Generic, Protocol, TypeVar
from weakref import WeakValueDictionary

from kvpool.core.errors import ExhaustedError, KvpoolError
from kvpool.server.limits.messages import LARGE_MESSAGE_BYTES

RETRY_SECONDS: Final = 0.1
YIELD_ITERATIONS: Final = 2
"""Event loop iterations between turns: gRPC reports arrived messages in one; they are read in the next."""
YIELD_AFTER_SECONDS: Final = 0.001
MAX_KNOWN_SESSIONS: Final = 4096
"""Maximum number of sessions whose clock is kept: the most recently used ones."""

_FairServicerT = TypeVar("_FairServicerT", bound="FairServicer")
_RequestT = TypeVar("_RequestT")
_ResponseT = TypeVar("_ResponseT")
_Method = Callable[[_FairServicerT, _RequestT, object], Awaitable[_ResponseT]]


class _Turn(asyncio.Future[None]):
    """A turn that a caller waits for.

    Attributes:
        num_bytes: Size of the caller's message if it is large; 0 otherwise.
    """

    num_bytes = 0


class _Flow:
    """A pool or a session.

    Attributes:
        clock_seconds: Start of its next turn, in the virtual time of its level.
        is_queued: Whether it is in the queue of its level.
    """

    __slots__ = ("__weakref__", "clock_seconds", "is_queued")

    def __init__(self) -> None:
        self.clock_seconds = 0.0
        self.is_queued = False


_FlowT = TypeVar("_FlowT", bound=_Flow)


class _Level(Generic[_FlowT]):
    """Flows that share time equally.

    Attributes:
        now_seconds: Clock of the flow that was served last.
        heap: The queued flows, the one with the lowest clock first.
    """

    __slots__ = ("_count", "heap", "now_seconds")

    def __init__(self) -> None:
        self.heap: list[tuple[float, int, _FlowT]] = []
        self.now_seconds = 0.0
        self._count = 0

    def put(self, flow: _FlowT) -> None:
        """Adds a flow to the queue unless it is queued."""
        if not flow.is_queued:
            flow.is_queued = True
            self._count += 1
            flow.clock_seconds = max(flow.clock_seconds, self.now_seconds)
            heapq.heappush(self.heap, (flow.clock_seconds, self._count, flow))

    def take(self) -> _FlowT | None:
        """Removes the flow with the lowest clock from the queue and returns it; None if the queue is empty."""
        if not self.heap:
            return None
        flow = heapq.heappop(self.heap)[2]
        flow.is_queued = False
        return flow


class _Pool(_Flow):
    """A pool. It is known while one of its sessions is."""

    __slots__ = ("sessions",)

    def __init__(self) -> None:
        super().__init__()
        self.sessions = _Level[_Session]()


class _Session(_Flow):
    """A session of a pool, with the callers that wait for its turn."""

    __slots__ = ("pool", "waiters")

    def __init__(self, pool: _Pool) -> None:
        super().__init__()
        self.pool = pool
        self.waiters: list[_Turn] = []  # nearly always empty; an empty deque takes 600 bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of the large messages of its waiters. O(waiters)."""
        return sum(turn.num_bytes for turn in self.waiters)


class FairTurns:
    """The turns of one server. Belongs to one event loop.

    Args:
        max_waiting: Maximum number of waiting callers.
        max_waiting_bytes: Maximum number of bytes of their large messages together.

    Attributes:
        num_waiting: Number of waiting callers.
    """

    def __init__(self, max_waiting: int, max_waiting_bytes: int) -> None:
        self._max_waiting = max_waiting
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting_bytes = 0
        self._pools = _Level[_Pool]()
        self._known_pools = WeakValueDictionary[str, _Pool]()
        self._known_sessions: OrderedDict[tuple[str, object], _Session] = OrderedDict()
        self._current: _Session | None = None
        self._is_yielding = False
        self._began_seconds = 0.0
        self._busy_seconds = 0.0  # processor time of the turns since the last yield
        self.num_waiting = 0
        self._is_held = False

    def hold(self) -> None:
        """Gives no further turn; callers wait."""
        self._is_held = True

    def resume(self) -> None:
        """Gives turns again."""
        self._is_held = False
        if self._current is None and not self._is_yielding:
            self._is_yielding = True
            self._yield_loop(0)

    def reject_all(self, error: KvpoolError) -> None:
        """Ends the waits of all callers with an error."""
        for session in self._waiting_sessions():
            for turn in session.waiters:
                if not turn.done():
                    turn.set_exception(error)

    async def take(self, pool: str, session: object) -> None:
        """Waits for a session's turn. The caller must call `end` afterwards, without an `await` in between.

        Args:
            pool: The pool; empty for calls that belong to none.
            session: Key of the session within the pool.

        Raises:
            ExhaustedError: Too many callers wait, or their messages are too large together.
        """
        key = pool, session
        flow = self._known_sessions.get(key)
        if flow:
            self._known_sessions.move_to_end(key)
        else:
            flow = self._new_session(pool, session)
        if self._current or self._is_yielding or self._is_held:
            await self._wait(flow)
        self._current = flow
        self._began_seconds = time.thread_time()

    def end(self) -> None:
        """Ends the current turn, and yields to the event loop before the next one if needed; see rule 1."""
        session = self._current
        if session is None:
            raise RuntimeError("no turn was taken")
        self._current = None
        seconds = time.thread_time() - self._began_seconds
        levels: tuple[tuple[_Flow, _Level[Any]], ...] = (session, session.pool.sessions), (session.pool, self._pools)
        for flow, level in levels:
            level.now_seconds = max(level.now_seconds, flow.clock_seconds)
            flow.clock_seconds = level.now_seconds + seconds
        self._busy_seconds += seconds
        if self.num_waiting:
            self._put(session)
        if self._busy_seconds >= YIELD_AFTER_SECONDS or self.num_waiting:
            self._busy_seconds, self._is_yielding = 0.0, True
            asyncio.get_running_loop().call_soon(self._yield_loop, YIELD_ITERATIONS)

    def _new_session(self, pool: str, session: object) -> _Session:
        known = self._known_pools.get(pool) or _Pool()
        flow = self._known_sessions[pool, session] = _Session(known)
        self._known_pools[pool] = known
        if len(self._known_sessions) > MAX_KNOWN_SESSIONS:
            idle = (key for key, each in self._known_sessions.items() if not (each.is_queued or each.waiters))
            key = next(idle, None)
            if key:
                del self._known_sessions[key]
        return flow

    async def _wait(self, session: _Session) -> None:
        turn = _Turn(loop=asyncio.get_running_loop())
        num_bytes = LARGE_MESSAGE_BYTES.get()
        if self.num_waiting >= self._max_waiting:
            message = f"{self._max_waiting} calls and steps wait for their turn, the maximum"
            self._reject_one(session, 1, lambda each: len(each.waiters), message)
        while num_bytes and self._waiting_bytes + num_bytes > self._max_waiting_bytes:
            message = f"calls and steps with {self._waiting_bytes} bytes wait, the maximum is {self._max_waiting_bytes}"
            self._reject_one(session, num_bytes, lambda each: each.num_bytes, message)
        if num_bytes:
            turn.num_bytes = num_bytes
            self._waiting_bytes += num_bytes
        session.waiters.append(turn)
        self.num_waiting += 1
        if self._current is not session:  # its clock has not advanced yet
            self._put(session)
        try:
            await turn
        except asyncio.CancelledError:
            if turn in session.waiters:
                session.waiters.remove(turn)
            elif turn.done() and not turn.cancelled() and not turn.exception():  # given to a cancelled caller
                self.end()
            raise
        finally:
            self.num_waiting -= 1
            self._waiting_bytes -= turn.num_bytes

    def _put(self, session: _Session) -> None:
        """Queues a session, and its pool, if callers wait for them. The current pool is queued when its turn ends."""
        pool = session.pool
        if session.waiters:
            pool.sessions.put(session)
        if pool.sessions.heap and not (self._current and self._current.pool is pool):
            self._pools.put(pool)

    def _yield_loop(self, iterations: int) -> None:
        """Lets the event loop run for some iterations, then gives the turn to the next waiter."""
        if iterations:
            asyncio.get_running_loop().call_soon(self._yield_loop, iterations - 1)
            return
        self._is_yielding = False
        while self._current is None and not self._is_held and (pool := self._pools.take()):
            while self._current is None and (session := pool.sessions.take()):
                while self._current is None and session.waiters:
                    turn = session.waiters.pop(0)
                    if not turn.done():
                        turn.set_result(None)
                        self._current = session
                        self._began_seconds = time.thread_time()

    def _waiting_sessions(self) -> list[_Session]:
        """The sessions whose callers wait, and the one whose turn it is."""
        pools = [pool for _, _, pool in self._pools.heap]
        sessions = []
        if self._current:  # it is not queued
            pools.append(self._current.pool)
            sessions.append(self._current)
        return sessions + [session for pool in pools for _, _, session in pool.sessions.heap]

    def _reject_one(self, newcomer: _Session, share: int, share_of: Callable[[_Session], int], message: str) -> None:
        """Rejects the newest waiter of the session with the largest share; the newcomer if that would be its one."""
        largest = max([newcomer, *self._waiting_sessions()], key=share_of)
        error = ExhaustedError("TOO_MANY_WAITING", message, retry_seconds=RETRY_SECONDS)
        if share_of(largest) <= share_of(newcomer) + share:
            raise error
        rejected = largest.waiters.pop()
        self._waiting_bytes -= rejected.num_bytes
        rejected.num_bytes = 0
        if not rejected.done():
            rejected.set_exception(error)


class FairServicer(Protocol):
    """A service whose methods take turns."""

    turns: FairTurns

    def flow_of(self, request: object, /) -> tuple[str, object]:
        """Returns the pool and the session that a request belongs to; see `FairTurns.take`."""


def in_turn(
    method: Callable[[_FairServicerT, _RequestT], _ResponseT],
) -> _Method[_FairServicerT, _RequestT, _ResponseT]:
    """Makes an RPC of a plain method that changes state or reads much of it. The RPC waits for its turn first.

    The method takes the request and returns the response. It has no `await`, so nothing runs
    between its check and its change.
    """

    @functools.wraps(method)
    async def call(self: _FairServicerT, request: _RequestT, _: object) -> _ResponseT:
        await self.turns.take(*self.flow_of(request))
        try:
            return method(self, request)
        finally:
            self.turns.end()

    return call

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
4. A caller takes its turn before anything is checked, and awaits nothing during the turn.
"""

import asyncio
import functools
import heapq
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Final, Protocol, TypeVar

from kvpool.core.errors import ExhaustedError, KvpoolError
from kvpool.server.limits.messages import LARGE_MESSAGE_BYTES

RETRY_SECONDS: Final = 0.1
YIELD_ITERATIONS: Final = 2
"""Event loop iterations between turns: gRPC reports arrived messages in one; they are read in the next."""
YIELD_AFTER_SECONDS: Final = 0.001
MAX_KNOWN_FLOWS: Final = 1024
"""Maximum number of flows per level whose clock is kept: the most recently used ones."""

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
    """A pool or one of its sessions.

    Attributes:
        clock_seconds: Start of its next turn, in the virtual time of its level.
        is_queued: Whether it is in the queue of its level.
        waiters: Callers waiting for a turn; sessions only.
        sessions: The level below; pools only.
    """

    __slots__ = ("clock_seconds", "is_queued", "sessions", "waiters")

    def __init__(self) -> None:
        self.clock_seconds = 0.0
        self.is_queued = False
        self.waiters: list[_Turn] = []  # nearly always empty; an empty deque takes 600 bytes
        self.sessions: _Level | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the large messages of its waiters. O(waiters)."""
        return sum(turn.num_bytes for turn in self.waiters)


class _Level:
    """Flows that share time equally."""

    def __init__(self) -> None:
        self._flows: OrderedDict[object, _Flow] = OrderedDict()
        self._heap: list[tuple[float, int, _Flow]] = []
        self._now_seconds = 0.0  # clock of the flow served last
        self._count = 0

    def flow(self, key: object) -> _Flow:
        """Returns the flow of a key, and creates it if needed."""
        flow = self._flows.get(key)
        if flow is None:
            flow = self._flows[key] = _Flow()
            if len(self._flows) > MAX_KNOWN_FLOWS:
                self._forget_one()
        else:
            self._flows.move_to_end(key)
        return flow

    def put(self, flow: _Flow) -> None:
        """Adds a flow to the queue unless it is queued."""
        if not flow.is_queued:
            flow.is_queued = True
            self._count += 1
            flow.clock_seconds = max(flow.clock_seconds, self._now_seconds)
            heapq.heappush(self._heap, (flow.clock_seconds, self._count, flow))

    def take(self) -> _Flow | None:
        """Removes the flow with the lowest clock from the queue and returns it; None if the queue is empty."""
        if not self._heap:
            return None
        flow = heapq.heappop(self._heap)[2]
        flow.is_queued = False
        return flow

    def served(self, flow: _Flow, seconds: float) -> None:
        """Advances a flow's clock."""
        self._now_seconds = max(self._now_seconds, flow.clock_seconds)
        flow.clock_seconds = self._now_seconds + seconds

    @property
    def has_queued(self) -> bool:
        """Whether any flow is queued."""
        return bool(self._heap)

    @property
    def queued(self) -> "list[_Flow]":
        """The queued flows."""
        return [flow for _, _, flow in self._heap]

    def _forget_one(self) -> None:
        key = next((k for k, flow in self._flows.items() if not (flow.is_queued or flow.waiters)), None)
        if key is not None:
            del self._flows[key]


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
        self._pools = _Level()
        self._current: tuple[_Flow, _Level, _Flow] | None = None
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
        for flow in self._waiting_flows():
            for turn in flow.waiters:
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
        pool_flow = self._pools.flow(pool)
        sessions = pool_flow.sessions = pool_flow.sessions or _Level()
        flow = sessions.flow(session)
        if self._current or self._is_yielding or self._is_held:
            await self._wait(pool_flow, sessions, flow)
        self._current = pool_flow, sessions, flow
        self._began_seconds = time.thread_time()

    def end(self) -> None:
        """Ends the current turn, and yields to the event loop before the next one if needed; see rule 1."""
        if self._current is None:
            raise RuntimeError("no turn was taken")
        pool_flow, sessions, flow = self._current
        seconds = time.thread_time() - self._began_seconds
        self._busy_seconds += seconds
        self._current = None
        sessions.served(flow, seconds)
        self._pools.served(pool_flow, seconds)
        self._put(pool_flow, sessions, flow)
        if self._busy_seconds >= YIELD_AFTER_SECONDS or self.num_waiting:
            self._busy_seconds, self._is_yielding = 0.0, True
            asyncio.get_running_loop().call_soon(self._yield_loop, YIELD_ITERATIONS)

    async def _wait(self, pool_flow: _Flow, sessions: _Level, flow: _Flow) -> None:
        turn = _Turn(loop=asyncio.get_running_loop())
        num_bytes = LARGE_MESSAGE_BYTES.get()
        if self.num_waiting >= self._max_waiting:
            message = f"{self._max_waiting} calls and steps wait for their turn, the maximum"
            self._reject_one(flow, 1, lambda each: len(each.waiters), message)
        while num_bytes and self._waiting_bytes + num_bytes > self._max_waiting_bytes:
            message = f"calls and steps with {self._waiting_bytes} bytes wait, the maximum is {self._max_waiting_bytes}"
            self._reject_one(flow, num_bytes, lambda each: each.num_bytes, message)
        if num_bytes:
            turn.num_bytes = num_bytes
            self._waiting_bytes += num_bytes
        flow.waiters.append(turn)
        self.num_waiting += 1
        if not (self._current and self._current[2] is flow):  # its clock has not advanced yet
            self._put(pool_flow, sessions, flow)
        try:
            await turn
        except asyncio.CancelledError:
            if turn in flow.waiters:
                flow.waiters.remove(turn)
            elif turn.done() and not turn.cancelled() and not turn.exception():  # given to a cancelled caller
                self.end()
            raise
        finally:
            self.num_waiting -= 1
            self._waiting_bytes -= turn.num_bytes

    def _put(self, pool_flow: _Flow, sessions: _Level, flow: _Flow) -> None:
        if flow.waiters:
            sessions.put(flow)
        if sessions.has_queued and not (self._current and self._current[0] is pool_flow):
            self._pools.put(pool_flow)

    def _yield_loop(self, iterations: int) -> None:
        """Lets the event loop run for some iterations, then gives the turn to the next waiter."""
        if iterations:
            asyncio.get_running_loop().call_soon(self._yield_loop, iterations - 1)
            return
        self._is_yielding = False
        while self._current is None and not self._is_held and (pool_flow := self._pools.take()):
            sessions = pool_flow.sessions
            while self._current is None and sessions and (flow := sessions.take()):
                while self._current is None and flow.waiters:
                    turn = flow.waiters.pop(0)
                    if not turn.done():
                        turn.set_result(None)
                        self._current = pool_flow, sessions, flow
                        self._began_seconds = time.thread_time()

    def _waiting_flows(self) -> list[_Flow]:
        """The sessions whose callers wait, and the one whose turn it is."""
        pools, flows = self._pools.queued, []
        if self._current:  # it is not queued
            pools.append(self._current[0])
            flows.append(self._current[2])
        return flows + [flow for pool in pools if pool.sessions for flow in pool.sessions.queued]

    def _reject_one(self, newcomer: _Flow, share: int, share_of: Callable[[_Flow], int], message: str) -> None:
        """Rejects the newest waiter of the flow with the largest share; the newcomer if that would be its flow."""
        largest = max([newcomer, *self._waiting_flows()], key=share_of)
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

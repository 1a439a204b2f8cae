"""Whose turn it is to change a pool, among all that wait: nobody gets more of the server's time than its share.

Start-time fair queueing, on two levels. Pools share the loop's time alike, whatever their number of sessions; in each
its sessions do. Every flow has a clock that moves on by the time that its turns took; of those that wait, the one goes
on whose clock is furthest behind. Who comes back after a pause begins where the others are: nothing is saved up.

1. One turn at a time. When turns have taken a millisecond more than the time between them, the event loop comes round
   before the next: what has arrived meanwhile is read, and takes part in who that is. Who comes while nobody waits or
   rests does not wait at all.
2. A flow's own waiters are served as they came.
3. No more wait than the limit. Beyond it the newest waiter of the flow that has most is turned away: who sends little
   is not made to suffer for who sends much.
4. A turn is waited for before anything is checked, and nothing is awaited in it.
"""

import asyncio
import heapq
import time
from collections import OrderedDict
from typing import Final

from kvpool.core.errors import ExhaustedError

RETRY_SECONDS: Final = 0.1
REST_LOOPS: Final = 2
"""Rounds of the event loop after a turn: one in which gRPC says what has come, one in which that is read."""
REST_AFTER_SECONDS: Final = 0.001
KNOWN_FLOWS: Final = 1024
"""Flows on each level whose clocks are remembered, those that were served last."""


class _Flow:
    """A pool or one of its sessions: its clock, and who waits.

    Attributes:
        clock_seconds: When its next turn starts, in the time of its level.
        waiters: Whose turn comes, of a session.
        sessions: The level below, of a pool.
    """

    __slots__ = ("clock_seconds", "is_queued", "sessions", "waiters")

    def __init__(self) -> None:
        self.clock_seconds = 0.0
        self.is_queued = False
        self.waiters: list[asyncio.Future[None]] = []  # nearly always empty, and a deque takes 600 bytes then
        self.sessions: _Level | None = None


class _Level:
    """Flows that share the time alike."""

    def __init__(self) -> None:
        self._flows: OrderedDict[object, _Flow] = OrderedDict()
        self._heap: list[tuple[float, int, _Flow]] = []
        self._now_seconds = 0.0  # where the flow stood that was served last
        self._count = 0

    def flow(self, key: object) -> _Flow:
        """The flow of a key."""
        flow = self._flows.get(key)
        if flow is None:
            flow = self._flows[key] = _Flow()
            if len(self._flows) > KNOWN_FLOWS:
                self._forget_one()
        else:
            self._flows.move_to_end(key)
        return flow

    def put(self, flow: _Flow) -> None:
        """Puts a flow in line, if it is not."""
        if not flow.is_queued:
            flow.is_queued = True
            self._count += 1
            flow.clock_seconds = max(flow.clock_seconds, self._now_seconds)
            heapq.heappush(self._heap, (flow.clock_seconds, self._count, flow))

    def take(self) -> _Flow | None:
        """Takes the flow out of the line whose clock is furthest behind."""
        if not self._heap:
            return None
        flow = heapq.heappop(self._heap)[2]
        flow.is_queued = False
        return flow

    def served(self, flow: _Flow, seconds: float) -> None:
        """Moves a flow's clock on."""
        self._now_seconds = max(self._now_seconds, flow.clock_seconds)
        flow.clock_seconds = self._now_seconds + seconds

    @property
    def has_waiting(self) -> bool:
        """Whether any is in line."""
        return bool(self._heap)

    @property
    def waiting(self) -> "list[_Flow]":
        """Those in line."""
        return [flow for _, _, flow in self._heap]

    def _forget_one(self) -> None:
        key = next((k for k, flow in self._flows.items() if not (flow.is_queued or flow.waiters)), None)
        if key is not None:
            del self._flows[key]


class FairTurns:
    """The turns of one server; belongs to one event loop.

    Args:
        max_waiting: Most that wait at a time.

    Attributes:
        num_waiting: How many do.
    """

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._pools = _Level()
        self._current: tuple[_Flow, _Level, _Flow] | None = None
        self._is_resting = False
        self._began_seconds = self._ended_seconds = 0.0
        self._busy_seconds = 0.0  # that turns took, less the time between them
        self.num_waiting = 0

    async def take(self, pool: str, session: object) -> None:
        """Waits for a session's turn. `end` must follow, without an `await` between.

        Args:
            pool: The pool; empty for calls of none.
            session: Tells the session from others of the pool.

        Raises:
            ExhaustedError: Too many wait.
        """
        pool_flow = self._pools.flow(pool)
        sessions = pool_flow.sessions = pool_flow.sessions or _Level()
        flow = sessions.flow(session)
        if self._current or self._is_resting:
            await self._wait(pool_flow, sessions, flow)
        self._current = pool_flow, sessions, flow
        self._began_seconds = time.perf_counter()

    def end(self) -> None:
        """Ends the turn that was taken, and lets the event loop come round before the next."""
        if self._current is None:
            raise RuntimeError("no turn was taken")
        pool_flow, sessions, flow = self._current
        now_seconds = time.perf_counter()
        seconds = now_seconds - self._began_seconds
        between_seconds = self._began_seconds - self._ended_seconds
        self._busy_seconds = max(self._busy_seconds - between_seconds, 0.0) + seconds
        self._current, self._ended_seconds = None, now_seconds
        sessions.served(flow, seconds)
        self._pools.served(pool_flow, seconds)
        self._put(pool_flow, sessions, flow)
        if self._busy_seconds >= REST_AFTER_SECONDS or self.num_waiting:
            self._busy_seconds, self._is_resting = 0.0, True
            asyncio.get_running_loop().call_soon(self._rest, REST_LOOPS)

    async def _wait(self, pool_flow: _Flow, sessions: _Level, flow: _Flow) -> None:
        if self.num_waiting >= self._max_waiting:
            self._turn_one_away(flow)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        flow.waiters.append(turn)
        self.num_waiting += 1
        if not (self._current and self._current[2] is flow):  # whose clock is still to move
            self._put(pool_flow, sessions, flow)
        try:
            await turn
        except asyncio.CancelledError:
            if turn in flow.waiters:
                flow.waiters.remove(turn)
            elif turn.done() and not turn.cancelled() and not turn.exception():  # given, and not wanted
                self.end()
            raise
        finally:
            self.num_waiting -= 1

    def _put(self, pool_flow: _Flow, sessions: _Level, flow: _Flow) -> None:
        if flow.waiters:
            sessions.put(flow)
        if sessions.has_waiting and not (self._current and self._current[0] is pool_flow):
            self._pools.put(pool_flow)

    def _rest(self, loops: int) -> None:
        """Lets the loop come round so many times, then gives the turn to who is next."""
        if loops:
            asyncio.get_running_loop().call_soon(self._rest, loops - 1)
            return
        self._is_resting = False
        while self._current is None and (pool_flow := self._pools.take()):
            sessions = pool_flow.sessions
            while self._current is None and sessions and (flow := sessions.take()):
                while self._current is None and flow.waiters:
                    turn = flow.waiters.pop(0)
                    if not turn.done():
                        turn.set_result(None)
                        self._current = pool_flow, sessions, flow
                        self._began_seconds = time.perf_counter()

    def _turn_one_away(self, newcomer: _Flow) -> None:
        pools = self._pools.waiting
        waiting = [newcomer]
        if self._current:  # which is not in line
            pools.append(self._current[0])
            waiting.append(self._current[2])
        waiting += (flow for pool in pools if pool.sessions for flow in pool.sessions.waiting)
        longest = max(waiting, key=lambda flow: len(flow.waiters))
        message = f"{self._max_waiting} calls and steps wait for their turn, as many as may"
        error = ExhaustedError("TOO_MANY_WAITING", message, retry_seconds=RETRY_SECONDS)
        if len(longest.waiters) <= len(newcomer.waiters) + 1:
            raise error
        turned_away = longest.waiters.pop()
        if not turned_away.done():
            turned_away.set_exception(error)

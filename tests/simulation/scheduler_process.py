"""A scheduler: the real asyncio client, an engine loop above it, and steps that it sends to the ranks.

1. Some schedulers launch up to three steps before the first of them has run, and report launched steps. The ranks run
   them in order. Of the others at most one step runs on the ranks at a time: no block of that step is freed, preempted
   or slid out of a window before every rank has reported the step as done.
2. An uncertain change is settled before the next request.
3. When a rank is lost during a step, or the session has ended, the scheduler restarts its jobs. It closes a session
   only if no step of it can be running.
4. The copies of blocks that a step's answer orders are on their way to the ranks before the next step is sent: with the
   computations of the round, or without any. Those of a session that has ended are dropped.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kvpool.client import aio
from kvpool.client.hashing import ExtraKeys
from kvpool.client.results import Answer, Decodes, HitChanged
from kvpool.client.step_builder import StepBuilder
from kvpool.core.errors import AbortedError, ExhaustedError, NotFoundError, UnavailableError, WrongStateError
from kvpool.core.ids import TableLease
from kvpool.core.steps.allocation_options import DEFAULT_OPTIONS, AllocationOptions
from kvpool.wire.errors import DeadlineError
from simulation.gpu import Computation, StepWork
from simulation.scheduler_parts import (
    EngineError,
    Running,
    SchedulerSettings,
    computation_of,
)

_UNSETTLED = (UnavailableError, DeadlineError)
_OVER = (AbortedError, NotFoundError)
_PAUSE_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class _Asked:
    """An allocation that a step requests.

    Attributes:
        running: The job and its request.
        answer: The result of the allocation.
        start: Number of tokens allocated before; None for an admission.
    """

    running: Running
    answer: Answer
    start: int | None

    @property
    def is_refused(self) -> bool:
        """Whether a running request got no slots."""
        return not self.answer.ok and self.start is not None


@dataclass(frozen=True, slots=True)
class _Decoded:
    """Requests that get a slot for one more token.

    Attributes:
        batch: The jobs and their requests.
        starts: Number of tokens allocated before, of each.
        answer: The answer of all.
    """

    batch: list[Running]
    starts: list[int]
    answer: Decodes

    @property
    def is_refused(self) -> bool:
        """Whether a request got no slot."""
        return bool(self.answer.refused)


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step on its way through the ranks.

    Attributes:
        sequence: Its number.
        ran: Ends when it has run; its result is the error, if any.
        computed: What the running requests have computed then: request, its admission, and number of tokens.
    """

    sequence: int
    ran: "asyncio.Task[EngineError | None]"
    computed: "list[tuple[Running, int, int]]"


class SchedulerProcess:
    """One process of a scheduler."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self._settings = settings
        self._random = settings.random
        self._running: list[Running] = []
        self._waiting: list[Running] = []
        self._executed = self._launched = 0  # numbers of steps
        self._in_flight: deque[_Launched] = deque()
        self._backoff_rounds = 0
        self._num_requests = 0
        self._reserves = False
        self._computed: dict[str, int] = {}  # number of tokens that all ranks have computed, per running request

    async def main(self) -> None:
        """Works until all jobs are done."""
        settings = self._settings
        client = aio.connect(settings.address, deadline_seconds=settings.deadline_seconds)
        while settings.jobs:
            session = await self._open(client)
            if session is None:
                continue
            try:
                self._reserves = session.reserve_tokens > 0
                await self._serve(session)
                await self._finish_all()
                await self._close(session)
            except _OVER as error:
                settings.watcher.session_ended(session, error)
                settings.trace("%s: session ended: %s", settings.pool, error.reason)
                session._calls.forget()
                await self._finish_all()
                await self._pause()
            self._running.clear()
            self._waiting.clear()
            self._computed.clear()

    async def _open(self, client: aio.AsyncClient) -> aio.AsyncSession | None:
        settings = self._settings
        try:
            await client.wait_until_ready(settings.pool, timeout_seconds=1.0)
            self._executed = self._launched = 0
            low, high = settings.quota
            return await client.open_session(
                settings.pool,
                client_name="simulated",  # the default names the process
                lease_seconds=settings.lease_seconds,
                min_blocks=low,
                max_blocks=high,
                weights_version=str(settings.weights),
                reserve_tokens=settings.reserve_tokens,
            )
        except (*_UNSETTLED, NotFoundError, ExhaustedError, WrongStateError) as error:
            settings.trace("cannot open: %s", error.reason)
            await self._pause()
            return None

    async def _close(self, session: aio.AsyncSession) -> None:
        try:
            await session.close()
        except (*_UNSETTLED, ExhaustedError, AbortedError, NotFoundError):
            return  # its lease will expire

    async def _pause(self) -> None:
        await asyncio.sleep(_PAUSE_SECONDS * (1 + self._random.random()))

    async def _serve(self, session: aio.AsyncSession) -> None:
        settings = self._settings
        while settings.jobs or self._running:
            self._take_up_jobs(session)
            if self._random.random() < 0.1:
                await self._do_something_odd(session)
            await self._round(session)
            await self._compute(session, [])
            self._check_settled(session)

    def _check_settled(self, session: aio.AsyncSession) -> None:
        """Compares the session with the server, unless a step is in the background, which the next step settles."""
        if session._protocol.unanswered() is None:
            self._settings.watcher.settled(session, self._running)

    def _take_up_jobs(self, session: aio.AsyncSession) -> None:
        known = {id(running.job) for running in (*self._running, *self._waiting)}
        for job in self._settings.jobs:
            if len(self._running) + len(self._waiting) >= self._settings.max_running:
                return
            if id(job) not in known:
                self._num_requests += 1
                keys = ExtraKeys(cache_salt=job.salt or None)
                request = session.request(f"{job.name}.{self._num_requests}", job.token_ids, extra_keys=keys)
                self._waiting.append(Running(job, request, [[] for _ in session.config.groups]))

    async def _round(self, session: aio.AsyncSession) -> None:
        asked: list[_Asked] = []
        decoded: list[_Decoded] = []
        gone = [running for running in self._running if running.job.is_done or running.aborted]

        def fill(step: StepBuilder) -> None:
            for running in gone:
                self._computed.pop(running.request.request_id, None)
                step.free(running.request)
            rest = [each for each in self._running if each not in gone]
            decoded.extend(self._decode(step, rest))
            for running in (each for each in rest if not any(each in one.batch for one in decoded)):
                asked.extend(self._ask_for_more(step, running))
            if self._backoff_rounds:
                self._backoff_rounds -= 1
                return
            for running in self._waiting:
                answer = step.admit(running.request, self._random.choice((0, 0, 5)))
                asked.append(_Asked(running, answer, None))

        if not await self._send(session, fill, self._random.choice((0, 0, 24))):
            return
        self._let_go(gone)
        work = self._take_answers(asked) + self._take_decodes(decoded)
        await self._compute(session, work)
        if any(one.is_refused for one in asked) or any(one.is_refused for one in decoded):
            await self._make_room(session)
        elif not work and not gone:
            await self._pause()

    def _let_go(self, gone: list[Running]) -> None:
        self._running = [running for running in self._running if running not in gone]
        for running in gone:
            if running.job.is_done:
                self._settings.jobs.remove(running.job)

    def _ask_for_more(self, step: StepBuilder, running: Running) -> "list[_Asked]":
        random, request = self._random, running.request
        if running.is_delayed:
            running.is_delayed = False
            step.cache_blocks(request, request.num_computed_tokens)
            return []
        running.is_delayed = random.random() < 0.1 and not self._reserves
        num_computed = request.num_computed_tokens
        left = request.num_tokens - num_computed
        num_in_flight = num_computed - self._computed.get(request.request_id, 0)
        answer = step.allocate_slots(
            request,
            left if left == 1 or random.random() < 0.7 else random.randint(1, left),
            num_lookahead_tokens=random.choice((0, 0, 0, 2)),
            delay_cache_blocks=running.is_delayed,
            options=AllocationOptions(num_in_flight_tokens=num_in_flight) if num_in_flight else DEFAULT_OPTIONS,
        )
        return [_Asked(running, answer, num_computed)]

    def _decode(self, step: StepBuilder, running: list[Running]) -> "list[_Decoded]":
        """Asks for the next token of those requests that lack one, as an engine with slots in reserve does."""
        if not self._reserves:
            return []
        random = self._random
        batch = [
            each
            for each in running
            if not each.is_delayed and each.request.num_tokens == each.request.num_computed_tokens + 1
        ]
        batch = [each for each in batch if random.random() < 0.9]
        starts = [each.request.num_computed_tokens for each in batch]
        in_flight = [
            start - self._computed.get(each.request.request_id, 0) for each, start in zip(batch, starts, strict=True)
        ]
        answer = step.decode(
            [each.request for each in batch],
            num_lookahead_tokens=random.choice((0, 0, 0, 2)),
            num_in_flight_tokens=in_flight,
        )
        return [_Decoded(batch, starts, answer)]

    def _take_decodes(self, decoded: "list[_Decoded]") -> list[Computation]:
        work: list[Computation] = []
        for one in decoded:
            for place, running in enumerate(one.batch):
                if place not in one.answer.refused:
                    running.take_blocks(one.answer.new_blocks[place])
                    if not self._is_dropped(running):
                        work.append(computation_of(running, one.starts[place], self._settings.weights))
        return work

    def _is_dropped(self, running: Running) -> bool:
        """Sometimes aborts a request that decodes on credit before its computation is launched, if it need not run."""
        request, may_drop = running.request, self._settings.max_in_flight == 1 and self._executed
        if may_drop and request.num_sent_computed_tokens < request.num_computed_tokens and self._random.random() < 0.05:
            running.aborted = True
            return True
        return False

    async def _send(
        self, session: aio.AsyncSession, fill: Callable[[StepBuilder], None], budget_tokens: int = 0
    ) -> bool:
        """Sends a step and waits until it is settled or in the background; False if it was refused for now."""
        await self._compute(session, [])
        is_filled = False
        try:
            async with session.step(admission_budget_tokens=budget_tokens, **self._sequences(session)) as step:
                self._check_settled(session)
                is_filled = True
                fill(step)
        except _UNSETTLED:
            await self._settle(session)
            return is_filled or await self._send(session, fill, budget_tokens)
        except ExhaustedError:
            await self._pause()
            return False
        return True

    def _sequences(self, session: aio.AsyncSession) -> dict[str, int]:
        executed, launched = self._executed, self._launched
        if self._launched and not self._in_flight:
            executed = session.sequence
        elif self._in_flight and launched <= executed:
            launched = session.sequence + 1  # work on credit
        return {"executed_sequence": executed, "launched_sequence": launched}

    async def _settle(self, session: aio.AsyncSession) -> None:
        while True:
            await self._pause()
            try:
                return await session.settle()
            except _UNSETTLED:
                continue

    def _take_answers(self, asked: "list[_Asked]") -> list[Computation]:
        work: list[Computation] = []
        for one in asked:
            running, start = one.running, one.start
            if not one.answer.ok:
                running.is_delayed = False
                continue
            if start is None:
                start = one.answer.num_hit_tokens
                self._waiting.remove(running)
                self._running.append(running)
                running.tables = [list(blocks) for blocks in one.answer.hit_blocks] if self._reserves else []
                running.num_run_tokens = start
            if self._reserves:
                running.take_blocks(one.answer.new_blocks)
            work.append(computation_of(running, start, self._settings.weights))
        return work

    async def _compute(self, session: aio.AsyncSession, computations: list[Computation]) -> None:
        """Makes the copies that were ordered, and computes."""
        copies = tuple((copy.source, copy.target) for copy in session.take_copies())
        if not copies and not computations:
            return
        work, sequence = StepWork(copies, tuple(computations)), session.sequence
        computed = [(each, each.num_admissions, each.request.num_computed_tokens) for each in self._running]
        if self._settings.max_in_flight == 1:
            await self._settings.ranks.run(session.table_lease, work)
            self._note_executed(sequence, computed)
            self._generate()
        else:
            ran = asyncio.create_task(self._run(session.table_lease, work))
            self._in_flight.append(_Launched(sequence, ran, computed))
            self._launched = sequence
            self._generate()
            while self._in_flight and (
                self._in_flight[0].ran.done() or len(self._in_flight) >= self._settings.max_in_flight
            ):
                await self._finish_first()
        if self._random.random() < 0.2:
            try:
                await session.mark_executed(self._executed)
            except _UNSETTLED:
                return  # the next step reports it

    async def _run(self, lease: TableLease, work: StepWork) -> EngineError | None:
        try:
            await self._settings.ranks.run(lease, work)
        except EngineError as error:
            return error
        return None

    async def _finish_first(self) -> None:
        """Waits for the oldest step in flight.

        Raises:
            EngineError: It failed.
        """
        first = self._in_flight.popleft()
        error = await first.ran
        if error:
            raise error
        self._note_executed(first.sequence, first.computed)

    async def _finish_all(self) -> None:
        while self._in_flight:
            await self._finish_first()

    def _note_executed(self, sequence: int, computed: "list[tuple[Running, int, int]]") -> None:
        if any(each.sequence == sequence for each in self._in_flight):  # work on credit, which ends with this number
            sequence -= 1
        self._executed = max(self._executed, sequence)
        for running, num_admissions, num_tokens in computed:
            if running in self._running and running.num_admissions == num_admissions:
                self._computed[running.request.request_id] = running.num_run_tokens = num_tokens

    def _generate(self) -> None:
        """Draws the next tokens. A scheduler that runs ahead knows them early, as if it had guessed them."""
        for running in self._running:
            job, request = running.job, running.request
            if request.num_computed_tokens == request.num_tokens and not job.is_done:
                # With reserves, equal prompts continue alike, so that sessions hit what others decoded.
                job.token_ids.append(0 if self._reserves and sum(job.token_ids) == 0 else self._random.randint(0, 2))
                request.append(job.token_ids[-1:])

    async def _make_room(self, session: aio.AsyncSession) -> None:
        """Preempts the newest request, so that others can continue."""
        if not self._running:
            return
        victim = self._running[-1]

        def fill(step: StepBuilder) -> None:
            self._computed.pop(victim.request.request_id, None)
            step.preempt(victim.request)

        if await self._send(session, fill):
            victim.keep_contents(0)
            victim.num_admissions += 1
            self._running.remove(victim)
            self._waiting.append(victim)
            self._backoff_rounds = self._random.randint(0, 3)
            await self._pause()

    async def _set_weights(self, session: aio.AsyncSession, weights: int) -> None:
        """States the version of the weights that the engine loads now, until the service answers."""
        while session.weights_version != str(weights):
            try:
                await session.set_weights_version(str(weights))
            except (*_UNSETTLED, ExhaustedError):
                await self._pause()

    async def _change_weights(self, session: aio.AsyncSession) -> None:
        """Loads other weights, also those of earlier. Running requests continue with what they have computed."""
        weights = self._random.choice((1, 2, 3))
        await self._set_weights(session, weights)
        self._settings.trace("weights %s", weights)
        self._settings.weights = weights
        for running in self._running:
            running.keep_contents(running.request.num_computed_tokens)
        for running in self._waiting:
            running.keep_contents(0)

    async def _do_something_odd(self, session: aio.AsyncSession) -> None:
        doings: list[Callable[[], Awaitable[object]]] = [
            session.reset_prefix_cache,
            lambda: self._change_weights(session),
            lambda: self._admit_in_two(session),
        ]
        if self._running:
            running = self._random.choice(self._running)
            doings.append(lambda: session.get_common_prefix_blocks(running.request))
            held = [block for table in running.request.block_ids for block in table if block]
            if held:
                doings.append(lambda: session.evict_blocks([self._random.choice(held)]))
            running.aborted = running.aborted or self._random.random() < 0.1
        try:
            await self._random.choice(doings)()
        except _UNSETTLED:
            await self._settle(session)
        except ExhaustedError:
            await self._pause()

    async def _admit_in_two(self, session: aio.AsyncSession) -> None:
        if not self._waiting:
            return
        running = self._waiting[0]
        request = running.request
        computed = await session.get_computed_blocks(request)
        for _ in range(3):
            await asyncio.sleep(0.01 * self._random.random())
            try:
                got = await session.allocate_slots(
                    request,
                    request.num_tokens - computed.num_tokens,
                    computed=computed if computed.num_tokens else None,
                )
            except _UNSETTLED:
                await self._settle(session)
                got = None
            if isinstance(got, HitChanged):
                computed = got.computed
                continue
            if request.num_computed_tokens:
                self._waiting.remove(running)
                self._running.append(running)
                running.tables = [list(blocks) for blocks in request.block_ids] if self._reserves else []
                running.num_run_tokens = computed.num_tokens
                await self._compute(session, [computation_of(running, computed.num_tokens, self._settings.weights)])
            return

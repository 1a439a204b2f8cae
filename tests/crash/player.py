"""A scheduler's rounds on one session: sends steps, logs the answers, executes, and checks the contents that it reads.

1. A request is logged before it is sent, an answer as soon as it arrives.
2. A scheduler without ranks executes only while its lease is certainly valid; ranks decide by their fences.
3. Every block of a request is read before its next tokens are computed, and must have the expected content.
"""

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from crash.execution import Executor, Task
from crash.memory import Progress, content
from crash.records import Log
from kvpool.client import Answer, ComputedBlocks, DeadlineError, Decodes, Outcome, Request, Session, UnavailableError
from kvpool.client.rows import Row
from kvpool.client.step_builder import StepBuilder
from kvpool.core.ids import BlockId
from kvpool.core.specs.kinds import allocation_spec
from kvpool.core.steps.columns import Operation

MOST_RUNNING: Final = 4
MOST_WAITING: Final = 3
CHUNK_TOKENS: Final = 24
_PREFIXES: Final = 8

_T = TypeVar("_T")


@dataclass(slots=True, eq=False)
class Work:
    """A request being played.

    Attributes:
        request: The session's request.
        output_left: Tokens still to generate.
        num_executed_tokens: Tokens whose contents are in memory.
    """

    request: Request
    output_left: int
    num_executed_tokens: int = 0

    @property
    def is_done(self) -> bool:
        """Whether all tokens are computed."""
        request = self.request
        return not self.output_left and self.num_executed_tokens == request.num_tokens


@dataclass(slots=True)
class Place:
    """A scheduler's log and memory, the maximum duration of its steps, and blocks that its last answers gave it."""

    log: Log
    progress: Progress
    slot: int
    step_seconds: float
    given: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Player:
    """Runs random work on a session, round by round.

    Attributes:
        session: The session.
        place: Its log and memory.
        seed: Seed of the prefixes, the same in all schedulers of a run.
        chance: Source of all other random decisions.
        running: Requests that hold blocks.
        waiting: Requests without blocks.
        executor: Runs the steps.
    """

    session: Session
    place: Place
    seed: int
    chance: random.Random
    executor: Executor
    running: list[Work] = field(default_factory=list)
    waiting: list[Work] = field(default_factory=list)
    _count: int = 0
    _executed: int = 0
    _held: set[int] = field(default_factory=set)
    _background: tuple[StepBuilder, int, float] | None = None
    """A step without an answer, its number, and when it was sent."""

    def play_round(self) -> None:
        """Runs one round."""
        self._refill()
        draw = self.chance.random()
        if draw < 0.03 and self.running:
            self._evict_some()
        elif draw < 0.04:
            self._send(lambda step: step.reset_prefix_cache())
        elif draw < 0.10 and self.waiting and len(self.running) < MOST_RUNNING:
            self._look_up_then_allocate(self.waiting[0])
        elif draw < 0.13 and self.running:
            self._preempt(self.chance.choice(self.running))
        elif draw < 0.15 and self.running:
            work = self.chance.choice(self.running)  # its client disconnected
            self.running.remove(work)
            self._send(lambda step: step.free(work.request))
        else:
            self._schedule()
        self._executed = self.session.sequence

    def _refill(self) -> None:
        while len(self.waiting) < MOST_WAITING:
            self._count += 1
            unit = self.session.config.hit_alignment
            shared = random.Random(self.seed * 100 + self.chance.randrange(_PREFIXES))  # noqa: S311 - a workload
            prefix = [shared.randrange(1000) for _ in range(unit * shared.randint(1, max(1, 40 // unit)))]
            own = [self.chance.randrange(1000) for _ in range(self.chance.randint(1, 24))]
            request = self.session.request(f"r{self._count}", [*prefix, *own])
            self.waiting.append(
                Work(request, self.chance.randint(0, self.session.config.max_model_len - request.num_tokens) // 3)
            )

    def _schedule(self) -> None:
        """Runs a round in one step, as engines do."""
        finished = [work for work in self.running if work.is_done]
        self.running = [work for work in self.running if not work.is_done]
        asked = [(work, self._next_chunk(work)) for work in self.running]
        admitting = self.waiting[: MOST_RUNNING - len(self.running)]

        decoding = [work for work, n in asked if n == 1 and self.session.reserve_tokens]
        asked = [(work, n) for work, n in asked if work not in decoding]

        def fill(step: StepBuilder) -> tuple[Decodes, list[Answer], list[Answer]]:
            for work in finished:
                step.free(work.request)
            return (
                step.decode([work.request for work in decoding]),
                [step.allocate_slots(work.request, n) for work, n in asked],
                [step.admit(work.request, CHUNK_TOKENS) for work in admitting],
            )

        decoded, allocated, admitted = self._send(fill)
        served = [work for (work, _), answer in zip(asked, allocated, strict=True) if answer.ok]
        served += [work for place, work in enumerate(decoding) if place not in decoded.refused]
        for work, answer in zip(admitting, admitted, strict=True):
            if answer.ok:
                self._admit(work, answer.num_hit_tokens)
                served.append(work)
        self._compute(served)
        if (decoded.refused or not all(answer.ok for answer in allocated)) and self.running:
            self._preempt(self.running[-1])
        elif not served:
            time.sleep(0.005 * self.chance.random())  # other sessions hold the blocks

    def _next_chunk(self, work: Work) -> int:
        request = work.request
        if request.num_computed_tokens == request.num_tokens and work.output_left:
            request.append([self.chance.randrange(1000)])
            work.output_left -= 1
        return min(request.num_tokens - request.num_computed_tokens, CHUNK_TOKENS)

    def _look_up_then_allocate(self, work: Work) -> None:
        found = self._send(lambda step: step.get_computed_blocks(work.request))
        for _ in range(3):
            promised = ComputedBlocks(
                tuple([BlockId(block) for block in blocks] for blocks in found.hit_blocks), found.num_hit_tokens
            )
            n = min(work.request.num_tokens - promised.num_tokens, CHUNK_TOKENS)
            found = self._send(
                lambda step, n=n, promised=promised: step.allocate_slots(  # type: ignore[misc]
                    work.request, n, computed=promised if promised.num_tokens else None
                )
            )
            if found.outcome is not Outcome.HIT_CHANGED:
                break
        if found.ok:
            self._admit(work, promised.num_tokens)
            self._compute([work])

    def _admit(self, work: Work, num_hit_tokens: int) -> None:
        self.waiting.remove(work)
        self.running.append(work)
        work.num_executed_tokens = num_hit_tokens

    def _preempt(self, work: Work) -> None:
        self._send(lambda step: step.preempt(work.request))
        work.num_executed_tokens = 0
        self.running.remove(work)
        self.waiting.insert(0, work)

    def _evict_some(self) -> None:
        table = self.chance.choice(self.running).request.block_ids[0]
        blocks = [block for block in table if block and self.chance.random() < 0.3]
        if blocks:
            self._send(lambda step: step.evict_blocks(blocks))

    def _compute(self, works: list[Work]) -> None:
        """Executes the allocated tokens. If that is refused, sends a step to learn the state of the session."""
        tasks, full = [], []
        for work in works:
            request, start, end = work.request, work.num_executed_tokens, work.request.num_computed_tokens
            written = list(self._cells(request, start, end))
            reads = [(block, cell) for block, _, cell in self._cells(request, 0, start, num_run_tokens=start)]
            tasks.append(Task(reads, [(block, cell) for block, _, cell in written]))
            full += [(block, short(cell)) for block, is_full, cell in written if is_full]
            work.num_executed_tokens = end
        while (outcome := self.executor.run(tasks, self.place.step_seconds * self.chance.random())).refused:
            self._send(
                lambda step: step.evict_blocks([])
            )  # an empty step, which renews the lease or reports the session's end
            self._settle_background()
            if outcome.refused in ("EPOCH_PASSED", "SESSION_ENDED"):
                self.violated("FENCED_WHILE_ALIVE", reason=outcome.refused)
        for block, found, expected in outcome.wrong:
            self.violated("WRONG_CONTENT", block=block, found=found.hex(), expected=expected.hex())
        if full:
            self.place.log.write("full", blocks=full)

    def _cells(
        self, request: Request, start: int, end: int, num_run_tokens: int = 0
    ) -> Iterator[tuple[int, bool, bytes]]:
        """Blocks of tokens [start, end), whether each is full then, and its content then.

        Without those behind windows once `num_run_tokens` have run: a step in the background may have freed them.
        """
        config = self.session.config
        for group, (table, span) in enumerate(zip(request.block_ids, config.spans_tokens, strict=True)):
            first = max(start, allocation_spec(config.groups[group].spec).num_skipped_tokens(num_run_tokens))
            for i in range(first // span, -(-end // span)):
                last = min((i + 1) * span, end)
                if table[i]:
                    is_full = last == (i + 1) * span
                    yield table[i], is_full, content(request, group, last, config.hash_block_size, full=is_full)

    def _send(self, fill: Callable[[StepBuilder], _T]) -> _T:
        self._settle_background()
        sent_seconds, sequence = time.monotonic(), self.session.sequence + 1
        self.place.log.write("ask", seq=sequence)
        try:
            with self.session.step(executed_sequence=self._executed) as step:
                answers = fill(step)
        except (UnavailableError, DeadlineError):
            self._settle()
        if self.session.sequence >= sequence:
            self._log_answer(step, sequence, sent_seconds)
        elif step.is_sent:  # else the session answered without the server
            self._background = (step, sequence, sent_seconds)
        self.place.progress.count(self.place.slot)
        return answers

    def _settle_background(self) -> None:
        """Waits for the answer of a step for which the session did not wait, and logs it."""
        if self._background:
            self._settle()
            background, self._background = self._background, None
            self._log_answer(*background)

    def _settle(self) -> None:
        for pause_seconds in (0.0, 0.1, 0.5, *[1.0] * 20):  # ranks may be killed repeatedly
            time.sleep(pause_seconds)
            with contextlib.suppress(UnavailableError, DeadlineError):
                self.session.settle()
                return
        self.session.settle()

    def _log_answer(self, step: StepBuilder, sequence: int, sent_seconds: float) -> None:
        hits: dict[int, str] = {}
        at = 0
        for row in step.rows:
            operation = step.step.operations[at]
            at += 1 if isinstance(row, Row) else len(row.requests)
            if (
                isinstance(row, Row)
                and row.request
                and row.answer.ok
                and operation in (Operation.ADMIT, Operation.ALLOCATE)
            ):
                found = row.computed.block_ids if row.computed else row.answer.hit_blocks
                hits |= self._hit_cells(row.request, found)
        held = {
            block
            for work in (*self.running, *self.waiting)
            for table in (*work.request.block_ids, *work.request.reserve_ids)
            for block in table
            if block
        }
        new = held & self.place.given
        self.place.given.clear()
        # Of two messages, the first may have freed a block that the second hit after another session had filled it.
        kept = self._held if self.session.sequence == sequence else set()
        self.place.log.write(
            "answered",
            seq=self.session.sequence,
            first=sequence,
            sent=sent_seconds,
            new=sorted(new),
            hit=[[block, cell] for block, cell in hits.items() if block not in kept and block not in new],
            gone=sorted(self._held - held),
        )
        self._held = held

    def _hit_cells(self, request: Request, found: Sequence[Sequence[int]]) -> dict[int, str]:
        config, cells = self.session.config, {}
        for group, (blocks, span) in enumerate(zip(found, config.spans_tokens, strict=False)):
            for i, block in enumerate(blocks):
                if block:
                    cells[block] = short(content(request, group, (i + 1) * span, config.hash_block_size, full=True))
        return cells

    def violated(self, what: str, **fields: object) -> None:
        """Logs a violation."""
        self.place.log.write("violation", what=what, **fields)


def short(cell: bytes) -> str:
    """Content in the form of the log."""
    return cell[:9].hex()

"""A small continuous-batching scheduler. What it schedules is run by an `Executor`.

1. A round is one message: what has finished is freed, each running request gets room (one token when it decodes, a
   chunk of its prompt before), then waiting ones are admitted within what is left of the token budget.
2. When a running request finds too few blocks, the newest running one is preempted and goes to the head of the queue;
   nothing is admitted in such a round.
3. What holds nothing blocks nobody: a scheduler alone with too few blocks gives up its own and waits a little.
4. Every block that got its hash in a round is computed in it. Room is made in order, and none after the first request
   that finds too few blocks; so one that is preempted, from the end, got none in this round.
"""

import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kvpool.client import Answer, Request, Session, StepBuilder
from kvpool.core.specs.base import RequestLimits
from kvpool.core.specs.kinds import allocation_spec, num_draft_blocks
from kvpool.replay.executor import Executor, NoModel, Scheduled
from kvpool.replay.result import Counts
from kvpool.replay.workload import Work, Workload

_FIRST_PAUSE_SECONDS: Final = 0.001
_LONGEST_PAUSE_SECONDS: Final = 0.05
_MOST_ADMISSIONS: Final = 64


@dataclass(slots=True, eq=False)
class _Entry(Scheduled):
    work: Work = field(kw_only=True)
    output: list[int] = field(default_factory=list)
    admitted_before: bool = False


class Scheduler:
    """Plays one workload on one session."""

    def __init__(  # noqa: PLR0913 - two limits and two hooks, all with defaults
        self,
        session: Session,
        workload: Workload,
        *,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        advance: Callable[[], object] = lambda: None,
        executor: Executor | None = None,
    ) -> None:
        """Takes the workload's first requests.

        Args:
            session: The session to play on.
            workload: What to play.
            max_num_seqs: Most requests running at once.
            max_num_batched_tokens: Most tokens given room in a round.
            advance: Called for each request that is done with.
            executor: Runs the rounds; None for one that computes nothing.
        """
        self.counts = Counts()
        self._session = session
        self._workload = workload
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._advance = advance
        self._executor = executor or NoModel()
        self._waiting: deque[_Entry] = deque()
        self._running: list[_Entry] = []
        self._finished: list[_Entry] = []
        self._random = random.Random(session.session_id)  # noqa: S311 - spreads pauses
        self._pause_seconds = _FIRST_PAUSE_SECONDS
        for work in workload.start():
            self._take(work)

    @property
    def epoch(self) -> int:
        """The pool's epoch when its session was opened."""
        return self._session.epoch

    def run(self, stopped: Callable[[], bool] = lambda: False) -> Counts:
        """Plays the workload to its end, or until `stopped`, which is asked before each round."""
        while (self._waiting or self._running or self._finished) and not stopped():
            if self._round():
                self._pause_seconds = _FIRST_PAUSE_SECONDS
            else:  # others hold the blocks
                time.sleep(self._pause_seconds * self._random.uniform(0.5, 1.0))
                self._pause_seconds = min(2 * self._pause_seconds, _LONGEST_PAUSE_SECONDS)
        return self.counts

    def _take(self, work: Work) -> None:
        self.counts.input_tokens += len(work.token_ids)
        if not self._can_ever_fit(len(work.token_ids) + work.output_length):
            self.counts.rejected_requests += 1
            self._advance()
            return
        self._waiting.append(_Entry(self._session.request(work.work_id, work.token_ids), work=work))

    def _can_ever_fit(self, num_tokens: int) -> bool:
        config = self._session.config
        if num_tokens > config.max_model_len:
            return False
        limits = RequestLimits(num_tokens, self._max_num_batched_tokens, 0, config.dcp_world_size)
        blocks = 0
        for group, span_tokens in zip(config.groups, config.spans_tokens, strict=True):
            spec = allocation_spec(group.spec)
            # Planning allows for a window that begins within a block; a request never takes more than its tokens do.
            most = spec.max_blocks(limits)
            blocks += most if spec.keeps_all else min(most, -(-num_tokens // span_tokens) + num_draft_blocks(spec))
        return blocks <= config.num_blocks - 1 - sum(config.num_sink_blocks)

    def _round(self) -> bool:
        """Plays one round; returns whether anything moved."""
        budget = self._max_num_batched_tokens
        finished, self._finished = self._finished, []
        allocations: list[tuple[_Entry, Answer]] = []
        admissions: list[tuple[_Entry, Answer]] = []
        asked = [(entry, n) for entry, n in self._chunks(budget) if n]
        left = budget - sum(n for _, n in asked)
        with self._session.step(admission_budget_tokens=left, executed_sequence=self._session.sequence) as step:
            for entry in finished:
                step.free(entry.request)
            allocations += ((entry, step.allocate_slots(entry.request, n)) for entry, n in asked)
            if left:
                room = min(self._max_num_seqs - len(self._running), _MOST_ADMISSIONS, len(self._waiting))
                admissions += ((self._waiting[i], step.admit(self._waiting[i].request)) for i in range(room))
        self.counts.steps += 1
        failed = [(entry, n) for (entry, n), (_, answer) in zip(asked, allocations, strict=True) if not answer.ok]
        preempted = self._preempt_until_served(failed) if failed else []
        admitted = [(entry, answer) for entry, answer in admissions if answer.ok]
        for entry, answer in admitted:
            self._admit(entry, answer)
        self._execute([entry.request for entry in finished + preempted])
        return bool(finished or admitted or self._running or self._finished)

    def _chunks(self, budget: int) -> "list[tuple[_Entry, int]]":
        chunks = []
        for entry in self._running:
            n = min(entry.request.num_tokens - entry.request.num_computed_tokens, budget)
            budget -= n
            chunks.append((entry, n))
        return chunks

    def _preempt_until_served(self, failed: list[tuple[_Entry, int]]) -> list[_Entry]:
        preempted = []
        while failed:
            victim = self._running.pop()
            failed = [(entry, n) for entry, n in failed if entry is not victim]
            with self._session.step() as step:
                step.preempt(victim.request)
                answers = [self._retry(step, entry, n) for entry, n in failed]
            victim.num_executed_tokens = 0
            self._waiting.appendleft(victim)
            preempted.append(victim)
            self.counts.preemptions += 1
            self.counts.steps += 1
            failed = [pair for pair, answer in zip(failed, answers, strict=True) if not answer.ok]
        return preempted

    @staticmethod
    def _retry(step: StepBuilder, entry: _Entry, num_new_tokens: int) -> Answer:
        return step.allocate_slots(entry.request, num_new_tokens)

    def _admit(self, entry: _Entry, answer: Answer) -> None:
        self._waiting.remove(entry)
        self._running.append(entry)
        entry.num_executed_tokens = answer.num_hit_tokens
        if entry.admitted_before:
            self.counts.readmitted_hit_tokens += answer.num_hit_tokens
            return
        entry.admitted_before = True
        self.counts.hit_tokens += answer.num_hit_tokens
        self.counts.shared_hit_tokens += answer.num_shared_hit_tokens

    def _execute(self, released: list[Request]) -> None:
        running, self._running = self._running, []
        tokens = iter(self._executor.execute(running, released))
        for entry in running:
            request = entry.request
            entry.num_executed_tokens = request.num_computed_tokens
            if request.num_computed_tokens < request.num_tokens:
                self._running.append(entry)
                continue
            token = next(tokens)
            if len(entry.output) < entry.work.output_length:
                entry.output.append(token)
                request.append((token,))
                self.counts.output_tokens += 1
            if len(entry.output) < entry.work.output_length:
                self._running.append(entry)
            else:
                self._finish(entry)

    def _finish(self, entry: _Entry) -> None:
        self._finished.append(entry)
        self.counts.requests += 1
        self._advance()
        follow_up = self._workload.follow_up(entry.work, entry.output)
        if follow_up:
            self._take(follow_up)

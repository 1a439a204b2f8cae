"""A small continuous-batching scheduler. An `Executor` runs the requests that it schedules.

1. A round is one step. It frees finished requests, allocates slots for running requests (one token per decode, or a
   chunk of the prompt), then admits waiting requests within the rest of the token budget.
2. If there are too few blocks for a running request, the newest running request is preempted and moves to the head of
   the queue. Such a round admits no request.
3. A waiting request holds no blocks. A scheduler that finds too few blocks for its only request preempts that too, and
   pauses.
4. Every block that is hashed in a round is computed in the same round. Slots are allocated in order, and no longer
   after the first request that finds too few blocks. A preempted request, taken from the end, has thus got none.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, TypeAlias

from kvpool.client import Answer, Request, Session
from kvpool.core.specs.base import RequestLimits
from kvpool.core.specs.kinds import allocation_spec, num_draft_blocks
from kvpool.replay.executor import Executor, NoModel, Scheduled
from kvpool.replay.result import Counts
from kvpool.replay.workload import Work, Workload
from kvpool.wire.backoff import Backoff

_MAX_ADMISSIONS: Final = 64


@dataclass(slots=True, eq=False)
class _Entry(Scheduled):
    work: Work = field(kw_only=True)
    output: list[int] = field(default_factory=list)
    admitted_before: bool = False


_Chunk: TypeAlias = tuple[_Entry, int]
"""A running request, and the number of its tokens to compute in a round."""


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
        """Queues the first requests of the workload.

        Args:
            session: The session to play on.
            workload: The workload.
            max_num_seqs: Maximum number of running requests.
            max_num_batched_tokens: Maximum tokens of a round.
            advance: Called for each request that is done.
            executor: Runs the rounds; None to compute nothing.
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
        self._backoff = Backoff(0.0005, 0.025)
        for work in workload.start():
            self._take(work)

    @property
    def is_done(self) -> bool:
        """Whether the whole workload was played."""
        return not (self._waiting or self._running or self._finished)

    def run(self, stopped: Callable[[], bool] = lambda: False) -> Counts:
        """Plays the workload to its end, or until `stopped` returns true; it is called before each round."""
        while not self.is_done and not stopped():
            self.play_round()
        return self.counts

    def play_round(self) -> None:
        """Plays one round; pauses after it if others hold the blocks."""
        if self._round():
            self._backoff.reset()
        else:
            time.sleep(self._backoff.next())

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
        """Plays one round; returns whether any request made progress."""
        finished, self._finished = self._finished, []
        chunks = self._chunks()
        left = self._max_num_batched_tokens - sum(n for _, n in chunks)
        num_admissions = min(self._max_num_seqs - len(self._running), _MAX_ADMISSIONS) if left else 0
        with self._session.step(admission_budget_tokens=left, executed_sequence=self._session.sequence) as step:
            for entry in finished:
                step.free(entry.request)
            answers = [step.allocate_slots(entry.request, n) for entry, n in chunks]
            admissions = [(entry, step.admit(entry.request)) for entry in islice(self._waiting, num_admissions)]
        self.counts.steps += 1
        preempted = self._preempt_until_served(_refused(chunks, answers))
        admitted = [(entry, answer) for entry, answer in admissions if answer.ok]
        for entry, answer in admitted:
            self._admit(entry, answer)
        self._execute([entry.request for entry in finished + preempted])
        return bool(finished or admitted or self._running or self._finished)

    def _chunks(self) -> list[_Chunk]:
        """Returns the tokens to compute of each running request, within the round's budget."""
        budget = self._max_num_batched_tokens
        chunks = []
        for entry in self._running:
            n = min(entry.request.num_tokens - entry.request.num_computed_tokens, budget)
            budget -= n
            if n:
                chunks.append((entry, n))
        return chunks

    def _preempt_until_served(self, failed: list[_Chunk]) -> list[_Entry]:
        """Preempts the newest requests until there are blocks for all of `failed`; returns the preempted ones."""
        preempted = []
        while failed:
            victim = self._running.pop()
            failed = [(entry, n) for entry, n in failed if entry is not victim]
            with self._session.step() as step:
                step.preempt(victim.request)
                answers = [step.allocate_slots(entry.request, n) for entry, n in failed]
            victim.num_executed_tokens = 0
            self._waiting.appendleft(victim)
            preempted.append(victim)
            self.counts.preemptions += 1
            self.counts.steps += 1
            failed = _refused(failed, answers)
        return preempted

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


def _refused(chunks: list[_Chunk], answers: list[Answer]) -> list[_Chunk]:
    return [chunk for chunk, answer in zip(chunks, answers, strict=True) if not answer.ok]

"""The calls of an engine to its session: which go together in a message, and which messages it waits for.

1. Calls go in their order. What needs no answer (frees, evictions) goes in the background, and one message is under way
   at a time: the next one waits for its answer.
2. Steps run in scheduling order. This engine may hit the blocks of earlier rounds at once, other sessions only after
   the output of the step arrives.
3. A message that the service refuses has changed nothing. Its frees and evictions go again with the next message.
4. When the session of an engine with private memory has ended, the round ends as if the pool had no free blocks: all
   blocks that were granted before still belong to the engine. Before the next round the scheduler opens a session.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from vllm.v1.request import Request as EngineRequest

from kvpool.client.protocol import ends_session
from kvpool.client.request import Request
from kvpool.client.session import Session
from kvpool.client.step_builder import StepBuilder, StepFormat
from kvpool.client.vllm.promotions import Promotions
from kvpool.core.errors import (
    AbortedError,
    DeniedError,
    ExhaustedError,
    KvpoolError,
    NotFoundError,
    UnauthenticatedError,
    UnavailableError,
)
from kvpool.core.sessions.request import BlockCopy
from kvpool.core.steps.columns import Step
from kvpool.lending.host_copies import CopyOrders
from kvpool.wire.errors import DeadlineError, ServerError

SESSION_ENDED: Final = (
    "The kvpool service has ended this engine's session, so other sessions may own its blocks: restart the engine."
)
_REMEDIES: Final = {
    "EPOCH_PASSED": "Engines outlast a `kvpool worker` that is killed, or ends with --keep-memory, and is back within "
    "the --rank-grace-seconds of the service.",
    "SESSION_NOT_FOUND": "Engines outlast a killed service that keeps a journal: start it without --no-journal.",
    "JOURNAL_DROPPED": "`journal dropped` in the log of the service says why it lost the sessions.",
}
"""By the reason of the session's end: what prevents the next one."""
_NO_ANSWER: Final = (
    "The kvpool service did not answer within deadline_seconds, so the blocks of this engine are unknown: "
    "make sure that the service and the workers of the pool run, and restart the engine."
)
_REFUSED_ACCESS: Final = (
    "The kvpool service refuses this engine's token (KVPOOL_TOKEN_FILE or KVPOOL_TOKEN), so its step has no answer: "
    "have the token accepted, and restart the engine. Its blocks remain allocated until its lease ends."
)


class EngineCalls:
    """Collects the calls of one engine, and sends them.

    Attributes:
        session: The session.
        is_private: Whether no other process writes to the engine's blocks.
        requests: Requests of the session, by id of the engine's request.
        has_failed: Whether a call to the service failed, so that the session is unusable.
        lost: The error that ended the session of an engine with private memory.
        waits: How often a round has waited for the service, by cause.
        promotions: Copies from host memory in the background.
    """

    def __init__(self, session: Session, promotions: Promotions, *, is_private: bool) -> None:
        self.session = session
        self.promotions = promotions
        self.is_private = is_private
        self.requests: dict[str, Request] = {}
        self.has_failed = False
        self.lost: KvpoolError | None = None
        self.waits: Counter[str] = Counter()
        self._builder: StepBuilder | None = None
        self._begun: tuple[StepBuilder, Callable[[], None]] | None = None
        """The message that `begin` has sent, and what to call after the answer."""
        self._undelivered: list[tuple[Callable[[StepBuilder], object], tuple[Request, ...]]] = []
        """Calls of `deliver` that the service may not have executed, each with its requests."""
        self._num_delivering = 0
        """Number of these calls in the last message."""
        self._executed = self._reported = self._launched = 0  # numbers of steps
        self._reporting = 0
        """The step that the last message reports as executed."""
        self._has_launched = False  # whether a round has no outputs yet
        self._copies: list[BlockCopy] = []
        self._host_copies: list[BlockCopy] = []
        """Copies that no output carries yet: those within the first tier, and the others."""
        self._given_up: list[BlockCopy] = []
        """Copies that will not be made, and whose targets the service may not have evicted yet."""

    @property
    def builder(self) -> StepBuilder:
        """Collects the next message. Waits for the answer to the message before."""
        if self._builder is None:
            self.settle()
            self._settle_background()
            if not self.lost:
                with self._explained():
                    self._builder = self.session.new_step()
            self._builder = self._builder or StepBuilder(StepFormat.of(self.session.config), 0, Step(0))
            for call, _ in self._undelivered:
                call(self._builder)
        return self._builder

    def builder_for(self, *session_requests: Request) -> StepBuilder:
        """Returns the builder of the next message, after earlier calls of the requests have been answered."""
        if not self.builder.can_name(session_requests):
            self.send()
        return self.builder

    def session_request(self, request: EngineRequest) -> Request:
        """Returns the session's request for an engine's request; creates it on first use."""
        session_request = self.requests.get(request.request_id)
        if session_request is None:
            lora_name = request.lora_request.lora_name if request.lora_request else None
            session_request = self.session.request_hashed_elsewhere(
                request.request_id,
                request._all_token_ids,  # noqa: SLF001 - the list itself, because its read-only view has a slow `len`
                request.block_hashes if self.session.config.enable_caching else [],  # made for any KV connector
                lora_name=lora_name,
                trace_parent=(request.trace_headers or {}).get("traceparent", ""),
            )
            if session_request.num_tokens > request.num_prompt_tokens:  # of an earlier session
                session_request.num_prompt_tokens = request.num_prompt_tokens
            self.requests[request.request_id] = session_request
        return session_request

    def deliver(self, call: Callable[[StepBuilder], object], *session_requests: Request) -> None:
        """Adds a call to the next message; if the service refuses that message, to the one after it.

        Args:
            call: Adds the call to a builder. It needs no answer, and the service never refuses it by itself.
            session_requests: The requests that it names.
        """
        named = {each for _, requests in self._undelivered for each in requests}
        if self._builder is not None or not self.session.must_wait or not named.isdisjoint(session_requests):
            call(self.builder_for(*session_requests))
        self._undelivered.append((call, session_requests))

    def free(self, session_request: Request) -> None:
        """Frees the blocks of a request and forgets the request."""
        self.deliver(lambda builder: builder.free(session_request), session_request)
        self.requests.pop(session_request.request_id, None)  # forgotten already if this was deferred

    def decode_on_credit(
        self, session_requests: Sequence[Request], num_lookahead_tokens: int, num_in_flight_tokens: Sequence[int]
    ) -> dict[int, list[list[int]]] | None:
        """Decodes as `Session.decode_on_credit`, unless something else is to be sent."""
        if not self.session.must_wait:
            if self._builder is not None or self._undelivered:
                return None
            self._settle_background()
        return self.session.decode_on_credit(
            session_requests,
            num_lookahead_tokens=num_lookahead_tokens,
            num_in_flight_tokens=num_in_flight_tokens,
            executed_sequence=0 if self.is_private else self._executed,  # which no other session waits for
        )

    def send(self) -> None:
        """Sends the collected calls, or answers them locally if possible.

        Raises:
            KvpoolError: The engine cannot continue; a note explains what to do.
        """
        self.settle()
        builder = self._next_builder()
        if not self.lost:
            with self._explained():
                self.session.send(builder)
        self._note_answered(builder)

    def begin(self, on_answer: Callable[[], None]) -> None:
        """Sends the collected calls without waiting; `settle` waits, and then calls `on_answer`. Raises as `send`."""
        builder = self._next_builder()
        with self._explained():
            self.session.begin(builder)
        self._begun = builder, on_answer

    def settle(self) -> None:
        """Waits for the answer to the message that `begin` has sent, if it has not arrived. Raises as `send`."""
        if self._begun:
            (builder, on_answer), self._begun = self._begun, None
            self.waits["admission"] += 1
            with self._explained():
                self.session.settle()
            self._note_answered(builder)
            on_answer()

    def _settle_background(self) -> None:
        """Waits for the answer to the message in the background, if there is one. Raises as `send`."""
        if self.session.is_in_background and not self.lost:
            if self.session.must_wait:
                self.waits["background"] += 1
            with self._explained():
                self.session.settle()
            self._note_answered()

    def flush(self) -> None:
        """Sends changes that other sessions wait for: freed requests and executed steps."""
        self._settle_background()
        has_calls = self._undelivered or not (self._builder is None or self._builder.is_empty)
        if has_calls or self._executed > self._reported:
            self.send()

    def deliver_all(self) -> None:
        """Sends these changes, and waits until the service has executed them."""
        self.flush()
        self._settle_background()

    def mark_start(self) -> None:
        """Makes a step before the first round, so that it can be named as launched."""
        if not self._launched:
            self.builder.evict_blocks(())
            self.deliver_all()
            self.end_round()

    def end_round(self) -> int:
        """Sends changes that other sessions wait for; returns the number of the last step of the round."""
        if not self.session.reserve_tokens or (self._undelivered and not self.session.must_wait):
            self.flush()  # else the next round reports what is executed, if others wait for it
        self._launched = self.session.sequence
        self._has_launched = True
        return self._launched

    def mark_executed(self, sequence: int, *, is_newest: bool) -> None:
        """Records that the outputs of the round that ended with this step have arrived.

        Args:
            sequence: The step.
            is_newest: Whether no later round has been scheduled, so that all steps that were sent have run.
        """
        executed = self.promotions.last_executed(self.session.sequence if is_newest else sequence)
        self._collect_copies()
        for copy in (*self._host_copies, *self._given_up):
            executed = min(executed, copy.sequence - 1)
        self._executed = max(self._executed, executed)
        self._has_launched = not is_newest

    def take_copies(self) -> list[BlockCopy]:
        """Returns the copies within the first tier that were ordered since the last call."""
        self.settle()
        self._collect_copies()
        copies, self._copies = self._copies, []
        return copies

    def take_host_copies(self, used: Collection[int], *, is_idle: bool) -> CopyOrders | None:
        """Returns the other copies, in order. The output of the round that has ended carries them.

        Its workers make them before those within the first tier, which may read what they write. Those of a session
        that is lost are not made: their blocks may have other owners. See `Promotions.orders`.
        """
        self._collect_copies()
        copies, self._host_copies = self._host_copies, []
        return None if self.lost else self.promotions.orders(copies, used, is_idle=is_idle)

    def host_targets(self) -> set[int]:
        """Returns the blocks that the next such copies fill."""
        self._collect_copies()
        return {copy.target for copy in self._host_copies}

    def give_up_host_copies(self) -> None:
        """Evicts the targets of copies that no output will carry, as no request is left, from which to go on."""
        self._collect_copies()
        if not self._host_copies:
            return
        lost = {copy.target for copy in self._host_copies}
        for copy in self._copies:  # made later
            if copy.source in lost:
                lost.add(copy.target)
        self._given_up += self._host_copies
        self._host_copies = []
        self.deliver(lambda builder: builder.evict_blocks(sorted(lost)))
        self.deliver_all()

    def _collect_copies(self) -> None:
        num_blocks = self.session.config.num_blocks
        for copy in self.session.take_copies():
            has_host = max(copy.source, copy.target) >= num_blocks
            (self._host_copies if has_host else self._copies).append(copy)

    def check_lease(self) -> None:
        """Asks the service, if the lease may be over, whether the session is open. Otherwise the step must not run.

        Raises:
            KvpoolError: The session has ended, so other sessions may own the blocks; or the service does not answer.
        """
        # The lease counts from the time at which a step was sent. A step that waited for an absent service is answered
        # late, so that the lease can seem to be over although it is not.
        if self.session.lease_left_seconds <= 0 and not self.is_private:
            with self._explained():
                self.session.mark_executed(self._executed)

    def set_weights_version(self, weights_version: str) -> None:
        """Sets the version of the weights with which later rounds compute, see `Session`. Raises as `send`."""
        with self._explained():
            self.session.set_weights_version(weights_version)

    def _next_builder(self) -> StepBuilder:
        """Returns the collected calls, and starts a new message.

        They report the executed step. The session sends no message only if no other session waits for that report.
        """
        builder, self._builder = self.builder, None
        self._num_delivering, self._reporting = len(self._undelivered), self._executed
        builder.step.executed_sequence, builder.step.launched_sequence = self._executed, self._launched
        self.promotions.put_times(builder.step)
        if self._has_launched and self._launched <= self._executed:  # a round on credit, which has no number
            builder.step.launched_sequence = self.session.sequence + 1
        return builder

    def _note_answered(self, builder: StepBuilder | None = None) -> None:
        """Records that the service has executed the last message, or that there is no session to execute it."""
        if builder and self.lost:
            builder.refuse()
        if not self.session.is_in_background:
            del self._undelivered[: self._num_delivering]
            self._num_delivering, self._reported = 0, self._reporting
            if not self._undelivered:
                self._given_up.clear()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Adds a note with instructions to errors that end the engine. Records the end of a session in `lost`."""
        try:
            yield
        except (UnauthenticatedError, DeniedError) as error:
            self.has_failed = True
            error.add_note(_REFUSED_ACCESS)
            raise
        except (NotFoundError, AbortedError, UnavailableError, DeadlineError, ExhaustedError, ServerError) as error:
            if isinstance(error, ExhaustedError) and error.retry_seconds is None:  # refused: nothing has changed
                raise
            self.has_failed = True
            # After a bug of its own, a service without a journal has ended the session.
            if self.is_private and (ends_session(error) or isinstance(error, ServerError)):
                self.lost = error
                return
            has_ended = isinstance(error, NotFoundError | AbortedError)
            error.add_note(SESSION_ENDED if has_ended else _NO_ANSWER)
            if remedy := _REMEDIES.get(error.reason):
                error.add_note(remedy)
            raise

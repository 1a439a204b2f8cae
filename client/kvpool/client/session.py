"""A scheduler's synchronous session, and the base that it shares with the asyncio session."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from types import TracebackType
from typing import Any, Final, Self

from kvpool.client import operations
from kvpool.client.blocking import blocking, run
from kvpool.client.hashing import NO_EXTRA_KEYS, BlockHasher, ExtraKeys
from kvpool.client.protocol import SessionProtocol, ends_session, is_refusal
from kvpool.client.request import Request, checked_token_ids
from kvpool.client.step_builder import StepBuilder
from kvpool.client.transports.transport import OpenedSession
from kvpool.core.errors import ExhaustedError, KvpoolError, UnauthenticatedError
from kvpool.core.ids import BlockHash, RequestId, RequestNumber, TableLease
from kvpool.core.sessions.request import BlockCopy
from kvpool.core.sessions.session_ends import ended_error
from kvpool.core.steps.columns import Step
from kvpool.v1.pool_pb2 import PoolInfo

_CONTINUES: Final = (
    "The session continues if its token is accepted again within the lease: "
    "call settle(), which sends the step again and has it applied once."
)


class SessionBase:
    """The requests and the coroutines of a session.

    The asyncio session awaits the coroutines. The synchronous session runs them with a transport that blocks: see
    `kvpool.client.blocking`.

    Attributes:
        config: The pool's configuration.
        epoch: The pool's epoch when the session was opened.
        session_id: The session's secret name.
        session_number: Its number on the server, never used again. Not secret.
        table_lease: Epoch and session number that its block tables carry to the ranks.
        lease_seconds: The lease: how long the session outlives its last call.
        weights_version: The version of its weights when it was opened, or as this process has set it since.
        reserve_tokens: Number of tokens for which running requests hold slots in reserve; 0 in pools without reserves.
    """

    def __init__(self, opened: OpenedSession) -> None:
        self.config = opened.config
        self.epoch = opened.epoch
        self.session_id = opened.session_id
        self.session_number = opened.session_number
        self.table_lease = TableLease(opened.epoch, opened.session_number)
        self.lease_seconds = opened.lease_seconds
        self.weights_version = opened.weights_version
        self.reserve_tokens = opened.reserve_tokens
        self._transport = opened.transport
        self._calls = opened.calls
        self._lease_timer = opened.lease_timer
        self._protocol = SessionProtocol(opened.config, opened.reserve_tokens)
        self._last_number = 0
        self._closed = False

    def __repr__(self) -> str:
        state = "closed" if self._closed else "ended" if self._protocol.is_over else f"after step {self.sequence}"
        return f"<{type(self).__name__} {self.session_number} on pool {self.config.name!r}, {state}>"

    @property
    def sequence(self) -> int:
        """Number of the last step that was answered."""
        return self._protocol.sequence

    @property
    def free_blocks(self) -> int:
        """Blocks that the session could be given when its last step was answered; 0 before the first."""
        return self._protocol.free_blocks

    @property
    def lease_left_seconds(self) -> float:
        """Time for which the lease is certain to last, counted from when the last call that was answered was sent.

        An engine whose memory is not fenced by ranks checks it before it executes a step: at 0 the server may have
        given the session's blocks to other sessions. Infinity where the core is in this process. An operator or a lost
        rank can end a session earlier. So does a server that restarts without a journal, as it has lost all leases:
        start it after the leases and its `--quarantine-seconds` are over, or use a journal.
        """
        return self._lease_timer.left_seconds

    @property
    def has_ended(self) -> bool:
        """Whether the service has reported the end of the session, to a call or to a renewal of the lease."""
        return self._lease_timer.lease_seconds == 0.0

    def take_copies(self) -> list[BlockCopy]:
        """Returns the copies of blocks to make before any layer of the next step runs, in order; each once.

        Only pools with partial hits or with host memory have copies. They are made even if the request that needs them
        is freed. The service keeps both blocks of a copy until the session reports its step as launched, or makes the
        next step. A copy with a block of host memory (an id from `config.num_blocks` on) that is not made needs an
        eviction of its target (`StepBuilder.evict_blocks`), before its step is reported as executed.
        """
        copies, self._protocol.copies = self._protocol.copies, []
        return copies

    def request(
        self,
        request_id: str,
        token_ids: Sequence[int],
        *,
        extra_keys: ExtraKeys = NO_EXTRA_KEYS,
        trace_parent: str = "",
    ) -> Request:
        """Makes a request, and hashes its blocks. It is declared to the server by the first call that names it.

        Args:
            request_id: Its id, unique in the session.
            token_ids: The prompt.
            extra_keys: Its LoRA, cache salt and multimodal items.
            trace_parent: See `Request`.

        Raises:
            InvalidArgumentError: A token is not an integer in [0, 2^32).
        """
        own = list(checked_token_ids(token_ids))
        return self._new_request(request_id, own, hasher=self._hasher, extra_keys=extra_keys, trace_parent=trace_parent)

    def request_hashed_elsewhere(
        self,
        request_id: str,
        token_ids: list[int],
        hashes: list[BlockHash],
        *,
        lora_name: str | None = None,
        trace_parent: str = "",
    ) -> Request:
        """Makes a request of an engine that hashes its blocks itself. Its lists are read as they grow, never changed.

        Args:
            request_id: Its id, unique in the session.
            token_ids: Prompt and output, which may only grow; `hashes` must grow first.
            hashes: The hash of each full hash block of the tokens, by the pool's hash scheme; empty without caching. A
                hash that covers tokens after its block comes with these.
            lora_name: Its LoRA, for events.
            trace_parent: See `Request`.
        """
        keys = ExtraKeys(lora_name=lora_name) if lora_name else NO_EXTRA_KEYS
        return self._new_request(request_id, token_ids, extra_keys=keys, known_hashes=hashes, trace_parent=trace_parent)

    def _new_request(self, request_id: str, token_ids: list[int], **fields: Any) -> Request:  # noqa: ANN401 - of `Request`
        self._last_number += 1
        number = RequestNumber(self._last_number)
        return Request(RequestId(request_id), number, token_ids, len(self.config.groups), **fields)

    @cached_property
    def _hasher(self) -> BlockHasher | None:
        config = self.config
        return BlockHasher(config.hash_scheme, config.hash_block_size) if config.enable_caching else None

    def new_step(
        self, admission_budget_tokens: int = 0, executed_sequence: int = 0, launched_sequence: int = 0
    ) -> StepBuilder:
        """Starts a step for `send` or `begin`. See `step` for the arguments.

        Raises:
            KvpoolError: The session has ended, or a step that was begun is not settled.
        """
        return self._protocol.new_step(admission_budget_tokens, executed_sequence, launched_sequence)

    async def _send(self, builder: StepBuilder, *, waits: bool = True) -> None:
        """Sends a step if it must be sent, and applies its result, or does not wait for it."""
        self._transport.check_usable()
        if not self._protocol.answer_on_credit(builder, self._lease_timer):
            exchange = self._exchange if waits else self._calls.begin_exchange
            await exchange(self._protocol.encode(builder))

    async def _send_collected(self, builder: StepBuilder) -> None:
        """Sends a step. With slots in reserve, waits for its result only if the scheduler needs it."""
        await self._send(builder, waits=builder.waits or not self.reserve_tokens)

    async def _begin(self, builder: StepBuilder) -> None:
        """Sends a step without waiting for its result."""
        await self._send(builder, waits=False)

    async def _new_settled_step(self, *arguments: int) -> StepBuilder:
        """Starts a step after the answer to one in the background; see `new_step`."""
        if self._protocol.is_in_background:
            await self._settle()
        return self.new_step(*arguments)

    def decode_on_credit(
        self,
        requests: Sequence[Request],
        *,
        num_lookahead_tokens: int = 0,
        num_in_flight_tokens: Sequence[int] = (),
        executed_sequence: int = 0,
    ) -> dict[int, list[list[int]]] | None:
        """Decodes as a `step` with nothing else, if that needs no message. Costs least of all ways.

        Args:
            requests: The requests, each once.
            num_lookahead_tokens: See `StepBuilder.decode`.
            num_in_flight_tokens: See `StepBuilder.decode`.
            executed_sequence: See `step`.

        Returns:
            The new blocks of those requests that got any, per group, by place. None, and nothing was changed, if a
            message is needed: make a step.
        """
        if not self._lease_timer.is_fresh:
            return None
        num_slots = 1 + num_lookahead_tokens
        return self._protocol.decode_on_credit(requests, num_slots, executed_sequence, num_in_flight_tokens)

    @property
    def is_in_background(self) -> bool:
        """Whether a step was sent whose answer no scheduler needs, and `settle` has not been called."""
        return self._protocol.is_in_background

    @property
    def must_wait(self) -> bool:
        """Whether `settle` would wait for the answer to a step in the background, without which decodes may go on."""
        return self._protocol.is_in_background and self._lease_timer.is_fresh and not self._calls.is_answered()

    async def _settle(self) -> None:
        """Waits for the answer of a step that was begun, or sends a step again that got no answer in time.

        Fills its answers. Does nothing if all steps are answered.
        """
        if step := self._protocol.unanswered():
            self._transport.check_usable()
            await self._exchange(step)

    async def _exchange(self, step: Step) -> None:
        try:
            result = await self._calls.exchange(step)
        except KvpoolError as error:
            self._protocol.fail(error)
            self._handle_end(error)
            if isinstance(error, UnauthenticatedError):
                error.add_note(_CONTINUES)
            raise
        self._protocol.apply_result(result)
        if retry := self._protocol.new_retry():
            try:
                await self._exchange(self._protocol.encode(retry))
            except ExhaustedError as error:
                if not is_refusal(error):
                    raise
                # The step itself was applied, and an error would say that it was not. Its answers stay as they are.

    async def _mark_executed(self, sequence: int | None = None) -> None:
        """Reports that all steps up to `sequence` (None: the last) have been executed on the GPU.

        Until then only this session's requests hit the blocks that these steps filled. The number can also be sent with
        the next step, without a message of its own: see `step`, also for steps in flight that have the same number. If
        it gets no answer, call it again.
        """
        executed_sequence = self.sequence if sequence is None else sequence
        await self._handled(self._calls.mark_executed(executed_sequence))
        self._protocol.executed(executed_sequence)

    async def _set_weights_version(self, weights_version: str) -> None:
        """Sets the version of the weights with which the engine computes from now on.

        Requests that begin later hit blocks only of sessions with an equal version, so all earlier prefixes are out of
        reach at once. Requests that hold blocks keep them and continue; blocks that they fill from now on are not
        cached, because their contents continue from the weights before. Call it when no step is in flight, before the
        first step with the new weights. If it gets no answer, call it again.

        Args:
            weights_version: An opaque value of at most 256 bytes, equal in engines with the same weights.

        Raises:
            InvalidArgumentError: It is too long.
            WrongStateError: A step has no answer yet, so its requests may begin with either version.
        """
        if self._protocol.is_in_background:
            await self._settle()
        self._protocol.check_settled()
        await self._handled(self._calls.set_weights_version(weights_version))
        self.weights_version = weights_version

    async def _pool(self) -> PoolInfo:
        """Returns the current state of the pool."""
        return await self._transport.get_pool(self.config.name)

    async def _close(self) -> None:
        """Frees the blocks that the session still holds, and ends it. Call it again if it got no answer."""
        if self._closed:
            return
        await self._handled(self._calls.close())
        self._closed = True
        self._handle_end(ended_error("SESSION_CLOSED"))

    async def _leave(self, error: BaseException | None) -> None:
        """Closes the session at the end of a `with` block. An error of the block hides an error of closing."""
        try:
            await self._close()
        except KvpoolError:
            if error is None:
                raise

    async def _handled(self, call: Awaitable[None]) -> None:
        """Waits for a call. Its error may say that the session is over."""
        try:
            await call
        except KvpoolError as error:
            self._handle_end(error)
            raise

    def _handle_end(self, error: KvpoolError) -> None:
        """Handles the error of a call: the session may be over."""
        if ends_session(error):
            self._protocol.end(error)
            self._lease_timer.end()
            self._calls.forget()


class Session(SessionBase):
    """A scheduler's session. Belongs to one thread at a time; every call has a deadline and raises `KvpoolError`."""

    get_computed_blocks = blocking(operations.get_computed_blocks)
    admit = blocking(operations.admit)
    allocate_slots = blocking(operations.allocate_slots)
    cache_blocks = blocking(operations.cache_blocks)
    free = blocking(operations.free)
    preempt = blocking(operations.preempt)
    evict_blocks = blocking(operations.evict_blocks)
    reset_prefix_cache = blocking(operations.reset_prefix_cache)
    get_common_prefix_blocks = blocking(operations.get_common_prefix_blocks)
    settle = blocking(SessionBase._settle)
    mark_executed = blocking(SessionBase._mark_executed)
    set_weights_version = blocking(SessionBase._set_weights_version)
    pool = blocking(SessionBase._pool)
    close = blocking(SessionBase._close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        run(self._leave(error))

    def step(
        self, *, admission_budget_tokens: int = 0, executed_sequence: int = 0, launched_sequence: int = 0
    ) -> AbstractContextManager[StepBuilder]:
        """Collects operations. Sends them as one message and fills their answers when the `with` block ends.

        With slots in reserve, a step that only frees, preempts or evicts is not waited for. If the service then refuses
        it, the next call raises the error, and nothing of it was done: name its requests again.

        Args:
            admission_budget_tokens: Maximum number of tokens that all admissions together allocate; 0 for no limit.
            executed_sequence: Newest step whose execution has finished: see `mark_executed`. A step of which no message
                was sent has the number of the last message, `sequence`: report it when no step with it is in flight.
            launched_sequence: Newest step that is certain to be executed, before any later step. Blocks that steps up
                to it filled stay in the cache when their request is freed, although they are not executed yet. What is
                freed goes to other sessions when this step was reported as executed. If steps of which no message was
                sent are in flight, and all launched ones with a message have been executed: `sequence + 1`.
        """
        return _Collected(self._new_settled(admission_budget_tokens, executed_sequence, launched_sequence), self.send)

    def begin_step(
        self, *, admission_budget_tokens: int = 0, executed_sequence: int = 0, launched_sequence: int = 0
    ) -> AbstractContextManager[StepBuilder]:
        """As `step`, but does not wait for the service: `settle` waits, and fills the answers.

        For a scheduler that works one step ahead: the service allocates meanwhile. Until it settles, the session
        refuses every other call that makes a step. Its requests may grow; the next step reports their tokens.

        Args:
            admission_budget_tokens: See `step`.
            executed_sequence: See `step`.
            launched_sequence: See `step`.
        """
        return _Collected(self._new_settled(admission_budget_tokens, executed_sequence, launched_sequence), self.begin)

    def _new_settled(self, *arguments: int) -> StepBuilder:
        """Does what `_new_settled_step` does, without a coroutine: every step passes through it."""
        if self._protocol.is_in_background:
            self.settle()
        return self.new_step(*arguments)

    def send(self, builder: StepBuilder) -> None:
        """Sends a step and fills its answers, as the end of a `step` block does."""
        run(self._send(builder, waits=builder.waits or not self.reserve_tokens))

    def begin(self, builder: StepBuilder) -> None:
        """Sends a step without waiting, as the end of a `begin_step` block does."""
        run(self._send(builder, waits=False))


class _Collected(AbstractContextManager[StepBuilder]):
    """A step that is sent when the `with` block ends. Not a generator, as every step passes through it."""

    __slots__ = ("_builder", "_is_begun", "_send")

    def __init__(self, builder: StepBuilder, send: Callable[[StepBuilder], None]) -> None:
        self._builder = builder
        self._send = send
        self._is_begun = False

    def __enter__(self) -> StepBuilder:
        if self._is_begun:
            raise RuntimeError("a step is collected once")
        self._is_begun = True
        return self._builder

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._send(self._builder)

"""A scheduler's session, synchronous."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from types import TracebackType
from typing import Self

from kvpool.client import calls, steps
from kvpool.client.hashing import NO_EXTRA_KEYS, BlockHasher, ExtraKeys
from kvpool.client.request import Request
from kvpool.client.results import Admission, Allocation, HitChanged
from kvpool.client.step_builder import StepBuilder
from kvpool.client.steps import SessionProtocol
from kvpool.client.transports.embedded import HeldRequest, OpenedSession, Transport
from kvpool.core.blocks.prefix_search import ComputedBlocks
from kvpool.core.errors import InvalidArgumentError, KvpoolError, check_range
from kvpool.core.ids import BlockHash, TableLease
from kvpool.core.sessions.session_ends import ended_error
from kvpool.core.steps.columns import Step
from kvpool.core.views.pool_info import PoolInfo


class SessionBase:
    """What sync and asyncio sessions share: requests and step numbers, no I/O.

    Attributes:
        config: The pool's configuration.
        epoch: The pool's epoch when the session was opened.
        session_id: The session's secret name. A process that stores it, and `sequence`, can be started anew and resume
            the session: see `Client.resume_session`.
        session_number: Its number on the server, never used again, another once it is resumed; no secret.
        table_lease: What its block tables are good for; goes with them to the ranks.
        lease_seconds: How long it outlives its last sign of life.
        held_requests: What the session held when it was resumed; empty if it was opened. See `adopt`.
    """

    def __init__(self, opened: OpenedSession) -> None:
        self.config = opened.config
        self.epoch = opened.epoch
        self.session_id = opened.session_id
        self.session_number = opened.session_number
        self.table_lease = TableLease(opened.epoch, opened.session_number)
        self.lease_seconds = opened.lease_seconds
        self.held_requests = opened.held
        self._lease_timer = opened.lease_timer
        self._protocol = SessionProtocol(opened.config, opened.sequence)
        self._adopted: set[int] = set()  # numbers
        self._last_number = max((held.number for held in opened.held), default=0)

    def request(self, request_id: str, token_ids: Sequence[int], *, extra_keys: ExtraKeys = NO_EXTRA_KEYS) -> Request:
        """Makes a request and hashes its blocks here. The server learns of it with the first call that names it.

        Args:
            request_id: Its id, unique in the session.
            token_ids: The prompt.
            extra_keys: Its LoRA, cache salt and multimodal items.
        """
        self._last_number += 1
        return self._make(request_id, self._last_number, token_ids, extra_keys)

    def request_hashed_elsewhere(
        self, request_id: str, token_ids: list[int], hashes: list[BlockHash], *, lora_name: str | None = None
    ) -> Request:
        """Makes a request of an engine that hashes by itself: its lists are read as they grow, and not changed.

        Args:
            request_id: Its id, unique in the session.
            token_ids: Prompt and output, which may only grow; then `hashes` must have grown already.
            hashes: One for each full hash block of the tokens, as the pool's hash scheme says; none without caching.
            lora_name: Its LoRA, for events.
        """
        self._last_number += 1
        keys = ExtraKeys(lora_name=lora_name) if lora_name else NO_EXTRA_KEYS
        request = Request(
            request_id, self._last_number, (), num_groups=len(self.config.groups), hasher=None, extra_keys=keys
        )
        request.follow(token_ids, hashes)
        return request

    def adopt(
        self,
        held: HeldRequest,
        token_ids: Sequence[int],
        *,
        extra_keys: ExtraKeys = NO_EXTRA_KEYS,
        num_computed_tokens: int = 0,
    ) -> Request:
        """Makes a request of what a resumed session holds: it goes on as if this process had made it.

        If it is not known whether its last step has run, run that again before any other. Where a layer's state is
        overwritten in place (Mamba), that cannot be: free the request, and begin it anew.

        Args:
            held: One of `held_requests`.
            token_ids: Prompt and output, as far as the service was told of them or farther.
            extra_keys: Its LoRA, cache salt and multimodal items, as before.
            num_computed_tokens: How many had room when the process before knew last, which may be more than the service
                does: those that took room without a message. If it is 0, what the service knows, up to a block's tokens
                fewer; they are to be computed again.

        Raises:
            InvalidArgumentError: These are not the request's tokens or keys, as hashes tell where the pool caches; or
                it was adopted already; or
                it was declared by a unary call that gave it no number, and can neither be adopted nor freed by
                this client. Free other requests that cannot be adopted: `free_held`.
        """
        if len(token_ids) < held.num_tokens:
            known = f"{len(token_ids)} tokens, the service knows {held.num_tokens} of {held.request_id!r}"
            raise InvalidArgumentError("token_ids", known)
        if (extra_keys.lora_name or "") != held.lora_name:
            raise InvalidArgumentError("extra_keys", f"the LoRA of {held.request_id!r} is {held.lora_name!r}")
        if held.number in self._adopted:
            raise InvalidArgumentError("held", f"{held.request_id!r} was adopted already")
        request = self._held(held, token_ids, extra_keys)
        if request.num_sent_hashes and request.hashes[request.num_sent_hashes - 1] != held.last_block_hash:
            raise InvalidArgumentError("token_ids", f"not those of {held.request_id!r}, by the hash of its last block")
        if num_computed_tokens:
            check_range("num_computed_tokens", num_computed_tokens, held.num_computed_tokens, self.config.max_model_len)
            request.have_room(num_computed_tokens, 0)
        self._adopted.add(held.number)
        return request

    @cached_property
    def _hasher(self) -> BlockHasher | None:
        config = self.config
        return BlockHasher(config.hash_scheme, config.hash_block_size) if config.enable_caching else None

    def _held(self, held: HeldRequest, token_ids: Sequence[int], extra_keys: ExtraKeys = NO_EXTRA_KEYS) -> Request:
        if not held.number:
            raise InvalidArgumentError("held", f"steps cannot name {held.request_id!r}, which has no number")
        request = self._make(held.request_id, held.number, token_ids, extra_keys)
        request.declared = True
        request.block_ids = [list(table) for table in held.block_ids]
        request.num_sent_computed_tokens = held.num_computed_tokens
        request.have_room(held.num_computed_tokens, 0)
        request.num_sent_tokens = min(held.num_tokens, request.num_tokens)  # fewer are known only of one to be freed
        request.num_sent_hashes = held.num_tokens // self.config.hash_block_size if self._hasher else 0
        return request

    def _make(self, request_id: str, number: int, token_ids: Sequence[int], extra_keys: ExtraKeys) -> Request:
        return Request(
            request_id,
            number,
            token_ids,
            num_groups=len(self.config.groups),
            hasher=self._hasher,
            extra_keys=extra_keys,
        )

    def _next_step(self, builder: StepBuilder) -> Step | None:
        """The step to send; None if this process can answer it, as the session was there a moment ago."""
        if self._protocol.must_send(builder, is_fresh=self._lease_timer.is_fresh):
            return self._protocol.build(builder)
        return None

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Takes note of what a call ends with that is no step."""
        try:
            yield
        except KvpoolError as error:
            self._note(error)
            raise

    def _fail(self, error: KvpoolError) -> None:
        """Takes note of what a step ends with."""
        self._protocol.fail(error)
        self._note(error)

    def _note(self, error: KvpoolError) -> None:
        self._protocol.note(error)
        if steps.ends_session(error):
            self._lease_timer.end()

    @property
    def sequence(self) -> int:
        """Number of the last step that was answered."""
        return self._protocol.sequence

    @property
    def free_blocks(self) -> int:
        """Blocks that it could be given when its last step was answered; 0 before the first."""
        return self._protocol.free_blocks

    @property
    def lease_left_seconds(self) -> float:
        """How long the lease is sure to last, counted from when the last call that was answered had been sent.

        An engine whose memory nobody else fences looks at it before it runs a step: at 0 the server may have given the
        session's blocks to others. Infinity where the core is in this process. An operator, or a lost rank, can end a
        session before. So does a server that comes back without a journal, as it knows nothing of leases: start it when
        they and its `--quarantine-seconds` are over, or use a journal.
        """
        return self._lease_timer.left_seconds


class Session(SessionBase):
    """A scheduler's session. Belongs to one thread at a time; every call has a deadline and raises `KvpoolError`."""

    def __init__(self, transport: Transport, opened: OpenedSession) -> None:
        super().__init__(opened)
        self._transport = transport
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def get_computed_blocks(self, request: Request, *, counted: bool = True) -> ComputedBlocks:
        """Looks up the longest cached prefix of a request that holds no blocks; its last token is never hit.

        The blocks are not held: `allocate_slots` may find some of them gone.
        """
        return self._call(calls.call_get_computed_blocks(request, counted=counted))

    def admit(
        self,
        request: Request,
        max_new_tokens: int = 0,
        *,
        num_lookahead_tokens: int = 0,
        num_encoder_tokens: int = 0,
    ) -> Admission | None:
        """Looks up and allocates at once, for a request that holds no blocks.

        Args:
            request: The request.
            max_new_tokens: Most tokens to make room for beyond the hit; 0 for all that are left.
            num_lookahead_tokens: Tokens beyond these to keep room for.
            num_encoder_tokens: Tokens that the encoder puts out, for models with cross attention.

        Returns:
            What it got; None if there are not enough blocks, or its session would hold more than it may.
        """
        return self._call(calls.call_admit(request, max_new_tokens, num_lookahead_tokens, num_encoder_tokens))

    def allocate_slots(  # noqa: PLR0913 - the reference's own parameters
        self,
        request: Request,
        num_new_tokens: int,
        *,
        computed: ComputedBlocks | None = None,
        num_computed_tokens: int | None = None,
        num_lookahead_tokens: int = 0,
        num_encoder_tokens: int = 0,
        delay_cache_blocks: bool = False,
    ) -> Allocation | HitChanged | None:
        """Makes room for more tokens of a request, and caches the blocks that become full.

        Args:
            request: The request.
            num_new_tokens: Tokens to make room for, beyond the computed ones and the hit.
            computed: What `get_computed_blocks` promised, for a request that holds no blocks.
            num_computed_tokens: Computed tokens, if fewer than have room (drafts were rejected).
            num_lookahead_tokens: Tokens beyond the new ones to keep room for (drafts).
            num_encoder_tokens: Tokens that the encoder puts out, for models with cross attention; in the call that
                finds the request without blocks.
            delay_cache_blocks: Leave full blocks uncached until `cache_blocks`.

        Returns:
            The new blocks; None if there are not enough, or the session would hold more than it may (preempt and try
            again; the outcome in a `step` tells which); `HitChanged` if some of what was promised has been evicted
            meanwhile (allocate again with what it holds). In the last two cases nothing was allocated.
        """
        return self._call(
            calls.call_allocate_slots(
                request,
                num_new_tokens,
                computed,
                num_computed_tokens,
                num_lookahead_tokens,
                num_encoder_tokens=num_encoder_tokens,
                delay_cache_blocks=delay_cache_blocks,
            )
        )

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Caches the full blocks among the first `num_computed_tokens` tokens (after delay_cache_blocks)."""
        self._call(calls.call_simply(lambda step: step.cache_blocks(request, num_computed_tokens)))

    def free(self, request: Request) -> None:
        """Frees the request's blocks, the last first, and forgets it.

        What was not said to be computed of it by then (`mark_executed`) is found by nobody: its step may never run.
        """
        self._call(calls.call_simply(lambda step: step.free(request)))

    def preempt(self, request: Request) -> None:
        """Frees the request's blocks, as `free`; it keeps its tokens and will be admitted again."""
        self._call(calls.call_simply(lambda step: step.preempt(request)))

    def free_held(self, held: HeldRequest) -> None:
        """Frees a request of a resumed session that is not adopted; its tokens need not be known.

        Raises:
            InvalidArgumentError: It was declared by a unary call that gave it no number, so that no step can name it.
                Its blocks come back with AllocatorService's Free, which takes its id, or when the session is closed.
        """
        self._call(calls.call_simply(lambda step: step.free(self._held(held, ()))))

    def evict_blocks(self, block_ids: Sequence[int]) -> None:
        """Drops the hashes of blocks."""
        self._call(calls.call_simply(lambda step: step.evict_blocks(block_ids)))

    def reset_prefix_cache(self) -> bool:
        """Drops all hashes; False if a request of any session holds a block, and nothing was dropped."""
        return self._call(calls.call_simply(lambda step: step.reset_prefix_cache())).ok

    def get_common_prefix_blocks(self, request: Request) -> list[int]:
        """Counts the leading blocks, group by group, that all requests of this session that hold blocks share."""
        return self._call(calls.call_simply(lambda step: step.get_common_prefix_blocks(request))).num_common_blocks

    def step(
        self, *, admission_budget_tokens: int = 0, executed_sequence: int = 0, launched_sequence: int = 0
    ) -> AbstractContextManager[StepBuilder]:
        """Collects operations and sends them as one message when the block ends; then their answers are filled.

        Args:
            admission_budget_tokens: Tokens that all admissions together may make room for; 0 for no limit.
            executed_sequence: Newest step whose execution has finished: see `mark_executed`.
            launched_sequence: Newest step whose execution is sure to come, before that of any later one: what was
                filled up to there stays in the cache when its request is freed, though it was not yet executed.
        """
        return _Collected(StepBuilder(admission_budget_tokens, executed_sequence, launched_sequence), self._send)

    def begin_step(
        self, *, admission_budget_tokens: int = 0, executed_sequence: int = 0, launched_sequence: int = 0
    ) -> AbstractContextManager[StepBuilder]:
        """As `step`, but the block ends without waiting for the service: `settle` does, and fills the answers.

        For a scheduler that works a step ahead: the service allocates while it does something else. Until it settles,
        this session answers no other call that makes a step; its requests may grow, which the next step tells.

        Args:
            admission_budget_tokens: See `step`.
            executed_sequence: See `step`.
            launched_sequence: See `step`.
        """
        return _Collected(StepBuilder(admission_budget_tokens, executed_sequence, launched_sequence), self._begin)

    def send(self, builder: StepBuilder) -> None:
        """Sends a step that was collected on its own, and fills its answers: what `step` does as its block ends."""
        self._send(builder)

    def begin(self, builder: StepBuilder) -> None:
        """Sends a step that was collected on its own, without waiting: what `begin_step` does as its block ends."""
        self._begin(builder)

    def settle(self) -> None:
        """Waits for the answer of a step that was begun, or sends one again that had no answer in time; fills it in.

        Does nothing if all steps are answered.
        """
        step = self._protocol.unanswered()
        if step is not None:
            self._exchange(step)

    def mark_executed(self, sequence: int | None = None) -> None:
        """Says that all steps up to `sequence` (None: the last) have run on the GPU.

        Until then the blocks that they filled are hit by this session's requests only. The number can also ride on
        the next step, without a message of its own: see `step`. If decodes of the last step filled blocks without
        asking, this is a step, which tells of them and moves `sequence`; if it gets no answer, it can be called again.
        """
        executed_sequence = self.sequence if sequence is None else sequence
        self._settle_telling()
        if self._protocol.must_tell(executed_sequence):
            self._send(StepBuilder(executed_sequence=executed_sequence))
            return
        with self._noted():
            self._transport.mark_executed(self.session_id, executed_sequence)
        self._protocol.note_executed(executed_sequence)

    def pool(self) -> PoolInfo:
        """Tells what the pool is like now."""
        return self._transport.get_pool(self.config.name)

    def close(self) -> None:
        """Frees what the session still holds and forgets it; may be called again if it was not answered."""
        if not self._closed:
            with self._noted():
                self._transport.close_session(self.session_id)
            self._closed = True
            self._note(ended_error("SESSION_CLOSED"))

    def _call(self, call: calls.Call[calls.ResultT]) -> calls.ResultT:
        builder, read = call
        self._send(builder)
        return read()

    def _settle_telling(self) -> None:
        if self._protocol.is_telling:
            self.settle()

    def _send(self, builder: StepBuilder) -> None:
        self._settle_telling()
        step = self._next_step(builder)
        if step:
            self._exchange(step)

    def _begin(self, builder: StepBuilder) -> None:
        self._settle_telling()
        step = self._next_step(builder)
        if step:
            self._transport.send(self.session_id, step)

    def _exchange(self, step: Step) -> None:
        try:
            result = self._transport.apply(self.session_id, step)
        except KvpoolError as error:
            self._fail(error)
            raise
        self._protocol.finish(result)


class _Collected(AbstractContextManager[StepBuilder]):
    """A step that is sent when the block ends which collects it; every step goes through it, so it is no generator."""

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

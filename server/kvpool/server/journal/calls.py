"""The changes of an allocator as records: written as they are made, made again as they are read.

1. Every method that changes what an allocator holds is a record, unless it is named below with the reason why not.
2. A record is handed on after the change, and before anyone can be answered: none stands for what did not happen.
3. A record holds what the server's settings decided, not what they were asked: the next process may have others.
4. A record holds a checksum of the answer: made again from the same state, the change gives the same, or it is found.
"""

import functools
import struct
from collections.abc import Callable
from typing import Any, Final, Protocol
from zlib import crc32

from kvpool.core.allocator import Allocator
from kvpool.core.block_lifetimes import BlockLifetimes
from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.errors import KvpoolError
from kvpool.core.ids import SessionId
from kvpool.core.sessions.session import Session
from kvpool.core.specs.pool_config import PoolConfig
from kvpool.core.steps.columns import Step, StepResult
from kvpool.server.journal.codec import Decoder, Encoder, Messages, dumps, loads
from kvpool.server.journal.frames import NONSENSE, DamageError, FrameKind

RECORDED: Final = (
    "close_session",
    "count_retry",
    "create_pool",
    "drain",
    "end_lost_steps",
    "end_quarantine",
    "evict_session",
    "expire_session",
    "keep_rank_group",
    "mark_executed",
    "open_epoch",
    "open_session",
    "pass_epoch",
    "remove_pool",
    "renew_leases",
    "reset_prefix_cache",
    "resume",
    "resume_session",
    "suspend",
    "undrain",
)
NOT_RECORDED: Final = {
    "apply": "is a record of its own kind",
    "expire": "decides by the clock, and calls expire_session",
    "attach_stream": "streams end with the process",
    "detach_stream": "likewise",
    "lose_sessions": "is done before anything is recorded",
    "end_due_quarantines": "decides by the clock, and calls end_quarantine",
    "session": "hearing of a session moves its lease, and leases begin anew with each process",
    "closed_count": "changes nothing",
    "describe": "changes nothing",
    "find_session": "changes nothing",
    "has_pool": "changes nothing",
    "is_overdue": "changes nothing",
    "next_expiry_seconds": "changes nothing",
    "num_sessions_of": "changes nothing",
    "opened_by": "changes nothing",
    "owner": "changes nothing",
    "pool": "changes nothing",
    "pools": "changes nothing",
    "sessions": "changes nothing",
    "sessions_of": "changes nothing",
}
"""By method: why it is no record."""

_DIGEST: Final = 255
"""In place of a kind of message: what the session remembers is a digest of it."""
_STEP: Final = struct.Struct("<QBHI")

Sink = Callable[[FrameKind, bytes], None]


class WireCodec(Messages, Protocol):
    """What only `rpc` can encode; see `rpc.convert_journal`."""

    def encode_step(self, step: Step) -> bytes: ...  # noqa: D102 - see there
    def decode_step(self, source: object) -> Step: ...  # noqa: D102 - see there
    def encode_config(self, config: PoolConfig) -> bytes: ...  # noqa: D102 - see there
    def decode_config(self, encoded: bytes) -> PoolConfig: ...  # noqa: D102 - see there


class MismatchError(Exception):
    """A change that was made again gave another answer than the first time."""


class JournaledAllocator(Allocator):
    """An allocator whose changes are told as records.

    Attributes:
        sink: Takes each record; None while none is wanted.
        on_bug: Called when a change ended half made, or cannot be told: what records tell is no longer what is.
        is_inside: Whether a change is being made.
    """

    def __init__(
        self,
        messages: WireCodec,
        new_block_lifetimes: Callable[[], BlockLifetimes | None] = lambda: None,
    ) -> None:
        super().__init__(new_block_lifetimes)
        self.sink: Sink | None = None
        self.on_bug: Callable[[], None] = lambda: None
        self.is_inside = False
        self._messages = messages

    def apply(self, pool: KVCacheManager, session: Session, step: Step, source: object = None) -> StepResult:
        """See `Allocator.apply`."""
        try:
            result = super().apply(pool, session, step, source)
            if self.sink:
                self.sink(FrameKind.STEP, self._encode_step(session.session_id, step, source, result))
        except KvpoolError:
            raise
        except BaseException:
            self.on_bug()
            raise
        return result

    def replay(self, kind: FrameKind, payload: bytes) -> None:
        """Makes a change again that a record tells of; none is told of it.

        Raises:
            MismatchError: It gives another answer.
            DamageError: It is no record of what can have been.
            KvpoolError: The change is refused, so the state is not what it was.
        """
        if kind is FrameKind.STEP:
            self._replay_step(payload)
        else:
            self._replay_call(payload)
        for pool in self.pools():
            pool.blocks.take_events()

    def new_block_lifetimes(self) -> BlockLifetimes | None:
        """Makes what samples a pool's blocks in this process."""
        return self._new_block_lifetimes()

    def hold_leases(self) -> None:
        """Keeps sessions from running out while changes are made again: those that did are records themselves."""
        for _, session in self._sessions.values():
            _hold_lease(session)

    def _encode_step(self, session_id: SessionId, step: Step, source: object, result: StepResult) -> bytes:
        sent = (_DIGEST, source) if isinstance(source, bytes) else self._messages.encode(source)
        kind, encoded = sent or (0, b"")
        name = session_id.encode()
        own = b"" if kind == 1 else self._messages.encode_step(step)
        return b"".join((_STEP.pack(_checksum(result), kind, len(name), len(encoded)), name, encoded, own))

    def _replay_step(self, payload: bytes) -> None:
        try:
            answered, kind, name_length, length = _STEP.unpack_from(payload)
            at = _STEP.size + name_length
            pool, session = self._sessions[SessionId(payload[_STEP.size : at].decode())]
            sent = payload[at : at + length]
            source = sent if kind == _DIGEST else self._messages.decode(kind, sent) if kind else None
            step = self._messages.decode_step(source if kind == 1 else payload[at + length :])
        except (struct.error, LookupError, ValueError) as error:
            raise DamageError("a record of no step that can have been") from error
        result = super().apply(pool, session, step, source)
        if _checksum(result) != answered:
            raise MismatchError(f"step {step.sequence}")

    def _replay_call(self, payload: bytes) -> None:
        try:
            name, classes, arguments, answered = loads(payload)
            positional, named = Decoder(self._messages, classes, self._refer).value(arguments)
        except NONSENSE as error:
            raise DamageError("a record of no call") from error
        if name not in RECORDED:
            raise DamageError("a record of no call")
        try:
            answer = getattr(Allocator, name)(self, *positional, **named)
        except (TypeError, AttributeError, LookupError) as error:
            raise DamageError(f"a record of no {name} that can have been") from error
        if _answer_checksum(self._messages, answer) != answered:
            raise MismatchError(name)
        if name == "open_session":
            _hold_lease(answer[1])
        elif name == "renew_leases":
            self.hold_leases()

    def _refer(self, reference: list[Any]) -> object:
        kind, name = reference
        return self._pools[name] if kind == "pool" else self._sessions[name][1]


def _hold_lease(session: Session) -> None:
    session.open_streams = 1


def _checksum(result: StepResult) -> int:
    """Tells answers apart. Hashes of ints are the same in every process of one Python."""
    return (
        hash(
            (
                result.sequence,
                result.free_blocks,
                tuple(result.outcomes),
                tuple(result.num_hit_tokens),
                tuple(result.num_shared_hit_tokens),
                tuple(result.num_new_tokens),
                tuple(result.num_prefix_blocks),
                tuple(result.num_new_blocks),
                tuple(result.block_ids),
            )
        )
        & 0xFFFF_FFFF_FFFF_FFFF
    )


def _reference(value: object) -> list[object] | None:
    if isinstance(value, KVCacheManager):
        return ["pool", value.config.name]
    return ["session", value.session_id] if isinstance(value, Session) else None


def _answer_checksum(messages: WireCodec, answer: object) -> int:
    return crc32(dumps(Encoder(messages, _reference).node(answer)))


def _encode_call(
    messages: WireCodec, name: str, positional: tuple[Any, ...], named: dict[str, Any], answer: object
) -> bytes:
    encoder = Encoder(messages, _reference)
    arguments = encoder.node((positional, named))
    return dumps([name, encoder.classes, arguments, _answer_checksum(messages, answer)])


def _recorded(name: str) -> Callable[..., Any]:
    method = getattr(Allocator, name)

    @functools.wraps(method)
    def call(self: JournaledAllocator, *positional: Any, **named: Any) -> Any:  # noqa: ANN401 - as the method's
        if self.is_inside:  # of another change, whose record tells of this one too
            return method(self, *positional, **named)
        self.is_inside = True
        try:
            answer = method(self, *positional, **named)
            if self.sink:
                self.sink(FrameKind.CALL, _encode_call(self._messages, name, positional, named, answer))
        except KvpoolError:
            raise
        except BaseException:
            self.on_bug()
            raise
        finally:
            self.is_inside = False
        return answer

    return call


for _name in RECORDED:
    setattr(JournaledAllocator, _name, _recorded(_name))

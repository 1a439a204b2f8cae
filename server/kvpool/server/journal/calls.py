"""Changes of an allocator as records, which are written when a change is made and replayed at recovery.

1. Every method that changes an allocator's state is recorded, unless NOT_RECORDED names it with the reason.
2. A record is passed to the sink after the change and before the response. No record exists for a refused change.
3. A record holds values that the server's settings decided, since the next process may have other settings.
4. A record holds a checksum of the result. A replay from the same state must give the same result; a difference is
   detected.
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
from kvpool.server.journal.frames import MALFORMED, DamageError, FrameKind

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
    "apply": "has its own kind of record",
    "expire": "depends on the clock, and calls expire_session",
    "attach_stream": "streams end with the process",
    "detach_stream": "streams end with the process",
    "lose_sessions": "runs before recording starts",
    "end_due_quarantines": "depends on the clock, and calls end_quarantine",
    "session": "only renews the lease, and leases restart with each process",
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
"""Methods that are not recorded, with the reason."""

_DIGEST: Final = 255
"""Stands for a kind of message where the session remembers only a digest of the message."""
_STEP: Final = struct.Struct("<QBHI")

Sink = Callable[[FrameKind, bytes], None]


class WireCodec(Messages, Protocol):
    """Encodes values that need protobuf; see `kvpool.server.journal.messages`."""

    def encode_step(self, step: Step) -> bytes: ...  # noqa: D102 - documented there
    def decode_step(self, source: object) -> Step: ...  # noqa: D102 - documented there
    def encode_config(self, config: PoolConfig) -> bytes: ...  # noqa: D102 - documented there
    def decode_config(self, encoded: bytes) -> PoolConfig: ...  # noqa: D102 - documented there


class MismatchError(Exception):
    """A replayed change gave another result than the first time."""


class JournaledAllocator(Allocator):
    """An allocator that passes its changes to a sink as records.

    Attributes:
        sink: Receives each record; None while nothing is recorded.
        on_bug: Called when a change failed halfway or cannot be encoded: the records no longer match the state.
        is_inside: Whether a change is in progress.
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
        """Replays the change of a record, without recording it again.

        Raises:
            MismatchError: The change gives another result.
            DamageError: The record is malformed or impossible.
            KvpoolError: The change is refused, so the state differs from the original one.
        """
        if kind is FrameKind.STEP:
            self._replay_step(payload)
        else:
            self._replay_call(payload)
        for pool in self.pools():
            pool.blocks.take_events()

    def new_block_lifetimes(self) -> BlockLifetimes | None:
        """Makes the sampler of a pool's block lifetimes in this process."""
        return self._new_block_lifetimes()

    def hold_leases(self) -> None:
        """Keeps leases from expiring during a replay. Leases that did expire have records of their own."""
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
            raise DamageError("a record of an impossible step") from error
        result = super().apply(pool, session, step, source)
        if _checksum(result) != answered:
            raise MismatchError(f"step {step.sequence}")

    def _replay_call(self, payload: bytes) -> None:
        try:
            name, classes, arguments, answered = loads(payload)
            positional, named = Decoder(self._messages, classes, self._refer).value(arguments)
        except MALFORMED as error:
            raise DamageError("not a record of a call") from error
        if name not in RECORDED:
            raise DamageError("not a record of a call")
        try:
            answer = getattr(Allocator, name)(self, *positional, **named)
        except (TypeError, AttributeError, LookupError) as error:
            raise DamageError(f"a record of an impossible {name}") from error
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
    """Checksum of a step's result. Hashes of ints are the same in every process of one Python version."""
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
    def call(self: JournaledAllocator, *positional: Any, **named: Any) -> Any:  # noqa: ANN401 - same as the method's
        if self.is_inside:  # part of another change, whose record includes this one
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

"""Commands as records, which are written when a command was executed and executed again at recovery.

1. A record is written after the change and before the response. No record exists for a refused command.
2. A record holds a checksum of the result. The same command on the same state must give the same result; a difference
   is detected.
"""

import struct
from typing import Any, Final, Protocol
from zlib import crc32

from kvpool.core.commands import ApplyStep, AttachStream, Command, RenewLeases, SessionOpened
from kvpool.core.specs.pool_config import PoolConfig
from kvpool.core.state import State
from kvpool.core.steps.columns import Step, StepResult
from kvpool.server.journal.codec import Decoder, Encoder, Messages, dumps, loads
from kvpool.server.journal.frames import MALFORMED, DamageError, FrameKind

_DIGEST: Final = 255
"""Stands for a kind of message where the session remembers only a digest of the message."""
_STEP: Final = struct.Struct("<QdBHI")


class WireCodec(Messages, Protocol):
    """Encodes values that need protobuf; see `kvpool.server.journal.messages`."""

    def encode_step(self, step: Step) -> bytes: ...  # noqa: D102 - documented there
    def decode_step(self, source: object) -> Step: ...  # noqa: D102 - documented there
    def encode_config(self, config: PoolConfig) -> bytes: ...  # noqa: D102 - documented there
    def decode_config(self, encoded: bytes) -> PoolConfig: ...  # noqa: D102 - documented there


class MismatchError(Exception):
    """A command gave another result than the first time."""


class Records:
    """Encodes commands as records, and executes records.

    Args:
        messages: Encodes protobuf messages.
    """

    def __init__(self, messages: WireCodec) -> None:
        self._messages = messages

    def encode(self, command: Command[Any], now_seconds: float, result: object) -> tuple[FrameKind, bytes]:
        """Encodes a command that was executed.

        Raises:
            TypeError: The command or the result has a value that cannot be encoded.
        """
        if isinstance(command, ApplyStep) and isinstance(result, StepResult):
            return FrameKind.STEP, self._encode_step(command, now_seconds, result)
        encoder = Encoder(self._messages)
        node = encoder.node(command)
        return FrameKind.CALL, dumps([encoder.classes, node, now_seconds, self._checksum(result)])

    def execute(self, state: State, kind: FrameKind, payload: bytes) -> None:
        """Executes the command of a record.

        Raises:
            MismatchError: The command gives another result.
            DamageError: The record is malformed or impossible.
            KvpoolError: The command is refused, so the state differs from the original one.
        """
        decode = self._decode_step if kind is FrameKind.STEP else self._decode
        command, now_seconds, checksum = decode(payload)
        try:
            result = state.execute(command, now_seconds)
        except (TypeError, AttributeError, LookupError) as error:
            raise DamageError(f"a record of an impossible {type(command).__name__}") from error
        if self._checksum(result) != checksum:
            raise MismatchError(type(command).__name__)
        if isinstance(command, RenewLeases):
            hold_leases(state)
        elif isinstance(result, SessionOpened) and result.is_new:
            state.execute(AttachStream(result.session_id), now_seconds)
        for pool in state.pools():
            pool.blocks.take_events()

    def _decode(self, payload: bytes) -> tuple[Command[Any], float, int]:
        try:
            classes, node, now_seconds, checksum = loads(payload)
            command = Decoder(self._messages, classes).value(node)
        except MALFORMED as error:
            raise DamageError("not a record of a command") from error
        if not isinstance(command, Command) or not command.recorded:
            raise DamageError("not a record of a command")
        return command, now_seconds, checksum

    def _encode_step(self, command: ApplyStep, now_seconds: float, result: StepResult) -> bytes:
        source = command.source
        sent = (_DIGEST, source) if isinstance(source, bytes) else self._messages.encode(source)
        kind, encoded = sent or (0, b"")
        name = command.session_id.encode()
        own = b"" if kind == 1 else self._messages.encode_step(command.step)
        head = _STEP.pack(_step_checksum(result), now_seconds, kind, len(name), len(encoded))
        return b"".join((head, name, encoded, own))

    def _decode_step(self, payload: bytes) -> tuple[Command[Any], float, int]:
        try:
            checksum, now_seconds, kind, name_length, length = _STEP.unpack_from(payload)
            at = _STEP.size + name_length
            session_id = payload[_STEP.size : at].decode()
            sent = payload[at : at + length]
            source = sent if kind == _DIGEST else self._messages.decode(kind, sent) if kind else None
            step = self._messages.decode_step(source if kind == 1 else payload[at + length :])
        except (struct.error, LookupError, ValueError) as error:
            raise DamageError("a record of an impossible step") from error
        return ApplyStep(session_id, step, source), now_seconds, checksum

    def _checksum(self, result: object) -> int:
        return (
            _step_checksum(result)
            if isinstance(result, StepResult)
            else crc32(dumps(Encoder(self._messages).node(result)))
        )


def hold_leases(state: State) -> None:
    """Keeps leases from running out while records are executed. Leases that did have records of their own."""
    for _, session in state.sessions():
        state.execute(AttachStream(session.session_id), 0.0)


def _step_checksum(result: StepResult) -> int:
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

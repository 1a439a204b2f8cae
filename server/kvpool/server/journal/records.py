"""Commands as records, which are written when a command was executed, and executed again at recovery and by standbys.

1. A record is written after the change and before the response. No record exists for a refused command.
2. A record holds a checksum of the result. The same command on the same state must give the same result; a difference
   is detected.
"""

from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any, Final
from zlib import crc32

from google.protobuf.message import DecodeError

from kvpool.core.commands import ApplyStep, AttachStream, Command, CreatePool, OpenEpoch, RenewLeases, SessionOpened
from kvpool.core.state import State
from kvpool.core.steps.columns import StepResult
from kvpool.server.codec import DamageError, decode, encode
from kvpool.server.journal.frames import FrameKind, encode_frame
from kvpool.wire.changes import change_from_bytes, step_from_change

_columns_of: Final = attrgetter(*(field.name for field in fields(StepResult)))


@dataclass(frozen=True, slots=True)
class RecordedChange(Command[StepResult]):
    """An `ApplyStep` in a record. Its step follows from the message and the state."""

    session_id: str
    message: bytes


@dataclass(frozen=True, slots=True)
class Record:
    """A command that was executed.

    Attributes:
        command: The command.
        now_seconds: The time at which it was executed.
        checksum: Checksum of its result.
    """

    command: Command[Any]
    now_seconds: float
    checksum: int


class MismatchError(Exception):
    """A command gave another result than the first time."""


def encode_record(command: Command[Any], now_seconds: float, result: object) -> bytes:
    """Encodes a command that was executed as a frame, which is written and sent as it is."""
    if isinstance(command, ApplyStep):
        command = RecordedChange(command.session_id, command.message)
    return encode_frame(FrameKind.RECORD, encode(Record, Record(command, now_seconds, _checksum(result))))


def execute_record(state: State, payload: bytes) -> Record:
    """Executes the command of a record, of which this is the payload. Returns the record, with its step decoded.

    Raises:
        MismatchError: The command gives another result.
        DamageError: The record is malformed or impossible.
        KvpoolError: The command is refused, so the state differs from the original one.
    """
    record = decode(Record, payload)
    command, now_seconds = _command(state, record), record.now_seconds
    try:
        pool_name = _pool_of(state, command)  # before it ends the session that names the pool
        result = state.execute(command, now_seconds)
    except (TypeError, AttributeError, LookupError) as error:
        raise DamageError(f"a record of an impossible {type(command).__name__}") from error
    if _checksum(result) != record.checksum:
        raise MismatchError(type(command).__name__)
    if isinstance(command, RenewLeases):
        hold_leases(state)
    elif isinstance(result, SessionOpened) and result.is_new:
        state.execute(AttachStream(result.session_id), now_seconds)
    if pool_name in state.pools:
        state.pools.get(pool_name).blocks.take_events()
    return replace(record, command=command)


def _pool_of(state: State, command: Command[Any]) -> str:
    """Name of the pool whose blocks a command can change: at most one. Empty for none."""
    if isinstance(command, CreatePool | OpenEpoch):
        return command.config.name
    found = state.sessions.get(getattr(command, "session_id", ""))
    return found[0].config.name if found else getattr(command, "pool_name", None) or ""


def _command(state: State, record: Record) -> Command[Any]:
    recorded = record.command
    if isinstance(recorded, RecordedChange):
        pool, session = state.sessions.find(recorded.session_id, record.now_seconds)
        try:
            step = step_from_change(pool, session, change_from_bytes(recorded.message))
        except (DecodeError, LookupError) as error:
            raise DamageError("a record of an impossible change") from error
        return ApplyStep(recorded.session_id, step, recorded.message)
    if not recorded.recorded or isinstance(recorded, ApplyStep):
        raise DamageError(f"a record of a {type(recorded).__name__}")
    return recorded


def hold_leases(state: State) -> None:
    """Keeps leases from running out while records are executed. Leases that did have records of their own."""
    for _, session in state.sessions:
        state.execute(AttachStream(session.session_id), 0.0)


def _checksum(result: object) -> int:
    """Checksum of a result. Hashes of ints are the same in every process of one Python version."""
    if isinstance(result, StepResult):
        columns = (tuple(value) if isinstance(value, list) else value for value in _columns_of(result))
        return hash(tuple(columns)) & 0xFFFF_FFFF_FFFF_FFFF
    return crc32(repr(result).encode())

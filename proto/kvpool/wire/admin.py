"""Converts the messages of AdminService to and from core values."""

from typing import Final

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.views.inspection import BlockInfo, BlockState, RequestInfo, SessionInfo
from kvpool.v1 import admin_pb2
from kvpool.wire.fields import EnumNumbers, field_values

_BLOCK_STATES: Final = EnumNumbers(BlockState, admin_pb2.BlockState)


def session_to_proto(info: SessionInfo) -> admin_pb2.SessionInfo:
    """Encodes a session."""
    return admin_pb2.SessionInfo(**field_values(SessionInfo, info))


def session_from_proto(message: admin_pb2.SessionInfo) -> SessionInfo:
    """Decodes a session."""
    return SessionInfo(**field_values(SessionInfo, message))


def request_to_proto(info: RequestInfo) -> admin_pb2.RequestInfo:
    """Encodes a request."""
    return admin_pb2.RequestInfo(**field_values(RequestInfo, info))


def request_from_proto(message: admin_pb2.RequestInfo) -> RequestInfo:
    """Decodes a request."""
    return RequestInfo(**field_values(RequestInfo, message))


def block_to_proto(info: BlockInfo) -> admin_pb2.BlockInfo:
    """Encodes a block."""
    return admin_pb2.BlockInfo(state=block_state_to_proto(info.state), **field_values(BlockInfo, info, ["state"]))


def block_from_proto(message: admin_pb2.BlockInfo) -> BlockInfo:
    """Decodes a block. An unknown state of a newer server is decoded as USED, i.e. not available."""
    state = _BLOCK_STATES.member(message.state) or BlockState.USED
    return BlockInfo(state=state, **field_values(BlockInfo, message, ["state"]))


def block_state_from_proto(state: int) -> BlockState | None:
    """Decodes the block state of a filter; None for any state.

    Raises:
        InvalidArgumentError: The state is unknown.
    """
    found = _BLOCK_STATES.member(state)
    if found is None and state != admin_pb2.BLOCK_STATE_UNSPECIFIED:
        raise InvalidArgumentError("state", f"{state} is unknown")
    return found


def block_state_to_proto(state: BlockState | None) -> admin_pb2.BlockState.ValueType:
    """Encodes the block state of a filter."""
    return admin_pb2.BLOCK_STATE_UNSPECIFIED if state is None else _BLOCK_STATES.number(state)

"""Converts the messages of AdminService to and from core values."""

from dataclasses import asdict
from typing import Final

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.ids import BlockHash, BlockId, GroupId, PoolName, RequestId, SessionNumber
from kvpool.core.views.inspection import BlockInfo, BlockState, RequestInfo, SessionInfo
from kvpool.v1 import admin_pb2

_BLOCK_STATES: Final = {state: admin_pb2.BlockState.Value(f"BLOCK_STATE_{state.name}") for state in BlockState}
_BLOCK_STATES_BY_NUMBER: Final = {int(number): state for state, number in _BLOCK_STATES.items()}


def session_to_proto(info: SessionInfo) -> admin_pb2.SessionInfo:
    """Encodes a session."""
    return admin_pb2.SessionInfo(**asdict(info))


def session_from_proto(message: admin_pb2.SessionInfo) -> SessionInfo:
    """Decodes a session."""
    return SessionInfo(
        session_number=SessionNumber(message.session_number),
        client_name=message.client_name,
        pool_name=PoolName(message.pool_name),
        lease_seconds=message.lease_seconds,
        age_seconds=message.age_seconds,
        idle_seconds=message.idle_seconds,
        streaming=message.streaming,
        sequence=message.sequence,
        executed_sequence=message.executed_sequence,
        requests=message.requests,
        running_requests=message.running_requests,
        held_blocks=tuple(message.held_blocks),
        min_blocks=message.min_blocks,
        max_blocks=message.max_blocks,
    )


def request_to_proto(info: RequestInfo) -> admin_pb2.RequestInfo:
    """Encodes a request."""
    return admin_pb2.RequestInfo(**asdict(info))


def request_from_proto(message: admin_pb2.RequestInfo) -> RequestInfo:
    """Decodes a request."""
    return RequestInfo(
        request_id=RequestId(message.request_id),
        session_number=SessionNumber(message.session_number),
        num_tokens=message.num_tokens,
        num_computed_tokens=message.num_computed_tokens,
        held_blocks=tuple(message.held_blocks),
        num_preemptions=message.num_preemptions,
        lora_name=message.lora_name,
    )


def block_to_proto(info: BlockInfo) -> admin_pb2.BlockInfo:
    """Encodes a block."""
    return admin_pb2.BlockInfo(
        block_id=info.block_id,
        state=_BLOCK_STATES[info.state],
        ref_cnt=info.ref_cnt,
        block_hash=info.block_hash,
        group_id=info.group_id,
        session_number=info.session_number,
        pending=info.pending,
    )


def block_from_proto(message: admin_pb2.BlockInfo) -> BlockInfo:
    """Decodes a block. An unknown state of a newer server is decoded as USED, i.e. not available."""
    return BlockInfo(
        block_id=BlockId(message.block_id),
        state=_BLOCK_STATES_BY_NUMBER.get(message.state, BlockState.USED),
        ref_cnt=message.ref_cnt,
        block_hash=BlockHash(message.block_hash),
        group_id=GroupId(message.group_id),
        session_number=SessionNumber(message.session_number),
        pending=message.pending,
    )


def block_state_from_proto(state: int) -> BlockState | None:
    """Decodes the block state of a filter; None for any state.

    Raises:
        InvalidArgumentError: The state is unknown.
    """
    if state == admin_pb2.BLOCK_STATE_UNSPECIFIED:
        return None
    if state not in _BLOCK_STATES_BY_NUMBER:
        raise InvalidArgumentError("state", f"{state} is unknown")
    return _BLOCK_STATES_BY_NUMBER[state]


def block_state_to_proto(state: BlockState | None) -> admin_pb2.BlockState.ValueType:
    """Encodes the block state of a filter."""
    return admin_pb2.BLOCK_STATE_UNSPECIFIED if state is None else _BLOCK_STATES[state]

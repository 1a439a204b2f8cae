"""Between the wire's messages for operators and the core's values, both ways. Shared by server and client."""

from dataclasses import fields
from typing import Final

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.ids import BlockHash, BlockId, GroupId, PoolName, RequestId, SessionNumber
from kvpool.core.views.inspection import BlockInfo, BlockState, RequestInfo, SessionInfo
from kvpool.v1 import admin_pb2

_BLOCK_STATES: Final = {state: admin_pb2.BlockState.Value(f"BLOCK_STATE_{state.name}") for state in BlockState}


def session_to_proto(info: SessionInfo) -> admin_pb2.SessionInfo:
    """Encodes what a session is like."""
    return admin_pb2.SessionInfo(**{field.name: getattr(info, field.name) for field in fields(info)})


def session_from_proto(message: admin_pb2.SessionInfo) -> SessionInfo:
    """Decodes what a session is like."""
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
    """Encodes what a request is like."""
    return admin_pb2.RequestInfo(**{field.name: getattr(info, field.name) for field in fields(info)})


def request_from_proto(message: admin_pb2.RequestInfo) -> RequestInfo:
    """Decodes what a request is like."""
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
    """Encodes what a block is like."""
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
    """Decodes what a block is like; a state that only a newer server knows is taken for used: not to be had."""
    return BlockInfo(
        block_id=BlockId(message.block_id),
        state=next((known for known, wire in _BLOCK_STATES.items() if wire == message.state), BlockState.USED),
        ref_cnt=message.ref_cnt,
        block_hash=BlockHash(message.block_hash),
        group_id=GroupId(message.group_id),
        session_number=SessionNumber(message.session_number),
        pending=message.pending,
    )


def block_state_from_proto(state: int) -> BlockState | None:
    """Decodes the state that blocks are asked for in; None for any.

    Raises:
        InvalidArgumentError: It is unknown.
    """
    if state == admin_pb2.BLOCK_STATE_UNSPECIFIED:
        return None
    for known, wire in _BLOCK_STATES.items():
        if wire == state:
            return known
    raise InvalidArgumentError("state", f"{state} is unknown")


def block_state_to_proto(state: BlockState | None) -> admin_pb2.BlockState.ValueType:
    """Encodes the state that blocks are asked for in."""
    return admin_pb2.BLOCK_STATE_UNSPECIFIED if state is None else _BLOCK_STATES[state]

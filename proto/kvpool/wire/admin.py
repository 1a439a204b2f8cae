"""Converts the messages of AdminService to and from core values."""

from typing import Final

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.ids import GroupId
from kvpool.core.views.inspection import BlockInfo, BlockState, RequestInfo, SessionInfo
from kvpool.core.views.misses import GroupEnd, MissesInfo, PromptEnd, ScopeInfo, UnexecutedBlocks
from kvpool.v1 import admin_pb2
from kvpool.wire import pools as wire_pools
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


def misses_to_proto(info: MissesInfo) -> admin_pb2.ExplainMissesResponse:
    """Encodes what decides whether a session hits, with the none_hash if it is not secret."""
    return admin_pb2.ExplainMissesResponse(
        hash_scheme=wire_pools.hash_scheme_to_proto(info.hash_scheme, with_none_hash=True),
        scopes=[admin_pb2.ScopeInfo(**field_values(ScopeInfo, each)) for each in info.scopes],
        unexecuted=[admin_pb2.UnexecutedBlocks(**field_values(UnexecutedBlocks, each)) for each in info.unexecuted],
        remembered_evictions=info.remembered_evictions,
    )


def misses_from_proto(message: admin_pb2.ExplainMissesResponse) -> MissesInfo:
    """Decodes what decides whether a session hits."""
    return MissesInfo(
        wire_pools.hash_scheme_from_proto("hash_scheme", message.hash_scheme),
        tuple(ScopeInfo(**field_values(ScopeInfo, each)) for each in message.scopes),
        tuple(UnexecutedBlocks(**field_values(UnexecutedBlocks, each)) for each in message.unexecuted),
        message.remembered_evictions,
    )


def prompt_end_to_proto(end: PromptEnd) -> admin_pb2.ExplainPromptResponse:
    """Encodes where a look-up ends."""
    encoded = admin_pb2.ExplainPromptResponse(hit_tokens=end.hit_tokens, groups=map(_group_end_to_proto, end.groups))
    if end.miss:
        group_id, reason, num_tokens = end.miss
        number = wire_pools.miss_reason_to_proto(reason)
        encoded.miss.CopyFrom(admin_pb2.Miss(group_id=group_id, reason=number, num_tokens=num_tokens))
    return encoded


def prompt_end_from_proto(message: admin_pb2.ExplainPromptResponse) -> PromptEnd:
    """Decodes where a look-up ends."""
    miss = None
    if message.HasField("miss"):
        reason = wire_pools.miss_reason_from_proto(message.miss.reason)
        miss = GroupId(message.miss.group_id), reason, message.miss.num_tokens
    return PromptEnd(message.hit_tokens, miss, tuple(map(_group_end_from_proto, message.groups)))


def _group_end_to_proto(end: GroupEnd) -> admin_pb2.GroupEnd:
    encoded = admin_pb2.GroupEnd(**field_values(GroupEnd, end, ["reason"]))
    if end.reason:
        encoded.reason = wire_pools.miss_reason_to_proto(end.reason)
    return encoded


def _group_end_from_proto(message: admin_pb2.GroupEnd) -> GroupEnd:
    values = field_values(GroupEnd, message, ["reason", "missing_block"])
    if not message.HasField("missing_block"):
        return GroupEnd(**values)
    reason = wire_pools.miss_reason_from_proto(message.reason)
    return GroupEnd(missing_block=message.missing_block, reason=reason, **values)

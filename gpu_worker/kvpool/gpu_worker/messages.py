"""Between the wire's messages of a rank and the worker's values: the only place of the worker that sees protobuf."""

from typing import assert_never

from kvpool.core.errors import InvalidArgumentError, check_range
from kvpool.core.ids import MAX_BLOCKS
from kvpool.core.ranks.messages import Registration
from kvpool.gpu_worker.words import (
    Fenced,
    FenceSet,
    Heard,
    Heartbeat,
    Initialized,
    Leave,
    Planned,
    Ready,
    Registered,
    Status,
    Word,
)
from kvpool.v1 import worker_pb2
from kvpool.wire.pools import pool_state_from_proto
from kvpool.wire.ranks import plan_from_proto, registration_to_proto


def register(pool: str, registration: Registration) -> worker_pb2.JoinRequest:
    """Makes a stream's first message."""
    return worker_pb2.JoinRequest(register=registration_to_proto(pool, registration))


def encode(word: Word) -> worker_pb2.JoinRequest:
    """Makes any other."""
    match word:
        case Initialized(epoch, allocation):
            shapes = [
                worker_pb2.TensorShape(layer_name=name, shape=shape, dtype=dtype)
                for name, shape, dtype in allocation.shapes
            ]
            initialized = worker_pb2.Initialized(
                epoch=epoch,
                num_blocks=allocation.num_blocks,
                allocated_bytes=allocation.allocated_bytes,
                shapes=shapes,
            )
            return worker_pb2.JoinRequest(initialized=initialized)
        case Heartbeat(sequence):
            return worker_pb2.JoinRequest(heartbeat=worker_pb2.Heartbeat(sequence=sequence))
        case Fenced(sequence):
            return worker_pb2.JoinRequest(fenced=worker_pb2.Fenced(fence_sequence=sequence))
        case Leave():
            return worker_pb2.JoinRequest(leave=worker_pb2.Leave())
        case _:
            assert_never(word)


def decode(response: worker_pb2.JoinResponse) -> Heard | None:
    """Reads what the server says; None for a kind that only a newer server knows.

    Raises:
        InvalidArgumentError: A plan is of a kind of attention that this worker lacks, or of no blocks; or heartbeats
            have no interval.
    """
    match response.WhichOneof("message"):
        case "registered":
            said = response.registered
            if not (said.heartbeat_seconds > 0 and said.heartbeat_timeout_seconds > 0):
                raise InvalidArgumentError("registered.heartbeat_seconds", "heartbeats need an interval and a timeout")
            return Registered(said.heartbeat_seconds, said.heartbeat_timeout_seconds, said.grace_seconds)
        case "plan":
            check_range("plan.num_blocks", response.plan.num_blocks, 1, MAX_BLOCKS)
            return Planned(response.plan.epoch, plan_from_proto(response.plan), response.plan.max_model_len)
        case "ready":
            return Ready(response.ready.epoch, response.ready.num_blocks, response.ready.max_model_len)
        case "status":
            status = response.status
            state = pool_state_from_proto(status.state)
            return Status(state, status.epoch, tuple(status.absent_ranks), status.heartbeat_sequence)
        case "fence":
            fence = response.fence
            live = tuple(fence.live_session_numbers)
            return FenceSet(fence.fence_sequence, fence.epoch, fence.last_session_number, live)
        case _:
            return None

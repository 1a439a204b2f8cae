"""Encodes protobuf messages for the journal: messages that sessions remember, steps, pool configurations."""

from dataclasses import replace
from typing import Final

from google.protobuf.message import DecodeError, Message

from kvpool.core.execution.check import MAX_REQUEST_NUMBER
from kvpool.core.specs.pool_config import PoolConfig
from kvpool.core.steps.columns import Step
from kvpool.v1 import allocator_pb2, pool_pb2, step_pb2
from kvpool.wire.pools import config_from_proto, config_to_proto
from kvpool.wire.steps import step_from_proto, step_to_proto

_KINDS: Final[dict[int, type[Message]]] = {
    1: step_pb2.Step,
    2: allocator_pb2.GetComputedBlocksRequest,
    3: allocator_pb2.AllocateSlotsRequest,
    4: allocator_pb2.CacheBlocksRequest,
    5: allocator_pb2.FreeRequest,
    6: allocator_pb2.EvictBlocksRequest,
    7: allocator_pb2.ResetPrefixCacheRequest,
    8: allocator_pb2.GetCommonPrefixBlocksRequest,
}
"""Message types by their number in files. Never reuse a number."""
_NUM_NUMBERS: Final = 2**32
_NUMBERS: Final = {kind: number for number, kind in _KINDS.items()}


class WireMessages:
    """See `kvpool.server.journal.calls.WireCodec`."""

    def encode(self, message: object) -> tuple[int, bytes] | None:
        """Returns a message's kind and bytes; None for objects that sessions do not remember as messages."""
        if not isinstance(message, Message):
            return None
        number = _NUMBERS.get(type(message))
        return None if number is None else (number, message.SerializeToString())

    def decode(self, kind: int, encoded: bytes) -> Message:
        """Decodes a message.

        Raises:
            ValueError: The kind is unknown, or the bytes are not a message of this kind.
        """
        known = _KINDS.get(kind)
        if known is None:
            raise ValueError(f"{kind} is not a kind of message")
        try:
            return known.FromString(encoded)
        except DecodeError as error:
            raise ValueError("not a message of this kind") from error

    def encode_step(self, step: Step) -> bytes:
        """Encodes a step. Request numbers below 0, which steps on the wire cannot contain, wrap around."""
        numbers = [number % _NUM_NUMBERS for number in step.request_numbers]
        return step_to_proto(replace(step, request_numbers=numbers), "").SerializeToString()

    def decode_step(self, source: object) -> Step:
        """Decodes a step.

        Raises:
            ValueError: The source is not a step.
        """
        message = self.decode(1, source) if isinstance(source, bytes) else source
        if not isinstance(message, step_pb2.Step):
            raise ValueError("not a step")  # noqa: TRY004 - same type as all errors in a file
        step = step_from_proto(message)
        step.request_numbers = [
            number if number <= MAX_REQUEST_NUMBER else number - _NUM_NUMBERS for number in step.request_numbers
        ]
        return step

    def encode_config(self, config: PoolConfig) -> bytes:
        """Encodes a pool's configuration, including its none_hash."""
        return config_to_proto(config, with_none_hash=True).SerializeToString()

    def decode_config(self, encoded: bytes) -> PoolConfig:
        """Decodes a pool's configuration.

        Raises:
            ValueError: The bytes are not a configuration.
            InvalidArgumentError: A value is out of range in this version.
        """
        try:
            config = config_from_proto(pool_pb2.PoolConfig.FromString(encoded))
        except DecodeError as error:
            raise ValueError("not a pool configuration") from error
        config.check()
        return config

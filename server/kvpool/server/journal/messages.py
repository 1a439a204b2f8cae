"""The wire's messages as a journal keeps them: what sessions remember, steps, pools' configurations."""

from dataclasses import replace
from typing import Final

from google.protobuf.message import DecodeError, Message

from kvpool.core.specs.pool_config import PoolConfig
from kvpool.core.steps.columns import MAX_REQUEST_NUMBER, Step
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
"""By the number that files hold: never to be given to another."""
_NUM_NUMBERS: Final = 2**32
_NUMBERS: Final = {kind: number for number, kind in _KINDS.items()}


class WireMessages:
    """Encodes and decodes them."""

    def encode(self, message: object) -> tuple[int, bytes] | None:
        """A message's kind and bytes; None for what is none that a session remembers."""
        if not isinstance(message, Message):
            return None
        number = _NUMBERS.get(type(message))
        return None if number is None else (number, message.SerializeToString())

    def decode(self, kind: int, encoded: bytes) -> Message:
        """Makes the message again.

        Raises:
            ValueError: There is no such kind, or the bytes are no message of it.
        """
        known = _KINDS.get(kind)
        if known is None:
            raise ValueError(f"{kind} is no kind of message")
        try:
            return known.FromString(encoded)
        except DecodeError as error:
            raise ValueError("no message of its kind") from error

    def encode_step(self, step: Step) -> bytes:
        """A step, of whatever session. Numbers below 0, of requests that steps cannot name, wrap around."""
        numbers = [number % _NUM_NUMBERS for number in step.request_numbers]
        return step_to_proto(replace(step, request_numbers=numbers), "").SerializeToString()

    def decode_step(self, source: object) -> Step:
        """The step that a message is.

        Raises:
            ValueError: It is none.
        """
        message = self.decode(1, source) if isinstance(source, bytes) else source
        if not isinstance(message, step_pb2.Step):
            raise ValueError("no step")  # noqa: TRY004 - as all that is wrong with a file
        step = step_from_proto(message)
        step.request_numbers = [
            number if number <= MAX_REQUEST_NUMBER else number - _NUM_NUMBERS for number in step.request_numbers
        ]
        return step

    def encode_config(self, config: PoolConfig) -> bytes:
        """A pool's configuration, its none_hash included."""
        return config_to_proto(config, with_none_hash=True).SerializeToString()

    def decode_config(self, encoded: bytes) -> PoolConfig:
        """Makes it again.

        Raises:
            ValueError: The bytes are none.
            InvalidArgumentError: It is out of range here.
        """
        try:
            config = config_from_proto(pool_pb2.PoolConfig.FromString(encoded))
        except DecodeError as error:
            raise ValueError("no pool") from error
        config.check()
        return config

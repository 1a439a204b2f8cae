"""The number of fields of an encoded message."""

import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from kvpool.v1 import allocator_pb2, pool_pb2, step_pb2, worker_pb2
from kvpool.wire.message_fields import has_more_fields

GROUP = allocator_pb2.GroupBlocks(block_ids=range(1000))
MAPPING = pool_pb2.MappingProcess()
MESSAGES: dict[str, tuple[Message, int]] = {
    "empty": (step_pb2.Step(), 0),
    "packed": (step_pb2.Step(sequence=2**60, token_ids=range(100_000)), 2),
    "strings": (step_pb2.Step(request_ids=["", "a" * 300, "b"], lora_names=[""] * 4, block_hashes=b"\x80" * 500), 8),
    "nested": (
        allocator_pb2.AllocateSlotsRequest(computed=allocator_pb2.ComputedBlocks(groups=[GROUP] * 3)),
        1 + 3 * 2,
    ),
    "floats": (allocator_pb2.OpenSessionRequest(pool_name="m", lease_seconds=0.5), 2),
    "one of": (worker_pb2.JoinRequest(heartbeat=worker_pb2.Heartbeat(sequence=1, mapping_processes=[MAPPING] * 2)), 4),
}


@pytest.mark.parametrize(("message", "num_fields"), MESSAGES.values(), ids=MESSAGES)
def test_fields_of_all_levels_are_counted(message: Message, num_fields: int) -> None:
    data = message.SerializeToString()
    assert isinstance(message.DESCRIPTOR, Descriptor)
    counted = [has_more_fields(data, message.DESCRIPTOR, maximum) for maximum in (num_fields - 1, num_fields)]
    assert counted == [True, False]


@pytest.mark.parametrize(
    "unknown", [b"\xf8\x7f\x01", b"\xf9\x7f" + b"\xff" * 8, b"\xfd\x7f" + b"\xff" * 4, b"\xfb\x7f\xfc\x7f"]
)
def test_unknown_fields_are_counted(unknown: bytes) -> None:
    data = unknown * 10
    assert has_more_fields(data, step_pb2.Step.DESCRIPTOR, 9)
    assert not has_more_fields(data, step_pb2.Step.DESCRIPTOR, 20)


@pytest.mark.parametrize(
    "data",
    [
        b"\x80",
        b"\x08",
        b"\xff" * 2**20,
        b"\x08" + b"\x80" * 2**20,
        b"\x82\x01\xff\xff\xff\xff\xff\xff\xff\xff\x7f",
        b"\x82\x01\x05a",
    ],
)
def test_a_malformed_message_has_few_fields(data: bytes) -> None:
    assert not has_more_fields(data, step_pb2.Step.DESCRIPTOR, 1)

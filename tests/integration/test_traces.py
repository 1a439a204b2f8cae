"""Spans that a server sends to a real collector, over OTLP."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import grpc
import pytest

from kvpool.client import Client, ExhaustedError, Session, connect
from kvpool.v1 import allocator_pb2, allocator_pb2_grpc, step_pb2
from support.server import ServerProcess, free_port, pool_config, server_process
from support.traces import Collector, attributes_of, collector

TRACE: Final = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT: Final = "00f067aa0ba902b7"
TRACE_PARENT: Final = f"00-{TRACE}-{PARENT}-01"
UNSAMPLED: Final = f"00-{TRACE}-{PARENT}-00"
PROMPT: Final = list(range(41))  # ten full blocks and one token
NEVER_SLOW_SECONDS: Final = 3600.0


@contextlib.contextmanager
def traced(slow_seconds: float = NEVER_SLOW_SECONDS) -> Iterator[tuple[str, Collector]]:
    """Runs a server that is traced. The collector has all spans at the end of the context."""
    with (
        collector() as spans,
        server_process(tracing={"endpoint": spans.endpoint, "slow_seconds": slow_seconds}) as server,
    ):
        yield server.addresses[0], spans


@contextlib.contextmanager
def opened(address: str, num_blocks: int = 100) -> Iterator[tuple[Client, Session]]:
    with connect(address) as client:
        client.create_pool(pool_config(num_blocks=num_blocks))
        with client.open_session("m", client_name="engine-a") as session:
            yield client, session


def test_an_admission_has_a_span_in_the_trace_of_its_request() -> None:
    with traced() as (address, spans), opened(address) as (_, session):
        first = session.request("cmpl-1", PROMPT, trace_parent=TRACE_PARENT)
        session.admit(first)
        session.allocate_slots(first, 1)
        session.preempt(first)
        session.admit(first)
        second = session.request("cmpl-2", PROMPT)
        session.allocate_slots(second, 4, computed=session.get_computed_blocks(second))
    assert spans.services == {"kvpool"}
    again = {"kvpool.hit_tokens": 40, "kvpool.new_tokens": 1, "kvpool.preemptions": 1, "kvpool.blocks": 11}
    expected = [
        ("cmpl-1", {"kvpool.hit_tokens": 0, "kvpool.new_tokens": 41, "kvpool.blocks": 11, "kvpool.preemptions": 0}),
        ("cmpl-1", again),
        ("cmpl-2", {"kvpool.hit_tokens": 40, "kvpool.new_tokens": 4, "kvpool.prompt_tokens": 41}),
    ]
    admissions = spans.named("kvpool.admission")
    for span, (request_id, attributes) in zip(admissions, expected, strict=True):
        everywhere = {"kvpool.pool": "m", "kvpool.client": "engine-a", "gen_ai.request.id": request_id}
        assert {**everywhere, **attributes}.items() <= attributes_of(span).items()
        assert span.start_time_unix_nano < span.end_time_unix_nano
    assert [(span.trace_id.hex(), span.parent_span_id.hex()) for span in admissions[:2]] == [(TRACE, PARENT)] * 2
    assert admissions[2].trace_id.hex() != TRACE
    assert not admissions[2].parent_span_id


def test_a_refused_admission_and_one_that_is_not_sampled_have_no_span() -> None:
    with traced() as (address, spans), opened(address, num_blocks=4) as (_, session):
        with pytest.raises(ExhaustedError, match="more blocks"):
            session.admit(session.request("large", PROMPT))
        session.admit(session.request("unsampled", PROMPT[:4], trace_parent=UNSAMPLED))
        session.admit(session.request("malformed", PROMPT[:4], trace_parent="00-zz"))
    (span,) = spans.spans
    assert attributes_of(span)["gen_ai.request.id"] == "malformed"
    assert not span.parent_span_id


def test_a_step_that_is_sent_again_has_no_second_span() -> None:
    with traced() as (address, spans), opened(address) as (_, session):
        admit, free = (
            step_pb2.Step(session_id=session.session_id, sequence=sequence, operations=[operation], request_numbers=[1])
            for sequence, operation in ((1, step_pb2.OPERATION_ADMIT), (2, step_pb2.OPERATION_FREE))
        )
        admit.MergeFrom(step_pb2.Step(declares=[True], request_ids=["r"], num_appended_tokens=[3]))
        with grpc.insecure_channel(address) as channel:
            answers = list(allocator_pb2_grpc.AllocatorServiceStub(channel).Schedule(iter([admit, free, admit])))
    assert [answer.sequence for answer in answers] == [1, 2, 1]
    assert len(spans.named("kvpool.admission")) == 1


def test_the_context_of_a_call_is_in_its_metadata() -> None:
    with traced(slow_seconds=0) as (address, spans), opened(address) as (_, session):
        update = allocator_pb2.RequestUpdate(request_id="r", num_appended_tokens=4, block_hashes=bytes(32))
        request = allocator_pb2.AllocateSlotsRequest(
            session_id=session.session_id, sequence=1, request=update, num_new_tokens=4
        )
        metadata = (("traceparent", TRACE_PARENT),)
        with grpc.insecure_channel(address) as channel:
            stub = allocator_pb2_grpc.AllocatorServiceStub(channel)
            stub.AllocateSlots(request, metadata=metadata)
            with pytest.raises(grpc.RpcError):
                stub.GetPool(allocator_pb2.GetPoolRequest(pool_name="none"), metadata=metadata)
    (admission,) = spans.named("kvpool.admission")
    (call,) = spans.named("kvpool.v1.AllocatorService/AllocateSlots")
    refused = next(span for span in spans.named("kvpool.v1.AllocatorService/GetPool") if span.parent_span_id)
    for span in (admission, call, refused):
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert attributes_of(call)["rpc.grpc.status"] == "OK"
    assert attributes_of(refused)["rpc.grpc.status"] == "NOT_FOUND"


def test_a_slow_step_has_a_span() -> None:
    with traced(slow_seconds=0) as (address, spans), opened(address) as (_, session):
        session.admit(session.request("r", PROMPT))
    (step,) = spans.named("kvpool.v1.AllocatorService/Schedule")
    expected = {"rpc.method": "Schedule", "kvpool.pool": "m", "kvpool.client": "engine-a", "kvpool.sequence": 1}
    assert expected.items() <= attributes_of(step).items()


def test_a_collector_that_is_down_disturbs_no_call(tmp_path: Path) -> None:
    tracing = {"endpoint": f"http://127.0.0.1:{free_port()}", "slow_seconds": 0.0}
    server = ServerProcess(f"unix:{tmp_path / 's'}", tracing=tracing)
    with contextlib.ExitStack() as stack:
        stack.callback(server.kill)
        with opened(server.addresses[0]) as (_, session):
            assert session.admit(session.request("r", PROMPT)) is not None
        assert "Failed to export traces" in server.stop_cleanly(expected=["opentelemetry.exporter"])

"""Spans of admissions and slow calls, sent to a collector over OTLP. Needs the packages of the extra 'otel'.

1. An admission is the allocation that gives a request its first blocks, after it was declared or preempted. Its span
   is a child of the request's trace context; without one, of the context in the metadata of its call or stream.
2. A call with one request and one response, or a step, has a span if it took long. A call that waits by its purpose,
   such as WaitUntilReady, is no exception.
3. Whether a span is recorded is the sampler's decision, by default that of the parent. The variables OTEL_* of the
   OpenTelemetry SDK choose the sampler, the resource, and headers and certificates of the collector.
4. Without a tracer, a step costs two comparisons more.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, TraceFlags, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.ids import RequestNumber
from kvpool.core.sessions.session import Session
from kvpool.core.steps.columns import Operation, Outcome, Step, StepResult
from kvpool.server.config import TracingConfig

_TRACE_PARENT_KEY: Final = "traceparent"
_SCHEDULE: Final = "kvpool.v1.AllocatorService/Schedule"
_EXPORT_SECONDS: Final = 5.0
"""Maximum duration of an export, and thus of a stop while the collector does not answer."""
_NS_PER_SECOND: Final = 1_000_000_000
_PROPAGATOR: Final = TraceContextTextMapPropagator()


@dataclass(slots=True)
class _Call:
    """The call of the current task.

    Attributes:
        parent: The trace context in its metadata.
        arrived_ns: When its request, or the newest message of its stream, arrived.
    """

    parent: Context
    arrived_ns: int


_CALL: Final[ContextVar[_Call]] = ContextVar("_CALL")


class Tracer:
    """The tracer of one server.

    Args:
        config: Where to send the spans, and which calls are slow.
    """

    def __init__(self, config: TracingConfig) -> None:
        self._slow_ns = round(config.slow_seconds * _NS_PER_SECOND)
        resource = Resource.create({SERVICE_NAME: "kvpool"})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=config.endpoint, timeout=_EXPORT_SECONDS)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("kvpool.server")

    def begin_call(self, header: Callable[[str], str]) -> None:
        """Begins a call in the current task. `header` returns what its metadata have under a key; empty for nothing."""
        parent = _PROPAGATOR.extract({_TRACE_PARENT_KEY: header(_TRACE_PARENT_KEY)}, Context())  # none if malformed
        _CALL.set(_Call(parent, time.time_ns()))

    def message_arrived(self) -> None:
        """Records the time at which the request of the call, or a message of its stream, arrived."""
        _CALL.get().arrived_ns = time.time_ns()

    def end_call(self, method: str, code: str, **attributes: AttributeValue) -> None:
        """Makes the span of a call, or of a step of its stream, if it took long.

        Args:
            method: `package.Service/Method`.
            code: Name of its status.
            attributes: More attributes, without the prefix `kvpool.`.
        """
        call = _CALL.get()
        if time.time_ns() - call.arrived_ns >= self._slow_ns:
            service, _, name = method.partition("/")
            rpc = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": name, "rpc.grpc.status": code}
            self._record(method, call.parent, {**rpc, **_prefixed(attributes)})

    def end_step(self, pool: KVCacheManager, session: Session, sequence: int) -> None:
        """Makes the span of a step of a stream, if it took long."""
        self.end_call(_SCHEDULE, "OK", **_of_step(pool, session, sequence))

    def admissions(self, session: Session, step: Step) -> list[tuple[int, RequestNumber]]:
        """The operations of a step, which may be invalid, that would give their request its first blocks.

        Returns:
            The row of each, with its request; none for a step that is sent again. O(operations).
        """
        found = []
        for i, (operation, number) in enumerate(zip(step.operations, step.request_numbers, strict=False)):
            if operation in (Operation.ADMIT, Operation.ALLOCATE):
                request = session.by_number.get(RequestNumber(number))
                if request is None or not request.holds_blocks:
                    found.append((i, RequestNumber(number)))
        return found

    def record_admissions(
        self,
        pool: KVCacheManager,
        session: Session,
        rows: list[tuple[int, RequestNumber]],
        step: Step,
        result: StepResult,
    ) -> None:
        """Makes the spans of those of these operations that succeeded."""
        common = _prefixed(_of_step(pool, session, step.sequence))
        for trace_context, attributes in _admitted(session, rows, step, result):
            parent = _unpacked(trace_context) if any(trace_context) else _CALL.get().parent
            self._record("kvpool.admission", parent, {**attributes, **common})

    def _record(self, name: str, parent: Context, attributes: dict[str, AttributeValue]) -> None:
        start_ns = _CALL.get().arrived_ns
        span = self._tracer.start_span(name, parent, SpanKind.SERVER, attributes, start_time=start_ns)
        span.end(max(time.time_ns(), start_ns))

    async def stop(self) -> None:
        """Sends the spans that were recorded, and stops."""
        await asyncio.to_thread(self._provider.shutdown)


def _admitted(
    session: Session, rows: list[tuple[int, RequestNumber]], step: Step, result: StepResult
) -> Iterator[tuple[bytes, dict[str, AttributeValue]]]:
    """Yields the trace context and the attributes of the request of each admission that succeeded."""
    for i, number in rows:
        if result.outcomes and result.outcomes[i] != Outcome.OK:
            continue
        request = session.by_number[number]
        if step.operations[i] == Operation.ADMIT:
            new_tokens = result.num_new_tokens[i] if result.num_new_tokens else 0
        else:
            new_tokens = step.num_new_tokens[i] if step.num_new_tokens else 0
        external_tokens = step.num_external_tokens[i] if step.num_external_tokens else 0
        found = {
            "prompt_tokens": request.num_prompt_tokens,
            "hit_tokens": request.num_computed_tokens - new_tokens - external_tokens,
            "new_tokens": new_tokens,
            "external_tokens": external_tokens,
            "blocks": sum(len(table.block_ids) - table.num_skipped for table in request.tables),
            "preemptions": request.num_preemptions,
        }
        yield request.trace_context, {"gen_ai.request.id": request.request_id, **_prefixed(found)}


def _unpacked(packed: bytes) -> Context:
    trace_id, span_id = int.from_bytes(packed[:16]), int.from_bytes(packed[16:24])
    remote = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(packed[24]))
    return set_span_in_context(NonRecordingSpan(remote), Context())


def _of_step(pool: KVCacheManager, session: Session, sequence: int) -> dict[str, AttributeValue]:
    """The attributes of a step."""
    return {
        "pool": pool.config.name,
        "epoch": pool.epoch,
        "client": session.client_name,
        "session": session.session_number,
        "sequence": sequence,
    }


def _prefixed(attributes: Mapping[str, AttributeValue]) -> dict[str, AttributeValue]:
    return {f"kvpool.{name}": value for name, value in attributes.items()}

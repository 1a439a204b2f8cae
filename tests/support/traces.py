"""A collector of spans, with a real socket."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """A collector. A server sends it the last spans before it stops.

    Attributes:
        endpoint: Where it is.
        spans: The spans that it got.
        services: Names of the services that sent them.
    """

    def __init__(self) -> None:
        self.endpoint = ""
        self.spans: list[Span] = []
        self.services = set[str]()

    def Export(  # noqa: N802 - of gRPC
        self, request: trace_service_pb2.ExportTraceServiceRequest, _: object
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            self.services.add(attributes_of(resource.resource)["service.name"])
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def named(self, name: str) -> list[Span]:
        """The spans of this name, in the order in which they began."""
        return sorted((span for span in self.spans if span.name == name), key=lambda span: span.start_time_unix_nano)


def attributes_of(holder: Any) -> dict[str, Any]:
    """The attributes of a span or a resource."""
    return {each.key: getattr(each.value, str(each.value.WhichOneof("value"))) for each in holder.attributes}


@contextlib.contextmanager
def collector() -> Iterator[Collector]:
    """Runs a collector."""
    made, server = Collector(), grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(made, server)  # type: ignore[no-untyped-call]
    made.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield made
    finally:
        server.stop(None).wait()

"""The trace context of an engine's request reaches the span of its admission."""

from pathlib import Path

from engine.driving import Driver, Setup, make_scheduler
from engine.service import service
from kvpool.client.vllm import Scheduler
from support.traces import attributes_of, collector

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_an_admission_belongs_to_the_trace_of_its_request(tmp_path: Path) -> None:
    with collector() as spans:
        with service(tmp_path, "--otlp-traces-endpoint", spans.endpoint) as served:
            setup = Setup(additional_config={"kvpool": {"address": served.address, "pool": "m"}})
            scheduler = make_scheduler(Scheduler, setup, tmp_path)
            driver = Driver(scheduler, setup)
            for request_id, context in (("a", f"00-{TRACE}-{PARENT}-01"), ("b", "x" * 300)):
                driver.add(request_id, list(range(40)), 2, trace_headers={"traceparent": context})
            driver.finish()
            scheduler.shutdown()
        by_request = {attributes_of(span)["gen_ai.request.id"]: span for span in spans.named("kvpool.admission")}
    assert (by_request["a"].trace_id.hex(), by_request["a"].parent_span_id.hex()) == (TRACE, PARENT)
    assert not by_request["b"].parent_span_id

"""Stages of a decode step: client, messages and core in this process, and the rest, which counts as transport.

All stages run in this process one after another, so that code and data of each stage are warm. In a separate server
process they are less warm; that difference counts as transport.
"""

from typing import Final

from benchmarks.race import Figures, race
from benchmarks.report import Run
from benchmarks.session_target import SessionTarget
from benchmarks.workloads import Micros, Stopwatch, Task, Workload, open_workload
from kvpool.client import Client
from kvpool.client.blocking import run
from kvpool.client.connection import connect_as
from kvpool.client.transports.embedded import EmbeddedTransport
from kvpool.core.steps.columns import Step, StepResult
from kvpool.v1 import step_pb2
from kvpool.wire import steps as wire_steps
from kvpool.wire.channels import ClientCredentials

_STEP: Final = "decode_step_256_requests"
IN_PROCESS: Final = ("client", "encode_step", "decode_step", "core", "encode_result", "decode_result")
"""The stages in order. The client works before and after the others."""


def stages(run: Run) -> None:
    """Measures a decode step of 256 requests by stage and through a server."""
    task = Task("decodes", run.scale.num_blocks, prompt_blocks=4)
    transport = _StagedTransport()
    staged = _Staged(open_workload(SessionTarget(Client(transport), "stages", task), task), transport)
    with connect_as(ClientCredentials(), run.server.addresses[0]) as client:
        served = open_workload(SessionTarget(client, "stages", task), task)
        turns: dict[str, Workload] = {"staged": staged, "served": served}
        measured = race(turns, run.scale.num_rounds, run.scale.steps_a_round, run.advance)
    figures: Figures = measured["staged"]
    figures["client"] = figures.pop(_STEP) - sum(figures[name] for name in IN_PROCESS[1:])
    run.report.stages = {name: figures[name] for name in IN_PROCESS}
    run.report.stages["transport"] = measured["served"][_STEP] - sum(run.report.stages.values())


class _StagedTransport(EmbeddedTransport):
    """The core in process, called through encoded and decoded messages."""

    def __init__(self) -> None:
        super().__init__()
        self.stopwatch = Stopwatch()

    async def apply(self, session_id: str, step: Step) -> StepResult:
        """See `Transport`."""
        time = self.stopwatch.time
        sent = time("encode_step", lambda: wire_steps.step_to_proto(step, session_id).SerializeToString())
        received = time("decode_step", lambda: wire_steps.step_from_proto(step_pb2.Step.FromString(sent)))
        result = time("core", run, super().apply(session_id, received))
        answer = time("encode_result", lambda: wire_steps.result_to_proto(result).SerializeToString())
        return time("decode_result", lambda: wire_steps.result_from_proto(step_pb2.StepResult.FromString(answer)))


class _Staged:
    """Decode steps with times of their stages. See `Workload`."""

    def __init__(self, decodes: Workload, transport: _StagedTransport) -> None:
        self._decodes = decodes
        self._transport = transport

    def round(self, count: int) -> Micros:
        """See `Workload`."""
        self._transport.stopwatch = Stopwatch()
        return self._decodes.round(count) | self._transport.stopwatch.micros

    def close(self) -> None:
        """See `Workload`."""
        self._decodes.close()

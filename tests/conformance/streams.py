"""Steps over one long stream of Schedule for each session, as clients in other languages send them."""

import json
import os
import queue
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
from google.protobuf import json_format

from kvpool.client import Client
from kvpool.client.transports.blocking_grpc import BlockingGrpcTransport
from kvpool.client.transports.transport import OpenedSession, SessionCalls, SessionOptions
from kvpool.core.steps.columns import Step, StepResult
from kvpool.v1 import allocator_pb2_grpc, step_pb2
from kvpool.wire import steps as wire_steps
from support.paths import ROOT
from support.waiting import DEADLINE_SECONDS

_NODE: Final = Path(__file__).parent / "node"
_NODE_MODULES: Final = ROOT / ".venv-node" / "node_modules"
needs_node = pytest.mark.skipif(
    shutil.which("node") is None or not _NODE_MODULES.exists(),
    reason="needs node, and packages that .ci/run installs",
)

_CLOSED: Final = "session_id: the session was closed"
"""The error with which a stream ends whose session was closed."""

Exchange = Callable[[step_pb2.Step], step_pb2.StepResult]
"""Sends a step and waits for its result."""


@contextmanager
def stub_stream(address: str) -> Iterator[Exchange]:
    """A stream of the stub that gRPC's compiler makes for Python."""
    steps: queue.SimpleQueue[step_pb2.Step | None] = queue.SimpleQueue()
    with grpc.insecure_channel(address) as channel:
        results = allocator_pb2_grpc.AllocatorServiceStub(channel).Schedule(iter(steps.get, None))

        def exchange(step: step_pb2.Step) -> step_pb2.StepResult:
            steps.put(step)
            return next(results)

        yield exchange
        with pytest.raises(grpc.RpcError, match=_CLOSED):
            next(results)
        steps.put(None)


@contextmanager
def node_stream(address: str) -> Iterator[Exchange]:
    """A stream of a program for Node.js that reads the protos."""
    command = ["node", str(_NODE / "schedule.js"), str(ROOT / "proto"), address]
    environment = {**os.environ, "NODE_PATH": str(_NODE_MODULES)}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        assert process.stdin
        assert process.stdout
        steps, results = process.stdin, process.stdout

        def exchange(step: step_pb2.Step) -> step_pb2.StepResult:
            steps.write(json.dumps(json_format.MessageToDict(step, preserving_proto_field_name=True)) + "\n")
            return json_format.Parse(results.readline(), step_pb2.StepResult())

        yield exchange
        assert json.loads(results.read()) == {"error": _CLOSED}


@contextmanager
def streaming_client(address: str, exchange: Exchange) -> Iterator[Client]:
    """A client whose only session sends its steps over a stream."""
    with Client(_Service(BlockingGrpcTransport(address, DEADLINE_SECONDS), exchange)) as client:
        yield client


class _Service:
    """A transport with other calls of a session."""

    def __init__(self, service: BlockingGrpcTransport, exchange: Exchange) -> None:
        self._service = service
        self._exchange = exchange

    def __getattr__(self, name: str) -> Any:
        return getattr(self._service, name)

    async def open_session(self, options: SessionOptions) -> OpenedSession:
        opened = await self._service.open_session(options)
        return replace(opened, calls=_Calls(opened.calls, opened.session_id, self._exchange))


class _Calls:
    """The calls of a session, with steps over a stream."""

    def __init__(self, calls: SessionCalls, session_id: str, exchange: Exchange) -> None:
        self._calls = calls
        self._session_id = session_id
        self._exchange = exchange

    def __getattr__(self, name: str) -> Any:
        return getattr(self._calls, name)

    async def exchange(self, step: Step) -> StepResult:
        return wire_steps.result_from_proto(self._exchange(wire_steps.step_to_proto(step, self._session_id)))

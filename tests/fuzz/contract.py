"""The documented contract: every RPC, and the status codes that its comment names."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc
from google.protobuf import message_factory
from google.protobuf.message import Message

from kvpool.v1 import admin_pb2, allocator_pb2, directory_pb2, event_pb2, worker_pb2

_PROTOS: Final = Path(__file__).parents[2] / "proto" / "kvpool" / "v1"
_FILES: Final = (admin_pb2, allocator_pb2, directory_pb2, event_pb2, worker_pb2)
_DECLARED: Final = re.compile(r"\s*(service|rpc) (\w+)")
_CODES: Final = {code.name: code for code in grpc.StatusCode}
_OF_ANY_CALL: Final = frozenset(
    (
        grpc.StatusCode.OK,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    )  # from the comment of AllocatorService
)
_OF_ITS_SERVICE: Final = frozenset(("Join",))
"""Services with one RPC, whose comment names the codes."""


@dataclass(frozen=True, slots=True)
class Method:
    """An RPC.

    Attributes:
        service: Name of the service.
        name: Name of the method.
        request: Class of the request.
        is_stream: Whether requests are streamed.
        answers_stream: Whether responses are streamed.
        codes: All documented status codes.
    """

    service: str
    name: str
    request: type[Message]
    is_stream: bool
    answers_stream: bool
    codes: frozenset[grpc.StatusCode]

    @property
    def path(self) -> str:
        """Path of the method in HTTP/2."""
        return f"/kvpool.v1.{self.service}/{self.name}"

    @property
    def key(self) -> str:
        """Unique name of the method."""
        return f"{self.service}.{self.name}"


def _codes(comment: str) -> frozenset[grpc.StatusCode]:
    return frozenset(_CODES[word] for word in re.findall(r"\b[A-Z_]+\b", comment) if word in _CODES)


def _comments() -> dict[tuple[str, str], str]:
    """Comment of each RPC by service and name; the comment of its service if it names no code."""
    found = {}
    for path in sorted(_PROTOS.glob("*.proto")):
        comment = about = service = ""
        for line in path.read_text().splitlines():
            if line.lstrip().startswith("//"):
                comment += line
                continue
            declared = _DECLARED.match(line)
            if declared and declared[1] == "service":
                about, service = comment, declared[2]
            elif declared:
                found[service, declared[2]] = about if declared[2] in _OF_ITS_SERVICE else comment
            comment = ""
    return found


def _methods() -> dict[str, Method]:
    comments = _comments()
    methods = {}
    for module in _FILES:
        for service in module.DESCRIPTOR.services_by_name.values():
            for rpc in service.methods:
                method = Method(
                    service.name,
                    rpc.name,
                    message_factory.GetMessageClass(rpc.input_type),
                    is_stream=rpc.client_streaming,
                    answers_stream=rpc.server_streaming,
                    codes=_codes(comments[service.name, rpc.name]) | _OF_ANY_CALL,
                )
                methods[method.key] = method
    return methods


METHODS: Final = _methods()
"""All RPCs, by service and name."""

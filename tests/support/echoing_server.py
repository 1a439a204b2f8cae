"""A server in front of another one, whose answers have a text of the test in every field that holds text."""

from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_status import rpc_status

from kvpool.core.errors import WrongStateError
from kvpool.v1 import admin_pb2  # noqa: F401 - registers its messages
from kvpool.wire.errors import to_status
from support.waiting import DEADLINE_SECONDS

PACKAGE: Final = "kvpool.v1."


def fill(message: Message, text: str, kept: Collection[str]) -> None:
    """Puts a text into all strings of a message and of its parts, and an element into lists that are empty.

    Args:
        message: The message.
        text: The text.
        kept: Names of fields that keep their values, as `Message.field`.
    """
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if f"{message.DESCRIPTOR.name}.{field.name}" in kept:
            continue
        if field.message_type and not field.message_type.GetOptions().map_entry:
            if field.is_repeated and not value:
                _set_others(value.add())
            elif not field.is_repeated and not message.HasField(field.name):
                continue
            for part in value if field.is_repeated else (value,):
                fill(part, text, kept)
        elif field.type == FieldDescriptor.TYPE_STRING:
            if field.is_repeated:
                value[:] = [text] * max(len(value), 1)
            else:
                setattr(message, field.name, text)


def _set_others(message: Message) -> None:
    """Puts 1 into the numbers and enums of a message, as unspecified ones are refused."""
    for field in message.DESCRIPTOR.fields:
        if (
            not field.is_repeated
            and not field.message_type
            and field.type
            not in (
                FieldDescriptor.TYPE_STRING,
                FieldDescriptor.TYPE_BYTES,
            )
        ):
            setattr(message, field.name, 1)


class _Front(grpc.GenericRpcHandler):
    def __init__(self, channel: grpc.Channel, text: str, kept: Collection[str], *, refuses: bool) -> None:
        self._channel, self._text, self._kept, self._refuses = channel, text, kept, refuses

    def service(self, handler_call_details: Any) -> Any:
        path: str = handler_call_details.method
        return grpc.unary_unary_rpc_method_handler(lambda request, context: self._answer(path, request, context))

    def _answer(self, path: str, request: bytes, context: grpc.ServicerContext) -> bytes:
        if self._refuses:
            error = WrongStateError(self._text, self._text, field=self._text)
            context.abort_with_status(rpc_status.to_status(to_status(error)))
        try:
            call: Any = self._channel.unary_unary(path)
            answered: bytes = call(request, timeout=DEADLINE_SECONDS)
        except grpc.RpcError as error:
            context.abort(error.code(), error.details() or "")
        service, _, method = path[1:].partition("/")
        if not service.startswith(PACKAGE):
            return answered
        output = descriptor_pool.Default().FindServiceByName(service).methods_by_name[method].output_type
        message = GetMessageClass(output).FromString(answered)
        fill(message, self._text, self._kept)
        return bytes(message.SerializeToString())


@contextmanager
def echoing_server(address: str, text: str, kept: Collection[str] = (), *, refuses: bool = False) -> Iterator[str]:
    """Runs the server, and yields its address.

    Args:
        address: The server that answers.
        text: What all fields get.
        kept: Names of fields that keep their values, as `Message.field`.
        refuses: Whether each call is refused, with an error that has the text everywhere.
    """
    with grpc.insecure_channel(address) as channel:
        server = grpc.server(ThreadPoolExecutor(4))
        server.add_generic_rpc_handlers((_Front(channel, text, kept, refuses=refuses),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(None).wait()

"""vLLM's ZeroMQ publisher of block events, on a socket that reports subscriptions."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Event
from types import SimpleNamespace
from typing import Any

import zmq
from vllm.distributed import kv_events


class Publisher(kv_events.ZmqEventPublisher):  # type: ignore[misc]  # vLLM has no types here
    """vLLM's publisher with an XPUB socket instead of PUB, which drops what is sent before a subscriber has subscribed.

    Attributes:
        subscribed: Set when a subscriber has subscribed, also after it has lost its connection.
    """

    _ctx: Any

    def _socket_setup(self) -> None:
        self.subscribed = Event()
        context, take = self._ctx, self._event_queue.get
        self._ctx = SimpleNamespace(socket=lambda kind: context.socket(zmq.XPUB if kind == zmq.PUB else kind))
        super()._socket_setup()
        self._ctx = context
        self._pub.setsockopt(zmq.XPUB_VERBOSE, 1)  # each subscription, not only the first to a topic

        def read_and_take(timeout: float) -> object:
            self._read_subscriptions()
            return take(timeout=timeout)

        # The publisher's thread, which alone may use the socket, waits at most 0.1 s for an event.
        self._event_queue.get = read_and_take

    def _read_subscriptions(self) -> None:
        with suppress(zmq.ZMQError):  # else the thread would end; an error comes again when an event is sent
            while self._pub.poll(0):
                if self._pub.recv().startswith(b"\x01"):
                    self.subscribed.set()


@contextmanager
def replaced_publisher() -> Iterator[None]:
    """Lets vLLM make this publisher where it would make its own for ZeroMQ."""
    registry = kv_events.EventPublisherFactory._registry  # noqa: SLF001 - has no method that replaces
    own, registry["zmq"] = registry["zmq"], Publisher
    try:
        yield
    finally:
        registry["zmq"] = own

"""Health of a rank by the standard protocol (grpc.health.v1): SERVING while its pool is ready. Needs no torch."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvpool.gpu_worker.status import WorkerStatus
from kvpool.wire.address import DEFAULT_SOCKET_MODE, BoundSocket

_THREADS: Final = 2
_STOP_SECONDS: Final = 1.0
_SERVING, _NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@contextmanager
def health_served(address: str) -> Iterator[tuple[str, Callable[[WorkerStatus], None]]]:
    """Serves health checks, with NOT_SERVING as the first status.

    Args:
        address: Address to listen on: `host:port` (port 0 for a free one) or `unix:/path`.

    Yields:
        The address, with port 0 replaced by the assigned port, and a callback for `WorkerHooks.on_status`.

    Raises:
        OSError: The address cannot be bound.
    """
    servicer = health.HealthServicer()
    servicer.set(health.OVERALL_HEALTH, _NOT_SERVING)
    pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvpool-health")
    server = grpc.server(pool, options=[("grpc.so_reuseport", 0)])
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    socket = BoundSocket(address)
    try:
        with socket.made(DEFAULT_SOCKET_MODE):
            port = server.add_insecure_port(socket.address)
    except RuntimeError as error:
        raise OSError("grpc cannot bind it; is it in use?") from error
    server.start()
    try:
        bound = address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"
        yield bound, lambda status: servicer.set(health.OVERALL_HEALTH, _SERVING if status.is_serving else _NOT_SERVING)
    finally:
        servicer.enter_graceful_shutdown()
        server.stop(_STOP_SECONDS).wait()
        socket.remove()
        pool.shutdown()

"""`kvpool health`. Container health checks run it every few seconds, so it imports little."""

from dataclasses import replace
from typing import Final

import click
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvpool.cli.access import access_options, current_access
from kvpool.cli.options import text_option, usage_errors
from kvpool.cli.text import print_line
from kvpool.wire.address import DEFAULT_ADDRESS, parse_seeds
from kvpool.wire.channels import ClientCredentials
from kvpool.wire.unreachable import explained

SERVING: Final = "SERVING"


@click.command()
@click.argument("address", required=False)
@click.option(
    "--address",
    "address_option",
    default=DEFAULT_ADDRESS,
    envvar="KVPOOL_ADDRESS",
    show_envvar=True,
    metavar="ADDRESS",
    help="The address, as for other commands.",
)
@text_option("--service", "NAME", "Check one service, such as kvpool.v1.AllocatorService.")
@click.option(
    "--timeout-seconds",
    type=click.FloatRange(0, 3600, min_open=True),
    default=3.0,
    help="How long to wait for an answer.",
)
@access_options()
@click.pass_context
def health(
    ctx: click.Context, *, address: str | None, address_option: str, service: str, timeout_seconds: float
) -> None:
    """Check whether the server or worker at ADDRESS (host:port or unix:/path) serves; exit with 0 if so, else 1.

    A server serves until it begins to stop. A worker (--health-listen) serves while its pool is ready. The argument
    takes precedence over --address. Of several addresses, separated by commas, one that serves suffices. A standby
    serves, but its services for pools and sessions, such as kvpool.v1.AllocatorService, are NOT_SERVING.
    """
    with usage_errors("" if address else "address_option: "):
        *others, last = parse_seeds(address or address_option)
    for other in others:
        try:
            if _serves(other, service, timeout_seconds):
                return
        except click.ClickException as error:
            print_line(error.message, err=True)
    ctx.exit(0 if _serves(last, service, timeout_seconds) else 1)


def _serves(address: str, service: str, timeout_seconds: float) -> bool:
    """Checks one server, prints its status, and returns whether it serves.

    Raises:
        click.ClickException: It does not answer, or has no such service.
    """
    try:
        with usage_errors():
            status = status_of(current_access(), address, service, timeout_seconds)
    except grpc.RpcError as error:
        raise click.ClickException(f"{address}: {_describe(error, service, timeout_seconds)}") from error
    print_line(f"{address}: {status}")
    return status == SERVING


def status_of(access: ClientCredentials, address: str, service: str, timeout_seconds: float) -> str:
    """Asks a server for the status of a service, such as `SERVING`.

    Raises:
        ValueError: A file of the credentials cannot be used.
        grpc.RpcError: The server does not answer, or has no such service.
    """
    request = health_pb2.HealthCheckRequest(service=service)
    with replace(access, token=None).channel(address, ()) as channel:  # health checks need no token
        response = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_seconds)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))


def _describe(error: grpc.RpcError, service: str, timeout_seconds: float) -> str:
    match error.code():
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return f"no answer within {timeout_seconds:g} s"
        case grpc.StatusCode.NOT_FOUND:
            return f"it has no service {service!r}"
        case code:
            return f"{code.name}: {explained(error.details() or '')}"

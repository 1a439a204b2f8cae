"""The connection of an operator's command to its server, and the options of all such commands.

Exit status: 0 on success, 1 if the server refuses or cannot be reached, 2 for a usage error.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

import click

from kvpool.cli.access import access_options, current_access
from kvpool.cli.options import did_you_mean, name_as_given, together, usage_errors
from kvpool.client.admin import DEFAULT_DEADLINE_SECONDS, AdminClient
from kvpool.core.errors import KvpoolError
from kvpool.wire.address import DEFAULT_ADDRESS, parse_seeds

address_option: Final = together(
    click.option(
        "--address",
        default=DEFAULT_ADDRESS,
        envvar="KVPOOL_ADDRESS",
        show_envvar=True,
        metavar="ADDRESS",
        help="Server address: host:port or unix:/path; those of a primary and its standbys, separated by commas.",
    ),
    access_options(),
)
"""Adds the address of the server and the options of access to it."""

server_options: Final = together(
    address_option, click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
)
"""Adds `address_option` and --json."""

_PARAMETERS: Final = {"pool_name": "pool", "session_number": "number", "weights_version": "version"}
"""Parameters of commands that have another name than the field of the call."""

limit_option: Final = click.option("--limit", type=click.IntRange(1), help="Maximum number of rows.")


@contextmanager
def connected(address: str, deadline_seconds: float = DEFAULT_DEADLINE_SECONDS) -> Iterator[AdminClient]:
    """Yields a connection to a server. Errors of its calls name the parameters of the command.

    Raises:
        click.UsageError: The address is malformed.
    """
    access = current_access()
    with usage_errors("address: "):
        parse_seeds(address)
    with usage_errors():
        client = AdminClient(
            address,
            deadline_seconds=deadline_seconds,
            tls=access.tls,
            token=access.token,
            allow_plaintext=access.allow_plaintext,
        )
    with client:
        try:
            yield client
        except KvpoolError as error:
            if error.reason == "POOL_NOT_FOUND":
                _add_pools(error, client)
            if error.field:
                error.rename_field(name_as_given(_PARAMETERS.get(error.field, error.field)))
            raise


def _add_pools(error: KvpoolError, client: AdminClient) -> None:
    """Adds a hint to the error of an unknown pool: its name may be misspelt."""
    with suppress(KvpoolError):  # the caller may not list pools
        names = [info.config.name for info in client.overview().pools]
        if hint := did_you_mean(str(click.get_current_context().params.get("pool", "")), names):
            error.message += f"; {hint}"

"""The connection of an operator's command to its server, and the options of all such commands.

Exit status: 0 on success, 1 if the server refuses or cannot be reached, 2 for a usage error.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import click

from kvpool.cli.access import access_options, current_access
from kvpool.cli.options import together, usage_errors
from kvpool.client.admin import DEFAULT_DEADLINE_SECONDS, AdminClient
from kvpool.wire.address import DEFAULT_ADDRESS

address_option: Final = together(
    click.option(
        "--address",
        default=DEFAULT_ADDRESS,
        envvar="KVPOOL_ADDRESS",
        show_envvar=True,
        metavar="ADDRESS",
        help="Server address: host:port or unix:/path; several of a cluster, separated by commas.",
    ),
    access_options(),
)
"""Adds the address of the server and the options of access to it."""

server_options: Final = together(
    address_option, click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
)
"""Adds `address_option` and --json."""

limit_option: Final = click.option("--limit", type=click.IntRange(1), help="Maximum number of rows.")


@contextmanager
def connected(address: str, deadline_seconds: float = DEFAULT_DEADLINE_SECONDS) -> Iterator[AdminClient]:
    """Yields a connection to a server.

    Raises:
        click.UsageError: The address is malformed.
    """
    access = current_access()
    with usage_errors("--address: "):
        client = AdminClient(
            address,
            deadline_seconds=deadline_seconds,
            tls=access.tls,
            token=access.token,
            allow_plaintext=access.allow_plaintext,
        )
    with client:
        yield client

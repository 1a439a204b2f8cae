"""Options of `kvpool serve` for TLS and authentication."""

from typing import Final

import click

from kvpool.cli.options import file_option, together
from kvpool.server.auth.config import PLAINTEXT_KINDS
from kvpool.wire.address import DEFAULT_SOCKET_MODE


def _file_mode(text: str) -> int:
    """Parses a file mode in octal digits."""
    try:
        return int(str(text), 8)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a file mode such as 0660") from None


def _as_set(_ctx: click.Context, _param: click.Parameter, kinds: tuple[str, ...]) -> frozenset[str]:
    return frozenset(kinds)


auth_options: Final = together(
    file_option("--tls-cert", "Serve TLS on TCP with this certificate chain (PEM, the server's certificate first)."),
    file_option("--tls-key", "Private key of --tls-cert, without a passphrase. Changed files are reloaded."),
    file_option("--tls-client-ca", "Require client certificates that these authorities signed."),
    file_option("--tokens", "Require a token of this file for each call; see docs/how-to/secure.md."),
    click.option(
        "--allow-plaintext",
        type=click.Choice(PLAINTEXT_KINDS),
        multiple=True,
        callback=_as_set,
        help="Allow this without TLS on addresses that other machines reach. Can be repeated.",
    ),
    click.option(
        "--socket-mode",
        type=_file_mode,
        default=f"{DEFAULT_SOCKET_MODE:04o}",
        metavar="MODE",
        help="File mode of unix sockets. Users with write permission can connect.",
    ),
)
"""Adds the options of `AuthConfig`."""

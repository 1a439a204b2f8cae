"""Options of `kvpool serve` for TLS and authentication."""

from pathlib import Path
from typing import Any, Final

import click

from kvpool.cli.options import Option, together
from kvpool.server.auth.config import PLAINTEXT_KINDS, AuthConfig
from kvpool.wire.address import DEFAULT_SOCKET_MODE

_NAMES: Final = ("tls_cert", "tls_key", "tls_client_ca", "tokens", "allow_plaintext", "socket_mode")


def _file_mode(text: str) -> int:
    """Parses a file mode in octal digits."""
    try:
        return int(str(text), 8)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a file mode such as 0660") from None


def _file_option(flag: str, text: str) -> Option:
    return click.option(flag, type=click.Path(path_type=Path), metavar="FILE", help=text)


auth_options: Final = together(
    _file_option("--tls-cert", "Serve TLS on TCP with this certificate chain (PEM, the server's certificate first)."),
    _file_option("--tls-key", "Private key of --tls-cert, without a passphrase. Changed files are reloaded."),
    _file_option("--tls-client-ca", "Require client certificates that these authorities signed."),
    _file_option("--tokens", "Require a token of this file for each call; see docs/how-to/secure.md."),
    click.option(
        "--allow-plaintext",
        type=click.Choice(PLAINTEXT_KINDS),
        multiple=True,
        help="Allow this without TLS on addresses that other machines reach. Can be repeated.",
    ),
    click.option(
        "--socket-mode",
        type=_file_mode,
        default=f"{DEFAULT_SOCKET_MODE:04o}",
        show_default=True,
        metavar="MODE",
        help="File mode of unix sockets. Users with write permission can connect.",
    ),
)
"""Adds the options; `take_auth_config` reads them."""


def take_auth_config(settings: dict[str, Any]) -> AuthConfig:
    """Removes these options from a command's settings and returns them as a config.

    Raises:
        ValueError: The options contradict each other; the message names the field.
    """
    taken = {name: settings.pop(name) for name in _NAMES}
    return AuthConfig(**{**taken, "allow_plaintext": frozenset(taken["allow_plaintext"])})

"""The options of a server's doors."""

from pathlib import Path
from typing import Any, Final

import click

from kvpool.cli.options import Option, together
from kvpool.server.auth.config import PLAINTEXT_KINDS, AuthConfig
from kvpool.wire.address import DEFAULT_SOCKET_MODE

_NAMES: Final = ("tls_cert", "tls_key", "tls_client_ca", "tokens", "allow_plaintext", "socket_mode")


def _file_mode(text: str) -> int:
    """Reads a mode in octal digits."""
    try:
        return int(str(text), 8)
    except ValueError:
        raise click.BadParameter(f"{text!r} is no file mode, such as 0660") from None


def _file_option(flag: str, text: str) -> Option:
    return click.option(flag, type=click.Path(path_type=Path), metavar="FILE", help=text)


auth_options: Final = together(
    _file_option("--tls-cert", "Listen with TLS on TCP: our certificate, then those up to its authority. PEM."),
    _file_option("--tls-key", "Its key, without a passphrase. The files are read again when they change."),
    _file_option("--tls-client-ca", "Let in only clients with a certificate of the authorities in here."),
    _file_option(
        "--tokens", "Let in only calls with a token of this file, each for its own; see docs/how-to/secure.md."
    ),
    click.option(
        "--allow-plaintext",
        type=click.Choice(PLAINTEXT_KINDS),
        multiple=True,
        help="Listen beyond this machine without TLS, for this; may be given several times.",
    ),
    click.option(
        "--socket-mode",
        type=_file_mode,
        default=f"{DEFAULT_SOCKET_MODE:04o}",
        show_default=True,
        metavar="MODE",
        help="File mode of unix sockets: who may write, may connect.",
    ),
)
"""Adds the options; `take_auth_config` makes a config of them."""


def take_auth_config(settings: dict[str, Any]) -> AuthConfig:
    """Takes the options of the doors out of a command's settings.

    Raises:
        ValueError: They contradict each other; names the field.
    """
    taken = {name: settings.pop(name) for name in _NAMES}
    return AuthConfig(**{**taken, "allow_plaintext": frozenset(taken["allow_plaintext"])})

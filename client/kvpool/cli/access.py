"""The options by which a command gets into a server. Cheap to import, for `kvpool health`."""

from pathlib import Path
from typing import Any, Final

import click

from kvpool.cli.options import Option, together
from kvpool.wire.channels import Access, TlsConfig

_KEY: Final = "kvpool.access"


def _keep(ctx: click.Context, param: click.Parameter, value: object) -> None:
    ctx.meta.setdefault(_KEY, {})[param.name] = value


def access_options(*listens: str) -> Option:
    """Adds the options; `current_access` and `allowed_plaintext` tell what they say.

    Args:
        listens: What the command itself listens with, that may be asked to be plaintext beside the token.
    """
    allowed = click.Choice(["token", *listens])
    return together(
        _file_option("--tls-ca", "Speak TLS; the server's certificate is checked against the authorities in here."),
        _file_option("--tls-cert", "Our own certificate, for a server that asks for one."),
        _file_option("--tls-key", "Its key."),
        click.option(
            "--tls-server-name",
            envvar="KVPOOL_TLS_SERVER_NAME",
            show_envvar=True,
            default="",
            metavar="NAME",
            expose_value=False,
            callback=_keep,
            help="Name in the server's certificate; default: the address's.",
        ),
        _file_option("--token-file", "Holds our token; KVPOOL_TOKEN may hold it itself."),
        click.option(
            "--allow-plaintext",
            type=allowed,
            multiple=True,
            expose_value=False,
            callback=_keep,
            help="Over TCP beyond this machine, let this go without TLS; may be given several times.",
        ),
    )


def _file_option(flag: str, text: str) -> Option:
    return click.option(
        flag,
        type=click.Path(path_type=Path),
        envvar=f"KVPOOL_{flag.removeprefix('--').replace('-', '_').upper()}",
        show_envvar=True,
        metavar="FILE",
        expose_value=False,
        callback=_keep,
        help=text,
    )


def current_access() -> Access:
    """What the running command is to show at a server's door.

    Raises:
        click.UsageError: The options contradict each other.
    """
    kept: dict[str, Any] = click.get_current_context().meta[_KEY]
    ca, cert, key, name = (kept[f"tls_{part}"] for part in ("ca", "cert", "key", "server_name"))
    try:
        tls = TlsConfig(ca, cert, key, name) if ca or cert or key else None
        return Access.of(tls, kept["token_file"], allow_plaintext="token" in kept["allow_plaintext"])
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def allowed_plaintext() -> tuple[str, ...]:
    """What may listen without TLS beyond this machine."""
    found: tuple[str, ...] = click.get_current_context().meta[_KEY]["allow_plaintext"]
    return found

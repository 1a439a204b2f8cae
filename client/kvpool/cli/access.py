"""Options of TLS and authentication for commands that connect to a server. Cheap to import, for `kvpool health`."""

from typing import Any, Final

import click

from kvpool.cli.options import Option, file_option, text_option, together, usage_errors
from kvpool.wire.channels import ClientCredentials, TlsConfig

_KEY: Final = "kvpool.access"


def _keep(ctx: click.Context, param: click.Parameter, value: object) -> None:
    ctx.meta.setdefault(_KEY, {})[param.name] = value


def access_options(*listens: str) -> Option:
    """Adds the options; `current_access` and `allowed_plaintext` return their values.

    Args:
        listens: The command's own listeners that --allow-plaintext accepts besides "token".
    """
    return together(
        _file_option("--tls-ca", "Use TLS, and verify the server's certificate with these authorities."),
        _file_option("--tls-cert", "Client certificate, for a server that requires one."),
        _file_option("--tls-key", "Private key of --tls-cert."),
        text_option(
            "--tls-server-name",
            "NAME",
            "Host name in the server's certificate; default: the host of the address.",
            envvar="KVPOOL_TLS_SERVER_NAME",
            show_envvar=True,
            expose_value=False,
            callback=_keep,
        ),
        _file_option("--token-file", "File that holds the token. KVPOOL_TOKEN can hold the token itself."),
        click.option(
            "--allow-plaintext",
            type=click.Choice(["token", *listens]),
            multiple=True,
            expose_value=False,
            callback=_keep,
            help="Allow this without TLS over TCP to other machines. Can be repeated.",
        ),
    )


def _file_option(flag: str, text: str) -> Option:
    name = flag.removeprefix("--").replace("-", "_").upper()
    return file_option(flag, text, envvar=f"KVPOOL_{name}", show_envvar=True, expose_value=False, callback=_keep)


def current_access() -> ClientCredentials:
    """Returns TLS and token of the running command.

    Raises:
        click.UsageError: The options contradict each other.
    """
    kept: dict[str, Any] = click.get_current_context().meta[_KEY]
    ca, cert, key, name = (kept[f"tls_{part}"] for part in ("ca", "cert", "key", "server_name"))
    with usage_errors():
        tls = TlsConfig(ca, cert, key, name) if ca or cert or key else None
        return ClientCredentials.of(tls, kept["token_file"], allow_plaintext="token" in kept["allow_plaintext"])


def allowed_plaintext() -> tuple[str, ...]:
    """Returns the values of --allow-plaintext."""
    found: tuple[str, ...] = click.get_current_context().meta[_KEY]["allow_plaintext"]
    return found

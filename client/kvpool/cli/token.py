"""`kvpool token`."""

import secrets
from datetime import datetime

import click

from kvpool.server.auth.tokens import Role, checked_grant, entry_text, new_token


@click.group()
def token() -> None:
    """Make tokens for a server's --tokens file."""


@token.command()
@click.option("--name", required=True, help="Whose it is; sessions belong to the name.")
@click.option("--role", required=True, type=click.Choice([role.value for role in Role]), help="What it is for.")
@click.option(
    "--pool", "pools", required=True, multiple=True, metavar="PATTERN", help="For pools so named: llama*, or * for all."
)
@click.option("--salt", help="Share cached prefixes only with tokens of the same salt, at least 16 random bytes.")
@click.option("--new-salt", is_flag=True, help="Draw a salt: share cached prefixes with no other token.")
@click.option("--expires", type=click.DateTime(["%Y-%m-%d"]), metavar="DATE", help="Last day it is good for, UTC.")
def new(  # noqa: PLR0913 - one parameter an option
    *, name: str, role: str, pools: tuple[str, ...], salt: str | None, new_salt: bool, expires: datetime | None
) -> None:
    """Print a fresh token, and on stderr the entry to add to the server's file. Neither is kept anywhere.

    (umask 077; kvpool token new --name a --role scheduler --pool 'llama*' >a.token 2>>tokens.toml)
    """
    if salt is not None and new_salt:
        raise click.UsageError("--salt and --new-salt: give one of them")
    fresh, digest = new_token()
    entry: dict[str, object] = {"name": name, "role": role, "pools": list(pools), "sha256": digest}
    if salt is not None or new_salt:
        entry["salt"] = secrets.token_urlsafe(24) if salt is None else salt
    if expires:
        entry["expires"] = expires.date()
    try:
        grant = checked_grant("token", entry)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    click.echo(fresh)
    click.echo(entry_text(grant), err=True)

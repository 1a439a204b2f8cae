"""`kvpool token`."""

import secrets
from datetime import datetime

import click

from kvpool.cli.options import as_given
from kvpool.cli.text import print_line
from kvpool.server.auth.tokens import Role, checked_grant, entry_text, new_token


@click.group()
def token() -> None:
    """Create tokens for a server's --tokens file."""


@token.command()
@click.option("--name", required=True, help="Name of the owner. Sessions belong to this name.")
@click.option("--role", required=True, type=click.Choice([role.value for role in Role]), help="Role of the client.")
@click.option(
    "--pool",
    "pools",
    required=True,
    multiple=True,
    metavar="PATTERN",
    help="Pattern of pool names: llama*, or * for all pools.",
)
@click.option("--salt", help="Share cached prefixes only with tokens that have this salt (at least 16 random bytes).")
@click.option(
    "--new-salt", is_flag=True, help="Generate a salt, so that cached prefixes are shared with no other token."
)
@click.option(
    "--expires", type=click.DateTime(["%Y-%m-%d"]), metavar="DATE", help="Last day on which the token is valid (UTC)."
)
def new(  # noqa: PLR0913 - one parameter per option
    *, name: str, role: str, pools: tuple[str, ...], salt: str | None, new_salt: bool, expires: datetime | None
) -> None:
    """Print a new token, and its entry on stderr.

    Add the entry to the server's file. Neither is stored.

    (umask 077; kvpool token new --name a --role scheduler --pool 'llama*' >a.token 2>>tokens.toml)
    """
    if salt is not None and new_salt:
        raise click.UsageError("--salt and --new-salt exclude each other")
    fresh, digest = new_token()
    entry: dict[str, object] = {"name": name, "role": role, "pools": list(pools), "sha256": digest}
    if salt is not None or new_salt:
        entry["salt"] = secrets.token_urlsafe(24) if salt is None else salt
    if expires:
        entry["expires"] = expires.date()
    try:
        grant = checked_grant("entry", entry)
    except ValueError as error:
        raise click.UsageError(as_given(str(error).removeprefix("entry: "))) from error
    print_line(fresh)
    for line in entry_text(grant).splitlines():
        print_line(line, err=True)

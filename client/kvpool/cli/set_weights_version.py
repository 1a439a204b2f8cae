"""`kvpool set-weights-version`."""

import click

from kvpool.cli.connection import connected, server_options
from kvpool.cli.tables import print_answer
from kvpool.cli.text import counted


@click.command("set-weights-version")
@click.argument("version")
@click.option("--pool", required=True, metavar="NAME", help="The pool.")
@click.option(
    "--session",
    "number",
    type=click.IntRange(1),
    metavar="NUMBER",
    help="Only this session; default: all open sessions of the pool.",
)
@server_options
def set_weights_version(*, version: str, pool: str, number: int | None, address: str, as_json: bool) -> None:
    """State that engines compute with the weights VERSION from now on.

    Their new requests hit blocks only of sessions with the same version. Requests that run keep their blocks, and cache
    no further ones. Call it while the engines are paused, before they load the weights. An empty VERSION is allowed.
    """
    with connected(address) as client:
        numbers = client.set_weights_version(pool, version, number or 0)
    sentence = f"weights version {version!r} set in {counted(len(numbers), 'session')} of pool {pool}"
    print_answer({"weights_version": version, "sessions": numbers}, sentence, as_json=as_json)

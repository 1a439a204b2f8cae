"""Generates text with two CPU ranks and two schedulers on one pool, and compares it with a model without a cache.

Run it from the root of the repository: `python -m examples.reference_engine`. It needs torch and numpy.
"""

import random
from contextlib import nullcontext
from typing import Final

import click

from examples.reference_engine.config import ReferenceConfig
from examples.reference_engine.deployment import Deployment
from examples.reference_engine.generate import Generation, generate
from examples.reference_engine.prompts import Prompts
from kvpool.cli.progress import progress
from kvpool.cli.tables import print_facts
from kvpool.client import KvpoolError
from kvpool.replay import ChildError
from kvpool.replay.children import own_server

_POOL: Final = "reference-engine"
_DEPLOYMENT: Final = Deployment(ReferenceConfig("sliding"), tp_size=2, num_blocks=70)
_PROMPTS, _BEGINNINGS, _OUTPUT_TOKENS = 16, 2, 16


@click.command()
@click.option("--server", metavar="ADDRESS", help="A running server; default: start one.")
@click.pass_context
def main(ctx: click.Context, *, server: str | None) -> None:
    """Generate with two ranks on CPU, and check every token.

    Exits with status 1 if a request's tokens differ from those of the same model without a cache.
    """
    click.echo(
        f"Two CPU ranks form a pool. Each has half the heads of a small transformer ({_DEPLOYMENT.config.num_layers} "
        "layers, full and sliding-window attention).\n"
        f"Two scheduler processes share it. Each has {_PROMPTS} prompts and generates {_OUTPUT_TOKENS} tokens for each."
    )
    try:
        with (
            nullcontext(server) if server else own_server() as address,
            progress("generating", 2 * _PROMPTS) as console,
        ):
            done = generate(address, _POOL, _DEPLOYMENT, _workloads(), console.advance)
    except (KvpoolError, ChildError) as error:
        raise click.ClickException(str(error)) from error
    _print(done)
    ctx.exit(0 if done.equal else 1)


def _workloads() -> list[Prompts]:
    """Prompts for two schedulers. All begin with one of the same token sequences, so that requests share blocks."""
    source = random.Random(2026)  # noqa: S311 - prompts

    def tokens(count: int) -> list[int]:
        return [source.randrange(_DEPLOYMENT.config.vocab_size) for _ in range(count)]

    beginnings = [tokens(24) for _ in range(_BEGINNINGS)]
    return [
        Prompts([beginnings[i % _BEGINNINGS] + tokens(3 + i) for i in range(_PROMPTS)], _OUTPUT_TOKENS)
        for _ in range(2)
    ]


def _print(done: Generation) -> None:
    counts, pool = done.counts, done.pool
    rows = [
        ("ranks", f"{len(pool.ranks)}, {pool.config.num_blocks} blocks, {pool.state.value}, epoch {pool.epoch}"),
        ("requests", f"{counts.requests:,}"),
        ("generated tokens", f"{counts.output_tokens:,}"),
        ("preemptions", f"{counts.preemptions:,}"),
        ("prompt tokens found in the cache", f"{counts.hit_tokens:,}"),
        ("of these, computed for the other scheduler", f"{counts.shared_hit_tokens:,}"),
        ("requests with the tokens of the same model without a cache", f"{done.equal_requests} of {counts.requests}"),
    ]
    print_facts("two ranks, two schedulers, one model", rows)


if __name__ == "__main__":
    main()

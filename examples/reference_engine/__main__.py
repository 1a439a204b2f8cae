"""Generates text with ranks and schedulers on one pool, and compares it with a model without a cache.

Run it from the root of the repository: `python -m examples.reference_engine`. It needs torch and numpy. By default two
ranks with memory of their own and two schedulers form the engine, on CPU or on one GPU. With `--memory` it is one rank
on lent memory and one scheduler.
"""

import json
import random
from contextlib import nullcontext
from dataclasses import replace
from typing import Final

import click

from examples.reference_engine.config import ReferenceConfig
from examples.reference_engine.deployment import NUM_LENT_BLOCKS, Deployment
from examples.reference_engine.generate import Generation, generate
from examples.reference_engine.prompts import Prompts
from kvpool.cli.progress import progress
from kvpool.cli.tables import print_facts
from kvpool.client import KvpoolError, PoolState
from kvpool.replay import ChildError
from kvpool.replay.children import own_server
from kvpool.wire.readable import word

_POOL: Final = "reference-engine"
_MODEL: Final = ReferenceConfig("sliding")
_DEPLOYMENT: Final = Deployment(_MODEL, tp_size=2, num_blocks=70)
_PROMPTS, _BEGINNINGS, _OUTPUT_TOKENS = 16, 2, 16


@click.command()
@click.option("--server", metavar="ADDRESS", help="A running server; default: start one.")
@click.option("--memory", metavar="unix:PATH", default="", help="Map the memory that a `kvpool worker --lend` lends.")
@click.option("--pool", default=_POOL, help="Name of the pool; with --memory, that of the worker.")
@click.option("--device", default="cpu", help="Device of the ranks: cpu, or cuda:N.")
@click.option("--requests", default=_PROMPTS, type=click.IntRange(1), help="Number of prompts per scheduler.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def main(  # noqa: PLR0913 - one per option
    ctx: click.Context, *, server: str | None, memory: str, pool: str, device: str, requests: int, as_json: bool
) -> None:
    """Generate, and check every token.

    Exits with status 1 if a request's tokens differ from those of the same model without a cache.
    """
    if memory and not server:
        raise click.UsageError("--memory needs --server: the server of the worker")
    if memory:
        deployment = Deployment(_MODEL, num_blocks=NUM_LENT_BLOCKS, num_schedulers=1, device=device, memory=memory)
    else:
        deployment = replace(_DEPLOYMENT, device=device)
        if not as_json:
            _introduce(device)
    workloads = _workloads(requests)[: deployment.num_schedulers]
    try:
        with (
            nullcontext(server) if server else own_server() as address,
            nullcontext() if as_json else progress("generating", requests * len(workloads)) as advance,
        ):
            done = generate(address, pool, deployment, workloads, advance or (lambda _: None))
    except (KvpoolError, ChildError) as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        counts = {name: getattr(done.counts, name) for name in ("requests", "input_tokens", "hit_tokens")}
        click.echo(json.dumps({**counts, "equal_requests": done.equal_requests}))
    else:
        _print(done)
    ctx.exit(0 if done.equal else 1)


def _introduce(device: str) -> None:
    click.echo(
        f"Two ranks on {device} form a pool. Each has half the heads of a small transformer "
        f"({_DEPLOYMENT.config.num_layers} layers, full and sliding-window attention).\n"
        f"Two scheduler processes share it. Each has {_PROMPTS} prompts and generates {_OUTPUT_TOKENS} tokens for each."
    )


def _workloads(count: int) -> list[Prompts]:
    """Prompts for two schedulers. All begin with one of the same token sequences, so that requests share blocks."""
    source = random.Random(2026)  # noqa: S311 - prompts

    def tokens(count: int) -> list[int]:
        return [source.randrange(_DEPLOYMENT.config.vocab_size) for _ in range(count)]

    beginnings = [tokens(24) for _ in range(_BEGINNINGS)]
    return [
        Prompts([beginnings[i % _BEGINNINGS] + tokens(3 + i % _PROMPTS) for i in range(count)], _OUTPUT_TOKENS)
        for _ in range(2)
    ]


def _print(done: Generation) -> None:
    counts, pool = done.counts, done.pool
    state = word(PoolState, pool.state)
    rows = [
        (
            "ranks",
            f"{len(pool.ranks)}, {pool.config.num_blocks} blocks, {state}, epoch {pool.epoch}",
        ),
        ("requests", f"{counts.requests:,}"),
        ("generated tokens", f"{counts.output_tokens:,}"),
        ("preemptions", f"{counts.preemptions:,}"),
        ("prompt tokens found in the cache", f"{counts.hit_tokens:,}"),
        ("of these, computed for the other scheduler", f"{counts.shared_hit_tokens:,}"),
        ("requests with the tokens of the same model without a cache", f"{done.equal_requests} of {counts.requests}"),
    ]
    print_facts("reference engine", rows)


if __name__ == "__main__":
    main()

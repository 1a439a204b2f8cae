"""`kvpool demo`."""

import importlib.util
import random
from typing import Final

import click

from kvpool.cli.output import demo_table, generation_table, progress
from kvpool.client import ReuseOrder
from kvpool.replay.play import PoolOptions, replay_shares, service
from kvpool.replay.playing import SchedulerOptions
from kvpool.replay.workload import ChatShare, Workload

_POOL: Final = PoolOptions("demo", 2500, 16, 8192, ReuseOrder.UNCACHED_FIRST)
_CONVERSATIONS, _TURNS = 120, 5
_RANKS_POOL: Final = "demo-ranks"
_PROMPTS, _BEGINNINGS, _OUTPUT_TOKENS = 16, 2, 16


@click.command()
@click.pass_context
def demo(ctx: click.Context) -> None:
    """Show two scheduler processes sharing one pool, then a small model that generates on two ranks.

    One command, nothing to configure: a server, generated chats, and with torch the ranks.
    """
    shares: list[Workload] = [ChatShare(2026, index, _CONVERSATIONS, _TURNS) for index in range(2)]
    click.echo(
        f"A server with a pool of {_POOL.num_blocks:,} blocks of {_POOL.block_size} tokens; two scheduler processes, "
        f"each with {_CONVERSATIONS} conversations of {_TURNS} turns over the same system prompts and documents."
    )
    with service(None) as address:
        with progress("chatting", 2 * _CONVERSATIONS * _TURNS) as console:
            how = SchedulerOptions(address, _POOL.name, 0.0, max_num_seqs=48, max_num_batched_tokens=2048)
            result = replay_shares(_POOL, shares, how, console)
        demo_table(result)
        equal = _generate(address)
    ctx.exit(1 if result.failed_sessions or not equal else 0)


def _generate(address: str) -> bool:
    """Has two ranks generate, if there is what ranks need; returns whether nothing was wrong."""
    if not all(map(importlib.util.find_spec, ("torch", "numpy"))):
        click.echo('Without torch and numpy there are no ranks to show: pip install "kvpool[worker]".')
        return True
    from examples.reference_engine.config import ReferenceConfig  # noqa: PLC0415 - clients have no torch
    from examples.reference_engine.deployment import Deployment  # noqa: PLC0415 - likewise
    from examples.reference_engine.generate import generate  # noqa: PLC0415 - likewise
    from examples.reference_engine.prompts import Prompts  # noqa: PLC0415 - likewise

    config = ReferenceConfig("sliding")
    deployment = Deployment(config, tp_size=2, num_blocks=70)
    source = random.Random(2026)  # noqa: S311 - prompts

    def tokens(count: int) -> list[int]:
        return [source.randrange(config.vocab_size) for _ in range(count)]

    beginnings = [tokens(24) for _ in range(_BEGINNINGS)]
    workloads = [
        Prompts([beginnings[i % _BEGINNINGS] + tokens(3 + i) for i in range(_PROMPTS)], _OUTPUT_TOKENS)
        for _ in range(2)
    ]
    click.echo(
        "Two ranks on CPU that form a pool, half the heads of a small transformer (full and sliding-window attention) "
        f"each; two scheduler processes, each with {_PROMPTS} prompts, {_OUTPUT_TOKENS} tokens to generate for each."
    )
    with progress("generating", 2 * _PROMPTS) as console:
        done = generate(address, _RANKS_POOL, deployment, workloads, console.advance)
    generation_table(done)
    return done.equal

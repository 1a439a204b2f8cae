"""`kvpool demo`."""

from typing import Final

import click

from kvpool.cli.progress import progress
from kvpool.cli.tables import print_facts
from kvpool.client import ReuseOrder
from kvpool.replay.children import own_server
from kvpool.replay.play import PoolOptions, replay_shares
from kvpool.replay.scheduler import SchedulerOptions
from kvpool.replay.workload import ChatShare, Workload

_POOL: Final = PoolOptions("demo", 2500, 16, 8192, ReuseOrder.UNCACHED_FIRST)
_CONVERSATIONS, _TURNS = 120, 5


@click.command()
@click.pass_context
def demo(ctx: click.Context) -> None:
    """Show two scheduler processes that share one pool.

    Starts a server and plays generated chats. Nothing needs to be configured. The schedulers take turns, so that
    only the speed depends on the machine.
    """
    shares: list[Workload] = [ChatShare(2026, index, _CONVERSATIONS, _TURNS) for index in range(2)]
    click.echo(
        f"A server has a pool of {_POOL.num_blocks:,} blocks of {_POOL.block_size} tokens.\n"
        f"Two scheduler processes share it. Each plays {_CONVERSATIONS} conversations of {_TURNS} turns over the same "
        "system prompts and documents."
    )
    with own_server() as address, progress("chatting", 2 * _CONVERSATIONS * _TURNS) as reporter:
        options = SchedulerOptions(address, _POOL.name, max_num_seqs=48, max_num_batched_tokens=2048, in_turn=True)
        result = replay_shares(_POOL, shares, options, reporter)
    print_facts("two schedulers, one pool", result.rows())
    ctx.exit(1 if result.failed_sessions else 0)

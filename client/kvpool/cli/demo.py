"""`kvpool demo`."""

import click

from kvpool.cli.output import demo_table, progress
from kvpool.client import ReuseOrder
from kvpool.replay.play import PoolOptions, replay_shares, service
from kvpool.replay.processes import SchedulerOptions
from kvpool.replay.workload import ChatShare, Workload

_POOL = PoolOptions("demo", 2500, 16, 8192, ReuseOrder.UNCACHED_FIRST)
_CONVERSATIONS, _TURNS = 120, 5


@click.command()
@click.pass_context
def demo(ctx: click.Context) -> None:
    """Show two scheduler processes sharing one pool: generated chats, one command, nothing to configure."""
    shares: list[Workload] = [ChatShare(2026, index, _CONVERSATIONS, _TURNS) for index in range(2)]
    click.echo(
        f"A server with a pool of {_POOL.num_blocks:,} blocks of {_POOL.block_size} tokens; two scheduler processes, "
        f"each with {_CONVERSATIONS} conversations of {_TURNS} turns over the same system prompts and documents."
    )
    with service(None) as address, progress("chatting", 2 * _CONVERSATIONS * _TURNS) as console:
        how = SchedulerOptions(address, _POOL.name, 0.0, max_num_seqs=48, max_num_batched_tokens=2048)
        result = replay_shares(address, _POOL, shares, how, console)
    demo_table(result)
    ctx.exit(1 if result.failed_sessions else 0)

"""`kvpool demo`."""

from collections.abc import Callable
from typing import Final

import click

from kvpool.cli.progress import progress
from kvpool.cli.tables import print_facts
from kvpool.cli.text import print_line
from kvpool.client import Client, ReuseOrder
from kvpool.client.connection import connect_as
from kvpool.replay.children import own_server
from kvpool.replay.play import measured, replay_pool
from kvpool.replay.result import Counts
from kvpool.replay.scheduler import Scheduler
from kvpool.replay.workload import ChatShare
from kvpool.wire.channels import ClientCredentials

_POOL: Final = replay_pool("demo", 2500, 16, 8192, ReuseOrder.UNCACHED_FIRST)
_CONVERSATIONS, _TURNS = 120, 5


@click.command()
def demo() -> None:
    """Show two schedulers that share one pool.

    Starts a server and plays generated chats. Nothing needs to be configured. The schedulers take turns, so that
    only the speed depends on the machine.
    """
    print_line(f"A server has a pool of {_POOL.num_blocks:,} blocks of {_POOL.hash_block_size} tokens.")
    print_line(
        f"Two schedulers share it. Each plays {_CONVERSATIONS} conversations of {_TURNS} turns over the same "
        "system prompts and documents."
    )
    with (
        own_server() as address,
        connect_as(ClientCredentials(), address) as client,
        progress("chatting", 2 * _CONVERSATIONS * _TURNS) as advance,
    ):
        result = measured(client, client.create_pool(_POOL), lambda: _play_in_turn(client, lambda: advance(1)))
    print_facts("two schedulers, one pool", result.rows())


def _play_in_turn(client: Client, advance: Callable[[], object]) -> Counts:
    """Plays a round of each scheduler in turn, so that what they find cached does not depend on the machine."""
    with client.open_session(_POOL.name) as first, client.open_session(_POOL.name) as second:
        schedulers = [
            Scheduler(
                session,
                ChatShare(2026, index, _CONVERSATIONS, _TURNS),
                max_num_seqs=48,
                max_num_batched_tokens=2048,
                advance=advance,
            )
            for index, session in enumerate((first, second))
        ]
        while playing := [scheduler for scheduler in schedulers if not scheduler.is_done]:
            for scheduler in playing:
                scheduler.play_round()
    total = Counts()
    for scheduler in schedulers:
        total.add(scheduler.counts)
    return total

"""Options of `kvpool serve` for publishing block events over ZeroMQ."""

from typing import Final

import click

from kvpool.cli.options import together
from kvpool.cli.settings import config_options
from kvpool.server.events.config import EventsConfig

events_options: Final = together(
    click.option(
        "--events-endpoint",
        default="",
        show_default=False,
        metavar="ENDPOINT",
        help="Publish block events over ZeroMQ, as vLLM does. tcp://*:5557 and ipc://PATH are bound, and each further "
        "pool uses the next port; tcp://HOST:5557 is connected to. Off by default. Needs kvpool[events].",
    ),
    click.option(
        "--events-replay-endpoint",
        default="",
        show_default=False,
        metavar="ENDPOINT",
        help="Serve replays and snapshots of events, for example on tcp://*:5657. Off by default.",
    ),
    click.option(
        "--events-pool",
        multiple=True,
        metavar="POOL",
        help="Publish this pool. Can be repeated, in the order of ports. Default: all pools, in order of creation.",
    ),
    config_options(
        EventsConfig(),
        "events_",
        topic="Topic of the messages; {pool} and {host} are replaced.",
        hashes="Block hashes as the integer of their last 8 bytes, or in full.",
        removed="Report a hash as removed with its last block or, as in vLLM, with each block.",
        buffer_batches="Number of batches kept for replay, and limit of the queue of a slow subscriber.",
        heartbeat_seconds="Publish an empty batch after this time without events; 0: never.",
    ),
    config_options(
        EventsConfig(), replay_framing="Replay batches with their topic, as in vLLM 0.26 and later, or without."
    ),
)
"""Adds the options of `EventsConfig`."""

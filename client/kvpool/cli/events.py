"""Options of `kvpool serve` for publishing block events over ZeroMQ."""

from typing import Any, Final

import click

from kvpool.cli.options import together
from kvpool.server.events.config import (
    DEFAULT_TOPIC,
    EventsConfig,
    HashForm,
    RemovedForm,
    ReplayFraming,
)

events_options: Final = together(
    click.option(
        "--events-endpoint",
        default="",
        metavar="ENDPOINT",
        help="Publish block events over ZeroMQ, as vLLM does. tcp://*:5557 and ipc://PATH are bound, and each further "
        "pool uses the next port; tcp://HOST:5557 is connected to. Off by default. Needs kvpool[events].",
    ),
    click.option(
        "--events-replay-endpoint",
        default="",
        metavar="ENDPOINT",
        help="Serve replays and snapshots of events, for example on tcp://*:5657. Off by default.",
    ),
    click.option(
        "--events-pool",
        multiple=True,
        metavar="POOL",
        help="Publish this pool. Can be repeated, in the order of ports. Default: all pools, in order of creation.",
    ),
    click.option(
        "--events-topic",
        default=DEFAULT_TOPIC,
        show_default=True,
        help="Topic of the messages; {pool} and {host} are replaced.",
    ),
    click.option(
        "--replay-framing",
        type=click.Choice([kind.value for kind in ReplayFraming]),
        default=ReplayFraming.TOPIC.value,
        show_default=True,
        help="Replay batches with their topic, as in vLLM 0.26 and later, or without.",
    ),
    click.option(
        "--events-hashes",
        type=click.Choice([kind.value for kind in HashForm]),
        default=HashForm.INTEGER.value,
        show_default=True,
        help="Block hashes as the integer of their last 8 bytes, or in full.",
    ),
    click.option(
        "--events-removed",
        type=click.Choice([kind.value for kind in RemovedForm]),
        default=RemovedForm.LAST_COPY.value,
        show_default=True,
        help="Report a hash as removed with its last block or, as in vLLM, with each block.",
    ),
    click.option(
        "--events-buffer-batches",
        type=int,
        default=10_000,
        show_default=True,
        help="Number of batches kept for replay, and limit of the queue of a slow subscriber.",
    ),
    click.option(
        "--events-heartbeat-seconds",
        type=float,
        default=10.0,
        show_default=True,
        help="Publish an empty batch after this time without events; 0: never.",
    ),
)
"""Adds the options; `take_events_config` reads them."""


def take_events_config(settings: dict[str, Any]) -> EventsConfig:
    """Removes these options from a command's settings and returns them as a config.

    Raises:
        ValueError: An option is malformed or out of range, or a required package is not installed.
    """
    return EventsConfig(
        endpoint=settings.pop("events_endpoint"),
        replay_endpoint=settings.pop("events_replay_endpoint"),
        pools=tuple(settings.pop("events_pool")),
        topic=settings.pop("events_topic"),
        replay_framing=ReplayFraming(settings.pop("replay_framing")),
        hashes=HashForm(settings.pop("events_hashes")),
        removed=RemovedForm(settings.pop("events_removed")),
        buffer_batches=settings.pop("events_buffer_batches"),
        heartbeat_seconds=settings.pop("events_heartbeat_seconds"),
    )

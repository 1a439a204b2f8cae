"""The options of `kvpool serve` that say how block events are published over ZeroMQ."""

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
        help="Publish block events here over ZeroMQ, as vLLM does. tcp://*:5557 or ipc://PATH is bound, and a second "
        "pool takes the next port, and so on; tcp://HOST:5557 is connected to. Off by default; needs kvpool[events].",
    ),
    click.option(
        "--events-replay-endpoint",
        default="",
        metavar="ENDPOINT",
        help="Serve replays and snapshots of them here: tcp://*:5657. Off by default.",
    ),
    click.option(
        "--events-pool",
        multiple=True,
        metavar="POOL",
        help="Publish this pool; may be given several times, in the order of their ports. Default: all, as they come.",
    ),
    click.option(
        "--events-topic", default=DEFAULT_TOPIC, show_default=True, help="Topic; {pool} and {host} are replaced."
    ),
    click.option(
        "--replay-framing",
        type=click.Choice([kind.value for kind in ReplayFraming]),
        default=ReplayFraming.TOPIC.value,
        show_default=True,
        help="Replayed batches with their topic, as vLLM since 0.26, or without.",
    ),
    click.option(
        "--events-hashes",
        type=click.Choice([kind.value for kind in HashForm]),
        default=HashForm.INTEGER.value,
        show_default=True,
        help="Block hashes as the integer of their last 8 bytes, or whole.",
    ),
    click.option(
        "--events-removed",
        type=click.Choice([kind.value for kind in RemovedForm]),
        default=RemovedForm.LAST_COPY.value,
        show_default=True,
        help="A hash is removed with the last block that has it, or, as in vLLM, with each.",
    ),
    click.option(
        "--events-buffer-batches",
        type=int,
        default=10_000,
        show_default=True,
        help="Newest batches kept for replay, and at most queued for a slow subscriber.",
    ),
    click.option(
        "--events-heartbeat-seconds",
        type=float,
        default=10.0,
        show_default=True,
        help="After how long without events to publish an empty batch; 0: never.",
    ),
)
"""Gives a command these options."""


def take_events_config(settings: dict[str, Any]) -> EventsConfig:
    """Takes them out of a command's settings.

    Raises:
        ValueError: One is malformed or out of range, or what they need is not installed.
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

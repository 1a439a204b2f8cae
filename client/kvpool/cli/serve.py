"""`kvpool serve`."""

import asyncio
import time
from typing import Any

import click

from kvpool.cli.auth import auth_options, take_auth_config
from kvpool.cli.events import events_options, take_events_config
from kvpool.cli.limits import limits_options, take_limits
from kvpool.cli.logs import log_options, start_logging
from kvpool.cli.options import Option
from kvpool.cli.settings import config_option
from kvpool.core.ranks.messages import RankTiming
from kvpool.core.sessions.session import LeaseBounds
from kvpool.server import app
from kvpool.server.config import (
    DEFAULT_BLOCK_SAMPLE_RATE,
    DEFAULT_MAX_JOURNAL_BYTES,
    DEFAULT_MAX_POOL_BLOCKS,
    DEFAULT_MAX_POOLS,
    DEFAULT_QUARANTINE_SECONDS,
    MIB,
    JournalConfig,
    MetricsConfig,
    ServerConfig,
)
from kvpool.wire.address import DEFAULT_ADDRESS

_LEASES = LeaseBounds()
_YEAR_2025_SECONDS = 1_735_689_600


def _seconds_option(flag: str, default: float, text: str) -> Option:
    return click.option(flag, type=float, default=default, show_default=True, help=text)


@click.command()
@config_option
@click.option(
    "--listen",
    "listen",
    multiple=True,
    default=(DEFAULT_ADDRESS,),
    show_default=True,
    metavar="ADDRESS",
    help="host:port (port 0: a free one) or unix:/path; may be given several times.",
)
@click.option("--max-message-bytes", type=int, default=16 * MIB, show_default=True, help="Largest message taken.")
@click.option(
    "--max-pool-blocks",
    type=int,
    default=DEFAULT_MAX_POOL_BLOCKS,
    show_default=True,
    help="Most blocks of one pool; each takes about 65 bytes of memory.",
)
@click.option("--max-pools", type=int, default=DEFAULT_MAX_POOLS, show_default=True, help="Most pools at a time.")
@click.option(
    "--metrics-listen",
    default="",
    metavar="HOST:PORT",
    help="Where Prometheus finds /metrics (port 0: a free one); default: nowhere. 9464 is a usual port.",
)
@click.option("--vllm-metrics", is_flag=True, help="Tell them under the names of vLLM's dashboards, too.")
@click.option(
    "--block-sample-rate",
    type=float,
    default=DEFAULT_BLOCK_SAMPLE_RATE,
    show_default=True,
    help="Share of the blocks that is followed, for the metrics of how long contents are kept.",
)
@_seconds_option("--grace-seconds", 10.0, "How long a stopping server waits for calls in flight.")
@_seconds_option(
    "--drain-seconds",
    0.0,
    "How long SIGTERM lets open sessions go on, while no new ones are taken; a second one stops at once.",
)
@_seconds_option(
    "--dead-peer-seconds", 10.0, "How long a peer may be silent on the network before its stream counts as broken."
)
@_seconds_option(
    "--default-lease-seconds",
    _LEASES.default_lease_seconds,
    "How long a session that asks for no lease of its own outlives its last sign of life.",
)
@_seconds_option("--min-lease-seconds", _LEASES.min_lease_seconds, "Shortest lease that a session may ask for.")
@_seconds_option("--max-lease-seconds", _LEASES.max_lease_seconds, "Longest lease that a session may ask for.")
@_seconds_option("--heartbeat-seconds", 1.0, "How often ranks are to be heard of.")
@_seconds_option(
    "--heartbeat-timeout-seconds",
    5.0,
    "After how long without a heartbeat a rank counts as silent, and its pool as degraded.",
)
@_seconds_option(
    "--rank-grace-seconds", 30.0, "How long a rank that is silent or lost may come back with nothing lost."
)
@_seconds_option(
    "--quarantine-seconds",
    DEFAULT_QUARANTINE_SECONDS,
    "How long the blocks of a session whose lease ran out, or that was evicted, are given to nobody, since a step "
    "of it may still run. Only for pools without ranks that answer fences; longer than your longest step. 0: not at "
    "all.",
)
@click.option(
    "--journal",
    default="",
    metavar="FOLDER",
    help="Write down here what changes, so that a server that is killed comes back as it was. Default: nowhere.",
)
@click.option(
    "--journal-max-bytes",
    type=int,
    default=DEFAULT_MAX_JOURNAL_BYTES,
    show_default=True,
    help="Most that the journal's files may take.",
)
@auth_options
@click.option(
    "--past-epoch",
    type=int,
    metavar="EPOCH",
    help="Pools begin in an epoch above this. Default: the seconds since 2025 began, so that servers which know "
    "nothing of each other give none twice.",
)
@limits_options
@events_options
@log_options
def serve(log_level: str, log_format: str, **settings: Any) -> None:  # noqa: ANN401 - named and checked by ServerConfig
    """Serve pools until SIGTERM.

    Every option can also be set in the environment, as KVPOOL_SERVE_LISTEN and so on, or in the file.
    """
    start_logging(log_level, log_format)
    try:
        timing = RankTiming(
            settings.pop("heartbeat_seconds"),
            settings.pop("heartbeat_timeout_seconds"),
            settings.pop("rank_grace_seconds"),
        )
        metrics = MetricsConfig(
            settings.pop("metrics_listen"), settings.pop("vllm_metrics"), settings.pop("block_sample_rate")
        )
        leases = LeaseBounds(
            settings.pop("min_lease_seconds"), settings.pop("max_lease_seconds"), settings.pop("default_lease_seconds")
        )
        journal = JournalConfig(settings.pop("journal"), settings.pop("journal_max_bytes"))
        events, auth, limits = take_events_config(settings), take_auth_config(settings), take_limits(settings)
        past_epoch = settings.pop("past_epoch")
        config = ServerConfig(
            addresses=settings.pop("listen"),
            rank_timing=timing,
            metrics=metrics,
            events=events,
            limits=limits,
            leases=leases,
            journal=journal,
            auth=auth,
            past_epoch=_seconds_since_2025() if past_epoch is None else past_epoch,
            **settings,
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    try:
        asyncio.run(app.serve(config, _say_ready if log_format == "console" else None))
    except OSError as error:
        raise click.ClickException(str(error)) from error


def _seconds_since_2025() -> int:
    return max(int(time.time()) - _YEAR_2025_SECONDS, 0)


def _say_ready(addresses: list[str]) -> None:
    click.echo(f"kvpool: listening on {', '.join(addresses)}", err=True)

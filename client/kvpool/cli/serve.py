"""`kvpool serve`."""

import asyncio
import logging
import os
import socket
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import click
from click.core import ParameterSource

from kvpool.cli.logs import log_options, start_logging
from kvpool.cli.options import as_given, text_option, usage_errors
from kvpool.cli.serve_options import SectionedCommand, auth_options, cluster_options, limits_options
from kvpool.cli.settings import config_option, config_options, take_config
from kvpool.cli.text import print_line
from kvpool.core.ranks.messages import RankTiming
from kvpool.core.sessions.session import LeaseBounds
from kvpool.server import app
from kvpool.server.auth.config import AuthConfig
from kvpool.server.cluster.config import ClusterConfig
from kvpool.server.config import MetricsConfig, ServerConfig, TracingConfig
from kvpool.server.journal.config import JournalConfig
from kvpool.server.limits.config import Limits
from kvpool.server.preflight import check_folder, find_problems
from kvpool.wire.log_queue import LogQueue

_DEFAULTS = ServerConfig()
_YEAR_2025_SECONDS = 1_735_689_600
RELEASED_SECONDS: Final = 1_795_478_400
"""Date of the newest release in CHANGELOG.md: a clock that is earlier is wrong."""
_log = logging.getLogger("kvpool.server")


@click.command(cls=SectionedCommand)
@config_option
@click.option(
    "--check",
    is_flag=True,
    help="Check the settings, certificates, tokens and the journal's folder, and exit: with 0, or with 1 or 2 if the "
    "server would not start.",
)
@click.option(
    "--listen",
    multiple=True,
    default=_DEFAULTS.addresses,
    metavar="ADDRESS",
    help="Address to listen on: host:port (port 0: a free port) or unix:/path. Can be repeated.",
)
@click.option(
    "--steps-listen",
    multiple=True,
    default=_DEFAULTS.steps_listen,
    metavar="ADDRESS",
    help="Address to take steps as frames, host:port or unix:/path. Can be repeated. Default: beside each address, the "
    "next port or PATH.steps; a client that cannot reach it uses gRPC.",
)
@text_option(
    "--metrics-listen",
    "HOST:PORT",
    "Serve /metrics and a status page at this address (port 0: a free port). Off by default; usual port: 9464.",
)
@click.option("--vllm-metrics", is_flag=True, help="Also export metrics under the names that vLLM's dashboards use.")
@config_options(_DEFAULTS.metrics, block_sample_rate="Share of blocks sampled for the metrics of block lifetimes.")
@text_option(
    "--otlp-traces-endpoint",
    "URL",
    "Send spans of admissions and slow calls to this collector over OTLP/gRPC, such as http://localhost:4317. Off "
    "by default. Needs the extra 'otel'.",
)
@config_options(
    _DEFAULTS.tracing, "trace_", slow_seconds="Duration from which a call or a step is traced, besides admissions."
)
@config_options(
    _DEFAULTS,
    max_message_bytes="Maximum size of a message.",
    max_pool_blocks="Maximum blocks of a pool; each takes about 65 bytes of memory.",
    max_pools="Maximum number of pools.",
    grace_seconds="How long a stopping server waits for running calls.",
    drain_seconds="How long open sessions may continue after SIGTERM; no new sessions are accepted. A second SIGTERM "
    "stops at once.",
    dead_peer_seconds="How long a peer may be silent on the network before its stream is closed.",
    quarantine_seconds="How long the blocks of an expired or evicted session are not reused, since one of its steps "
    "may still run. Only for pools without ranks that answer fences. Choose more than the longest step takes; 0: no "
    "quarantine.",
)
@config_options(
    _DEFAULTS.leases,
    default_lease_seconds="Lease of sessions that request none: how long a session lives after its last message.",
    min_lease_seconds="Minimum lease that a session may request.",
    max_lease_seconds="Maximum lease that a session may request.",
)
@config_options(
    _DEFAULTS.rank_timing,
    heartbeat_seconds="Interval of the ranks' heartbeats.",
    heartbeat_timeout_seconds="Time without a heartbeat after which a rank is silent and its pool degraded.",
)
@config_options(
    _DEFAULTS.rank_timing,
    "rank_",
    grace_seconds="How long a silent or lost rank may take to return before the epoch ends.",
)
@text_option(
    "--journal",
    "FOLDER",
    "Write a journal of all changes to this folder, so that a killed server keeps its state. Default: a folder "
    "of host and first address in $XDG_STATE_HOME/kvpool (~/.local/state/kvpool), or none if its port is 0.",
)
@click.option("--no-journal", is_flag=True, help="Write no journal, also where a weaker source sets --journal.")
@config_options(_DEFAULTS.journal, "journal_", max_bytes="Maximum size of the journal's files.")
@click.option(
    "--past-epoch",
    type=int,
    metavar="EPOCH",
    help="New pools get epochs above this one. Default: the seconds since the beginning of 2025, so that servers which "
    "do not share state never use the same epoch.",
)
@auth_options
@cluster_options
@limits_options
@log_options
def serve(
    log_level: str,
    log_format: str,
    *,
    check: bool,
    **settings: Any,  # noqa: ANN401 - named and checked by ServerConfig
) -> None:
    """Serve pools until SIGTERM.

    Every option can also be set in the environment (KVPOOL_SERVE_LISTEN and so on) or in the file of --config.
    """
    log = start_logging(log_level, log_format)
    past_epoch = settings.pop("past_epoch")
    if past_epoch is None and (behind_seconds := RELEASED_SECONDS - time.time()) > 0:
        _log.warning("clock is behind, epochs may repeat", extra={"seconds": round(behind_seconds)})
    settings["journal"] = _journal_folder(settings["journal"], settings["listen"], is_off=settings.pop("no_journal"))
    with usage_errors():
        config = ServerConfig(
            addresses=settings.pop("listen"),
            past_epoch=_seconds_since_2025() if past_epoch is None else past_epoch,
            rank_timing=take_config(settings, RankTiming, grace_seconds="rank_grace_seconds"),
            metrics=take_config(settings, MetricsConfig, address="metrics_listen", vllm_names="vllm_metrics"),
            tracing=take_config(settings, TracingConfig, "trace_", endpoint="otlp_traces_endpoint"),
            leases=take_config(settings, LeaseBounds),
            journal=take_config(settings, JournalConfig, "journal_", folder="journal"),
            limits=take_config(settings, Limits),
            auth=take_config(settings, AuthConfig),
            cluster=take_config(settings, ClusterConfig, url="cluster"),
            **settings,
        )
    if check:
        _report(find_problems(config))
        return
    try:
        if config.journal.folder:
            check_folder(Path(config.journal.folder))
        restarts = asyncio.run(app.serve(config, partial(_say_ready, log) if log_format == "console" else None))
    except (OSError, ValueError) as error:
        raise click.ClickException(as_given(str(error))) from error
    if restarts:  # in another role: with nothing of its state
        logging.shutdown()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - the program itself


def _journal_folder(given: str, addresses: Sequence[str], *, is_off: bool) -> str:
    """The journal's folder, by default one of the first address on this host; empty for none.

    A server on any free port has none by default: its clients and ranks do not find the next one.
    """
    if is_off:
        source = click.get_current_context().get_parameter_source
        order = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT, ParameterSource.DEFAULT_MAP)
        return given if given and order.index(source("journal")) < order.index(source("no_journal")) else ""
    address = next(iter(addresses), ":0")
    if given or address.endswith(":0"):
        return given
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    if not state.is_absolute():
        state = Path(os.environ.get("HOME", "/"), ".local", "state")
    if address.startswith("unix:"):  # a folder for each of its parts
        address = str(Path("unix", *Path(address.removeprefix("unix:")).resolve().parts[1:]))
    return str(state / "kvpool" / socket.gethostname() / address)  # several hosts may share a home


def _report(problems: list[str]) -> None:
    for problem in problems:
        print_line(f"Error: {as_given(problem)}", err=True)
    if problems:
        sys.exit(1)
    print_line("the settings are valid")


def _seconds_since_2025() -> int:
    return max(int(time.time()) - _YEAR_2025_SECONDS, 0)


def _say_ready(log: LogQueue, addresses: list[str]) -> None:
    log.write_line(f"kvpool: listening on {', '.join(addresses)}")

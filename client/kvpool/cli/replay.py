"""`kvpool replay`."""

import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import click

from kvpool.cli.access import access_options, current_access
from kvpool.cli.options import enum_option, usage_errors
from kvpool.cli.progress import progress
from kvpool.cli.replay_sweep import SweepReport
from kvpool.cli.settings import take_config
from kvpool.cli.tables import print_facts, print_json
from kvpool.cli.terminal import Wakeup
from kvpool.client import KvpoolError, ReuseOrder
from kvpool.client.connection import DEFAULT_DEADLINE_SECONDS
from kvpool.replay.children import own_server
from kvpool.replay.endless import play_until
from kvpool.replay.play import ExistingPool, PoolOptions, PoolSource, replay_serially, replay_shares
from kvpool.replay.result import Result
from kvpool.replay.scheduler import SchedulerOptions
from kvpool.replay.sweep import sweep
from kvpool.replay.trace import read_trace
from kvpool.replay.trace_formats import TraceRequest
from kvpool.replay.workload import ChatShare, TraceShare, Workload

_TURNS: Final = 5
_MAX_CHAT_TOKENS: Final = 8192
_STOP_SECONDS: Final = 5.0


@click.command()
@click.argument("trace", type=click.Path(path_type=Path), required=False)
@click.option(
    "--chats",
    type=click.IntRange(1),
    help=f"Instead of TRACE: number of concurrent generated conversations per scheduler, of {_TURNS} turns.",
)
@click.option("--seed", default=2026, help="With --chats: seed of the generator. Equal seeds give equal chats.")
@click.option(
    "--share",
    type=click.IntRange(0),
    default=0,
    help="With --chats: number of the first scheduler. With the same seed, schedulers with different numbers have "
    "different conversations over the same system prompts and documents.",
)
@click.option(
    "--num-blocks",
    type=click.IntRange(2, 2**31 - 1),
    help="Create a pool of this many blocks, including the null block. Default: wait for an existing pool.",
)
@click.option("--block-size", type=click.IntRange(1, 65_536), help="Tokens per block; required with --num-blocks.")
@click.option(
    "--address",
    envvar=["KVPOOL_REPLAY_ADDRESS", "KVPOOL_ADDRESS"],
    metavar="ADDRESS",
    help="A running server. Default: that of KVPOOL_ADDRESS, else the command starts one, as with an empty ADDRESS.",
)
@click.option(
    "--sessions",
    type=click.IntRange(1, 256),
    help="Number of concurrent schedulers, which also generate outputs. Default: 1 with --chats; with TRACE, play the "
    "prompts one after another.",
)
@click.option("--repeat", type=click.IntRange(1), default=1, help="How often to play the workload.")
@click.option(
    "--forever",
    is_flag=True,
    help="Play until SIGTERM, as one scheduler. When its session ends, because the server restarts or a rank is lost, "
    "it waits for the pool and opens another.",
)
@click.option(
    "--sweep",
    "sweeps",
    is_flag=True,
    help="Print the hits of pools of all sizes that hold the largest request, from one pass without a server. The "
    "prompts of TRACE play one after another. With --num-blocks also half, twice and four times as many.",
)
@click.option(
    "--plot", type=click.Path(dir_okay=False, writable=True, path_type=Path), help="With --sweep: an SVG file to draw."
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
@enum_option("--reuse-order", ReuseOrder, ReuseOrder.LRU, "Order in which freed blocks are reused.")
@click.option("--pool", default="replay", help="Name of the pool.")
@click.option("--limit", type=click.IntRange(1), help="Number of requests of the trace to play; default: all.")
@click.option("--max-num-seqs", type=click.IntRange(1), default=256, help="Maximum number of running requests.")
@click.option(
    "--max-num-batched-tokens", type=click.IntRange(1), default=8192, help="Maximum tokens of a scheduling round."
)
@click.option(
    "--step-seconds",
    type=click.FloatRange(0, 60),
    default=0.0,
    help="Time to sleep per scheduling round, in place of a GPU's computation.",
)
@click.option(
    "--deadline-seconds",
    type=click.FloatRange(0, 3600, min_open=True),
    default=DEFAULT_DEADLINE_SECONDS,
    help="Time limit of each call, retries included.",
)
@click.option(
    "--lease-seconds", default=0.0, show_default=False, help="Lease of the sessions; default: the server's default."
)
@click.option(
    "--wait-seconds",
    type=click.FloatRange(0, 3600),
    default=60.0,
    help="Without --num-blocks: how long to wait for the pool.",
)
@access_options()
@click.pass_context
def replay(  # noqa: PLR0913 - one parameter per option
    ctx: click.Context,
    /,
    *,
    address: str | None,
    pool: str,
    num_blocks: int | None,
    block_size: int | None,
    reuse_order: ReuseOrder,
    wait_seconds: float,
    sessions: int | None,
    sweeps: bool,
    plot: Path | None,
    as_json: bool,
    **settings: Any,  # noqa: ANN401 - named and checked by dataclasses
) -> None:
    """Replay a request trace or generated chats.

    TRACE is a file of JSON lines, a JSON array or a log of vLLM (also as .gz): a Mooncake or Qwen-Bailian trace, token
    ids, texts, or chats as in ShareGPT. The keys of its first entry determine which.

    Every option can also be set in the environment (KVPOOL_REPLAY_ADDRESS and so on).
    """
    with usage_errors():
        work = take_config(settings, _Work)
        if sweeps:
            if not work.trace or block_size is None or work.forever or sessions is not None:
                raise click.UsageError(
                    "--sweep plays the prompts of TRACE one after another: give TRACE and --block-size, and neither "
                    "--sessions nor --forever"
                )
            _sweep(work, block_size, reuse_order, num_blocks).show(as_json=as_json, plot=plot)
            return
        if plot:
            raise click.UsageError("--plot draws the curve of --sweep")
        if (num_blocks is None) != (block_size is None):
            raise click.UsageError("give both --num-blocks and --block-size, or neither")
        if not address and (work.forever or num_blocks is None):
            raise click.UsageError("without --address, give --num-blocks and --block-size, and not --forever")
        if work.forever and sessions is not None:
            raise click.UsageError("--forever runs one scheduler: leave out --sessions, or start it several times")
        source: PoolSource = ExistingPool(pool, wait_seconds)
        if num_blocks is not None and block_size is not None:
            source = PoolOptions(pool, num_blocks, block_size, work.max_model_len, reuse_order)
        else:
            _report(f"waiting for pool {pool!r}, at most {wait_seconds:g} s")
        options = SchedulerOptions(address or "", pool, access=current_access(), **settings)
        _report(f"playing on {address or 'a server of its own, which it starts'}")
        if work.forever:
            _play_until_signal(source, work.shares(1)[0], options)
            return
        result = _play(source, work, options, sessions)
    if as_json:
        print_json(result.as_json())
    else:
        print_facts("replay", result.rows())
    ctx.exit(1 if result.failed_sessions else 0)


@dataclass
class _Work:
    """The workload. Attributes have the names of options."""

    trace: Path | None
    limit: int | None
    chats: int | None
    seed: int
    share: int
    repeat: int
    forever: bool

    def __post_init__(self) -> None:
        if (self.trace is None) == (self.chats is None):
            raise click.UsageError("give either TRACE or --chats")
        self.requests: list[TraceRequest] = read_trace(self.trace, self.limit) if self.trace else []

    @property
    def max_model_len(self) -> int:
        """Maximum tokens of a request."""
        return max((entry.input_length + entry.output_length for entry in self.requests), default=_MAX_CHAT_TOKENS)

    def shares(self, count: int) -> list[Workload]:
        """Splits the workload between schedulers."""
        num_rounds = None if self.forever else self.repeat
        if self.trace:
            return [TraceShare(self.trace, self.limit, index, count, num_rounds) for index in range(count)]
        first, chats = self.share, self.chats or 0
        return [ChatShare(self.seed, first + index, chats, _TURNS, num_rounds) for index in range(count)]

    def num_requests(self, sessions: int) -> int:
        """Returns the number of requests that this many schedulers play."""
        return (len(self.requests) or sessions * (self.chats or 0) * _TURNS) * self.repeat


def _sweep(work: _Work, block_size: int, reuse_order: ReuseOrder, num_blocks: int | None) -> SweepReport:
    start_seconds = time.perf_counter()
    curve = sweep(work.requests * work.repeat, block_size, reuse_order)
    return SweepReport(curve, block_size, reuse_order, num_blocks, time.perf_counter() - start_seconds)


def _play(source: PoolSource, work: _Work, options: SchedulerOptions, sessions: int | None) -> Result:
    count = sessions or 1
    server = nullcontext(options.address) if options.address else own_server()
    with server as address, progress("replaying", work.num_requests(count)) as reporter:
        options = replace(options, address=address)
        if work.trace and sessions is None:
            return replay_serially(source, work.requests * work.repeat, options, reporter)
        return replay_shares(source, work.shares(count), options, reporter)


def _play_until_signal(source: PoolSource, share: Workload, options: SchedulerOptions) -> None:
    """Plays in a thread, so that the main thread handles signals while a call to the server blocks."""
    stopping = threading.Event()
    failures: list[Exception] = []
    with Wakeup() as wakeup:

        def play() -> None:
            try:
                play_until(stopping, source, share, options, _report)
            except (KvpoolError, ValueError) as error:
                failures.append(error)
            finally:
                wakeup.wake()

        player = threading.Thread(target=play, daemon=True)
        player.start()
        wakeup.wait()
        stopping.set()
        player.join(_STOP_SECONDS)
    for failure in failures:
        raise failure


def _report(sentence: str) -> None:
    click.echo(f"kvpool: {sentence}", err=True)

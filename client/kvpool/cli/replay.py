"""`kvpool replay`."""

import functools
import json
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import click

from kvpool.cli.access import access_options, current_access
from kvpool.cli.output import progress, result_table
from kvpool.cli.wakeup import Wakeup
from kvpool.client import KvpoolError, ReuseOrder
from kvpool.replay.endless import play_until
from kvpool.replay.executor import paced
from kvpool.replay.play import (
    ExistingPool,
    PoolOptions,
    PoolSource,
    replay_serially,
    replay_shares,
    service,
    trace_shares,
)
from kvpool.replay.playing import SchedulerOptions
from kvpool.replay.result import Result
from kvpool.replay.trace import TraceError, TraceRequest, read_trace
from kvpool.replay.workload import ChatShare, Workload

_TURNS: Final = 5
_MAX_CHAT_TOKENS: Final = 8192
_STOP_SECONDS: Final = 5.0


@click.command()
@click.argument("trace", type=click.Path(path_type=Path), required=False)
@click.option(
    "--chats",
    type=click.IntRange(1),
    help=f"Instead of TRACE: so many generated conversations at a time for each scheduler, of {_TURNS} turns.",
)
@click.option("--seed", type=int, default=2026, show_default=True, help="With --chats: equal seeds give equal chats.")
@click.option(
    "--share",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="With --chats: number of the first scheduler. Schedulers of one seed with other numbers have other "
    "conversations over the same system prompts and documents.",
)
@click.option(
    "--num-blocks",
    type=click.IntRange(2, 2**31 - 1),
    help="Blocks of the pool, null block included; default: the pool is there already, or ranks form it.",
)
@click.option("--block-size", type=click.IntRange(1, 65_536), help="Tokens a block; goes with --num-blocks.")
@click.option("--address", metavar="ADDRESS", help="A running server; default: one of our own.")
@click.option(
    "--sessions",
    type=click.IntRange(1, 256),
    help="Schedulers that play concurrently, outputs included; default: with --chats 1; with TRACE none, its prompts "
    "are played serially.",
)
@click.option("--repeat", type=click.IntRange(1), default=1, show_default=True, help="Play everything so many times.")
@click.option(
    "--forever",
    is_flag=True,
    help="Play until SIGTERM, as one scheduler. When its session ends, as the server restarts or a rank is lost, it "
    "waits for the pool and opens another.",
)
@click.option("--json", "as_json", is_flag=True, help="End with one JSON object.")
@click.option(
    "--reuse-order",
    type=click.Choice([order.value for order in ReuseOrder]),
    default=ReuseOrder.LRU.value,
    show_default=True,
    help="The order in which freed blocks are used again.",
)
@click.option("--pool", default="replay", show_default=True, help="Name of the pool.")
@click.option("--limit", type=click.IntRange(1), help="Only the first requests of the trace.")
@click.option(
    "--max-num-seqs", type=click.IntRange(1), default=256, show_default=True, help="Most requests running at once."
)
@click.option(
    "--max-num-batched-tokens",
    type=click.IntRange(1),
    default=8192,
    show_default=True,
    help="Most tokens of a scheduling round.",
)
@click.option(
    "--step-seconds",
    type=click.FloatRange(0, 60),
    default=0.0,
    show_default=True,
    help="How long a scheduling round takes to compute, as it would on a GPU.",
)
@click.option("--lease-seconds", type=float, default=0.0, help="Lease of the sessions; default: the server's.")
@click.option(
    "--wait-seconds",
    type=click.FloatRange(0, 3600),
    default=60.0,
    show_default=True,
    help="Without --num-blocks: how long the pool is waited for.",
)
@access_options()
@click.pass_context
def replay(  # noqa: PLR0913 - one parameter an option
    ctx: click.Context,
    *,
    trace: Path | None,
    chats: int | None,
    seed: int,
    share: int,
    num_blocks: int | None,
    block_size: int | None,
    address: str | None,
    sessions: int | None,
    repeat: int,
    forever: bool,
    as_json: bool,
    reuse_order: str,
    pool: str,
    limit: int | None,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    step_seconds: float,
    lease_seconds: float,
    wait_seconds: float,
) -> None:
    """Replay a request trace (.jsonl or .jsonl.gz, in the format of the Mooncake traces), or chats, through a service.

    Every option can also be set in the environment, as KVPOOL_REPLAY_ADDRESS and so on.
    """
    work = _Work(trace, limit, chats, seed, share, None if forever else repeat)
    if (num_blocks is None) != (block_size is None):
        raise click.UsageError("give both --num-blocks and --block-size, or neither")
    if address is None and (forever or num_blocks is None):
        raise click.UsageError("without --address, give --num-blocks and --block-size, and not --forever")
    if forever and sessions is not None:
        raise click.UsageError("--forever is one scheduler: give no --sessions, start it several times")
    source: PoolSource = ExistingPool(pool, wait_seconds)
    if num_blocks is not None and block_size is not None:
        source = PoolOptions(pool, num_blocks, block_size, work.max_model_len, ReuseOrder(reuse_order))
    else:
        click.echo(f"kvpool: waits for pool {pool!r}, at most {wait_seconds:g} s", err=True)
    executor = functools.partial(paced, step_seconds) if step_seconds else None
    try:
        limits = (lease_seconds, max_num_seqs, max_num_batched_tokens)
        how = SchedulerOptions(address or "", pool, *limits, executor, access=current_access())
        if forever:
            _play_until_told_to_end(source, work.shares(1)[0], how)
            return
        result = _play(source, work, how, sessions)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if as_json:
        click.echo(json.dumps(result.as_json()))
    else:
        result_table(result)
    ctx.exit(1 if result.failed_sessions else 0)


@dataclass
class _Work:
    """What there is to play; each attribute is the option of its name, num_rounds is None for ever."""

    trace: Path | None
    limit: int | None
    chats: int | None
    seed: int
    share: int
    num_rounds: int | None

    def __post_init__(self) -> None:
        if (self.trace is None) == (self.chats is None):
            raise click.UsageError("give either TRACE or --chats")
        try:
            self.requests: list[TraceRequest] = read_trace(self.trace, self.limit) if self.trace else []
        except TraceError as error:
            raise click.UsageError(str(error)) from error

    @property
    def max_model_len(self) -> int:
        """Most tokens of a request."""
        return max((entry.input_length + entry.output_length for entry in self.requests), default=_MAX_CHAT_TOKENS)

    def shares(self, count: int) -> list[Workload]:
        """Deals it out to schedulers."""
        if self.trace:
            return trace_shares(self.trace, self.limit, count, self.num_rounds)
        return [
            ChatShare(self.seed, self.share + index, self.chats or 0, _TURNS, self.num_rounds) for index in range(count)
        ]

    def num_requests(self, sessions: int) -> int:
        """How many requests so many schedulers play."""
        return (len(self.requests) or sessions * (self.chats or 0) * _TURNS) * (self.num_rounds or 1)


def _play(source: PoolSource, work: _Work, how: SchedulerOptions, sessions: int | None) -> Result:
    count = sessions or 1
    with service(how.address or None) as at, progress("replaying", work.num_requests(count)) as console:
        if sessions is None and work.trace:
            requests = work.requests * (work.num_rounds or 1)
            return replay_serially(source, requests, replace(how, address=at), console)
        return replay_shares(source, work.shares(count), replace(how, address=at), console)


def _play_until_told_to_end(source: PoolSource, share: Workload, how: SchedulerOptions) -> None:
    """Plays in a thread: signals reach the main one, also while the other waits for a server that does not answer."""
    stopping = threading.Event()
    failures: list[Exception] = []
    with Wakeup() as wakeup:

        def play() -> None:
            try:
                play_until(stopping, source, share, how, lambda sentence: click.echo(f"kvpool: {sentence}", err=True))
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

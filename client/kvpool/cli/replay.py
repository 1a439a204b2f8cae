"""`kvpool replay`."""

import time
from dataclasses import replace
from pathlib import Path

import click

from kvpool.cli.access import access_options, current_access
from kvpool.cli.options import enum_option, usage_errors
from kvpool.cli.progress import progress
from kvpool.cli.replay_sweep import SweepReport
from kvpool.cli.tables import print_facts, print_json
from kvpool.client import PoolConfig, ReuseOrder
from kvpool.client.connection import connect_as
from kvpool.replay.play import measured, play_prompts, replay_pool
from kvpool.replay.result import Result
from kvpool.replay.sweep import sweep
from kvpool.replay.trace import read_trace
from kvpool.replay.trace_formats import TraceRequest


@click.command()
@click.argument("trace", type=click.Path(path_type=Path))
@click.option(
    "--num-blocks",
    type=click.IntRange(2, 2**31 - 1),
    help="Create a pool of this many blocks, including the null block. Default: use an existing pool of --address.",
)
@click.option(
    "--num-host-blocks",
    type=click.IntRange(1, 2**31 - 1),
    help="With --num-blocks: blocks of host memory, a second tier.",
)
@click.option("--block-size", type=click.IntRange(1, 65_536), help="Tokens per block; required with --num-blocks.")
@click.option(
    "--address",
    envvar=["KVPOOL_REPLAY_ADDRESS", "KVPOOL_ADDRESS"],
    metavar="ADDRESS",
    help="A running server. Default: that of KVPOOL_ADDRESS; without it or if empty, the pool is in this process.",
)
@click.option("--repeat", type=click.IntRange(1), default=1, help="How often to play the trace.")
@click.option(
    "--sweep",
    "sweeps",
    is_flag=True,
    help="Print the hits of pools of all sizes that hold the largest request, from one pass without a server. "
    "With --num-blocks also half, twice and four times as many.",
)
@click.option(
    "--sweep-host",
    "host_sizes",
    type=click.IntRange(1, 2**31 - 1),
    multiple=True,
    metavar="BLOCKS",
    help="With --sweep, repeatable: also print the hit rates with this many blocks of host memory. Each is a replay of "
    "its own, as one pass models one tier; --num-blocks limits the rows to half, once, twice and four times as many.",
)
@click.option(
    "--plot", type=click.Path(dir_okay=False, writable=True, path_type=Path), help="With --sweep: an SVG file to draw."
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
@enum_option("--reuse-order", ReuseOrder, ReuseOrder.LRU, "Order in which freed blocks are reused.")
@click.option("--pool", default="replay", help="Name of the pool.")
@click.option("--limit", type=click.IntRange(1), help="Number of requests of the trace to play; default: all.")
@access_options()
def replay(  # noqa: PLR0913 - one parameter per option
    *,
    trace: Path,
    num_blocks: int | None,
    num_host_blocks: int | None,
    block_size: int | None,
    address: str | None,
    repeat: int,
    sweeps: bool,
    host_sizes: tuple[int, ...],
    plot: Path | None,
    as_json: bool,
    reuse_order: ReuseOrder,
    pool: str,
    limit: int | None,
) -> None:
    """Play the prompts of a request trace, one after another, and count the hits.

    TRACE is a Mooncake trace, one of `kvpool export-trace`, JSON lines of token ids or messages, or a log of vLLM (also
    as .gz). The keys of its first entry determine which.

    Every option can also be set in the environment (KVPOOL_REPLAY_ADDRESS and so on).
    """
    contradictions = {
        "--sweep needs --block-size": sweeps and block_size is None,
        "--sweep-host needs --sweep": host_sizes and not sweeps,
        "--plot draws the curve of --sweep": plot and not sweeps,
        "give both --num-blocks and --block-size, or neither": not sweeps and (not num_blocks) != (not block_size),
        "without --address, give --num-blocks and --block-size": not (sweeps or num_blocks or address),
        "--num-host-blocks needs --num-blocks": num_host_blocks and not num_blocks,
        "with --sweep, --num-host-blocks is --sweep-host": num_host_blocks and sweeps,
    }
    if found := next((message for message, is_so in contradictions.items() if is_so), None):
        raise click.UsageError(found)
    with usage_errors():
        requests = read_trace(trace, limit) * repeat
        longest = max(entry.input_length + entry.output_length for entry in requests)
        block_size = block_size or 1  # of a pool that exists, it is not used
        created = replay_pool(pool, num_blocks or 0, block_size, longest, reuse_order)
        if sweeps:
            start_seconds = time.perf_counter()
            curve = sweep(requests, block_size, reuse_order)
            report = SweepReport(curve, block_size, reuse_order, num_blocks, {host: [] for host in host_sizes})
            for host, hits in report.with_host.items():
                pools = (replace(created, num_blocks=n, num_host_blocks=host) for n in report.sizes)
                hits += [_play(requests, each, "embedded:").counts.hit_tokens for each in pools]
            report.seconds = time.perf_counter() - start_seconds
            report.show(as_json=as_json, plot=plot)
            return
        created = replace(created, num_host_blocks=num_host_blocks or 0)
        result = _play(requests, created if num_blocks else pool, address or "embedded:")
    if as_json:
        print_json(result.as_json())
    else:
        print_facts("replay", result.rows())


def _play(requests: list[TraceRequest], pool: PoolConfig | str, address: str) -> Result:
    """Plays on a new pool, or on one that has this name."""
    with connect_as(current_access(), address) as client, progress("replaying", len(requests)) as advance:
        before = client.get_pool(pool) if isinstance(pool, str) else client.create_pool(pool)
        with client.open_session(before.config.name, client_name="kvpool-replay") as session:
            return measured(client, before, lambda: play_prompts(session, requests, lambda: advance(1)))

"""`kvpool replay`."""

import json
from pathlib import Path

import click

from kvpool.cli.output import progress, result_table
from kvpool.client import ReuseOrder
from kvpool.replay.play import PoolOptions, replay_serially, replay_shares, service, trace_shares
from kvpool.replay.processes import SchedulerOptions
from kvpool.replay.trace import TraceError, read_trace


@click.command()
@click.argument("trace", type=click.Path(path_type=Path))
@click.option(
    "--num-blocks", type=click.IntRange(2, 2**31 - 1), required=True, help="Blocks of the pool, null block included."
)
@click.option("--block-size", type=click.IntRange(1, 65_536), required=True, help="Tokens a block.")
@click.option("--address", metavar="ADDRESS", help="A running server; default: one of our own.")
@click.option(
    "--sessions",
    type=click.IntRange(1, 256),
    help="Schedulers that play the trace concurrently, outputs included; default: serially, prompts only.",
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
@click.option("--lease-seconds", type=float, default=0.0, help="Lease of the sessions; default: the server's.")
@click.pass_context
def replay(  # noqa: PLR0913 - one parameter an option
    ctx: click.Context,
    *,
    trace: Path,
    num_blocks: int,
    block_size: int,
    address: str | None,
    sessions: int | None,
    as_json: bool,
    reuse_order: str,
    pool: str,
    limit: int | None,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    lease_seconds: float,
) -> None:
    """Replay a request trace (.jsonl or .jsonl.gz, in the format of the Mooncake traces) through a service."""
    try:
        requests = read_trace(trace, limit)
    except TraceError as error:
        raise click.UsageError(str(error)) from error
    max_model_len = max(entry.input_length + entry.output_length for entry in requests)
    options = PoolOptions(pool, num_blocks, block_size, max_model_len, ReuseOrder(reuse_order))
    try:
        with service(address) as at, progress("replaying", len(requests)) as console:
            if sessions is None:
                result = replay_serially(at, options, requests, lease_seconds, console)
            else:
                shares = trace_shares(trace, limit, sessions)
                how = SchedulerOptions(at, pool, lease_seconds, max_num_seqs, max_num_batched_tokens)
                result = replay_shares(at, options, shares, how, console)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if as_json:
        click.echo(json.dumps(result.as_json()))
    else:
        result_table(result)
    ctx.exit(1 if result.failed_sessions else 0)

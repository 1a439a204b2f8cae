"""`kvpool export-trace`."""

import json
import os
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Final, TextIO

import click

from kvpool.cli.terminal import Wakeup
from kvpool.core.errors import KvpoolError
from kvpool.core.ids import BlockHash, MapId
from kvpool.server.codec import DamageError
from kvpool.server.journal.records import MismatchError
from kvpool.server.journal.requests import JournaledRequest, journaled_requests

_PAUSE_SECONDS: Final = 0.5


@click.command("export-trace")
@click.argument("journal", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--pool", required=True, metavar="NAME", help="The pool whose requests to write.")
@click.option("--output", type=click.File("w", lazy=False), default="-", help="A file; by default the standard output.")
@click.option("--follow", is_flag=True, help="Continue until SIGTERM or Ctrl-C, with what the server writes meanwhile.")
def export_trace(*, journal: Path, pool: str, output: TextIO, follow: bool) -> None:
    """Write the requests in a server's JOURNAL as a trace for `kvpool replay`.

    The server may be running. Without --follow these are the requests since its newest snapshot, which are few: the
    server writes one for each 256th of --journal-max-bytes. The trace has no tokens, and ids in place of hashes.
    """
    with Wakeup() if follow else nullcontext() as wakeup:

        def reads_on() -> bool:
            output.flush()
            if wakeup and not wakeup.is_ending:
                wakeup.wait(_PAUSE_SECONDS)
            return wakeup is not None and not wakeup.is_ending

        try:
            requests = journaled_requests(journal, reads_on)
            output.writelines(_lines(each for each in requests if each.pool.config.name == pool))
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter flushes the standard output at its end
        except (DamageError, MismatchError, KvpoolError, OSError) as error:
            raise click.ClickException(f"{journal}: the journal cannot be read: {error}") from error


def _lines(requests: Iterator[JournaledRequest]) -> Iterator[str]:
    """Yields the lines of a trace. Equal hashes get equal ids; a block without a hash gets an id of its own."""
    ids: dict[tuple[MapId, BlockHash], int] = {}
    next_id, first_seconds = count(), None
    for each in requests:
        request, block_size = each.request, each.pool.hash_block_size
        first_seconds = each.declared_seconds if first_seconds is None else first_seconds
        num_ids = -(-request.num_prompt_tokens // block_size)
        hash_ids = []
        for block_hash in request.hashes[: request.num_prompt_tokens // block_size]:
            key = (request.first_map, block_hash)
            if key not in ids:
                ids[key] = next(next_id)
            hash_ids.append(ids[key])
        hash_ids += [next(next_id) for _ in range(num_ids - len(hash_ids))]
        entry = {
            "timestamp": round(1000 * (each.declared_seconds - first_seconds)),
            "input_length": request.num_prompt_tokens,
            "output_length": request.num_tokens - request.num_prompt_tokens,
            "hash_ids": hash_ids,
            "block_size": block_size,
        }
        yield json.dumps(entry) + "\n"

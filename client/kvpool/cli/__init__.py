"""The `kvpool` command."""

import logging
import sys
from typing import Any

import click

from kvpool.cli.demo import demo
from kvpool.cli.plan import plan
from kvpool.cli.replay import replay
from kvpool.cli.serve import serve
from kvpool.cli.worker import worker
from kvpool.client import KvpoolError, __version__
from kvpool.replay.processes import ChildError


class _Group(click.Group):
    """Turns the errors that are expected into one line each."""

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401 - as click has it
        try:
            return super().invoke(ctx)
        except KvpoolError as error:
            raise click.ClickException(f"{error.reason}: {error}") from error
        except ChildError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=_Group, context_settings={"auto_envvar_prefix": "KVPOOL", "help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kvpool")
def main() -> None:
    """A shared KV-cache block allocator for LLM inference."""
    logging.captureWarnings(capture=True)


main.add_command(serve)
main.add_command(replay)
main.add_command(demo)
main.add_command(plan)
main.add_command(worker)

if __name__ == "__main__":
    sys.exit(main())

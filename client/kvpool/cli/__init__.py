"""The `kvpool` command."""

import importlib
import logging
import os
import sys
from typing import Any, Final

import click

from kvpool.core.errors import KvpoolError
from kvpool.replay.child_error import ChildError

_COMMANDS: Final = {
    "blocks": "kvpool.cli.admin:blocks",
    "demo": "kvpool.cli.demo:demo",
    "drain": "kvpool.cli.admin:drain",
    "evict-session": "kvpool.cli.admin:evict_session",
    "health": "kvpool.cli.health:health",
    "plan": "kvpool.cli.plan:plan",
    "pools": "kvpool.cli.admin:pools",
    "remove-pool": "kvpool.cli.admin:remove_pool",
    "replay": "kvpool.cli.replay:replay",
    "requests": "kvpool.cli.admin:requests",
    "reset": "kvpool.cli.admin:reset",
    "serve": "kvpool.cli.serve:serve",
    "sessions": "kvpool.cli.admin:sessions",
    "token": "kvpool.cli.token:token",
    "top": "kvpool.cli.top:top",
    "worker": "kvpool.cli.worker:worker",
}
"""By name: where the command is. It is imported when it is run, so that `health` does not wait for the others."""


class _Group(click.Group):
    """Imports commands when they are needed, and turns the errors that are expected into one line each."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *_COMMANDS})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return super().get_command(ctx, cmd_name)
        # grpc's core, which reads this as it is imported, would write lines of its own to stderr, some with bytes that
        # any peer can choose.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        module, _, name = _COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401 - as click has it
        try:
            try:
                return super().invoke(ctx)
            except KvpoolError as error:
                raise click.ClickException(f"{error.reason}: {error}") from error
            except ChildError as error:
                raise click.ClickException(str(error)) from error
        except click.ClickException as error:
            from kvpool.cli.logs import report  # noqa: PLC0415 - only now, so that `health` does not wait for it

            if not report(error):
                raise
            ctx.exit(error.exit_code)


@click.group(cls=_Group, context_settings={"auto_envvar_prefix": "KVPOOL", "help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kvpool", prog_name="kvpool")
def main() -> None:
    """A shared KV-cache block allocator for LLM inference."""
    logging.captureWarnings(capture=True)


if __name__ == "__main__":
    sys.exit(main())

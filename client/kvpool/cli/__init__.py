"""The `kvpool` command: one module per subcommand."""

import importlib
import logging
import os
import sys
from typing import Any, Final

import click

from kvpool.core.errors import KvpoolError
from kvpool.replay import ChildError

_COMMANDS: Final = (
    *(
        "blocks",
        "demo",
        "drain",
        "evict-session",
        "explain",
        "health",
        "plan",
        "pools",
        "remove-pool",
        "replay",
        "requests",
    ),
    *("reset", "serve", "sessions", "set-weights-version", "shard", "token", "top", "worker"),
)
"""Each is a function in a module of its name, which is imported when the command runs, so that `health` is fast."""

# Click's default_map and auto_envvar_prefix read flags, environment and file in this order. Typer would add pydantic to
# the environment of every scheduler.
_SETTINGS: Final = {"auto_envvar_prefix": "KVPOOL", "help_option_names": ["-h", "--help"], "show_default": True}


class _Group(click.Group):
    """Imports commands on demand and prints expected errors as one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *_COMMANDS})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return super().get_command(ctx, cmd_name)
        # gRPC's C core reads this on import. By default it writes lines to stderr, some with bytes that a peer chooses.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        name = cmd_name.replace("-", "_")
        command: click.Command = getattr(importlib.import_module(f"kvpool.cli.{name}"), name)
        return command

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401 - click's signature
        try:
            return super().invoke(ctx)
        except KvpoolError as error:
            failure = click.ClickException(f"{error.reason}: {error}")
        except ChildError as error:
            failure = click.ClickException(str(error))
        except click.ClickException as error:
            failure = error
        from kvpool.cli.logs import report  # noqa: PLC0415 - imported late, so that `health` is fast

        if not report(failure):
            raise failure
        return ctx.exit(failure.exit_code)


@click.group(cls=_Group, context_settings=_SETTINGS)
@click.version_option(package_name="kvpool", prog_name="kvpool")
def main() -> None:
    """A shared KV-cache block allocator for LLM inference."""
    logging.captureWarnings(capture=True)


if __name__ == "__main__":
    sys.exit(main())

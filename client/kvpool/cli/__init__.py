"""The `kvpool` command: one module per subcommand."""

import importlib
import logging
import os
from typing import Any, Final

import click
from click.shell_completion import CompletionItem

from kvpool.cli.options import did_you_mean
from kvpool.core.errors import KvpoolError
from kvpool.replay import ChildError

_SECTIONS: Final = {
    "Serve": {
        "serve": "Serve pools until SIGTERM.",
        "worker": "Run one rank of a pool, or lend its memory.",
        "health": "Check whether a server or worker serves.",
        "token": "Create tokens.",
    },
    "Try": {
        "demo": "Show two schedulers that share one pool.",
        "plan": "Plan a model's KV cache from its config.json.",
        "replay": "Count the hits of a request trace.",
        "export-trace": "Write the requests of a server's journal as a trace.",
    },
    "Look": {
        "top": "Watch pools, ranks and sessions live.",
        "pools": "List the pools.",
        "sessions": "List the sessions of schedulers.",
        "requests": "List the requests by session and id.",
        "blocks": "List the blocks of a pool.",
        "explain": "Say why prefixes were not hit.",
    },
    "Change": {
        "drain": "Accept no new sessions; optionally stop the server.",
        "reset": "Drop the cached prefixes of a pool.",
        "evict-session": "End a session and take its blocks back.",
        "set-weights-version": "State that engines compute with other weights now.",
        "remove-pool": "Remove a pool, so that its name is free again.",
        "shard": "Show the primary and its standbys; hand over.",
    },
}
"""The commands with their summaries, by the word before them in `kvpool --help`.

Each is a function in a module of its name, which is imported when the command runs: all of them take a second.
"""
_COMMANDS: Final = {name: summary for section in _SECTIONS.values() for name, summary in section.items()}

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

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in _COMMANDS and not name.startswith("-"):
            raise click.UsageError(f"No such command {name!r}; {did_you_mean(name, _COMMANDS)}", ctx)
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes a line per command, which all fit a screen of 24 lines and 80 columns."""
        self.format_usage(ctx, formatter)
        formatter.write(f"{self.help} Options: --version, --help.\n\n")
        for heading, commands in _SECTIONS.items():
            for i, (name, summary) in enumerate(commands.items()):
                formatter.write(f"{'' if i else heading:<7}{name:<21}{summary}\n")

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        found = [CompletionItem(name, help=text) for name, text in _COMMANDS.items() if name.startswith(incomplete)]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]

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
        from kvpool.cli.text import clean  # noqa: PLC0415 - as above

        # Messages quote answers and files. Click declares the attribute as final.
        vars(failure)["message"] = clean(failure.message)
        if not report(failure):
            raise failure
        return ctx.exit(failure.exit_code)


@click.group(cls=_Group, context_settings=_SETTINGS)
@click.version_option(package_name="kvpool", prog_name="kvpool")
def main() -> None:
    """A shared KV-cache block allocator for LLM inference."""
    logging.captureWarnings(capture=True)

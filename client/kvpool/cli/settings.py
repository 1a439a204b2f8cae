"""Settings from a TOML file and the environment, checked against a command's options.

Precedence: flags, environment, file, defaults.
"""

import os
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from kvpool.cli.options import Option, did_you_mean, enum_option, text_option, together

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_NO_SETTINGS: Final = ("config", "check", "help")
"""Options that are flags only."""
_ConfigT = TypeVar("_ConfigT", bound="DataclassInstance")


def load_config(ctx: click.Context, _: click.Parameter, path: Path | None) -> Path | None:
    """Callback of an eager `--config` option: makes the file's values the command's defaults.

    Raises:
        click.UsageError: The file cannot be read, or a key of the file or the environment is not an option.
    """
    known = {param.name: param for param in ctx.command.params if param.name and param.name not in _NO_SETTINGS}
    prefix = f"{ctx.auto_envvar_prefix}_"
    _refuse_unknown(
        (name.removeprefix(prefix).lower() for name in os.environ if name.startswith(prefix)),
        [*known, "config"],
        "environment",
        lambda key: f"{prefix}{key.upper()}",
    )
    if path is None:
        return None
    try:
        values: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise click.UsageError(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise click.UsageError(f"{path}: not TOML: {error}") from error
    _refuse_unknown(values, known, str(path))
    for key, value in values.items():
        if isinstance(value, list) and not known[key].multiple:
            raise click.UsageError(f"{path}: {key}: takes one value, not a list")
        if known[key].multiple and isinstance(value, str):
            values[key] = [value]
    ctx.default_map = {**(ctx.default_map or {}), **values}
    return path


config_option = click.option(
    "--config",
    type=click.Path(path_type=Path),
    is_eager=True,
    expose_value=False,
    callback=load_config,
    help="TOML file. Its keys are the names of the other options, with underscores.",
)
"""Adds --config, a file of settings."""


def config_options(config: object, prefix: str = "", **texts: str) -> Option:
    """Adds an option for each named field of a config; `take_config` reads them.

    Args:
        config: A dataclass with the defaults.
        prefix: Beginning of the options' names, before the field's name.
        texts: The help of each option, by field.
    """
    return together(*(_option(prefix + name, getattr(config, name), text) for name, text in texts.items()))


def take_config(settings: dict[str, Any], kind: type[_ConfigT], prefix: str = "", **options: str) -> _ConfigT:
    """Removes the values of a config from a command's settings and makes the config.

    Args:
        settings: The values by option. A field without an option keeps its default.
        kind: A dataclass. The option of a field is `prefix` and the field's name.
        prefix: Beginning of the options' names.
        options: The options of fields with other names.

    Raises:
        ValueError: The config is invalid.
    """
    names = {field.name: options.get(field.name, prefix + field.name) for field in fields(kind)}
    return kind(**{name: settings.pop(option) for name, option in names.items() if option in settings})


def _option(name: str, default: object, text: str) -> Option:
    flag = f"--{name.replace('_', '-')}"
    if isinstance(default, Enum):
        return enum_option(flag, type(default), default, text)
    if isinstance(default, str):
        return text_option(flag, name.rpartition("_")[2].upper(), text, default=default)
    return click.option(flag, default=default, help=text)


def _refuse_unknown(
    keys: Iterable[str], known: Iterable[str], where: str, written: Callable[[str], str] = lambda key: key
) -> None:
    known = sorted(known)
    for key in keys:
        if key not in known:
            hint = did_you_mean(written(key), map(written, known))
            raise click.UsageError(f"{where}: unknown key {written(key)}; {hint}")

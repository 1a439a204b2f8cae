"""The tables of the documentation that the code states, which the site has in place of `<!-- table: NAME -->`."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import click
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.report import Report
from benchmarks.tables import markdown
from kvpool.cli import _SECTIONS, main
from kvpool.cli.serve_options import LIMITS_HELP
from kvpool.server.cluster.transitions import TRANSITIONS, Transition
from support.core import World
from support.exported_metrics import info_of, scrape, some_observations, worker_page
from support.logs import logged_events
from support.models import EXPECTED_FIGURES, derive, figures
from support.paths import ROOT
from support.plans import as_vllm_answers, derived, read_recorded

MARK: Final = re.compile(r"^<!-- table: ([a-z ]+) -->$", re.MULTILINE)
_LIMITS: Final = {"max_message_bytes", "max_pool_blocks", "max_pools", "journal_max_bytes", *LIMITS_HELP}


def filled(page: str) -> str:
    """Returns a page with its tables.

    Raises:
        KeyError: There is no such table.
    """
    return MARK.sub(lambda mark: TABLES[mark[1]](), page)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines)


def _commands() -> str:
    rows = [(f"`kvpool {name}`", text) for section in _SECTIONS.values() for name, text in section.items()]
    return _table(("command", "purpose"), rows)


def _options(command: str, names: frozenset[str] = frozenset()) -> str:
    """The options of a command: all, or those named."""
    context = click.Context(main, info_name="kvpool", show_default=True)
    found = main.get_command(context, command) or main
    rows = [
        _option(record)
        for param in found.get_params(context)
        if (not names or param.name in names) and (record := param.get_help_record(context))
    ]
    return _table(("option", "default", "meaning"), rows)


def _option(record: tuple[str, str]) -> tuple[str, str, str]:
    text, _, extra = record[1].partition("  [")
    default = re.search(r"default: ([^;\]]*)", extra)
    value = default[1] if default else ""
    return f"`{record[0]}`", f"{int(value):,}" if value.isdecimal() else value, text


def _metrics(page: str, prefix: str) -> str:
    """The metrics of a page whose names begin with the prefix."""
    rows = []
    for metric in text_string_to_metric_families(page):
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        labels = sorted({label for sample in metric.samples for label in sample.labels} - {"le"})
        if name.startswith(prefix):
            rows.append((f"`{name}`", metric.type, ", ".join(labels), metric.documentation))
    return _table(("name", "type", "labels", "meaning"), sorted(rows))


def _server_page() -> str:
    return scrape([(info_of(World(12, num_host_blocks=4)), None)], some_observations(), with_vllm=True)


def _events(*loggers: str) -> str:
    rows = [
        (f"`{message}`", logger, ", ".join(sorted(event.levels)) or "varies", ", ".join(sorted(event.fields)))
        for (logger, message), event in sorted(logged_events().items())
        if f"{logger}.".startswith(tuple(f"{each}." for each in loggers))
    ]
    return _table(("event", "logger", "level", "fields"), rows)


def _alerts() -> str:
    rules = (ROOT / "deploy" / "prometheus" / "rules.yml").read_text(encoding="utf-8").split("- alert: ")[1:]

    def value(rule: str, key: str) -> str:
        found = re.search(rf"\b{key}: (.*?)\}}?$", rule, re.MULTILINE)
        return found[1] if found else ""

    rows = [
        (f"[{name}](#{name.lower()})", *(value(rule, key) for key in ("severity", "for", "description")))
        for rule in rules
        for name in rule.split()[:1]
    ]
    return _table(("alert", "severity", "after", "meaning"), rows)


def _transitions() -> str:
    """What moves a server of a shard between its roles."""

    def row(transition: Transition) -> list[str]:
        roles = ", ".join(role.value for role in transition.roles)
        names = [each.__name__.strip("_").replace("_", " ") for each in (transition.condition, transition.action)]
        return [roles, names[0], transition.becomes.value, names[1]]

    return _table(("role", "condition", "becomes", "action"), map(row, TRANSITIONS))


def _figures() -> str:
    """Layers and bytes of the configs of public models."""
    heads = "config", "layers by kind", "full, bytes per token", "windowed, bytes per token", "state, bytes per request"
    return _table(heads, [[name, *figures(derive(name))] for name in EXPECTED_FIGURES])


def _benchmarks() -> str:
    saved = (ROOT / "docs" / "bench" / "bench.json").read_text(encoding="utf-8")
    return markdown(Report.from_json(json.loads(saved)))


def _plans() -> str:
    """What vLLM planned for 1 TiB, and whether kvpool plans the same."""
    rows = [[name, row["source"], *_plan(row)] for name, row in sorted(read_recorded().items())]
    return _table(("architecture", "config", "layers", "plan", "vLLM's"), rows)


def _plan(row: dict[str, object]) -> Iterator[str]:
    model, plan = derived(row)
    ours = as_vllm_answers(model, plan)
    yield f"{len(model.layers)} of {model.max_model_len:,} tokens"
    yield f"{ours['num_blocks']:,} blocks, groups: {len(ours['groups'])}, {ours['concurrency']:,} requests"
    yield "not built" if "error" in row else "equal" if ours == {key: row[key] for key in ours} else "differs"


TABLES: Final[dict[str, Callable[[], str]]] = {
    "commands": _commands,
    "options of serve": lambda: _options("serve"),
    "options of worker": lambda: _options("worker"),
    "limits": lambda: _options("serve", frozenset(_LIMITS)),
    "metrics of a server": lambda: _metrics(_server_page(), "kvpool_"),
    "metrics of vllm": lambda: _metrics(_server_page(), "vllm:"),
    "metrics of a worker": lambda: _metrics(worker_page(), "kvpool_"),
    "events of a server": lambda: _events("kvpool.server", "kvpool.cli", "kvpool.log", "kvpool.metrics"),
    "events of a worker": lambda: _events("kvpool.worker"),
    "events of an engine": lambda: _events("kvpool.client", "kvpool.lending"),
    "alerts": _alerts,
    "transitions": _transitions,
    "figures of models": _figures,
    "benchmarks": _benchmarks,
    "plans": _plans,
}
"""By the name in a page."""

"""Every code block says which test runs it, or why none does, and what a page names in commands exists."""

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from kvpool.cli import main
from support.pages import PAGES, Block, blocks
from support.paths import ROOT

MARK = re.compile(r"tested: (?P<test>tests/\S+\.py)|not run: (?P<reason>\S.*)")
KVPOOL = re.compile(r"\bkvpool ([a-z][a-z-]*(?: new| status| hand-over| wait-in-sync)?)([^`;&>]*)")
SETTING = re.compile(r"\bKVPOOL_(SERVE|WORKER)_([A-Z_]+)")
ALL_BLOCKS = [block for page in PAGES for block in blocks(page)]


def options_of(words: list[str]) -> set[str]:
    """The options of a command of the `kvpool` command line."""
    command: click.Command = main
    context = click.Context(main, info_name="kvpool")
    for word in words:
        assert isinstance(command, click.Group), words
        found = command.get_command(context, word)
        assert found, f"there is no kvpool {word}"
        command, context = found, click.Context(found, info_name=word, parent=context)
    return {name for parameter in command.get_params(context) for name in (*parameter.opts, *parameter.secondary_opts)}


def code(page: Path) -> Iterator[str]:
    """The commands of a page, in its blocks and within its sentences."""
    for block in blocks(page):
        yield from (command.replace("\\\n", "") for command in block.commands)
    if page.name != "CHANGELOG.md":  # earlier entries name earlier options
        yield from re.findall(r"`((?:kvpool|make) [^`\n]+)`", page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("block", ALL_BLOCKS, ids=lambda block: block.where)
def test_a_block_has_a_test_or_a_reason(block: Block) -> None:
    mark = MARK.fullmatch(block.mark)
    assert mark, "put <!-- tested: FILE --> or <!-- not run: REASON --> above the block"
    named = re.findall(r"tests/[\w./-]+\w", block.mark)
    assert not [path for path in named if not (ROOT / path).exists()]
    if mark["test"]:
        page = block.where.partition(":")[0].removeprefix("docs/")
        assert Path(page).name in (ROOT / mark["test"]).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_options_exist(page: Path) -> None:
    for command in code(page):
        for name, rest in KVPOOL.findall(command):
            unknown = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", rest)) - options_of(name.split()) - {"--help"}
            assert not unknown, command
        for name, setting in SETTING.findall(command):
            assert "--" + setting.lower().replace("_", "-") in options_of([name.lower()]), command


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    marks = [block.mark for block in blocks(page)]
    for text in (*code(page), *marks):
        assert targets.issuperset(re.findall(r"\bmake ([a-z][a-z-]*)", text)), text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_jobs_are_those_of_the_alerts(page: Path) -> None:
    job = re.compile(r"\bjob_name: (\S+)")
    jobs = job.findall((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
    assert set(jobs).issuperset(job.findall(page.read_text(encoding="utf-8")))

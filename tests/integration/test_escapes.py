"""What others chose reaches no terminal as a control: every string field of an answer or error, every command."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree as ET

import click
import pytest

from kvpool.cli import main
from kvpool.client import ExtraKeys, connect
from support.command import Done, kvpool
from support.echoing_server import echoing_server
from support.paths import MODEL_CONFIGS, ROOT
from support.server import pool_config, running_server

PLAIN = "plain"
HOSTILE = "\x1b]0;a\x07\x1b[2J\r\nb\x9b31m\u202ec\u2028[red]"
"""A title and a cleared screen, an end of a line, colours, text from right to left, and markup of rich."""
CONTEXT = click.Context(main)
LOCAL = {
    **dict.fromkeys(("plan", "replay", "export-trace"), "read files"),
    **dict.fromkeys(("serve", "worker"), "log: tests/unit/cli/test_logs.py"),
    "token": "prints what it makes",
    "demo": "prints figures",
    "shard": "reads the directory, and prints by the same functions",
}
REMOTE = sorted(set(main.list_commands(CONTEXT)) - set(LOCAL))
VALUES = {"pool": "m", "number": "1", "version": "v2"}
OPTIONS = {"top": ("--once", "--interval", "0.5")}
KEPT = {
    *(f"List{kind}Response.next_page_token" for kind in ("Sessions", "Requests", "Blocks")),
    "AttentionSpec.dtype",
}
"""Fields of which a client takes only values that it knows: it refuses others, or cannot go on."""
BY_NAME = {"explain", "requests"}
"""Commands that look for a pool by the name that the server gave."""


@contextmanager
def pool_in_use(command: str) -> Iterator[str]:
    """Yields the address of a server with a pool, and a request in it if the command does not need it to be unused."""
    with running_server() as address, connect(address) as client:
        client.create_pool(pool_config())
        if command != "remove-pool":
            session = client.open_session("m")
            session.admit(session.request("r1", list(range(41))))
        yield address


def run(command: str, *arguments: object) -> Done:
    """Runs a command with values for what it requires."""
    found = main.get_command(CONTEXT, command)
    assert found
    given: list[object] = []
    for param in found.params:
        if param.required and param.name:
            given += [param.opts[0]] * isinstance(param, click.Option) + [VALUES[param.name]]
    return kvpool(command, *given, *OPTIONS.get(command, ()), *arguments)


def assert_same_lines(plain: Done, hostile: Done) -> None:
    """Checks that a hostile text made no other lines than a plain one, and nothing that does not print."""
    assert plain.returncode == hostile.returncode, hostile
    for before, after in ((plain.stdout, hostile.stdout), (plain.stderr, hostile.stderr)):
        assert before.count("\n") == after.count("\n"), after
        assert all(line.isprintable() for line in after.split("\n")), after


@pytest.mark.parametrize("refuses", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("command", REMOTE)
def test_no_answer_controls_the_terminal(command: str, *, refuses: bool) -> None:
    kept = KEPT | ({"PoolConfig.name"} if command in BY_NAME else set())
    done = []
    for text in (PLAIN, HOSTILE):
        with pool_in_use(command) as address, echoing_server(address, text, kept, refuses=refuses) as front:
            done.append(run(command, "--address", front))
    assert "Error: " not in done[0].stderr or refuses, done[0]
    assert_same_lines(*done)


def test_no_name_in_a_sentence_controls_the_terminal(tmp_path: Path) -> None:
    """Of a LoRA and of a weights version, with which a prompt would hit."""
    prompt, done = list(range(41)), []
    (tmp_path / "tokens").write_text(json.dumps(prompt))
    for text in (PLAIN, HOSTILE):
        with running_server() as address, connect(address) as client:
            client.create_pool(pool_config())
            for weights_version, lora_name in (("", text), (text, None), ("", None)):
                session = client.open_session("m", weights_version=weights_version)
                if weights_version or lora_name:
                    session.admit(session.request("r", prompt, extra_keys=ExtraKeys(lora_name)))
                    session.mark_executed()
            done.append(run("explain", "--tokens", tmp_path / "tokens", "--session", 3, "--address", address))
    assert f"with LoRA {PLAIN}, the same tokens hit" in done[0].stdout
    assert f"(weights version {PLAIN}), the same tokens hit" in done[0].stdout
    assert_same_lines(*done)


LAYERS = {"layers": {"TEXT": {"type": "FullAttentionSpec", "block_size": 16, "num_kv_heads": 8, "head_size": 128}}}
FILES = {
    "a layer": LAYERS,
    "a type": {"layers": {"a": {"type": "TEXT"}}},
    "a key": {"layers": {"a": {"type": "FullAttentionSpec", "TEXT": 1}}},
    "another key": {"TEXT": 1},
}


@pytest.mark.parametrize("name", FILES)
def test_no_file_of_layers_controls_the_terminal(name: str, tmp_path: Path) -> None:
    done = []
    for text in (PLAIN, HOSTILE + "\ud800"):
        path = tmp_path / "layers.json"
        path.write_text(json.dumps(FILES[name]).replace("TEXT", json.dumps(text)[1:-1]))
        done.append(kvpool("plan", "--layers", path, "--memory", "1GiB", "--max-model-len", 100, COLUMNS="300"))
    assert_same_lines(*done)


@pytest.mark.parametrize("text", ["{TEXT: 1}", "{TEXT: 1, TEXT: 2}", "[TEXT]", '{"messages": [{TEXT: 1}]}'])
def test_no_trace_controls_the_terminal(text: str, tmp_path: Path) -> None:
    done = []
    for inserted in (PLAIN, HOSTILE + "\ud800"):
        path = tmp_path / "trace"
        path.write_text(text.replace("TEXT", json.dumps(inserted)))
        done.append(kvpool("replay", path, "--num-blocks", 10, "--block-size", 16))
    assert done[0].returncode
    assert_same_lines(*done)


def test_an_architecture_controls_neither_the_terminal_nor_a_plot(tmp_path: Path) -> None:
    done, config = [], json.loads((MODEL_CONFIGS / "llama-3.1-8b.json").read_text())
    for text in (PLAIN, HOSTILE + "\ud800"):
        path, plot = tmp_path / "config.json", tmp_path / "plot.svg"
        path.write_text(json.dumps(config | {"architectures": [text]}))
        options = ("--like", "LlamaForCausalLM", "--memory", "20GiB", "--plot", plot)
        done.append(kvpool("plan", path, *options, COLUMNS="300"))
        assert done[-1].returncode == 0, done[-1]
        ET.parse(plot)  # noqa: S314 - our own
    assert_same_lines(*done)


def test_the_status_page_inserts_text_only() -> None:
    """Names are put into the page as text: nothing parses them as HTML."""
    pages = [*(ROOT / "server" / "kvpool" / "server" / "http" / "static").glob("*.*s")]
    assert {"status.js", "figures.js"} <= {path.name for path in pages}
    parsing = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|createContextualFragment|DOMParser|\beval\b"
    assert not [path.name for path in pages if re.search(parsing, path.read_text())]


def test_commands_print_through_one_function() -> None:
    """Beside it are rows of tables and lines of `top`, which clean each cell, and JSON, which is ASCII."""
    folder = ROOT / "client" / "kvpool" / "cli"
    prints = re.compile(r"click\.(?:echo|secho|style)|\bprint\(|console\.print|std(?:out|err)\.write")
    found = {path.name for path in folder.glob("*.py") if prints.search(path.read_text())}
    assert found == {"text.py", "tables.py", "top.py"}

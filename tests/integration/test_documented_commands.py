"""The commands of the documentation run as printed, in real terminals, from the first block of a page to the last.

Each page has a folder of its own. Ports and folders of the system are replaced, since tests run beside each other, and
ranks run on the CPU. `PAGES` lists what a page leaves to the reader: files, earlier steps, names of hosts.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import pytest

from support.pages import blocks
from support.paths import DOCS, MODEL_CONFIGS, ROOT
from support.server import free_port
from support.terminal import Terminal
from support.waiting import DEADLINE_SECONDS

MARK: Final = f"tested: tests/integration/{Path(__file__).name}"
BASH: Final = shutil.which("bash") or "bash"
SECURE: Final = tuple(block.text for block in blocks(DOCS / "how-to" / "secure.md") if block.language == "sh")
"""The commands that create certificates and tokens."""

PORTS: Final = (50051, 50053, 50060, 50061, 2379, 2380, 9464, 9465)
READY: Final = (
    (r"for pool in .*kvpool serve", r"server listening.*server listening"),
    (r"kvpool serve", r"server listening"),
    (r"kvpool worker .*--lend", r"lending"),
    (r"kvpool worker .*--rank 0 --world-size 2", r"rank registered"),
    (r"kvpool worker", r"rank ready"),
    (r"kvpool top", r"tutorial"),
    (r"python (share|steps)\.py", r"[Pp]ress Enter"),
    (r"^etcd ", r"ready to serve client requests"),
)
"""Commands that run until they are ended, and what they print when the next can follow; the first match counts."""

KEYS: Final = {"kvpool top": "q", "python share.py": "\n", "python steps.py": "\n"}
"""What ends a command; Ctrl-C ends the others."""


def free_ports() -> set[int]:
    """Different ports, as many as the pages name."""
    ports: set[int] = set()
    while len(ports) < len(PORTS):
        ports.add(free_port())
    return ports


def model(name: str) -> str:
    """The config of a model, with few layers and a short context, since its ranks share a small CPU."""
    config = json.loads((MODEL_CONFIGS / f"{name}.json").read_text())
    text = config.get("text_config", config)
    text |= {"num_hidden_layers": 2, "max_position_embeddings": 1024, "rope_scaling": None}
    return json.dumps(config)


def python_of(page: Path) -> str:
    """The Python block of a page that has one."""
    (code,) = (block.text for block in blocks(page) if block.language == "python")
    return code


@dataclass(frozen=True, slots=True)
class Page:
    """A page whose commands run.

    Attributes:
        path: The page.
        replaced: Patterns in its commands, and what stands for them here.
        files: Files that the reader has, and their contents.
        before: Commands that the reader has run before.
        after: A command that succeeds when the page has had its effect.
    """

    path: Path
    replaced: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    before: tuple[str, ...] = ()
    after: str = "true"


TUTORIAL: Final = DOCS / "tutorials" / "first-pool.md"
TAKEOVER: Final = DOCS / "tutorials" / "takeover.md"
TRACE: Final = '{"timestamp": 0, "input_length": 1024, "output_length": 2, "hash_ids": [1, 2]}\n'
PAGES: Final = (
    Page(ROOT / "README.md"),
    Page(TUTORIAL, files={"share.py": python_of(TUTORIAL)}),
    Page(DOCS / "tutorials" / "vllm.md"),
    Page(TAKEOVER, files={"steps.py": python_of(TAKEOVER)}),
    Page(DOCS / "how-to" / "install.md", {"/path/to/clone": str(ROOT)}),
    Page(DOCS / "how-to" / "operate.md"),
    Page(DOCS / "how-to" / "status-page.md"),
    Page(DOCS / "how-to" / "secure.md", {"kvpool-server:": "localhost:"}, before=SECURE),
    Page(DOCS / "how-to" / "trace.md"),
    Page(DOCS / "how-to" / "share-memory.md", {r"python -m examples": f"PYTHONPATH={ROOT} python -m examples"}),
    Page(
        DOCS / "how-to" / "keep-more.md",
        files={"config.json": model("llama-3.1-8b"), "conversation_trace.jsonl": 2 * TRACE},
    ),
    Page(
        DOCS / "how-to" / "plan-and-replay.md",
        files={"gemma-3-27b-it/config.json": model("gemma-3-27b-it"), "conversation_trace.jsonl": 2 * TRACE},
        before=("kvpool serve --listen localhost:50051",),
    ),
    Page(
        DOCS / "how-to" / "deploy.md",
        files={"rules.yml": (ROOT / "deploy" / "prometheus" / "rules.yml").read_text()},
        after="grep -q 'runbook_url: https://docs.example.com' rules.yml && ! grep -q 'runbook_url: docs/' rules.yml",
    ),
    Page(
        DOCS / "explanation" / "ranks.md",
        {
            r"\bhost:": "localhost:",
            r"kvpool worker \.\.\.": (
                "kvpool worker --server localhost:50051 --tls-ca ca.pem --pool single --rank 0 --model config.json"
            ),
        },
        files={"config.json": model("llama-3.1-8b")},
        before=SECURE[:1],
    ),
    Page(DOCS / "explanation" / "journal.md"),
    Page(DOCS / "explanation" / "performance.md"),
    Page(DOCS / "reference" / "gpu.md", files={"config.json": model("llama-3.1-8b")}),
    Page(DOCS / "reference" / "logs.md"),
)


class Reader:
    """Types commands, each that runs until it is ended in a terminal of its own."""

    def __init__(self, folder: Path, replaced: Mapping[str, str]) -> None:
        self._folder = folder
        ports = dict(zip(PORTS, free_ports(), strict=True))
        self._replaced = {
            **replaced,
            r"/tmp/kvpool\.sock": f"{folder}/kvpool.sock",  # noqa: S108 - as printed
            r"/run/kvpool": f"{folder}/run",
            r"/var/lib/kvpool": f"{folder}/journal",
            r" --device cuda:\d": "",
            **{rf":{port}\b": f":{free}" for port, free in ports.items()},
        }
        self._environment = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "KVPOOL_SERVE_LISTEN": f"127.0.0.1:{ports[50051]}",
            "KVPOOL_SERVE_NO_JOURNAL": "",
            "XDG_STATE_HOME": f"{folder}/state",
            "KVPOOL_WORKER_DEVICE": "cpu",
            "KVPOOL_WORKER_MEMORY": "64MiB",
        }
        self._settings: list[str] = []
        self._running: dict[str, tuple[str, Terminal]] = {}
        """By what only one command can have: a command and its terminal."""

    def replace(self, text: str) -> str:
        """Replaces what differs here."""
        for pattern, replacement in self._replaced.items():
            text = re.sub(pattern, replacement, text)
        return text

    def type(self, printed: str) -> None:
        """Runs a command to its end, or until it is ready."""
        command = self.replace(printed)
        if command.startswith(("export ", ". ")):  # for the commands that follow
            self._settings.append(command)
        script = "\n".join([f"cd {self._folder}", *self._settings, command])
        ready = next((until for pattern, until in READY if re.search(pattern, command)), None)
        if ready:
            self._start(command, script, ready)
            return
        done = subprocess.run(
            [BASH, "-ec", script], env={**os.environ, **self._environment}, timeout=5 * DEADLINE_SECONDS,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"

    def close(self) -> None:
        """Ends what runs, the newest first; each command must succeed."""
        for place in reversed([*self._running]):
            self._end(place)

    def kill(self) -> None:
        """Ends what still runs."""
        for _, terminal in self._running.values():
            terminal.close()

    def _start(self, command: str, script: str, ready: str) -> None:
        address = re.search(r"--listen \S+", command)
        place = (address[0] if address else "default") if "kvpool serve" in command else command
        if place in self._running:  # the page goes on with another server at the same address
            self._end(place)
        waits = "\ntrap : INT; wait; wait" if command.endswith("& done") else ""  # Ctrl-C ends the first
        terminal = Terminal(BASH, "-c", script + waits, columns=250, lines=60, **self._environment)
        self._running[place] = (command, terminal)
        terminal.wait_for(re.compile(ready, re.DOTALL).search)

    def _end(self, place: str) -> None:
        command, terminal = self._running[place]
        terminal.press(next((key for start, key in KEYS.items() if command.startswith(start)), "\x03"))
        status = terminal.wait_ended()
        # A page may kill a server; etcd raises the signal that it ends with.
        expected = (-signal.SIGINT,) if command.startswith("etcd ") else (0, -signal.SIGKILL)
        assert status in expected, f"{command}\n{terminal.text.rstrip()}"
        self._running.pop(place)[1].close()


@contextmanager
def reader_of(page: Page) -> Iterator[Reader]:
    with TemporaryDirectory() as name:
        folder = Path(name)
        reader = Reader(folder, page.replaced)
        (folder / "run").mkdir()
        files = {".venv/bin/activate": "", **page.files}  # the environment of the test is active
        for file, text in files.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(reader.replace(text))
        try:
            yield reader
        finally:
            reader.kill()


MARKS: Final = {"README.md": [], "first-pool.md": [], "install.md": [pytest.mark.complete]}
"""Marks of pages; the others are slow."""


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=page.path.name, marks=MARKS.get(page.path.name, [pytest.mark.slow])) for page in PAGES],
)
def test_commands_of_a_page(page: Page) -> None:
    commands = [command for block in blocks(page.path) if block.mark == MARK for command in block.commands]
    assert commands
    for program in ("curl", "openssl", "etcd", "pkill"):
        if any(program in command for command in (*page.before, *commands)) and not shutil.which(program):
            pytest.skip(f"needs {program}")
    with reader_of(page) as reader:
        for command in (*page.before, *commands):
            reader.type(command)
        reader.type(page.after)
        reader.close()

"""A server with a lender as the target, and attacks on the lender by processes on its machine."""

import contextlib
import random
import tempfile
from itertools import cycle
from pathlib import Path
from typing import Any

from attacks.attack import Assault
from attacks.target import TENANTS, Target
from kvpool.lending.lender_client import connect_lender
from support import processes
from support.auth import secret_of
from support.lending import DECLARED, NUM_BLOCKS, LenderProcess
from support.waiting import DEADLINE_SECONDS

_SESSIONS = 5000
_PAUSE_SECONDS = 0.2
LENDER_SECRET = "kvp_lender-secret"  # noqa: S105 - of a test


class LendingTarget(Target):
    """A server with a lender, and an engine that maps the lender's memory throughout. See `Target`.

    Attributes:
        lender: The lender's process.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._closing = contextlib.ExitStack()
        memory = Path(self._closing.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        options = ["--tls-ca", self.authority.path, "--token-file", self._secret("rank", secret_of("rank"))]
        options += ["--lend-token-file", self._secret("lender", LENDER_SECRET), "--log-format", "json"]
        self.lender = self._closing.enter_context(LenderProcess(self.address, memory, 0, 1, *map(str, options)))
        engine = connect_lender(self.lender.address, "m", LENDER_SECRET, "engine")
        self._closing.callback(engine.close)
        self._memory = engine.map(DECLARED, DEADLINE_SECONDS)
        client = self._closing.enter_context(self.connect(TENANTS[0]))
        self._session = client.open_session("m", lease_seconds=600)

    @property
    def epoch(self) -> int:
        """Epoch of the lent memory."""
        return self._memory.epoch

    def step(self) -> None:
        """The engine runs a step; another one maps the memory, and gives it back."""
        self._memory.step(self._session.table_lease).done()
        other = connect_lender(self.lender.address, "m", LENDER_SECRET, "other")
        with contextlib.closing(other):
            assert other.map(DECLARED, DEADLINE_SECONDS).num_blocks == NUM_BLOCKS

    def errors(self) -> list[dict[str, str]]:
        """See `Target`; those of the lender too."""
        return super().errors() + self.errors_of(self.lender)

    def close(self) -> None:
        """Kills all processes."""
        super().close()
        self._closing.close()

    def _secret(self, name: str, secret: str) -> Path:
        path = self.folder / f"{name}.token"
        path.write_text(secret)
        path.chmod(0o600)
        return path


def map_memory(target: Target) -> None:
    """See `LendingTarget.step`."""
    assert isinstance(target, LendingTarget)
    target.step()


def name_sessions(assault: Assault) -> None:
    """Runs processes that map the memory, name 5,000 sessions, and exit, or are killed meanwhile, or never read."""
    target = assault.target
    assert isinstance(target, LendingTarget)
    program = Path(__file__).with_name("engine.py")
    chance = random.Random(0)  # noqa: S311 - a test's dice
    for how in cycle(("exits", "is killed", "reads nothing")):
        if assault.is_over.wait(_PAUSE_SECONDS):
            return
        process = processes.start(
            [processes.PYTHON, str(program), target.lender.address, str(target.epoch), str(_SESSIONS), how],
            stdin=processes.PIPE,
            stdout=processes.PIPE,
            env=processes.environment(KVPOOL_TOKEN=LENDER_SECRET),
            text=True,
        )
        if how == "is killed":
            assault.is_over.wait(chance.uniform(0.0, 2.0))
            process.kill()
        output, _ = process.communicate(timeout=DEADLINE_SECONDS)
        assert how == "is killed" or output == "named\n", output

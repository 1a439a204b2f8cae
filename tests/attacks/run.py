"""Attacks a server with hostile resources while tenants work on it, and judges what they met: see --help."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).parents[1]))
from attacks.attack import Assault, Attack
from attacks.kinds import ATTACKS
from attacks.target import TENANTS, Operator, Target, Tenant
from kvpool.client import KvpoolError
from support import processes
from support.programs import exit_on_sigterm
from support.waiting import wait_until

_CALM_FRACTION: Final = 0.25
_REVOKED_AT: Final = 0.3
_PROBES: Final = 20
_CHANGE_SECONDS: Final = 0.1
_RECOVERY_SECONDS: Final = 60.0
_MIN_JUDGED_SECONDS: Final = 60.0
"""Duration from which the time of rounds is judged. Shorter runs measure too few, and tests run on any machine."""


@dataclass
class Verdict:
    """What the tenants met.

    Attributes:
        violations: What must not happen and did.
        rounds: Rounds of the tenants during the attack.
        calm_p99_ms: 99th percentile of the rounds before the attack.
        attacked_p99_ms: The same during the attack.
        longest_ms: The longest round during the attack.
        pool_changes: Pools created and removed.
        meanwhile: How often others succeeded with what they do; see `Attack.meanwhile`.
    """

    violations: list[str] = field(default_factory=list)
    rounds: int = 0
    calm_p99_ms: float = 0.0
    attacked_p99_ms: float = 0.0
    longest_ms: float = 0.0
    pool_changes: int = 0
    meanwhile: int = 0

    def add(self, violation: str) -> None:
        """Adds a violation, once."""
        if violation not in self.violations:
            self.violations.append(violation)

    def check(self, is_met: Callable[[], bool], what: str) -> None:
        """Waits for a condition. It is a violation if it does not come true."""
        try:
            wait_until(is_met, f"not in time: {what}", _RECOVERY_SECONDS)
        except AssertionError as error:
            self.add(f"{error}")


def run(attack: Attack, folder: Path, seconds: float) -> Verdict:
    """Executes an attack and judges it.

    Args:
        attack: The attack.
        folder: Empty folder for all files.
        seconds: Duration of the attack; a quarter of it passes without an attack before.
    """
    verdict = Verdict()
    with (
        _small_disk(folder / "journal", attack),
        _unread_pipe(attack) as stderr,
        closing(attack.target(folder, attack.limit, stderr, attack.options)) as target,
        closing(Operator(target)) as operator,
    ):
        tenants = [Tenant(target, name) for name in TENANTS]
        _operate(operator, attack, verdict, seconds * _CALM_FRACTION)
        start_seconds = time.monotonic()
        with _under(attack, target, verdict, seconds):
            _operate(operator, attack, verdict, seconds * _REVOKED_AT)
            target.revoke()
            verdict.check(lambda: target.try_revoked() != "accepted", "the revoked token is refused")
            while target.server.is_alive and time.monotonic() < start_seconds + seconds:
                _operate(operator, attack, verdict, seconds / _PROBES)
                if target.try_revoked() == "accepted":
                    verdict.add("the revoked token was accepted again")
            end_seconds = time.monotonic()
        verdict.check(lambda: target.try_revoked() == "refused", "new connections are served again")
        verdict.check(target.is_journal_up, "the journal is up again")
        _operate(operator, attack, verdict, _CHANGE_SECONDS)
        for tenant in tenants:
            tenant.stop()
        for violation in (
            *(tenant.error for tenant in tenants if tenant.error),
            *([] if target.server.is_alive else [f"the server exited with status {target.server.end()}"]),
            *(_described(record) for record in target.errors() if not _is_expected(record, attack)),
        ):
            verdict.add(violation)
        verdict.pool_changes = operator.count
        _measure(verdict, tenants, start_seconds, end_seconds)
        if not attack.costs_time:
            judge_speed(verdict, end_seconds - start_seconds)
        if attack.afterwards:
            attack.afterwards(target)
            verdict.check(target.is_journal_up, "the journal is up again")
    return verdict


@contextmanager
def _under(attack: Attack, target: Target, verdict: Verdict, seconds: float) -> Iterator[None]:
    """Attacks during the block. What the attack itself finds wrong is a violation."""
    is_over = threading.Event()
    errors: list[BaseException] = []

    def attack_it() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        try:
            attack.run(Assault(target, seconds, is_over))
        except (AssertionError, KvpoolError) as error:
            verdict.add(f"{type(error).__name__}: {error}")
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    thread = threading.Thread(target=attack_it, name="attack")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
    if errors:
        raise errors[0]


@contextmanager
def _small_disk(folder: Path, attack: Attack) -> Iterator[None]:
    if not attack.is_on_small_disk:
        yield
        return
    folder.mkdir()
    subprocess.run(["/bin/mount", "-t", "tmpfs", "-o", "size=4m,mode=700", "none", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["/bin/umount", str(folder)], check=True)


@contextmanager
def _unread_pipe(attack: Attack) -> Iterator[int]:
    if not attack.has_full_log:
        yield processes.PIPE
        return
    reader, writer = os.pipe()
    try:
        yield writer
    finally:
        os.close(reader)
        os.close(writer)


def _operate(operator: Operator, attack: Attack, verdict: Verdict, seconds: float) -> None:
    due_seconds = time.monotonic() + seconds
    while operator.target.server.is_alive and time.monotonic() < due_seconds:
        try:
            operator.change()
            if attack.meanwhile:
                attack.meanwhile(operator.target)
                verdict.meanwhile += 1
        except (KvpoolError, OSError, AssertionError) as error:
            verdict.add(f"{type(error).__name__}: {error}")
        time.sleep(_CHANGE_SECONDS)


def _is_expected(record: dict[str, str], attack: Attack) -> bool:
    message = record["message"]
    return message == "tokens not reloaded" or (attack.costs_journal and message == "journal given up")


def _described(record: dict[str, str]) -> str:
    """A logged record without its time, with the last line of its traceback."""
    fields = [f"{key}={value}" for key, value in record.items() if key not in {"time", "message", "exception"}]
    return " ".join([record["message"], *fields, *record.get("exception", "").splitlines()[-1:]])


def _measure(verdict: Verdict, tenants: list[Tenant], start_seconds: float, end_seconds: float) -> None:
    rounds = [one for tenant in tenants for one in tenant.rounds]
    calm = [1000 * duration for at, duration in rounds if at < start_seconds]
    attacked = [1000 * duration for at, duration in rounds if start_seconds <= at < end_seconds]
    verdict.rounds = len(attacked)
    verdict.calm_p99_ms, verdict.attacked_p99_ms = (
        round(statistics.quantiles(each, n=100)[-1], 2) for each in (calm, attacked)
    )
    verdict.longest_ms = round(max(attacked), 2)


def judge_speed(verdict: Verdict, seconds: float) -> None:
    """Adds a violation if an attack that was long enough to judge slowed the tenants down."""
    if seconds >= _MIN_JUDGED_SECONDS and verdict.attacked_p99_ms > 3 * verdict.calm_p99_ms + 5:
        verdict.violations.append(f"rounds took {verdict.attacked_p99_ms} ms (p99), {verdict.calm_p99_ms} ms before")


def main() -> int:
    """Runs from the command line; exits with 1 if there are violations."""
    exit_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("attacks", nargs="*", choices=[*ATTACKS, []], help="the attacks; default: all")
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of each")
    options = parser.parse_args()
    verdicts = {}
    for name in options.attacks or ATTACKS:
        with tempfile.TemporaryDirectory() as folder:
            verdicts[name] = run(ATTACKS[name], Path(folder), options.seconds)
        print(name, json.dumps(asdict(verdicts[name])), flush=True)  # noqa: T201
    return 1 if any(verdict.violations for verdict in verdicts.values()) else 0


if __name__ == "__main__":
    sys.exit(main())

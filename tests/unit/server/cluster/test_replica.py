"""Replicas do what their transcripts show: see `replica_transcript`.

`KVPOOL_REWRITE=1 pytest tests/unit/server/cluster/test_replica.py` writes the output that replicas give now into the
transcripts. Read each difference before it is committed.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from kvpool.server.cluster.directory import MemberId, ShardRecord
from kvpool.server.cluster.replica import Effect, Replica
from support.replica_transcript import replay

FOLDER: Final = Path(__file__).with_name("transcripts")
PATHS: Final = sorted(FOLDER.glob("*.txt"))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_replicas_do_what_the_transcript_shows(path: Path) -> None:
    transcript = path.read_text()
    replayed = replay(transcript)
    if os.environ.get("KVPOOL_REWRITE"):
        path.write_text(replayed)
    else:
        assert replayed == transcript


def _awaited_as_known(self: Replica) -> set[MemberId]:
    return {member.member_id for member in self.in_sync} - {self._me.member_id}


def _awaited_as_sent(self: Replica) -> set[MemberId]:
    newest = self._pending.record.in_sync if self._pending else self.in_sync
    return {member.member_id for member in newest} - {self._me.member_id}


def _takes_over(self: Replica, record: ShardRecord) -> list[Effect]:
    self.has_state = True
    return self._claim(record.term + 1)


def _all_caught_up(real: Callable[[Replica, ShardRecord], object]) -> Callable[[Replica, ShardRecord], list[MemberId]]:
    def await_others(self: Replica, record: ShardRecord) -> list[MemberId]:
        real(self, record)
        return list(self._joining)

    return await_others


BROKEN: Final[dict[str, tuple[str, str, Any]]] = {
    "a member that is about to be added is not awaited": ("join", "awaited", property(_awaited_as_known)),
    "a member is not awaited once the swap that removes it was sent": (
        "removal",
        "awaited",
        property(_awaited_as_sent),
    ),
    "a member is added before it caught up": ("join", "_await_others", _all_caught_up(Replica._await_others)),
    "a member that lost its state takes over": ("lost_state", "_withdraw", _takes_over),
    "a standby acknowledges after its takeover was sent": ("takeover", "may_acknowledge", True),
    "a deposed primary confirms": ("deposed", "confirmed", property(lambda self: self.last_position)),
}
"""A transcript for each broken rule, and what replaces an attribute of `Replica`."""


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_changes_its_transcript(monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    name, attribute, replacement = BROKEN[rule]
    monkeypatch.setattr(Replica, attribute, replacement)
    transcript = (FOLDER / f"{name}.txt").read_text()
    assert replay(transcript) != transcript

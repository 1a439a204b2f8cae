"""Replicas do what their transcripts show: see `replica_transcript`."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from kvpool.server.cluster import replica as replica_module
from kvpool.server.cluster import transitions
from kvpool.server.cluster.directory import MemberId
from kvpool.server.cluster.replica import Replica
from kvpool.server.cluster.standbys import NOTHING, Standbys
from kvpool.server.cluster.transitions import TRANSITIONS, Transition
from support.replica_transcript import ReplicaTranscript
from support.transcripts import check, replay

FOLDER: Final = Path(__file__).with_name("transcripts")
PATHS: Final = sorted(FOLDER.glob("*.txt"))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_replicas_do_what_the_transcript_shows(path: Path) -> None:
    check(path, ReplicaTranscript().execute)


def _awaits_as_known(self: Replica) -> set[MemberId]:
    return {member.member_id for member in self.in_sync} - {self.me.member_id}


def _awaits_as_sent(self: Replica) -> set[MemberId]:
    newest = self.pending.record.in_sync if self.pending else self.in_sync
    return {member.member_id for member in newest} - {self.me.member_id}


def _confirms_always(self: Replica) -> None:
    self.confirmed = self.last_position


def _joins_at_once(real: Callable[..., None]) -> Callable[..., None]:
    def await_joining(self: Standbys, *arguments: Any) -> None:
        real(self, *arguments)
        for standby in self.connected.values():
            standby.joins_at = None if standby.joins_at is None else NOTHING

    return await_joining


def _with(**changed: Callable[[Replica], object]) -> tuple[Transition, ...]:
    """The transitions with other conditions or actions."""
    functions = (transition.condition.__name__ for transition in TRANSITIONS)
    assert changed.keys() <= set(functions)
    return tuple(
        replace(each, action=changed.get(each.condition.__name__, each.action))  # type: ignore[arg-type]
        for each in TRANSITIONS
    )


BROKEN: Final[dict[str, tuple[str, Any, str, Any]]] = {
    "a member that is about to be added is not awaited": ("join", Replica, "_members_to_await", _awaits_as_known),
    "a member is not awaited once the swap that removes it was sent": (
        "removal",
        Replica,
        "_members_to_await",
        _awaits_as_sent,
    ),
    "a member is added before it caught up": (
        "join",
        Standbys,
        "await_joining",
        _joins_at_once(Standbys.await_joining),
    ),
    "a member that lost its state takes over": (
        "lost_state",
        replica_module,
        "TRANSITIONS",
        _with(_is_in_sync_without_state=transitions._claim_next_term),
    ),
    "a standby acknowledges after its takeover was sent": (
        "silence",
        replica_module,
        "_ROLES",
        {},
    ),
    "a standby does not leave before its takeover is sent": ("takeover", transitions, "_leave", lambda _: None),
    "a deposed primary confirms": ("deposed", Replica, "_confirm", _confirms_always),
}
"""A transcript for each broken rule, and what replaces which attribute of what."""


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_changes_its_transcript(monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    name, target, attribute, replacement = BROKEN[rule]
    monkeypatch.setattr(target, attribute, replacement)
    transcript = (FOLDER / f"{name}.txt").read_text()
    assert replay(transcript, ReplicaTranscript().execute) != transcript

"""A damaged journal: a server starts with a recorded state or with an empty one, never with a partial one.

Changes by hostile messages are replayed exactly, too.
"""

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from fuzz.campaign import Campaign
from fuzz.mutations import mutate_bytes
from kvpool.server.journal.frames import Frame, FrameKind, FrameParser, encode_frame
from kvpool.server.journal.recovery import Recovery
from support.core import config
from support.integrity import check_integrity
from support.journal import Recorder, assert_alike, files_of, is_alike, leave_journal, recovered, replay, states_of
from support.state import DrivenState

_SEED = 9
_CHANGES = 40
_TRIES = 150


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """The folder that a killed process leaves."""
    leave_journal(tmp_path, config(16), _SEED, _CHANGES)
    return tmp_path


@pytest.fixture(scope="module")
def states() -> list[DrivenState]:
    return states_of(config(16), _SEED, _CHANGES)


def _check(found: Recovery) -> None:
    for pool in found.state.pools:
        check_integrity(pool, list(pool.sessions.values()))


def _victims(written: Path) -> Iterator[Path]:
    """Yields one of the folder's files, repeatedly, after all files are as they were written."""
    rng = Random(1)
    contents = {path: path.read_bytes() for path in files_of(written)}
    for _ in range(_TRIES):
        for path, content in contents.items():
            path.write_bytes(content)
        yield rng.choice(list(contents))


def test_damaged_files_give_an_earlier_state_or_none(written: Path, states: list[DrivenState]) -> None:
    rng = Random(2)
    num_dropped = 0
    for path in _victims(written):
        content = path.read_bytes()
        path.write_bytes(
            rng.randbytes(rng.randrange(300)) if rng.random() < 0.2 else mutate_bytes(rng, content, content)
        )
        found = recovered(written)
        if found.dropped:
            num_dropped += 1
            assert not list(found.state.sessions)
        else:
            assert any(is_alike(found.state, state) for state in states), path.name
        _check(found)
    assert 0 < num_dropped < _TRIES


def _frames(path: Path) -> list[Frame]:
    with path.open("rb") as file:
        return list(FrameParser().read(file))


def test_malformed_frames_never_prevent_the_start(written: Path) -> None:
    """Frames with valid checksums and malformed content, which no disk error produces."""
    rng = Random(3)
    for path in _victims(written):
        frames = _frames(path)
        content = [(FrameKind(frame.kind), bytes(frame.payload)) for frame in frames]
        at = rng.randrange(len(content))
        kind, payload = content[at]
        match rng.randrange(5):
            case 0:
                content[at] = rng.choice(list(FrameKind)), payload
            case 1:
                content.insert(at, content[at])
            case 2:
                del content[at]
            case _:
                content[at] = kind, mutate_bytes(rng, payload, payload)
        path.write_bytes(b"".join(encode_frame(kind, payload) for kind, payload in content))
        _check(recovered(written))


def _forget_joined(allocator: DrivenState) -> None:
    """Empties caches, which the campaign's own look-ups fill too."""
    for pool in allocator.pools:
        for session in [*list(pool.sessions.values()), *(each.session for each in pool.quarantine)]:
            for request in session.requests.values():
                request.last_hashes.clear()


@pytest.mark.slow
async def test_changes_by_hostile_messages_are_replayed_exactly() -> None:
    allocator = DrivenState()
    records = Recorder(allocator).records
    campaign = Campaign(4, allocator)
    await campaign.run(6000)
    await campaign.close()
    again = DrivenState()
    replay(again, records)
    _forget_joined(allocator)
    _forget_joined(again)
    assert_alike(again, allocator)
    assert len(records) > 1000

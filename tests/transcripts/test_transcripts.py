"""The core gives the results of the recorded transcripts: see `transcript`."""

from pathlib import Path

import pytest

from transcripts import player as player_module
from transcripts.transcript import record, replay

PATHS = sorted(Path(__file__).parent.glob("*.jsonl.bz2"))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
def test_the_first_commands_have_the_recorded_results(path: Path) -> None:
    assert replay(path, 5_000) == 5_000


@pytest.mark.slow
@pytest.mark.parametrize("num_commands", [100_000, pytest.param(250_000, marks=pytest.mark.complete)])
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
def test_many_commands_have_the_recorded_results(path: Path, num_commands: int) -> None:
    assert replay(path, num_commands) == num_commands


def test_another_result_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "transcript.jsonl.bz2"
    record(path, 2_000, seed=7)
    assert replay(path) == 2_000
    execute, count = player_module.Player.execute, 0

    def faulty(self: player_module.Player, command: dict[str, object]) -> object:
        nonlocal count
        count += 1
        result = execute(self, command)
        return [result[0] + 1, *result[1:]] if command["do"] == "step" and count > 1_000 and len(result) > 1 else result

    monkeypatch.setattr(player_module.Player, "execute", faulty)
    with pytest.raises(AssertionError, match="expected"):
        replay(path)

"""The memory limits of control groups of both versions."""

from pathlib import Path

import pytest

from kvpool.wire.control_groups import memory_limits_bytes


@pytest.mark.parametrize(
    ("membership", "files", "limits"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "100\n", "a/memory.max": "max\n", "memory.max": "300\n"}, [100, 300]),
        ("0::/of/the/host\n", {"memory.max": "200\n"}, [200]),
        ("4:cpu,memory:/a\n0::/\n", {"memory/a/memory.limit_in_bytes": "50\n"}, [50]),
        ("4:memory:/a\n", {"memory/a/memory.limit_in_bytes": f"{2**63 - 4096}\n"}, []),
        ("4:cpu:/a\n", {"memory/memory.limit_in_bytes": "50\n"}, []),
        (None, {}, []),
    ],
)
def test_control_groups_limit_the_memory(
    tmp_path: Path, membership: str | None, files: dict[str, str], limits: list[int]
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    if membership is not None:
        (tmp_path / "self").write_text(membership)
    assert list(memory_limits_bytes(tmp_path, tmp_path / "self")) == limits

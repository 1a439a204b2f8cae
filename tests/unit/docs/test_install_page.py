"""The install page lists every extra, and the versions that the package and its locks name."""

import re
import tomllib
from typing import Any, Final

from support.paths import DOCS, ROOT

PAGE: Final = (DOCS / "how-to" / "install.md").read_text(encoding="utf-8")
PROJECT: Final[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: Final[dict[str, list[str]]] = PROJECT["optional-dependencies"]


def row(first: str) -> list[str]:
    """The other cells of a row of a table."""
    (cells,) = re.findall(rf"^\| {first} \| (.*) \|$", PAGE, re.MULTILINE)
    return [cell.strip() for cell in cells.split(" | ")]


def requirement(name: str) -> str:
    """The version that the package requires of another, without the operator of a lower bound."""
    required: list[str] = [*PROJECT["dependencies"], *EXTRAS["worker"], *EXTRAS["cuda"]]
    (versions,) = {line.removeprefix(f"{name}>=") for line in required if line.startswith(f"{name}>=")}
    return versions


def locked(name: str, lock: str) -> str:
    """Major and minor version of a package in a lock."""
    text = (ROOT / lock).read_text(encoding="utf-8")
    (version,) = re.findall(rf"^{name}==(\d+\.\d+)\S* (?:\\|; platform_machine != .*)$", text, re.MULTILINE)
    return str(version)


def test_every_extra_is_listed() -> None:
    listed = re.findall(r"^\| `(\w+)` \| .* \| .* \|$", PAGE, re.MULTILINE)
    assert sorted(listed) == sorted(EXTRAS)


def test_an_extra_adds_what_is_listed() -> None:
    for extra in set(EXTRAS) - {"dev"}:
        names = {re.split(r"[<>=]", line)[0] for line in EXTRAS[extra]}
        assert set(row(f"`{extra}`")[0].split(", ")) == names


def test_supported_versions_are_those_of_the_package() -> None:
    assert row("Python")[0] == f"{PROJECT['requires-python'].removeprefix('>=')} or newer"
    assert row("grpcio")[0] == f"{requirement('grpcio')} or newer"
    assert row("protobuf")[0] == requirement("protobuf").replace(",<", " or newer, below ")
    assert row("torch, for ranks")[0] == f"{requirement('torch')} or newer"
    assert row("cuda-bindings, for lent memory on GPUs")[0] == f"{requirement('cuda-bindings')} or newer"
    versions = (ROOT / "client" / "kvpool" / "client" / "vllm" / "versions.py").read_text(encoding="utf-8")
    (supported,) = re.findall(r"^SUPPORTED_VERSIONS: Final = \((.*)\)$", versions, re.MULTILINE)
    assert all(version in row("vLLM")[0] for version in re.findall(r'"(.*?)"', supported))


def test_tested_versions_are_those_of_the_locks() -> None:
    server, engine = "deploy/requirements/server.lock", "deploy/vllm/requirements.lock"
    assert row("grpcio")[1] == locked("grpcio", server)
    assert row("protobuf")[1] == f"{locked('protobuf', server)}; beside vLLM {locked('protobuf', engine)}"
    (torch,) = re.findall(r"^TORCH := torch==(\d+\.\d+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert row("torch, for ranks")[1].startswith(f"{torch};")

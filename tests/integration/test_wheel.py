"""The distributions: their contents, and the commands in a fresh virtual environment with the locked dependencies.

Slow: it installs packages, from the index or pip's cache. `make dist` checks those in KVPOOL_DIST.
"""

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path, PurePosixPath

import pytest

from kvpool.client import __version__ as kvpool_version
from support.paths import MODEL_CONFIGS, ROOT

pytestmark = pytest.mark.slow

PACKAGES = {
    "cli",
    "client",
    "core",
    "etcd",
    "gpu_worker",
    "lending",
    "models",
    "replay",
    "server",
    "v1",
    "vllm_plugin",
    "wire",
}
NOT_SHIPPED = {"benchmarks", "examples", "tests", "conftest.py", "faults.py"}
SOURCE_PATHS = {"PYTHONPATH", "MYPYPATH", "VIRTUAL_ENV"}
"""Variables that would let the environment see this repository."""


def run(*command: str | Path, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in SOURCE_PATHS}
    done = subprocess.run(
        [str(word) for word in command], cwd=folder, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done


@pytest.fixture(name="dist", scope="module")
def fixture_dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source distribution."""
    if given := os.environ.get("KVPOOL_DIST"):
        return Path(given)
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-d", folder)
    return folder


@pytest.fixture(name="wheel", scope="module")
def fixture_wheel(dist: Path) -> Path:
    (wheel,) = dist.glob("kvpool-*.whl")
    return wheel


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


@pytest.fixture(name="environment", scope="module")
def fixture_environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel and its locked dependencies alone."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", folder)
    install: list[str | Path] = [
        folder / "bin" / "python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
    ]
    run(*install, "--require-hashes", "-r", ROOT / "deploy" / "requirements" / "server.lock")
    run(*install, "--no-deps", wheel)
    return folder


def test_the_wheel_holds_the_product_and_type_information_only(wheel: Path) -> None:
    names = names_in(wheel)
    paths = [PurePosixPath(name) for name in names]
    assert {path.parts[0] for path in paths} == {"kvpool"}
    assert {path.parts[1] for path in paths} == PACKAGES
    assert PurePosixPath("kvpool/server/http/static/index.html") in paths
    assert not [str(path) for path in paths if NOT_SHIPPED & set(path.parts)]
    assert {path.parts[1] for path in paths if path.name == "py.typed"} == PACKAGES
    protos = [path for path in paths if path.suffix == ".proto"]
    assert len(protos) > 10
    assert {str(path.with_name(f"{path.stem}_pb2{suffix}")) for path in protos for suffix in (".py", ".pyi")} <= names


def test_the_source_distribution_builds_the_same_wheel(dist: Path, wheel: Path, tmp_path: Path) -> None:
    (source,) = dist.glob("kvpool-*.tar.gz")
    run(
        sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
        "--wheel-dir", tmp_path, source,
    )  # fmt: skip
    (built,) = tmp_path.glob("*.whl")
    assert built.name == wheel.name
    assert names_in(built) == names_in(wheel)


def test_project_urls_are_a_setting_of_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVPOOL_REPOSITORY_URL", raising=False)
    assert "urls" not in json.loads(run(sys.executable, "-m", "hatchling", "metadata").stdout)
    monkeypatch.setenv("KVPOOL_REPOSITORY_URL", "https://git.example/kvpool/")
    urls = json.loads(run(sys.executable, "-m", "hatchling", "metadata").stdout)["urls"]
    assert urls["Source"] == "https://git.example/kvpool"


def test_commands_run_without_the_repository(environment: Path, tmp_path: Path) -> None:
    kvpool, python = environment / "bin" / "kvpool", environment / "bin" / "python"
    version = f"kvpool, version {kvpool_version}"
    for command in ([kvpool], [python, "-m", "kvpool.cli"]):
        assert run(*command, "--version", folder=tmp_path).stdout.strip() == version
    assert "two schedulers, one pool" in run(kvpool, "demo", folder=tmp_path).stdout
    pool = ("--num-blocks", "500", "--block-size", "16")
    (tmp_path / "trace.jsonl").write_text('{"prompt_token_ids": [1, 2, 3]}')
    assert "hit rate" in run(kvpool, "replay", "trace.jsonl", *pool, folder=tmp_path).stdout
    config = MODEL_CONFIGS / "llama-3.1-8b.json"
    assert "FullAttention" in run(kvpool, "plan", config, "--memory", "20GiB", folder=tmp_path).stdout


def test_readme_examples_pass_strict_type_checks(environment: Path, tmp_path: Path) -> None:
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert examples
    paths = [tmp_path / f"example_{number}.py" for number in range(len(examples))]
    for path, code in zip(paths, examples, strict=True):
        path.write_text(code)
    mypy = [sys.executable, "-m", "mypy", "--strict", "--config-file=", f"--cache-dir={tmp_path / 'cache'}"]
    for path in paths:  # one by one: examples may use the same names
        run(*mypy, "--python-executable", environment / "bin" / "python", path, folder=tmp_path)

"""The scripts that build the images and list their contents, with programs that record how they are called."""

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvpool.client import __version__
from support.paths import ROOT
from support.waiting import DEADLINE_SECONDS

LOCKS = ROOT / "deploy" / "requirements"
pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="the scripts name the commit")


def run(script: str, *arguments: object, **environment: str) -> str:
    done = subprocess.run(
        [ROOT / "deploy" / script, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=True,
        timeout=DEADLINE_SECONDS,
        env={**os.environ, **environment},
    )
    return done.stdout


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)
    return path


def test_images_are_labelled_with_commit_and_locks(tmp_path: Path) -> None:
    program(tmp_path / "docker", 'printf "%s\\n" "$@"')
    path = f"{tmp_path}:{os.environ['PATH']}"
    shown = run("images.sh", PATH=path, KVPOOL_REPOSITORY_URL="https://git.example/kvpool").splitlines()
    assert [shown[i + 1] for i, word in enumerate(shown) if word == "--target"] == ["server", "worker"]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)  # noqa: S607 - the git of the machine
    revision = next(word for word in shown if word.startswith("--label=org.opencontainers.image.revision="))
    assert revision.partition("revision=")[2].removesuffix("-dirty") == commit.stdout.strip()
    assert "--label=org.opencontainers.image.source=https://git.example/kvpool" in shown
    assert f"kvpool-server:{__version__}" in shown
    for lock in ("server", "beside-torch", "build"):
        digest = hashlib.sha256((LOCKS / f"{lock}.lock").read_bytes()).hexdigest()
        assert shown.count(f"--label=kvpool.lock.{lock}=sha256:{digest}") == 2
    assert "worker" not in run("images.sh", "server", PATH=path, DOCKER_BUILD_OPTIONS="--push").splitlines()


def test_the_lists_are_made_of_the_locks(tmp_path: Path) -> None:
    python = program(tmp_path / "python", 'cat >"${@: -1}"')
    files = run("sbom.sh", tmp_path / "out", PYTHON=str(python)).splitlines()
    assert [Path(file).name for file in files] == ["kvpool-server.cdx.json", "kvpool-worker.cdx.json"]
    server, worker = (Path(file).read_text() for file in files)
    lock = (LOCKS / "server.lock").read_text()
    assert server == lock
    assert worker.startswith("torch==")
    assert worker.endswith((LOCKS / "beside-torch.lock").read_text() + lock)


@pytest.mark.parametrize("dockerfile", ["Dockerfile", "deploy/vllm/Dockerfile"])
def test_an_image_has_all_files_that_its_wheel_is_built_from(dockerfile: str) -> None:
    (copied,) = re.findall(r"^COPY (pyproject\.toml .*) \./$", (ROOT / dockerfile).read_text(), re.MULTILINE)
    assert set(copied.split()) == {"pyproject.toml", "hatch_build.py", "README.md", "LICENSE"}


def test_the_installation_of_vllm_shows_its_progress(tmp_path: Path) -> None:
    python = program(tmp_path / "python", 'echo "$@"; cat >/dev/null')
    script = ROOT / "deploy" / "vllm" / "install-cpu.sh"
    done = subprocess.run([script, python, "a.lock"], capture_output=True, text=True, check=True, input="")
    assert "--requirement a.lock" in done.stdout
    assert "--quiet" not in done.stdout


@pytest.mark.parametrize(("cuda", "extras"), [("13.0", "vllm,cuda"), (None, "vllm")])
def test_an_image_of_vllm_lends_memory_on_a_gpu_if_its_torch_is_for_one(
    cuda: str | None, extras: str, tmp_path: Path
) -> None:
    (code,) = re.findall(r"extras=\$\(python3 -c '(.*)'\)", (ROOT / "deploy/vllm/Dockerfile").read_text())
    (tmp_path / "torch.py").write_text(f"class version: cuda = {cuda!r}")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == f"{extras}\n"

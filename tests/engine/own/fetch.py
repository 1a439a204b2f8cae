"""Fetches vLLM's own tests: from its sdist on the package index, of which `sdist.txt` has the hash.

python tests/engine/own/fetch.py FOLDER     with the interpreter whose pip is to download it
"""

import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_HERE: Final = Path(__file__).parent
_NEEDED: Final = re.compile(
    r"tests/(__init__|utils|v1/(__init__|utils|core/.*|kv_connector/.*|streaming_input/.*))\.py"
)
"""The tests, and what they import."""


def download(folder: Path, requirement: Path = _HERE / "sdist.txt") -> Path:
    """Downloads an sdist, of which a file has version and hash; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--dest", str(folder))
    only_sdist = ("--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--require-hashes")
    environment = {**os.environ, "PYTHONPATH": str(_HERE / "sdist_backend")}
    subprocess.run([*pip, *only_sdist, "--requirement", str(requirement)], env=environment, check=True)
    (path,) = folder.glob("vllm-*.tar.gz")
    return path


def locked_version() -> str:
    """Reads the version of the sdist."""
    requirement, _, _ = (_HERE / "sdist.txt").read_text().partition(" ")
    return requirement.removeprefix("vllm==")


def unpack_tests(sdist: Path, folder: Path) -> None:
    """Unpacks the tests that are needed, without vLLM's main conftest.py, which plugin.py replaces."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, members=_tests(archive), filter="data")


def _tests(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    for member in archive:
        _, _, name = member.name.partition("/")  # in a folder with the name of the version
        if _NEEDED.fullmatch(name):
            yield member.replace(name=name)


if __name__ == "__main__":
    to = Path(sys.argv[1])
    unpack_tests(download(to), to)

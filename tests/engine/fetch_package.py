"""Fetches the Python part of a vLLM that has no build for CPUs, and its own tests: from its sdist on the package index.

python tests/engine/fetch_package.py REQUIREMENT FOLDER     with the interpreter that has vLLM's build for CPUs

REQUIREMENT is a file with version and hash. With FOLDER on PYTHONPATH and VLLM_TARGET_DEVICE=cpu, vLLM is that version,
with the compiled libraries of the one that is installed. Its tests are in FOLDER/own-tests.
"""

import shutil
import sys
import tarfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from engine.own.fetch import download, unpack_tests


def unpack_package(sdist: Path, folder: Path) -> None:
    """Unpacks the package, and puts the libraries of the installed one beside it."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, members=_package(archive), filter="data")
    spec = find_spec("vllm")
    assert spec
    assert spec.origin
    installed = Path(spec.origin).parent
    for library in installed.rglob("*.so"):
        shutil.copy(library, folder / "vllm" / library.relative_to(installed))


def _package(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    for member in archive:
        _, _, name = member.name.partition("/")  # in a folder with the name of the version
        if name.startswith("vllm/"):
            yield member.replace(name=name)


if __name__ == "__main__":
    requirement, to = map(Path, sys.argv[1:])
    path = download(to, requirement)
    unpack_package(path, to)
    unpack_tests(path, to / "own-tests")
    path.unlink()

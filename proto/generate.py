"""Generates Python code next to the protos. With --check compares instead, and fails if the code is stale.

Runs in an environment of its own, `.venv-generate`: the oldest supported grpcio-tools, which it uses so that the code
runs with every later protobuf and grpcio, pins an old protobuf.
"""

import filecmp
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent
PACKAGES = [Path("kvpool/v1"), Path("kvpool/etcd")]


def generate(out: Path) -> None:
    """Generates messages, services and their type stubs under `out`."""
    protos = [path for package in PACKAGES for path in sorted((ROOT / package).glob("*.proto"))]
    kinds = [f"--{kind}_out={out}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    names = [str(path.relative_to(ROOT)) for path in protos]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", *kinds, *names]
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))  # protoc-gen-mypy is there
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "PATH": path})  # noqa: S603 - our own protoc
    for path in protos:
        if "\nservice " not in path.read_text():
            for stub in (out / path.parent.relative_to(ROOT)).glob(f"{path.stem}_pb2_grpc.py*"):
                stub.unlink()


def compare(fresh_root: Path, package: Path) -> set[str]:
    """Returns the names of generated files of a package that differ from those under `fresh_root`."""
    fresh = {path.name for path in (fresh_root / package).iterdir()}
    stale = {path.name for path in (ROOT / package).glob("*_pb2*.py*")} - fresh
    _, different, missing = filecmp.cmpfiles(fresh_root / package, ROOT / package, fresh, shallow=False)
    return {*stale, *different, *missing}


def main() -> int:
    """Generates or checks the code."""
    if sys.argv[1:] != ["--check"]:
        generate(ROOT)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        stale = set[str]().union(*(compare(Path(folder), package) for package in PACKAGES))
    if stale:
        sys.stderr.write(f"generated code is stale, run `make proto`: {sorted(stale)}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

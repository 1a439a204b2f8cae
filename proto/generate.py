"""Generates Python code next to the protos. With --check compares instead, and fails if the code is stale.

Uses the oldest supported grpcio-tools, so that the code runs with every later protobuf and grpcio.
"""

import filecmp
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent
PACKAGE = Path("kvpool/v1")


def generate(out: Path) -> None:
    """Generates messages, services and their type stubs under `out`."""
    protos = sorted(str(path.relative_to(ROOT)) for path in (ROOT / PACKAGE).glob("*.proto"))
    kinds = [f"--{kind}_out={out}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", *kinds, *protos]
    subprocess.run(command, cwd=ROOT, check=True, stderr=subprocess.PIPE, text=True)  # noqa: S603 - our own protoc
    services = {path.name for path in (ROOT / PACKAGE).glob("*.proto") if "\nservice " in path.read_text()}
    for path in (out / PACKAGE).glob("*_pb2_grpc.py*"):
        if path.name.partition("_pb2_grpc")[0] + ".proto" not in services:
            path.unlink()


def main() -> int:
    """Generates or checks the code."""
    if sys.argv[1:] != ["--check"]:
        generate(ROOT)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = {path.name for path in (Path(folder) / PACKAGE).iterdir()}
        stale = {path.name for path in (ROOT / PACKAGE).glob("*_pb2*.py*")} - fresh
        same, different, missing = filecmp.cmpfiles(Path(folder) / PACKAGE, ROOT / PACKAGE, fresh, shallow=False)
        del same
    if stale or different or missing:
        sys.stderr.write(f"generated code is stale, run `make proto`: {sorted({*stale, *different, *missing})}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

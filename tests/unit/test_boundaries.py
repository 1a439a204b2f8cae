"""The core imports the standard library only, and two packages import torch. import-linter checks the other rules."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import kvpool.core
import kvpool.gpu_worker
import kvpool.lending
from support.paths import ROOT
from support.waiting import DEADLINE_SECONDS

ALLOWED = sys.stdlib_module_names - {"asyncio", "time", "os", "socket", "threading", "random", "secrets"}
WORKER_ONLY = {"torch", "numpy"}
"""Packages that only the worker extra installs."""


def imports(path: Path) -> Iterator[str]:
    """The modules that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            yield node.module or ""


def test_core_imports_the_standard_library_only() -> None:
    (folder,) = kvpool.core.__path__
    paths = sorted(Path(folder).rglob("*.py"))
    assert len(paths) > 10
    for path in paths:
        for name in imports(path):
            assert name.startswith("kvpool.core") or name.partition(".")[0] in ALLOWED, (path.name, name)


def test_only_the_worker_and_lending_import_torch() -> None:
    workers = [ROOT / "gpu_worker" / "kvpool" / name for name in ("gpu_worker", "lending")]
    vllm = ROOT / "client" / "kvpool" / "client" / "vllm"
    # Run where vLLM, which brings torch, computes.
    engine_worker = {vllm / name for name in ("worker.py", "lent_allocation.py", "model_layers.py")}
    users = set()
    paths = [path for part in ("proto", "server", "client", "gpu_worker") for path in (ROOT / part).rglob("*.py")]
    assert len(paths) > 60
    for path in paths:
        if WORKER_ONLY & {name.partition(".")[0] for name in imports(path)}:
            assert any(map(path.is_relative_to, workers)) or path in engine_worker, path
            users.add(path.name)
    assert "tensors.py" in users


def test_one_file_of_the_worker_speaks_the_worker_protocol() -> None:
    """Health checks are another service, with gRPC's standard protocol, and lending has a protocol of its own."""
    users, lending = (
        {path.name for path in Path(*package.__path__).rglob("*.py") if uses_the_wire(path)}
        for package in (kvpool.gpu_worker, kvpool.lending)
    )
    assert users == {"stream.py", "worker_health.py", "lent_rank.py"}  # the last makes the offer of a lender
    assert lending == {"lender_client.py", "connection.py", "process_connection.py", "requests.py", "rank.py"}


def test_metrics_and_health_of_a_rank_need_no_torch() -> None:
    modules = "status", "worker_health", "worker_metrics"
    program = f"import sys; [__import__('kvpool.gpu_worker.' + name) for name in {modules}]; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=DEADLINE_SECONDS
    )
    loaded = set(done.stdout.split())
    assert "kvpool.gpu_worker.worker_metrics" in loaded
    assert not loaded & WORKER_ONLY


def uses_the_wire(path: Path) -> bool:
    return any(name.split(".")[0] in ("grpc", "google") or name.startswith("kvpool.v1") for name in imports(path))

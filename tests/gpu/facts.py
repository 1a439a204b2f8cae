"""Prints what the checks run on: one JSON object."""

import argparse
import datetime as dt
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch

from kvpool.gpu_worker.device import describe_device, device_memory, open_device

_QUERY = "driver_version,compute_mode,persistence_mode,mig.mode.current"


def facts(device: torch.device) -> dict[str, object]:
    """Device, driver and versions."""
    found: dict[str, object] = {
        "device": describe_device(device),
        "memory_mib": device_memory(device).total_bytes >> 20,
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "commit": os.environ.get("KVPOOL_COMMIT", ""),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
    }
    for package in ("torch", "cuda-bindings", "grpcio", "protobuf", "numpy"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "none"
    if device.type == "cuda":
        query = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader", "-i", str(device.index or 0)]
        values = subprocess.check_output(query, text=True).strip().split(", ")
        found |= dict(zip(_QUERY.split(","), values, strict=True))
        found["cuda"] = torch.version.cuda
        found["mps_pipe"] = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")).exists()  # noqa: S108
    return found


def main() -> None:
    """Prints the facts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    sys.stdout.write(json.dumps(facts(open_device(parser.parse_args().device))) + "\n")


if __name__ == "__main__":
    main()

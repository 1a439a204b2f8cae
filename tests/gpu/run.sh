#!/usr/bin/env bash
# Runs the checks of a GPU on a machine that reaches no package index: .gpu-kit/run.sh, from the root of a copy of the
# repository. It takes the options of tests/gpu/run.py. PYTHON names the Python that has torch.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT

# System packages would be those of the Python that made the environment of $python, which may lack torch.
"$python" -m venv --without-pip "$environment"
packages=$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), sep="\n")' \
    >"$packages/torch.pth"
"$python" -m pip --python "$environment/bin/python" install --quiet --disable-pip-version-check --no-index \
    --no-deps --ignore-installed "$root"/.gpu-kit/wheels/*.whl
"$python" -m pip --python "$environment/bin/python" install --quiet --disable-pip-version-check --no-index \
    --no-deps --no-build-isolation --editable "$root"
"$python" -m zipfile -e "$root/.gpu-kit/vllm.zip" "$packages"

cd "$root"
KVPOOL_COMMIT=${KVPOOL_COMMIT:-$(cat .gpu-kit/commit)} "$environment/bin/python" tests/gpu/run.py "$@"

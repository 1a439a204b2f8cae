#!/usr/bin/env bash
# Runs the checks of a GPU on a machine that reaches no package index: tests/gpu/run.sh, in a copy of the repository. It
# takes the options of tests/gpu/run.py. KIT names the folder of what `make gpu-kit` wrote, PYTHON the Python that has torch.
# The environment stays in KIT for the next run.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
kit=$(realpath "${KIT:-$root/.gpu-kit}")
python=${PYTHON:-python3}
environment=$kit/environment
made_of="$root $(stat -c '%n %s %Y' "$kit"/*.tar*)"

install() {
    rm -rf "$environment"
    # System packages would be those of the Python that made the environment of $python, which may lack torch.
    "$python" -m venv --without-pip "$environment"
    packages=$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), sep="\n")' \
        >"$packages/torch.pth"
    tar -C "$environment" -xf "$kit/wheels.tar"
    "$python" -m pip --python "$environment/bin/python" install --quiet --disable-pip-version-check --no-index \
        --no-deps --ignore-installed "$environment"/wheels/*.whl
    "$python" -m pip --python "$environment/bin/python" install --quiet --disable-pip-version-check --no-index \
        --no-deps --no-build-isolation --editable "$root"
    # Without vLLM its stages do not run.
    if [ -e "$kit/vllm.tar.xz" ]; then
        "$python" -W ignore -m tarfile -e "$kit/vllm.tar.xz" "$packages"
        # Else all engines that start at once compile it.
        "$environment/bin/python" -m compileall -q -j 0 "$packages/vllm"
    fi
    echo "$made_of" >"$environment/made_of"
}

[ "$(cat "$environment/made_of" 2>/dev/null)" = "$made_of" ] || install
cd "$root"
"$environment/bin/python" tests/gpu/run.py "$@"

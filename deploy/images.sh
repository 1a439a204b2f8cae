#!/usr/bin/env bash
# Builds the images and labels them with where they come from: the commit, its time, and the hash of each lock.
# Usage: deploy/images.sh [TARGET...]; targets of the Dockerfile, by default server and worker. KVPOOL_REPOSITORY_URL, if
# set, becomes the label of the source. DOCKER_BUILD_OPTIONS are passed on, as in DOCKER_BUILD_OPTIONS="--push".
set -euo pipefail
cd "$(dirname "$0")/.."
version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' client/kvpool/client/_version.py)
labels=(
  "org.opencontainers.image.version=$version"
  "org.opencontainers.image.revision=$(git describe --always --dirty --abbrev=40 --exclude='*')"
  "org.opencontainers.image.created=$(git log -1 --format=%cI)"
  "org.opencontainers.image.licenses=Apache-2.0"
)
[[ -z ${KVPOOL_REPOSITORY_URL-} ]] || labels+=("org.opencontainers.image.source=$KVPOOL_REPOSITORY_URL")
for lock in server beside-torch build; do
  hash=$(sha256sum "deploy/requirements/$lock.lock")
  labels+=("kvpool.lock.$lock=sha256:${hash%% *}")
done
[[ $# -gt 0 ]] || set -- server worker
for target; do
  # shellcheck disable=SC2086 # options, separated by spaces
  docker build --target "$target" "${labels[@]/#/--label=}" -t "kvpool-$target" -t "kvpool-$target:$version" \
    ${DOCKER_BUILD_OPTIONS-} .
done

#!/bin/sh
# Asks the registries for the current digests of the tags of third-party images and writes them into
# docker-compose.yml and the Dockerfiles:   sh docker/pin.sh && git diff
set -eu
cd "$(dirname "$0")/.."
files="docker-compose.yml docker/service.Dockerfile docker/worker.Dockerfile"
# shellcheck disable=SC2086  # names without spaces
for image in $(sed -nE 's/^ *(FROM|image:) ([^ ]+)@sha256:.*/\2/p' $files | sort -u); do
    digest=$(docker buildx imagetools inspect "$image" --format '{{.Manifest.Digest}}')
    if ! expr "$digest" : 'sha256:[0-9a-f]\{64\}$' >/dev/null; then
        echo "no digest for $image: the registry said '$digest'" >&2
        exit 1
    fi
    sed -i "s|$image@sha256:[0-9a-f]*|$image@$digest|" $files
    echo "$image@$digest"
done

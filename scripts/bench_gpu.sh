#!/usr/bin/env bash
# Measures one GPU: scripts/bench_gpu.sh [JSON] [arguments of engine_service.bench_gpu].
#
# On the machine with the GPU nothing is installed and no network is needed: a python3 with torch,
# triton, numpy, safetensors, tqdm and transformers, and msgspec, which this script unpacks into
# build/bench_gpu/packages wherever it runs with a network. That folder travels with the tree.
set -euo pipefail
cd "$(dirname "$0")/.."

packages=build/bench_gpu/packages
msgspec=$(grep '^msgspec==' requirements.lock)

python=${PYTHON:-}
if [ -z "$python" ]; then
    python=python3
    [ ! -x .venv/bin/python ] || python=.venv/bin/python
fi

fetch() {
    local version tag
    for version in 3.11 3.12 3.13; do
        tag=cp${version/./}
        [ ! -e "$packages/$tag/msgspec" ] || continue
        "$python" -m pip install --quiet --disable-pip-version-check --retries 1 \
            --only-binary=:all: --no-deps --implementation cp --python-version "$version" \
            --platform manylinux2014_x86_64 --target "$packages/$tag.new" "$msgspec" || return 1
        mv "$packages/$tag.new" "$packages/$tag"
    done
}
fetch || echo "bench_gpu: $msgspec was not fetched for another machine" >&2

if ! "$python" -c 'import msgspec' 2>/dev/null; then
    tag=$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
    export PYTHONPATH=$PWD/$packages/$tag${PYTHONPATH:+:$PYTHONPATH}
fi
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    export TRITON_INTERPRET=1
fi

json=build/bench-gpu.json
if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then
    json=$1
    shift
fi
exec "$python" -m engine_service.bench_gpu --json "$json" "$@"

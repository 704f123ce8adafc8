#!/usr/bin/env bash
# Generates protos/engine_pb2*.py and their stubs; --check fails when the committed ones differ.
set -euo pipefail
cd "$(dirname "$0")/.."

out=.
if [ "${1:-}" = --check ]; then
    out=$(mktemp -d)
    trap 'rm -rf "$out"' EXIT
fi
# From the root with -I ., so that the stubs import `from protos import engine_pb2` as they are.
PATH="$PWD/.venv/bin:$PATH" .venv/bin/python -m grpc_tools.protoc -I . protos/engine.proto \
    --python_out="$out" --grpc_python_out="$out" --mypy_out="$out" --mypy_grpc_out="$out"
[ "$out" != . ] || exit 0
for file in "$out"/protos/*; do
    diff -u "protos/${file##*/}" "$file" || {
        echo "protos: ${file##*/} is not what engine.proto generates; run: make protos" >&2
        exit 1
    }
done

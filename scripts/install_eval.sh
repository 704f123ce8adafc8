#!/usr/bin/env bash
# Makes .venv/eval with every version of scripts/eval.lock: lm-eval, which the slow tests run against
# the server, as its users do. Its dependencies (900 MB) are nothing that a server needs, so they
# stand apart. A second run returns at once.
set -euo pipefail
cd "$(dirname "$0")/.."

eval=.venv/eval
stamp=$eval/installed
wanted=$(cat scripts/eval.lock scripts/install_eval.sh | sha256sum)
if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi

# Two at once: the second waits and finds the work done.
exec 9>.venv/eval.lock
flock 9
[ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ] || exit 0

echo "eval: installing lm-eval into $eval, about a minute" >&2
rm -rf "$eval"
.venv/bin/python -m venv "$eval"
"$eval/bin/python" -m pip --disable-pip-version-check install --no-deps -r scripts/eval.lock
printf '%s\n' "$wanted" >"$stamp"

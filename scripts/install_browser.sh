#!/usr/bin/env bash
# Installs Debian's Chromium, which the tests of the pages drive. A second run does nothing.
# Where it can't, it says the command for someone who can and exits 0: those tests are skipped then
# (under CI=true they fail).
set -euo pipefail

for browser in chromium chromium-browser google-chrome; do
    if command -v "$browser" >/dev/null; then
        exit 0
    fi
done

packages=(chromium fonts-dejavu-core)

give_up() {
    printf 'browser: %s; for the tests of the pages:\n  %s\n' "$1" \
        "sudo apt-get install --no-install-recommends ${packages[*]}" >&2
    exit 0
}

as_root=()
[ "$(id -u)" -eq 0 ] || as_root=(sudo -n)
command -v apt-get >/dev/null || give_up "there is no apt-get here"
"${as_root[@]}" true 2>/dev/null || give_up "this user may not install packages"

echo "browser: installing ${packages[*]}, about 100 MB, for the tests of the pages" >&2
"${as_root[@]}" apt-get update || give_up "apt-get update failed"
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install --yes \
    --no-install-recommends "${packages[@]}" || give_up "apt-get install failed"

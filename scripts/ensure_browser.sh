#!/usr/bin/env bash
# Find a browser for the web UI tests, or install one without prompts: Debian's chromium as root, else
# playwright's. Never fails: without a browser the tests print instructions.
#   scripts/ensure_browser.sh PYTHON
set -u
python=${1:?usage: ensure_browser.sh PYTHON}

for name in "${CHROMIUM:-}" chromium-headless-shell chromium chromium-browser google-chrome google-chrome-stable chrome; do
  if [ -n "$name" ] && command -v "$name" >/dev/null 2>&1; then
    exit 0
  fi
done
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
  echo "installing chromium for the web UI tests"
  export DEBIAN_FRONTEND=noninteractive
  # The shell without a user interface needs a third less CPU time. Recommended packages are a
  # desktop: 96 packages, of which the tests need the fonts.
  install="apt-get install -y -qq --no-install-recommends fonts-liberation"
  apt-get update -qq && { $install chromium-headless-shell || $install chromium; } && exit 0
fi
echo "fetching a browser for the web UI tests"
"$python" -m playwright install chromium || true
exit 0

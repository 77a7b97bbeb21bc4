#!/usr/bin/env bash
# Measure what a new user meets: a fresh clone of HEAD without any cache, and print a table.
#
#   scripts/first_contact.sh            all rows but `make test`
#   scripts/first_contact.sh --test     all rows
#   DIR=... scripts/first_contact.sh    where to work (default: a new temporary directory, removed at the end)
#
# Needs git, make, Python 3.11 with venv, a C++17 compiler and a network. Run it on a quiet machine:
# figures are wall-clock times. HOME, the pip cache, ccache and the model cache are empty ones.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
with_tests=
[ "${1:-}" = --test ] && with_tests=1
python=${PYTHON:-python3}
work=${DIR:-$(mktemp -d)}
[ -n "${DIR:-}" ] || trap 'rm -rf "$work"' EXIT
mkdir -p "$work/home"
export HOME="$work/home" XDG_CACHE_HOME="$work/home/.cache" PIP_NO_CACHE_DIR=1 CCACHE_DISABLE=1
unset HF_HOME LLAISYS_CACHE VIRTUAL_ENV PYTHONPATH PYTHONDONTWRITEBYTECODE
port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
rows=()

# watch UNTIL COMMAND...: run until a line of output contains UNTIL (or to the end, if empty); prints
# "SECONDS LONGEST_SILENCE" on the last line. The command's output goes to stderr.
watch() {
  "$python" - "$@" <<'PY'
import os, signal, subprocess, sys, time

until, *command = sys.argv[1:]
begin = last = time.monotonic()
silence = 0.0
process = subprocess.Popen(
    command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
)
found = False
for line in process.stdout:
    now = time.monotonic()
    silence, last = max(silence, now - last), now
    sys.stderr.write(f"{now - begin:7.1f}  {line}")
    if until and until in line:
        found = True
        break
took = time.monotonic() - begin
if until:
    os.killpg(process.pid, signal.SIGTERM)
    process.stdout.read()
status = process.wait()
if (until and not found) or (not until and status != 0):
    sys.exit(f"error: {' '.join(command)} ended with status {status}")
print(f"{took:.1f} {silence:.1f}")
PY
}
row() { rows+=("$(printf '| %-44s | %-12s | %-10s |' "$1" "$2" "$3")"); }

git clone -q "$root" "$work/clone"
cd "$work/clone"
serve=(--port "$port" --session-file "$work/sessions.sqlite3")

read -r seconds silence < <(watch "llaisys: serving" make run ARGS="${serve[*]}")
row "make run to the URL" "$seconds s" "180 s"
row "longest silent stretch of it" "$silence s" "5 s"
read -r seconds _ < <(watch "llaisys: serving" .venv/bin/llaisys serve "${serve[@]}")
row "llaisys serve to ready, model cached" "$seconds s" "2.5 s"
row "size of .venv" "$(du -sm .venv | cut -f1) MB" "150 MB"

make wheel >&2
"$python" scripts/check_wheel.py dist/*.whl | tee "$work/wheel.txt" >&2
figure() { tail -n 1 "$work/wheel.txt" | "$python" -c 'import json, sys; print(json.load(sys.stdin)[sys.argv[1]])' "$1"; }
row "from a wheel to the URL, no compiler" "$(figure seconds) s" "40 s"
row "size of that environment, pip aside" "$(figure megabytes) MB" "150 MB"

make develop >&2
printf '\nnamespace { [[maybe_unused]] int first_contact = 1; }\n' >> src/models/decoder/decoder.cpp
read -r seconds _ < <(watch "" make develop)
row "rebuild after an edit of one C++ file" "$seconds s" "15 s"

if [ -n "$with_tests" ]; then
  git checkout -q src
  make clean >&2
  read -r seconds _ < <(watch "" make test)
  row "make test" "$seconds s" "720 s"
fi

printf '| %-44s | %-12s | %-10s |\n|---|---|---|\n' "$(nproc) cores, $(uname -m), $(date +%F)" measured goal
printf '%s\n' "${rows[@]}"

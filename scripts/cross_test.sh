#!/usr/bin/env bash
# Build the C++ tests for aarch64 with a cross compiler and run them under qemu-user.
#
#   scripts/cross_test.sh [ctest arguments]       e.g. -R test_ops
#
# Needs (Debian and Ubuntu packages): g++-aarch64-linux-gnu qemu-user cmake ninja-build. cmake and
# ninja are taken from build/tools when it exists. This script installs nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ -d build/tools/bin ]]; then
    PATH="$PWD/build/tools/bin:$PATH"
fi

missing=()
need() { # need PROGRAM PACKAGE
    command -v "$1" >/dev/null 2>&1 || missing+=("$2")
}
need aarch64-linux-gnu-g++ g++-aarch64-linux-gnu
need qemu-aarch64 qemu-user
need cmake cmake
need ninja ninja-build
if ((${#missing[@]})); then
    echo "error: missing for the aarch64 cross test: ${missing[*]}" >&2
    echo "       on Debian or Ubuntu: apt install ${missing[*]}" >&2
    exit 1
fi

build=build/aarch64
# The toolchain file sets the compilers; ignore those of the host.
env -u CC -u CXX cmake -S . -B "$build" -G Ninja \
    -DCMAKE_TOOLCHAIN_FILE="$PWD/cmake/aarch64-linux-gnu.cmake" \
    -DCMAKE_BUILD_TYPE=Release -DLLAISYS_BUILD_TESTS=ON -DLLAISYS_WERROR=ON
cmake --build "$build"
ctest --test-dir "$build" --output-on-failure -j "$(nproc 2>/dev/null || echo 2)" "$@"

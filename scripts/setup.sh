#!/bin/sh
# Makes .venv, or brings it up to date: scripts/setup.sh [EXTRA...], from the Makefile.
#
# The stamp .venv/installed.NAME is written after NAME (base, or an extra) is installed. It says what
# the installation came from: the folder, the version of Python, and the checksums of pyproject.toml
# and of the constraints. While those hold, nothing is done. Other checksums: pip updates the
# environment. No stamp of the base, another folder or another Python: .venv is made anew, since what
# an interrupted installation left behind cannot be trusted.
set -eu
cd "$(dirname "$0")/.."

say() { printf '%s\n' "setup: $*" >&2; }
fail() { printf '%s\n' "error: $*" >&2; exit 1; }

# The folder .venv stands in and the version of its Python; fails when that does not start.
identity() {
    printf '%s Python ' "$(pwd -P)"
    .venv/bin/python -E -s -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null
}

is_python() { # whether .venv was made from the Python at path $1
    .venv/bin/python -E -s -c 'import os, sys
sys.exit(not os.path.samefile(getattr(sys, "_base_executable", sys.executable), sys.argv[1]))' "$1"
}

why_rebuild() { # prints why .venv cannot be used, or nothing
    if [ ! -e .venv ]; then
        echo "there is none"
    elif ! now=$(identity); then
        echo "its Python does not start"
    elif [ ! -f .venv/installed.base ]; then
        echo "its installation was not finished"
    elif [ "$now" != "$(head -n 1 .venv/installed.base)" ]; then
        echo "it was made for another folder or Python"
    elif [ -n "$chosen" ] && ! is_python "$chosen"; then
        echo "another Python is asked for"
    fi
}

chosen=
if [ -n "${PYTHON:-}" ]; then
    chosen=$(sh scripts/find_python.sh)
fi
reason=$(why_rebuild)
if [ -n "$reason" ]; then
    [ -n "$chosen" ] || chosen=$(sh scripts/find_python.sh)
    say "making .venv with $chosen ($reason)"
    rm -rf .venv
    "$chosen" -m venv .venv >&2 || fail "$chosen could not make the virtual environment .venv (see" \
        "above); choose another Python with make PYTHON=/path/to/python"
fi

made_for=$(identity)
case $made_for in
    *" 3.11") constraints=constraints/py311.txt ;;
    *) constraints=constraints/py312.txt ;;
esac
stamp=$made_for'
'$(cksum pyproject.toml "$constraints")

has() { [ "$(cat ".venv/installed.$1" 2>/dev/null)" = "$stamp" ]; }

current=yes
for name in base "$@"; do
    if ! has "$name"; then current=no; fi
done
[ "$current" = no ] || exit 0

kept= # installed from the same files before, and untouched by what is added now
for file in .venv/installed.*; do
    name=${file#.venv/installed.}
    if has "$name"; then kept="$kept $name"; fi
done
extras=$(echo "$*" | tr ' ' ',')
say "installing shardlm${extras:+[$extras]} with the versions of $constraints (minutes the first time)"
rm -f .venv/installed.*
# -qq: an error is printed, remarks on pip's own settings are not.
.venv/bin/python -m pip install -qq --disable-pip-version-check -c "$constraints" \
    -e ".${extras:+[$extras]}" >&2 ||
    fail "the installation did not finish (see above); run the same command again to start it anew"
for name in $kept "$@" base; do
    printf '%s\n' "$stamp" >".venv/installed.$name"
done

#!/bin/sh
# Prints the path of the Python to make .venv with: the newest on the PATH that jax and its
# companions support, or the one named in the variable PYTHON. Every candidate is started, since a
# name on the PATH may be a shim or a link with nothing behind it.
set -euf

oldest=11
newest=14
needed="Python 3.$oldest to 3.$newest"
override="make PYTHON=/path/to/python"

# Prints: major, minor, the module missing for making .venv (or none), and the path to use: that of
# the base interpreter, so that an active virtual environment, perhaps the .venv about to be
# replaced, is seen through. Runs on any Python from 2.7 on.
probe='
import sys
missing = "none"
for name in ("venv", "ensurepip"):
    try:
        __import__(name)
    except ImportError:
        missing = name
path = getattr(sys, "_base_executable", None) or sys.executable
print("%d %d %s %s" % (sys.version_info[0], sys.version_info[1], missing, path))
'

best=0         # minor version and path of the best candidate so far
best_path=
incomplete=0   # the same for supported versions that lack a module
incomplete_path=
incomplete_module=
seen=          # what was found, for the message

consider() {
    if ! report=$("$1" -E -s -c "$probe" 2>/dev/null </dev/null) || [ -z "$report" ]; then
        seen="${seen:+$seen, }$1 (does not start)"
        return 0
    fi
    IFS=' ' read -r major minor module path <<END
$report
END
    case $seen in *"($path)"*) return 0 ;; esac
    seen="${seen:+$seen, }Python $major.$minor ($path)"
    if [ "$major" != 3 ] || [ "$minor" -lt $oldest ] || [ "$minor" -gt $newest ]; then
        return 0
    elif [ "$module" = none ]; then
        if [ "$minor" -gt "$best" ]; then best=$minor best_path=$path; fi
    elif [ "$minor" -gt "$incomplete" ]; then
        incomplete=$minor incomplete_path=$path incomplete_module=$module
    fi
}

if [ -n "${PYTHON:-}" ]; then
    where="PYTHON=$PYTHON gives"
    consider "$PYTHON"
else
    where="the PATH has"
    IFS=:
    for directory in $PATH; do
        for name in python3.14 python3.13 python3.12 python3.11 python3 python; do
            if [ -x "${directory:-.}/$name" ] && [ ! -d "${directory:-.}/$name" ]; then
                consider "${directory:-.}/$name"
            fi
        done
    done
    unset IFS
fi

if [ "$best" -gt 0 ]; then
    printf '%s\n' "$best_path"
elif [ "$incomplete" -gt 0 ]; then
    echo "error: Python 3.$incomplete ($incomplete_path) cannot make a virtual environment because" \
        "its module $incomplete_module is missing: install it (on Debian and Ubuntu: apt install" \
        "python3.$incomplete-venv) or choose another Python with $override" >&2
    exit 1
else
    echo "error: shardlm needs $needed, but $where ${seen:-no Python at all}: install a Python in" \
        "that range and put it on the PATH, or name one with $override" >&2
    exit 1
fi

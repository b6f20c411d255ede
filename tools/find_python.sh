#!/bin/sh
# Prints the path of a Python >= 3.12 that can make virtual environments, or says what to install.
# With an argument, such as 13, only a Python 3.13 will do.
# Each candidate is run, because a name on PATH may be a shim with nothing behind it.

minors=${1:-14 13 12}

try() { # path or name of an interpreter: prints its path and exits if it will do
    "$1" -c '
import ctypes, ensurepip, ssl, sys, venv, zlib
assert sys.version_info >= (3, 12) and "t" not in sys.abiflags  # t: free-threaded, few wheels
assert len(sys.argv) == 1 or sys.version_info[:2] == (3, int(sys.argv[1]))
ensurepip.version()
print(sys.executable)' $2 </dev/null 2>/dev/null && exit 0
}

if [ -n "$PYTHON" ]; then
    try "$PYTHON" "$1"
    echo "PYTHON=$PYTHON is no Python >= 3.12 with venv and ensurepip; looking for another." >&2
fi

for name in $(printf 'python3.%s ' $minors) python3; do
    IFS=:
    for folder in $PATH; do # all of PATH: a broken shim may hide a Python that works
        [ -x "$folder/$name" ] && try "$folder/$name" "$1"
    done
    unset IFS
done

for minor in $minors; do
    for python in "${PYENV_ROOT:-$HOME/.pyenv}/versions/3.$minor".*/bin/python; do
        [ -x "$python" ] && try "$python" "$1"
    done
done

cat >&2 <<'END'
No Python >= 3.12 with venv and ensurepip was found. Install one, for example:
  Debian, Ubuntu  sudo apt install python3.12 python3.12-venv
  Fedora          sudo dnf install python3.12
  macOS           brew install python@3.12
  pyenv           pyenv install 3.12
or name one that is elsewhere: make PYTHON=/path/to/python3.12 ...
END
exit 1

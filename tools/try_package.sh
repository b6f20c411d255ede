#!/bin/sh
# Installs a wheel or an sdist into an empty environment, and runs the quick start there, away from the checkout:
#     tools/try_package.sh dist/jgg-0.2.0-py3-none-any.whl
# $PYTHON is the interpreter, by default python3.
set -eu

package=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
checkout=$(cd "$(dirname "$0")/.." && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"

"${PYTHON:-python3}" -m venv environment
environment/bin/python -m pip install -q "$package[flax]"
export JAX_PLATFORMS=cpu
environment/bin/jgg --version
environment/bin/jgg info
sed -n '/^```python$/,/^```$/p' "$checkout/README.md" | sed '/^```/d' >readme.py
sed -n '/^```python$/,/^```$/p' "$checkout/docs/index.md" | sed '/^```/d' >quick_start.py
for program in readme.py quick_start.py; do
    environment/bin/python "$program"
    echo "$program runs with $(basename "$package")"
done

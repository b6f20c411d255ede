#!/bin/sh
# Installs a wheel or an sdist into an empty environment, first without extras, and runs README's commands and programs
# there, away from the checkout:
#     tools/try_package.sh dist/jgg-VERSION-py3-none-any.whl
# $PYTHON is the interpreter, by default python3.
set -eu

package=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
checkout=$(cd "$(dirname "$0")/.." && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"

"${PYTHON:-python3}" -m venv environment
export JAX_PLATFORMS=cpu
environment/bin/python -m pip install -q "$package"
environment/bin/python -W error -c 'import jgg'
environment/bin/jgg
environment/bin/jgg --version
environment/bin/jgg info
if environment/bin/python -c 'import triton' 2>/dev/null; then
    echo "$(basename "$package") installs Triton, of 1 GB, on a machine without a GPU" >&2
    exit 1
fi
environment/bin/python -m pip install -q "$package[demo,train]"
environment/bin/python -W error -c 'import jgg.data, jgg.hf, jgg.linen, jgg.models, jgg.nnx, jgg.train'
# the block of README's that fine-tunes the demo's model, unchanged
awk '/^```sh$/ { block = ""; inside = 1; next }
    /^```$/ { if (inside && block ~ /jgg finetune/) printf "%s", block; inside = 0 }
    inside { block = block $0 "\n" }' "$checkout/README.md" >readme.sh
PATH="$folder/environment/bin:$PATH" sh -e readme.sh | tee readme.txt
[ "$(tail -n 1 readme.txt)" = hello ]
echo "README.md's commands run with $(basename "$package")"
sed -n '/^```python$/,/^```$/p' "$checkout/README.md" | sed '/^```/d' >readme.py
sed -n '/^```python$/,/^```$/p' "$checkout/docs/index.md" | sed '/^```/d' >quick_start.py
for program in readme.py quick_start.py; do
    environment/bin/python "$program"
    echo "$program runs with $(basename "$package")"
done

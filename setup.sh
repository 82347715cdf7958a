#!/bin/sh
# Makes .venv with Steelyard in it. If the Python in use already has a torch that fits, .venv sees that one: a machine with a
# GPU keeps the build it has.
set -eu
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Steelyard needs Python 3.11 or newer; set PYTHON=..." >&2; exit 1; }
if "$python" -c '
import sys
from importlib.metadata import PackageNotFoundError, version
try:
    found = tuple(int(part) for part in version("torch").split("+")[0].split(".")[:2])
except (PackageNotFoundError, ValueError):
    sys.exit(1)
sys.exit(not (2, 11) <= found < (2, 14))
'; then
    echo "using the torch that is here" >&2
    "$python" -m venv --system-site-packages .venv
else
    "$python" -m venv .venv
fi
.venv/bin/python -m pip install --quiet --upgrade pip
.venv/bin/python -m pip install --quiet -e '.[dev]'

#!/bin/sh
# Makes .venv with Steelyard in it. Where the Python in use already has a torch that fits, .venv sees that one instead of
# fetching another: a machine with a GPU keeps the build it has.
set -eu
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "Steelyard needs Python 3.11 or newer; name one with PYTHON=..." >&2
    exit 1
}

# Prints the folder that holds a torch of the range in pyproject.toml; nothing where there is none.
found=$("$python" - <<'EOF'
import re
import tomllib
from importlib.metadata import PackageNotFoundError, distribution

project = tomllib.load(open("pyproject.toml", "rb"))
wanted = next(one for one in project["project"]["optional-dependencies"]["torch"] if one.startswith("torch"))
low, high = (tuple(int(part) for part in bound.split(".")) for bound in re.fullmatch(r"torch>=([\d.]+),<([\d.]+)", wanted).groups())
try:
    torch = distribution("torch")
    version = tuple(int(part) for part in re.match(r"(\d+)\.(\d+)", torch.version).groups())
    if low <= version < high:
        print(torch.locate_file(""))
except PackageNotFoundError:
    pass
EOF
)

"$python" -m venv .venv
if [ -n "$found" ]; then
    echo "using the torch in $found" >&2
    site=$(.venv/bin/python -c 'import site; print(site.getsitepackages()[0])')
    printf '%s\n' "$found" > "$site/torch-that-was-here.pth"
fi
.venv/bin/python -m pip install --quiet --upgrade pip
.venv/bin/python -m pip install --quiet -e '.[dev]'

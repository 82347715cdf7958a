#!/bin/sh
# A virtual environment that sees .venv and adds playwright; Debian's Chromium and a Chinese font where root and apt are at
# hand; axe-core where npm is. What cannot be had is said, and the tests that need it are skipped with that reason.
set -e
bin=${BIN:-.venv/bin}
place=.venv-browser

if [ ! -x /usr/bin/chromium ] || ! fc-list :lang=zh 2>/dev/null | grep -q .; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        export DEBIAN_FRONTEND=noninteractive
        get="apt-get install -y -qq --no-install-recommends chromium fonts-noto-cjk fonts-roboto-unhinted fontconfig"
        $get >/dev/null 2>&1 || { apt-get update -qq >/dev/null 2>&1 && $get >/dev/null 2>&1; } || echo "browser: apt-get did not install chromium" >&2
    else
        echo "browser: no /usr/bin/chromium with a Chinese font, and no root with apt-get to install them" >&2
    fi
fi

rm -rf $place
"$bin/python" -m venv $place
"$bin/python" -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' > $place/seen.pth
mv $place/seen.pth "$($place/bin/python -c 'import site; print(site.getsitepackages()[0])')"
$place/bin/python -m pip install --quiet 'playwright>=1.50' || echo "browser: playwright was not installed" >&2
if command -v npm >/dev/null; then
    npm install --silent --no-audit --no-fund --prefix $place 'axe-core@^4.10' >/dev/null || echo "browser: npm did not install axe-core" >&2
else
    echo "browser: no npm, so no axe-core" >&2
fi
touch $place/ready

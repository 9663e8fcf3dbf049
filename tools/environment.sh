# Sourced by tools/test and tools/quickstart: makes the virtual environment, or reuses one that is already right.
#
#   use_environment TORCH EXTRAS     e.g. use_environment 2.14 test,spikingjelly
#
# Afterwards $PYTHON is the environment's interpreter. An environment is right when its stamp file holds the hash of
# pyproject.toml, of the constraints and of the extras that were asked for. SNNPART_VENV names another folder;
# SNNPART_PYTHON another interpreter to start from.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

say() { printf '[snnpart] %s\n' "$*"; }

find_python() {
    local candidate
    for candidate in "${SNNPART_PYTHON:-}" python3.11 python3.12 python3.13 python3 python; do
        [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1 || continue
        "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
        echo "$candidate"
        return
    done
    say "no Python 3.11 or newer was found; install one, or name it with SNNPART_PYTHON=/path/to/python" >&2
    return 1
}

stamp_of() {  # TORCH EXTRAS
    (cd "$ROOT" && { cat pyproject.toml "tools/constraints-$1.txt"; echo "$2"; } | cksum | tr -d ' ')
}

use_environment() {  # TORCH EXTRAS
    local torch="$1" extras="$2" folder="$ROOT/.venv" start
    [ "$torch" = 2.14 ] || folder="$ROOT/.venv-torch$torch"
    folder="${SNNPART_VENV:-$folder}"
    PYTHON="$folder/bin/python"
    if [ -f "$folder/.snnpart-$extras" ] && [ "$(cat "$folder/.snnpart-$extras")" = "$(stamp_of "$torch" "$extras")" ]; then
        say "using the environment in $folder"
        return
    fi
    start=$(find_python)
    if [ ! -x "$PYTHON" ]; then
        say "making an environment in $folder with $("$start" --version)"
        "$start" -m venv "$folder"
    fi
    say "installing snnpart[$extras] with torch $torch into $folder (a few minutes the first time)"
    "$PYTHON" -m pip install --quiet --quiet --upgrade pip
    (cd "$ROOT" && "$PYTHON" -m pip install --quiet --quiet -e ".[$extras]" -c "tools/constraints-$torch.txt")
    stamp_of "$torch" "$extras" > "$folder/.snnpart-$extras"
}

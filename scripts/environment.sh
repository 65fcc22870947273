# What scripts/quickstart and scripts/test share: a Python, a virtual environment in .venv, and a torch that fits the
# machine. Read by `.`, from the root of the checkout. Plain POSIX sh; needs nothing but Python 3.11+ with venv.

say() { printf '\n==> %s\n' "$*" >&2; }

die() {
    printf '\n%s\n' "$*" >&2
    exit 2
}

# The name of a Python that is new enough: $PYTHON if it is set, else the machine's own, else a versioned one.
find_python() {
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.14 python}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    found=$("${PYTHON:-python3}" --version 2>&1) || found="none"
    die "Fivefold needs Python 3.11 or newer; found: $found.
Install one (Debian, Ubuntu: apt install python3 python3-venv), or name it: PYTHON=/path/to/python3.11 $0"
}

# Make .venv, or keep the one that is there and works.
make_environment() {
    if [ -x .venv/bin/python ] && .venv/bin/python -m pip --version >/dev/null 2>&1; then
        return
    fi
    python=$(find_python) || exit 2
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        die "$("$python" --version) at $(command -v "$python") has no venv module, which makes the environment.
Install it (Debian, Ubuntu: apt install python3-venv), or name another Python: PYTHON=/path/to/python3.11 $0"
    fi
    say "Making the environment .venv with $("$python" --version)"
    "$python" -m venv --clear .venv || die "could not make the environment .venv with $(command -v "$python")"
}

has_gpu() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q '^GPU '; }

# PyTorch's own index has builds for Linux without CUDA; other systems' builds have none anyway.
cpu_index=https://download.pytorch.org/whl/cpu

wants_cpu_index() {
    [ "$(uname -s)" = Linux ] && ! has_gpu && .venv/bin/python - "$cpu_index/torch/" 2>/dev/null <<'PYTHON'
import sys
import urllib.request

urllib.request.urlopen(sys.argv[1], timeout=5).close()
PYTHON
}

# pip with its output in .venv/install.log and one line on the terminal that shows that it is alive.
install() {
    .venv/bin/python -m pip install --disable-pip-version-check "$@" >>.venv/install.log 2>&1 &
    pip=$!
    trap 'kill $pip 2>/dev/null; exit 130' INT TERM
    if [ -t 2 ]; then
        seconds=0
        while kill -0 $pip 2>/dev/null; do
            printf '\r\033[K    %s s  %.60s' $seconds "$(tail -n 1 .venv/install.log)" >&2
            sleep 1
            seconds=$((seconds + 1))
        done
        printf '\r\033[K' >&2
    fi
    wait $pip || {
        tail -n 15 .venv/install.log >&2
        die "pip install $* failed; the whole output is in .venv/install.log"
    }
    trap - INT TERM
}

# torch first and alone, so that what follows finds it and takes no other build.
install_torch() {
    torch=$(grep '^torch==' constraints.txt)
    if wants_cpu_index; then
        say "Installing $torch (build without CUDA)"
        install "$torch" --extra-index-url "$cpu_index"
    else
        say "Installing $torch"
        install "$torch"
    fi
}

# One number for the contents of files; it changes when an installed environment is out of date.
sum_of() { cat "$@" | cksum | tr ' ' '-'; }

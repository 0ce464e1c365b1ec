#!/usr/bin/env bash
# Run podgrpo. Everything it needs is installed into .venv beside this file, once per requirements.txt.
#
#   bash launch.sh cpu [train flags]     train on this machine's CPU; without flags: the embedded default
#   bash launch.sh test [names]          run the tests: all, or those whose name contains one of the names
#   bash launch.sh setup                 only make .venv
#   bash launch.sh --dry-run COMMAND ..  print the commands instead of running them
#
# PYTHON=... picks the interpreter that makes .venv: 3.11 or newer; default: the first of python3.12,
# python3.11, python3 that is. Exit code: 0, 2 for a mistake in the call, else that of what was run.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"  # paths in flags stay relative to where you are
venv="$here/.venv"

die() {
  printf 'launch.sh: %s\n' "$1" >&2
  exit 2
}

usage() {
  sed -n '2,/^set /{/^set /!s/^#\( \|$\)//p;}' "$here/launch.sh"
}

# run a command, or print it, quoted for a shell, under --dry-run
run() {
  if [ "$dry_run" = 1 ]; then
    printf '%q ' "$@"
    printf '\n'
  else
    "$@"
  fi
}

new_enough() {
  command -v "$1" >/dev/null 2>&1 && "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
  if [ -n "${PYTHON:-}" ]; then
    new_enough "$PYTHON" || die "PYTHON=$PYTHON is not Python 3.11 or newer"
    printf '%s\n' "$PYTHON"
    return
  fi
  local candidate
  for candidate in python3.12 python3.11 python3; do
    if new_enough "$candidate"; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  die "no Python 3.11 or newer is here; install one, or name it: PYTHON=/path/to/python bash launch.sh ..."
}

# .venv with requirements.txt in it; a mark there remembers which requirements.txt it was
setup() {
  local mark python
  mark="$(cksum <"$here/requirements.txt")"
  if [ "$(cat "$venv/installed" 2>/dev/null)" = "$mark" ]; then
    return
  fi
  if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then # none, or one that was cut short
    python="$(find_python)"
    run "$python" -m venv --clear "$venv"
  fi
  run "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r "$here/requirements.txt"
  [ "$dry_run" = 1 ] || printf '%s\n' "$mark" >"$venv/installed"
}

dry_run=0
if [ "${1:-}" = --dry-run ]; then
  dry_run=1
  shift
fi
command="${1:-}"
[ $# -eq 0 ] || shift
case "$command" in
  cpu)
    setup
    run env JAX_PLATFORMS=cpu "$venv/bin/python" -u "$here/train.py" "$@"
    ;;
  test)
    setup
    run "$venv/bin/python" -u "$here/test_kernel.py" "${@:-all}"
    ;;
  setup) setup ;;
  help | -h | --help) usage ;;
  '')
    usage >&2
    exit 2
    ;;
  *) die "unknown command $command; it is one of cpu, test, setup; see: bash launch.sh --help" ;;
esac

#!/bin/bash
# The Python of a TPU worker in tests of launch.sh. It does some commands itself, and gives all others to $REAL_PYTHON.
# A .venv that it makes has a copy of this script as its Python. pip installs nothing, and adds its arguments to
# ~/pip.log. When train.py starts, the length of $HF_TOKEN is written to ~/token. If ~/broken exists, train.py fails. If
# $GCLOUD_STUB/idle exists, it writes a line, also to ~/said, and waits for two minutes or until it is stopped. If
# $GCLOUD_STUB/finishes exists, it exits with code 0, and its model is on this worker alone.
case "$*" in
  "-m venv --clear "*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
  "-I -m pip "*) echo "$*" >>~/pip.log ;;
  "-I -c import wandb") exit 1 ;;
  *train.py*)
    [ ! -e ~/broken ] || { echo no such luck && exit 7; }
    printf %s "${HF_TOKEN:-}" | wc -c >~/token
    if [ -e "$GCLOUD_STUB/idle" ]; then
      echo waits | tee ~/said
      exec /bin/sleep 120
    fi
    if [ -e "$GCLOUD_STUB/finishes" ]; then
      mkdir -p out/gs/bucket/run/final
      echo '{"step": 2}' >out/gs/bucket/run/final/podgrpo.json
      exit 0
    fi
    [ "$1" != -u ] || shift
    exec "$REAL_PYTHON" -u "$IMPATIENT" "$@"
    ;;
  *) exec "$REAL_PYTHON" "$@" ;;
esac

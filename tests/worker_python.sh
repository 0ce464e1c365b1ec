#!/bin/bash
# The Python of a TPU worker in tests of launch.sh, before the interpreter in $REAL_PYTHON.
# A .venv made of it holds it again. pip installs nothing and notes in ~/pip.log what it is asked
# for. train.py's start is noted in ~/token, as the length of the secret that came with it. It fails
# where ~/broken is; where $GCLOUD_STUB/idle is, it says so here and in ~/said, and waits for two
# minutes, or until it is stopped; where $GCLOUD_STUB/finishes is, it ends well, and its model is on this worker alone.
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

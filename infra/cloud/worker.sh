#!/usr/bin/env bash
# launch.sh runs these actions over ssh on each TPU worker, in ~/podgrpo. Every action can safely be repeated, because
# gcloud repeats a command when its connection breaks.
#
#   bash infra/cloud/worker.sh unpack SECRETS [flags]   unpack the tree, install .venv; SECRETS: "keep" or "forget" .env
#   bash infra/cloud/worker.sh start ID [flags]         start train.py with these flags, detached; only once for each ID
#   bash infra/cloud/worker.sh follow FIRST REST ID     print the run's log until the end, then "exit CODE TIME ID".
#                                                       Worker 0 begins at FIRST, the others at REST, as in `tail -n`
#   bash infra/cloud/worker.sh status                   print whether a run is going on, and the last line of its log
#   bash infra/cloud/worker.sh stop ID CALL             send SIGTERM to the run, once for each CALL: a second SIGTERM
#                                                       cuts a save short. If the run does not end, send SIGKILL
#                                                       after ten minutes. If ID is not "", stop only that run, and
#                                                       send SIGKILL after 30 s
#   bash infra/cloud/worker.sh test ARGUMENTS           run pytest with these arguments
#   bash infra/cloud/worker.sh results                  print where the run's results are; see tools/results.py
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

# A run holds run.lock from before its start until its end. `is_free` probes run.lock by holding a shared lock
# for a moment. `start` waits for that moment to pass, so that it does not mistake a probe for a run.
is_free() { flock -n -s run.lock true; }

unpack() {
  if [ "$1" = keep ]; then chmod 600 .env; else rm -f .env; fi
  # Remove the files that were sent before, as the new tree may not have them.
  # A git repository inside the tree was sent as one directory.
  if [ -f .sent ]; then xargs -0 rm -rf -- <.sent; fi
  tar -xzf tree.tgz
  cp run.sent .sent
  bash launch.sh setup tpu "${@:2}"
}

start() {
  local id="$1" lock=/tmp/libtpu_lockfile sudo='sudo -n'
  shift
  # gcloud may repeat this call while the first one is still running.
  exec 8>start.lock
  flock 8
  if [ "$(cat run.id 2>/dev/null)" = "$id" ]; then return; fi # gcloud has repeated this call
  flock setup.lock bash launch.sh setup tpu "$@" 8>&- # these flags may need more packages
  exec 9>run.lock # `train` inherits this lock, and holds it until the run has ended
  if ! flock -w 10 9; then
    echo 'launch.sh: a run is going on here' >&2
    return 1
  fi
  # A killed process leaves libtpu's lock file behind, and the next run would wait for it.
  if [ "$(id -u)" = 0 ]; then sudo=''; fi
  if [ -e "$lock" ] && [ -z "$($sudo find /proc/[0-9]*/fd -lname "$lock" 2>/dev/null)" ]; then $sudo rm -f "$lock"; fi
  rm -f run.exit
  : >run.log
  printf '%s\0' "$@" >run.flags
  printf '%s\n' "$id" >run.id
  setsid bash infra/cloud/worker.sh train "$@" </dev/null >/dev/null 2>&1 8>&- &
  echo $! >run.pid
}

# Run train.py, and write its exit code to run.exit. `start` leaves this running in the background.
train() {
  local code=0
  trap : TERM # SIGTERM is for train.py; this shell waits until train.py has ended
  # With this value, JAX fails if it cannot use the TPU, instead of training on the CPU.
  export JAX_PLATFORMS="${JAX_PLATFORMS:-tpu,cpu}"
  PODGRPO_COMMIT="$(cat run.commit)" bash launch.sh task "$@" >run.log 2>&1 9>&- || code=$?
  echo "$code $(date +%s.%N)" >run.exit.new # on a full disk, this fails, and leaves an empty file
  mv run.exit.new run.exit
}

follow() {
  local from="$2" id="$3" pid=999999999 # no process has this ID, so tail prints the log and ends
  # If gcloud repeats this call, launch.sh has counted worker 0's lines twice, and FIRST may lie beyond the end of the
  # log. Then begin at REST.
  if [ "$me" = 0 ] && [ "${1#+}" -le $(($(wc -l <run.log) + 1)) ]; then from="$1"; fi
  if ! is_free; then pid="$(cat run.pid)"; fi
  tail -n "$from" --pid="$pid" -F run.log 2>/dev/null
  # If run.exit is missing or empty, train.py was killed together with the shell that writes it, or the disk is full.
  echo "exit $(grep . run.exit 2>/dev/null || echo 137 9999999999) $id"
}

status() {
  local code ended
  if ! is_free; then
    echo running
  elif [ ! -f run.id ]; then
    echo 'no run was started here'
  elif read -r code ended 2>/dev/null <run.exit; then
    echo "no run; the last one ended with code $code at $(date -u -d "@$ended" '+%F %T UTC')"
  else
    echo 'no run; the last one was killed, or the disk is full' # see `follow`
  fi
  tail -n 1 run.log 2>/dev/null || :
}

stop() {
  local id="${1:-}" call="${2:-}" second patience=600
  if [ -n "$id" ]; then
    # Leave a run with another ID alone.
    if [ "$id" != "$(cat run.id)" ]; then return; fi
    # launch.sh gives an ID when a worker of that run has failed. The others wait for that worker and cannot save.
    patience=30
  fi
  for ((second = 0; second <= patience + 10; second++)); do
    if is_free; then
      [ -n "$id" ] || echo 'no run is active'
      return
    fi
    case $second in
      0)
        # Ignore a call that gcloud repeats.
        if [ -n "$call" ] && [ "$(cat run.stop 2>/dev/null)" = "$call" ]; then continue; fi
        kill -TERM -- "-$(cat run.pid)"
        echo "$call" >run.stop
        ;;
      "$patience") kill -KILL -- "-$(cat run.pid)" ;;
      30) echo 'the run is finishing its current work, and will save; another stop ends it at once' ;;
    esac
    sleep 1
  done
  echo 'launch.sh: the run does not end' >&2
  return 1
}

# This worker's number in its slice. Only this VM can ask for it, so use no proxy.
attributes="http://${GCE_METADATA_HOST:-metadata.google.internal}/computeMetadata/v1/instance/attributes"
me="$(curl -sf -m 10 --retry 3 --retry-connrefused --noproxy '*' -H 'Metadata-Flavor: Google' \
  "$attributes/agent-worker-number")" || {
  echo "launch.sh: this worker cannot learn its number: curl $attributes/agent-worker-number fails with code $?" >&2
  exit 1
}
label() { while IFS= read -r line || [ -n "$line" ]; do printf '[w%s] %s\n' "$me" "$line"; done; }
action="$1"
shift
case "$action" in
  unpack) unpack "$@" 2>&1 | label ;;
  start) start "$@" 2>&1 | label ;;
  follow) follow "$@" 2>&1 | label ;;
  status) status 2>&1 | label ;;
  stop) stop "$@" 2>&1 | label ;;
  # These actions print without a label, to a log or to launch.sh.
  train) train "$@" ;;
  test)
    .venv/bin/python -m pip install -q 'pytest>=9,<10'
    JAX_PLATFORMS="${JAX_PLATFORMS:-tpu,cpu}" .venv/bin/python -m pytest "$@" 2>&1
    ;;
  results) JAX_PLATFORMS=cpu .venv/bin/python tools/results.py ;;
esac
exit # bash must not read on: `unpack` may have replaced this file

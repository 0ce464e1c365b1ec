#!/usr/bin/env bash
# shellcheck disable=SC2016 # what stands in single quotes is for other shells
# Run podgrpo: here, on Slurm, or on all workers of a TPU slice in Google Cloud.
#
#   bash launch.sh cpu [--processes N] [flags]  train on this CPU; without flags: the embedded default
#   bash launch.sh gpu [flags]                  train on this machine's NVIDIA GPUs
#   bash launch.sh slurm [options] [flags]      submit a job and follow it; requeued, it resumes
#     --nodes N  --ntasks-per-node K  --gpus-per-node G  --partition P  --time T  --account A  --qos Q
#   bash launch.sh TYPE [options] [flags]       train on a TPU slice, v4-16, v5litepod-16, v5p-16, v6e-16 or
#                                               such: up, setup and run in one; Ctrl-C detaches
#   bash launch.sh TYPE up|setup|run|logs|status|stop|down|test [options]
#     up: find or make the TPU VM; setup: send this tree and .env to all workers, install; run [flags]: start
#     train.py on all, follow; logs: follow again; stop: SIGTERM; down: delete; test [pytest arguments]: the
#     loss, model and rollout on worker 0's TPU, with the compiled kernels
#     --name NAME  --zone A,B (tried in turn)  --spot (made again when preempted)  --queued  --yes (to down)
#   bash launch.sh plan [TYPE] [flags]          what fits there, or here, how fast; takes no TPU
#   bash launch.sh test [pytest arguments]      the tests, in minutes; longer ones: -m slow, -m aot; see README
#   bash launch.sh setup                        only make .venv
#   bash launch.sh --dry-run ...                print the commands instead of running them
# Flags are train.py's. gpu, slurm and TYPE train Qwen2.5-3B-Instruct on GSM8K unless they say otherwise;
# --out gs://bucket/run keeps checkpoints there. .env beside this file holds WANDB_API_KEY=.. and HF_TOKEN=..
# PYTHON=.. makes .venv: 3.11 or newer; else python3.12, python3.11 or python3; else uv brings 3.12.
# Exit code: 0, 2 for a mistake in the call, else that of what was run.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)" # paths in flags stay relative to where you are
venv="$here/.venv" dry_run=''
job=(--model Qwen/Qwen2.5-3B-Instruct --data gsm8k --eval_data gsm8k --max_prompt 1024 --max_answer 1024)

say() { printf 'launch.sh: %s\n' "$1" >&2; }
die() { say "$1" && exit "${2:-2}"; }
label() { while IFS= read -r line || [ -n "$line" ]; do printf '[%s] %s\n' "$1" "$line"; done; }

# run a command, or print it, quoted for a shell, under --dry-run
run() { if [ -z "$dry_run" ]; then "$@"; else printf '%q ' "$@" >&3 && echo >&3; fi; }
# ---------------------------------------------------------------- this machine, and Slurm
# .venv with requirements.txt and jax[$1] in it; .venv/installed remembers with which
setup() {
  local python mark extra="${1:-}" old='import sys; sys.exit(sys.version_info < (3, 11))'
  mark="$(cksum <"$here/requirements.txt") $extra"
  if grep -qxF "$mark" "$venv/installed" 2>/dev/null; then return; fi
  if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then # none, or one that was cut short
    for python in ${PYTHON:-python3.12 python3.11 python3} uv; do
      if [ "$python" != uv ] && "$python" -c "$old" >/dev/null 2>&1; then break; fi
    done
    case "${PYTHON:-}:$python" in
      :uv) run python3 -m pip install -q --user uv; run python3 -m uv venv -q --clear --seed -p3.12 "$venv" ;;
      *:uv) die "PYTHON=$PYTHON is not Python 3.11 or newer" ;;
      *) run "$python" -m venv --clear "$venv" ;;
    esac
  fi
  run "$venv/bin/python" -m pip install -q --disable-pip-version-check -r "$here/requirements.txt" \
    ${extra:+"jax[$extra]"} || exit
  [ -n "$dry_run" ] || printf '%s\n' "$mark" >"$venv/installed"
}
# what the tests need too; .venv/installed-tests remembers
setup_tests() {
  local mark
  setup
  mark="$(cksum <"$here/tests/requirements.txt")"
  if [ "$mark" = "$(cat "$venv/installed-tests" 2>/dev/null)" ]; then return; fi
  run "$venv/bin/python" -m pip install -q --disable-pip-version-check -r "$here/tests/requirements.txt" || exit
  [ -n "$dry_run" ] || printf '%s\n' "$mark" >"$venv/installed-tests"
}
# train.py, with .env in its environment, where no ps and no log shows it
train() {
  local line key value
  [ ! -f "$here/.env" ] || while IFS= read -r line || [ -n "$line" ]; do
    key="${line%%=*}" && key="${key#export }" && key="${key//[[:space:]]/}"
    value="${line#*=}" && value="${value#"${value%%[![:space:]]*}"}" && value="${value%$'\r'}"
    case "$value" in \"*\" | \'*\') value="${value:1:${#value}-2}" ;; esac
    case "$key" in '' | *[!A-Za-z0-9_]* | [0-9]* | "$line") ;; *) export "$key=$value" ;; esac
  done <"$here/.env"
  run exec env ${platform:+"JAX_PLATFORMS=$platform"} "$venv/bin/python" -u "$here/train.py" "$@"
}
# $1 processes that train together; the exit code is that of the first to fail
several() {
  local i codes="$scratch/codes" port=$((20000 + RANDOM % 10000))
  if [ "$1" = 1 ]; then (train "${@:2}"); exit; fi
  for ((i = 0; i < $1; i++)); do
    set -- "$@" --coordinator "127.0.0.1:$port" --processes "$1" --process_id "$i" # the last one counts
    { (train "${@:2}") 2>&1 || echo $? >>"$codes"; } | label "p$i" &
  done
  wait
  if [ -f "$codes" ]; then exit "$(head -n 1 "$codes")"; fi
}
# submit, follow; scontrol forgets a job some minutes after its end: that also is an end
slurm() {
  local id log now='' end='Invalid job|JobState=(COMPLETED|FAILED|CANC|TIMEO|PREEMPT|NODE_F|OUT_|DEADL|BOOT)'
  set -- --wrap "srun --export=ALL --kill-on-bad-exit=1 bash $(printf '%q ' "$here/launch.sh" task "$@")"
  set -- --export=ALL --requeue --open-mode=append --output=slurm-%j.log ${options[@]+"${options[@]}"} "$@"
  id="$(run sbatch --parsable --job-name=podgrpo "$@")"
  [ -z "$dry_run" ] || exit 0
  id="${id%%;*}" && log="slurm-$id.log" && touch "$log"
  say "job $id; its log: $log; end it: scancel $id"
  tail -n +1 -F "$log" 2>/dev/null &
  trap 'kill %1; say "detached; the job goes on: tail -F $log"; exit 130' INT
  until grep -qE "$end" <<<"$now"; do sleep 2 && now="$(scontrol show job -o "$id" 2>&1 || :)"; done
  sleep 2
  kill %1 2>/dev/null || :
  case "$now" in
    *JobState=COMPLETED*) exit 0 ;;
    *' ExitCode=0:0 '*) exit 1 ;;
    *'Invalid job'*) die "Slurm has forgotten job $id; how it ended is in $log" 1 ;;
  esac
  exit $(($(sed -n 's/.* ExitCode=\([0-9]*\):\([0-9]*\).*/\1 + (\2 ? 128 + \2 : 0)/p' <<<"$now")))
}
# ---------------------------------------------------------------- Google Cloud
# TYPE -> devices, hosts, image, zones (cloud.google.com/tpu/docs/runtimes, .../regions-zones)
slice() {
  local cores=1 alone=8 all # v4 and v5p count cores, two a device; so many devices are one host
  case "$type" in
    v4-*) cores=2 alone=4 image=tpu-ubuntu2204-base all=us-central2-b ;;
    v5p-*) cores=2 alone=4 image=v2-alpha-tpuv5 all=us-east5-a,us-central1-a ;;
    v5lite*) image=v2-alpha-tpuv5-lite all=us-west4-a,us-central1-a,us-west1-c,us-south1-a ;;
    v6e-*) image=v2-alpha-tpuv6e all=us-east5-b,us-east5-a,us-east1-d,us-central1-b,europe-west4-a ;;
  esac
  devices=$((${type#*-} / cores)) name="${name:-podgrpo-$type}" zones="${zones:-$all}"
  hosts=$((devices > alone ? devices / 4 : 1))
}
again() { printf 'bash launch.sh %s' "$type $1 ${options[*]-}"; }
# every call of gcloud; what it complains of goes to a file, for `why`
cloud() { run gcloud "$@" --quiet 2>"$errors" </dev/null; }
tpu() { cloud compute tpus "$1" "$2" "$name" --zone="$zone" "${@:3}"; }
must() { "$@" || { why && exit 1; }; }

# what gcloud complained of, and what to do about it
why() {
  local advice
  case "$(cat "$errors")" in
    *'active account'* | *'auth login'*) advice='log in: gcloud auth login' ;;
    *'[project]'*) advice='choose a project: gcloud config set project PROJECT' ;;
    *SERVICE_DISABLED* | *'has not been used'*) advice='run: gcloud services enable tpu.googleapis.com' ;;
    *PERMISSION_DENIED*) advice="ask for the role TPU Admin, or try another --zone" ;;
    *[Qq]uota*) advice='ask for more (console: IAM, Quotas), or try --spot, another --zone, a smaller type' ;;
    *[Rr]eserv*) advice="the reservation is elsewhere, or full: try another --zone, or --spot" ;;
    *apacity*) advice="$zone has no $type left" ;;
    *'be found in the zonal'* | *'not found in zone'*) advice="$zone offers no $type: try another --zone" ;;
    *'SSH Key is not'* | *publickey*) advice='run: ssh-add ~/.ssh/google_compute_engine' ;;
    *'launch.sh: No such file'*) advice="send the tree first: $(again setup)" ;;
    *) advice="look at it: $(again status)" ;;
  esac
  grep -q ERROR "$errors" || grep -vE '^(Using ssh|S[SC][HP]: Attempting)' "$errors" | tail -n 5 >&2 || :
  say "$(sed -n '/ERROR/,$p' "$errors" | tr -s '\n ' ' ' | cut -c 1-300)-> $advice"
}
# of the VM in $zone, or of its queued resource; nothing where there is none
state() {
  local now
  if ! now="$(tpu tpu-vm describe --format='value(state)' || grep -q NOT_FOUND "$errors")" ||
    { [ -z "$now$dry_run" ] && [ -n "$queued" ] &&
      ! now="$(tpu "$made_by" describe --format='value(state.state)' || grep -q NOT_FOUND "$errors")"; }; then
    why && return 1
  fi
  printf '%s\n' "$now"
}
# sets $zone to where the VM is and $state, or both to nothing
find_vm() {
  for zone in ${zones//,/ } ''; do
    if [ -n "$zone" ]; then state="$(state)"; fi
    [ -z "$state" ] || return 0
  done
}
delete() { must tpu "$made_by" delete ${queued:+--force} >&2; }
create() {
  say "creating $name, $hosts hosts with $devices devices, in $zone"
  set -- --accelerator-type="$type" ${queued:+--node-id="$name"} ${spot:+--spot}
  tpu "$made_by" create "--${queued:+runtime-}version=$image" "$@" >&2
}
ready() {
  local now=''
  until [ -n "$dry_run" ] || [ "$now" = READY ]; do
    now="$(state || echo unknown)"
    case "$now" in
      READY) ;;
      PREEMPTED | TERMINATED | FAILED | SUSPENDED) say "$name is $now" && delete && return 1 ;;
      '' | STOP*) say "$name is ${now:-gone}" && return 1 ;;
      *) sleep 10 ;;
    esac
  done
}
# a READY VM: the one that is there, or a new one in the first zone that has room
up() {
  local scarce=''
  find_vm
  case "$state" in
    STOP*) die "$name is stopped; delete it: $(again down)" ;;
    ?*) if ready; then return; fi ;;
  esac
  for zone in ${zones//,/ }; do
    if create && ready; then return; fi
    why
    ! grep -q apacity "$errors" || scarce=1
  done
  [ -n "$scarce" ] || exit 1
  say 'trying again in a minute' && sleep 60 && up
}
# a command in ~/podgrpo of worker $1, or of all; it must bear being run again, as gcloud does when ssh breaks
workers() {
  tpu tpu-vm ssh --worker="$1" --ssh-flag=-oServerAliveInterval=30 \
    --command="umask 077; mkdir -p podgrpo; cd podgrpo; $2"
}

# this tree as git sees it, and .env, to all workers; then the install there
send() {
  local files=("$scratch/tree.tgz" "$scratch/run.sent" "$scratch/run.commit") secrets='rm -f .env'
  must workers all 'flock -n run.lock true || echo busy' >"$scratch/busy"
  [ ! -s "$scratch/busy" ] || die "a run is going on there: $(again logs), or stop"
  if [ ! -f "${files[0]}" ]; then # after a preemption the same is sent again
    (cd "$here" && git ls-files -coz --exclude-standard | while IFS= read -r -d '' file; do
      [ ! -e "$file" ] || printf '%s\0' "$file"
    done) >"${files[1]}" || die "$here is no git checkout; what git knows is what is sent"
    git -C "$here" describe --always --dirty --abbrev=40 >"${files[2]}"
    COPYFILE_DISABLE=1 tar -C "$here" --null -T "${files[1]}" -czf "${files[0]}"
  fi
  if [ -f "$here/.env" ]; then files+=("$here/.env") secrets='chmod 600 .env'; else say 'no .env is here'; fi
  must cloud compute tpus tpu-vm scp "${files[@]}" "$name:podgrpo/" --zone="$zone" --worker=all >&2
  # one at a time, should gcloud run it again; what was sent before and is no more, goes
  must workers all "exec 8>setup.lock; flock 8; $secrets; "'[ ! -f .sent ] || xargs -0 rm -f <.sent
    tar -xzf tree.tgz && cp run.sent .sent && bash launch.sh worker setup 8>&-'
}
# all workers' logs until all have ended -> the code of the first to fail; 75 if the VM is gone
follow() {
  local line worker code ended="$scratch/ended"
  trap 'say "detached; the run goes on: $(again logs), or stop"; exit 130' INT
  while :; do
    : >"$ended"
    workers all 'bash launch.sh worker follow' | while IFS= read -r line; do
      printf '%s\n' "$line"
      case "$line" in '[w'[0-9]*'] exit '*) printf '%s\n' "$line" >>"$ended" ;; *) continue ;; esac
      if [ "$(cut -d ' ' -f 3 "$ended" | grep -vxc 0)" = 1 ]; then # the first to fail: the others only wait
        (errors="$ended.stop" && workers all 'id="$(cat run.id)"; sleep 5
          [ "$id" != "$(cat run.id)" ] || bash launch.sh worker stop') >/dev/null 2>&1 &
      fi
    done || :
    [ -z "$dry_run" ] || return 0
    [ "$(sort -u "$ended" | wc -l)" -ne "$hosts" ] || break
    until state="$(state)"; do sleep 30; done
    [ "$state" = READY ] || return 75
    say 'the connection broke; following again' && sleep 5
  done
  trap - INT
  read -r worker code <<<"$(sort -k 4 "$ended" | awk '$3 != 0 { print $1, $3; exit }')"
  [ -n "$worker" ] || return 0
  # the run on a spot VM that is about to go fails first, mostly by SIGTERM
  if [ -n "$spot" ] && [ "$code" != 2 ]; then
    sleep 60
    if state="$(state)" && [ "$state" != READY ]; then return 75; fi
  fi
  say "$worker failed first, with exit code $code; its last lines:"
  workers "${worker//[^0-9]/}" 'tail -n 20 run.log' >&2 || :
  return "$code"
}
# start train.py on all workers and follow it; a preempted VM is made again
train_there() {
  local code id
  set -- --require_processes "$hosts" --require_devices "$devices" --start_timeout 900 "${job[@]}" "$@"
  while :; do
    id="$$.$(date +%s)" # where one does not start, those that did are of no use
    workers all "bash launch.sh worker start $(printf '%q ' "$id" "$@")" ||
      { why; workers all "[ \"\$(cat run.id)\" != $id ] || bash launch.sh worker stop" || :; exit 1; }
    code=0 && follow || code=$?
    [ "$code" = 75 ] || break
    [ -n "$spot" ] || die "$name is gone; only with --spot is it made again" 1
    up
    send
  done
  say "out is on worker 0: gcloud compute tpus tpu-vm scp --recurse $name:podgrpo/out . --zone=$zone"
  say "the VM is still there, and paid for; delete it: $(again down)"
  exit "$code"
}
# what worker $me does, in ~/podgrpo: setup | start ID FLAGS of train.py | follow | status | stop
worker() {
  local lock=/tmp/libtpu_lockfile sudo='sudo -n' i
  case "$1" in
    setup) setup tpu ;;
    start)
      [ "$(cat run.id 2>/dev/null)" != "$2" ] || return 0 # the same call again, as a connection broke
      exec 9>run.lock # the run holds it from here to its end, so that whoever follows finds it held
      flock -n 9 || die 'a run is going on here' 1
      [ "$(id -u)" != 0 ] || sudo=''
      [ -n "$($sudo find /proc/[0-9]*/fd -lname "$lock" 2>/dev/null)" ] || $sudo rm -f "$lock"
      rm -f run.exit && : >run.log
      printf '%s\n' "$2" >run.id
      PODGRPO_COMMIT="$(cat run.commit)" setsid bash -c 'trap : TERM
        bash launch.sh task "$@" >run.log 2>&1 9>&-; echo "$? $(date +%s.%N)" >run.exit' run "${@:3}" \
        </dev/null >/dev/null 2>&1 &
      echo $! >run.pid
      ;;
    follow) # to the end, which is told as: exit CODE TIME
      tail -n $((me ? 20 : 999999999)) --pid="$(flock -n run.lock echo 999999999 || cat run.pid)" \
        -F run.log 2>/dev/null
      echo "exit $(cat run.exit 2>/dev/null || echo 137 9999999999)" # none: it was killed with its shell
      ;;
    status)
      if flock -n run.lock true; then echo "no run; the last: $(cat run.exit 2>&1)"; else echo running; fi
      tail -n 1 run.log 2>/dev/null || :
      ;;
    stop)
      for ((i = 0; i < 40; i++)); do
        if flock -n run.lock true; then return; fi
        case $i in 0 | 30) kill -$((i ? 9 : 15)) -- "-$(cat run.pid)" ;; esac
        sleep 1
      done
      die 'the run does not end' 1
      ;;
  esac
}
# ---------------------------------------------------------------- the call
if [ "${1:-}" = --dry-run ]; then dry_run=1 && shift && exec 3>&1; fi
command="${1:-}" action='' flags=() options=() processes=1 platform=''
name='' zones='' zone='' state='' spot='' made_by=tpu-vm queued='' yes=''
shift $(($# > 0))
case "$command" in
  task) # of a worker or of Slurm, whose SIGTERM to a task must not hide the exit code of the one that failed
    [ "${SLURM_STEP_NUM_TASKS:-1}" != 1 ] || train "$@"
    trap 'for i in {1..99}; do kill -0 $! 2>/dev/null && sleep 0.2 || break; done; exit 0' TERM # it saves
    (train "$@") &
    wait $! && exit
    exit
    ;;
  worker)
    url="http://${GCE_METADATA_HOST:-metadata.google.internal}/computeMetadata/v1/instance/attributes"
    me="$(curl -sf -H 'Metadata-Flavor: Google' "$url/agent-worker-number")"
    worker "$@" 2>&1 | label "w$me"
    exit
    ;;
  v4-[1-9]* | v5litepod-[1-9]* | v5p-[1-9]* | v6e-[1-9]*)
    type="$command" command=tpu
    case "${1:-}" in up | setup | run | logs | status | stop | down | test) action="$1" && shift ;; esac
    ;;
esac
while [ $# -gt 0 ]; do # this launcher's options; all else is train.py's
  case "$command ${1%%=*}" in
    *' --dry-run') die '--dry-run goes first: bash launch.sh --dry-run ...' ;;
    'tpu --help' | 'tpu -h') exec bash "$here/launch.sh" help ;;
    'tpu --spot') spot=--spot options+=("$1") ;;
    'tpu --queued') made_by=queued-resources queued=1 options+=("$1") ;;
    'tpu --yes') yes=y ;;
    'tpu --name' | 'tpu --zone' | 'cpu --processes' | slurm\ --nodes | slurm\ --*-per-node | \
      'slurm --partition' | 'slurm --time' | 'slurm --account' | 'slurm --qos')
      if [ "$1" = "${1%%=*}" ]; then [ $# -gt 1 ] || die "$1 needs a value"; set -- "$1=$2" "${@:3}"; fi
      case "$1" in --name*) name="${1#*=}" ;; --zone*) zones="${1#*=}" ;; --pr*) processes="${1#*=}" ;; esac
      options+=("$1")
      ;;
    *) flags+=("$1") ;;
  esac
  shift
done
set -- ${flags[@]+"${flags[@]}"}
case "$command/$action ${1:-}" in
  tpu/\ [!-]* | tpu/run\ [!-]*) die "$1 is no flag; up, logs and such stand right after $type" ;;
  tpu/\ * | tpu/run* | tpu/test*) ;;
  tpu/*\ ?*) die "$action does not take $1" ;;
esac
case "$processes" in '' | *[!0-9]* | 0*) die "--processes $processes is not a number of 1 or more" ;; esac
scratch="$(mktemp -d)" && errors="$scratch/errors" && : >"$errors"
trap 'rm -rf "$scratch"' EXIT

case "$command" in
  cpu) setup; platform=cpu; several "$processes" "$@" ;;
  gpu)
    [ -n "$dry_run" ] || command -v nvidia-smi >/dev/null || die 'no NVIDIA GPU is here; try cpu'
    setup cuda13; several 1 "${job[@]}" "$@"
    ;;
  slurm) if [ "${JAX_PLATFORMS:-}" = cpu ]; then setup; else setup cuda13; fi; slurm "${job[@]}" "$@" ;;
  plan)
    case "${1:--}" in
      -*) # of what is here
        if command -v nvidia-smi >/dev/null; then setup cuda13; set -- "${job[@]}" "$@"; else setup; fi
        train --plan here "$@"
        ;;
    esac
    [ "$(uname -sm)" = 'Linux x86_64' ] || die "libtpu, which compiles for $1, is for x86-64 Linux only"
    setup
    "$venv/bin/python" -c 'import libtpu' 2>/dev/null || run "$venv/bin/python" -m pip install -q 'jax[tpu]'
    platform=cpu # with libtpu, JAX would look for a TPU
    train --plan "$1" "${job[@]}" "${@:2}"
    ;;
  test)
    setup_tests
    cd "$here" # whose pyproject.toml pytest reads
    # two processes: most of a test is compiling, on one core
    run env "JAX_PLATFORMS=${JAX_PLATFORMS:-cpu}" "$venv/bin/python" -m pytest -n 2 --dist worksteal \
      --durations 15 "$@"
    ;;
  setup) setup ;;
  tpu)
    [ -n "$dry_run" ] || command -v gcloud >/dev/null || die 'no gcloud; see cloud.google.com/sdk/docs'
    slice
    case "$action" in '' | up | setup | test) up ;; *) find_vm ;; esac
    [ -n "$dry_run$zone" ] || die "there is no $name in $zones; make it: $(again up)"
    case "$action" in '' | setup | test) send ;; esac
    case "$action" in
      '' | run) train_there "$@" ;;
      logs)
        workers all '[ -f run.pid ]' || { why && die "no run was started there: $(again run)" 1; }
        code=0 && follow || code=$?
        [ "$code" != 75 ] || say "$name is gone; the command that started it resumes"
        exit "$code"
        ;;
      stop | status) say "$name in $zone is $state" && must workers all "bash launch.sh worker $action" ;;
      test)
        [ $# -gt 0 ] || set -- test_kernel.py tests/test_model.py tests/test_rollout.py tests/test_sampling.py
        workers 0 ".venv/bin/python -m pip install -q 'pytest>=9,<10' && JAX_PLATFORMS=\${JAX_PLATFORMS:-tpu,cpu} \
          .venv/bin/python -m pytest $(printf '%q ' "$@") 2>&1"
        ;;
      down)
        [ -n "$yes" ] || read -r -p "delete $name in $zone? [y/N] " yes || :
        if [ "$yes" = y ]; then delete; else die 'nothing is deleted; --yes does it without asking'; fi
        ;;
    esac
    ;;
  '' | help | -h | --help)
    sed -n '3,/^set /{/^set /!s/^#\( \|$\)//p;}' "$here/launch.sh"
    exit $((${#command} ? 0 : 2))
    ;;
  *) die "unknown command $command: not cpu, gpu, slurm, plan, test, setup nor a TPU type; see help" ;;
esac

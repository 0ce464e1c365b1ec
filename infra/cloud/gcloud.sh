#!/usr/bin/env bash
# A TPU slice in Google Cloud, and a run on it. launch.sh sources this file. The two files set these variables:
#
#   $type $devices $hosts $image    the slice, from check_type
#   $name $zones $options           its name, the zones where it may be, and launch options except --down and --yes
#   $spot $queued $create_flags     how to create it
#   $ssh_flags                      how to reach its workers, from --ssh
#   $delete_when_done $yes          --down, --yes
#   $scratch                        a directory for this call of the launcher
#
# cmd_tpu and the functions that it calls keep the slice's state, such as its zone, in global variables.
# ---------------------------------------------------------------- Google Cloud: types, and errors of gcloud
# Set $type, $devices, $hosts, $image and $all_zones, or exit and say why there is no such slice.
# (cloud.google.com/tpu/docs/runtimes, .../regions-zones, and the page of each generation)
check_type() {
  local size sizes='1 4 8 16 32 64 128 256' larger='' cores=1 one_host=8
  type="$1"
  case "$type" in v5e-*) type="v5litepod-${type#v5e-}" ;; esac
  size="${type#*-}"
  case "$type" in
    v4-*) image=tpu-ubuntu2204-base all_zones=us-central2-b ;;
    v5p-*) image=v2-alpha-tpuv5 all_zones=us-east5-a,us-central1-a ;;
    v5litepod-*) image=v2-alpha-tpuv5-lite all_zones=us-west4-a,us-central1-a,us-west1-c,us-south1-a ;;
    v6e-*) image=v2-alpha-tpuv6e all_zones=us-east5-b,us-east5-a,us-east1-d,us-central1-b,europe-west4-a ;;
    *) die "unknown TPU $type; types are v4-N, v5litepod-N, v5p-N and v6e-N" ;;
  esac
  case "$type" in
    # The sizes of these types count cores. A device has two cores, and a host has four devices.
    v4-* | v5p-*) cores=2 one_host=4 sizes='8 16 32 64' larger=', or a multiple of 128' ;;
  esac
  [[ " $sizes " = *" $size "* ]] || [[ -n "$larger" && "$size" =~ ^[1-9][0-9]*$ && $((size % 128)) = 0 ]] ||
    die "there is no $1; the number after ${type%%-*}- must be one of $sizes$larger"
  devices=$((size / cores))
  hosts=$((devices > one_host ? devices / 4 : 1))
}

# Print a command for the user: this slice's type, action $1, and the user's options except --down and --yes.
again() {
  printf 'bash launch.sh %s' "$type $1"
  [ ${#options[@]} = 0 ] || printf ' %q' "${options[@]}"
}
follow_again() { printf '%s%s' "$(again logs)" "${delete_when_done:+ --down}"; }

# Call gcloud. Write its stderr to a file, for `fault`. Log the command, its exit code and its stderr.
cloud() {
  local code=0 errors="$scratch/errors"
  run gcloud "$@" --quiet 2>"$errors" </dev/null || code=$?
  [ -n "$dry_run" ] || {
    printf '%s gcloud' "$(date +%T)"
    printf ' %q' "$@"
    printf '\nexit code %s\n' "$code"
    cat "$errors"
  } >>"$log"
  return "$code"
}
vm() { cloud compute tpus tpu-vm "$1" "$name" --zone="$zone" "${@:2}"; }
# Run ssh or scp with the flags of --ssh. Without the two timeouts, they could wait for a dead worker for ever. Only
# `gcloud alpha` can go through the Identity-Aware Proxy.
reach() { # ssh|scp ARGUMENTS...
  cloud ${alpha:+"$alpha"} compute tpus tpu-vm "$@" --zone="$zone" "--$1-flag=-oConnectTimeout=30" \
    "--$1-flag=-oServerAliveInterval=30" ${ssh_flags[@]+"${ssh_flags[@]}"}
}
queued_resource() { cloud compute tpus queued-resources "$1" "$name" --zone="$zone" "${@:2}"; }

# Faults of gcloud, one per line: a word; a pattern; advice. The first pattern that matches counts. `network` precedes
# `login`, because gcloud advises "auth login" when it is offline. `busy` precedes `quota`, because a 429, too many
# requests per minute, may mention a quota. Every 401, 403 and 404 ends in "... which is the active account specified by
# ...": no pattern but the last may match this ending. The patterns match the texts of gcloud 528 and its services.
faults() {
  cat <<END
network; Max retries exceeded; is this machine online?
usage; unrecognized arguments|expected one argument|Invalid choice; look at the flags in --ssh and --create, \
or update gcloud
login; not currently have an active account|auth login|invalid_grant|UNAUTHENTICATED; log in: gcloud auth login
project; \[project\]|resource project; choose a project: gcloud config set project PROJECT
billing; BILLING_DISABLED|billing to be enabled|billing account; link a billing account: \
gcloud billing projects link PROJECT --billing-account=ACCOUNT
api; SERVICE_DISABLED|has not been used in project; run: \
gcloud services enable tpu.googleapis.com compute.googleapis.com
missing; NOT_FOUND; see its state: $(again status)
absent; matched no objects; the bucket does not have the results
permission; PERMISSION_DENIED|does not have permission|HTTPError 403|Required '.*' permission; \
ask for this permission, or for the role TPU Admin, or try another --zone
busy; RATE_LIMIT_EXCEEDED|UNAVAILABLE|rror 429|rror 50[0-9]; see its state: $(again status)
quota; [Qq]uota; ask for more (console: IAM, Quotas), or try --spot, another --zone, a smaller type
reservation; [Rr]eserv; the reservation is elsewhere, or full: try another --zone, or --spot
capacity; apacity; $zone has no $type left
type; be found in the zonal|not found in zone; $zone offers no $type: try another --zone
key; SSH Key is not; run: ssh-add ~/.ssh/google_compute_engine
refused; publickey; run: ssh-add ~/.ssh/google_compute_engine
host_key; Host key verification failed; another machine had this address: \
remove its lines from ~/.ssh/google_compute_known_hosts
unsent; infra/cloud/worker.sh: No such file; send the tree first: $(again setup)
invalid; INVALID_ARGUMENT; look at --name, --zone and the flags in --create
internal; nternal error|INTERNAL; see its state: $(again status)
other; ERROR; see its state: $(again status)
command; .*; see its state: $(again status)
END
}
# Print the fault in TEXT, or in the last call of gcloud: its word in the table, a space, and a line for the user.
fault() { # [TEXT]
  local text word pattern
  text="${1:-$(cat "$scratch/errors")}"
  while IFS=';' read -r word pattern _; do
    if [[ "$text" =~ ${pattern# } ]]; then break; fi
  done < <(faults)
  # If a zone has no capacity, the error mentions reservations even if the user asked for none.
  if [ "$word" = reservation ]; then
    case " ${create_flags[*]-} " in *' --reserved '*) ;; *) word=capacity ;; esac
  fi
  printf '%s %s\n' "$word" "$(short_form "$text")"
}
# Shorten gcloud's output to its ERROR, or else to its last lines. If ssh failed, the ERROR does not say why, so
# prepend the workers that failed and ssh's own last line. If the command on the workers failed, gcloud's stderr has
# only these workers' numbers.
short_form() { # TEXT
  local text="$1" noise='^(Using ssh|S[SC][HP]: |Retrying: |#####|Warning: |$)' line failed ssh=''
  failed="$(sed -n 's/^.*Command execution on worker \([0-9]*\) failed.*/w\1/p' <<<"$text" | sort -u | tr '\n' ' ')"
  case "$text" in
    *'exited with return code'*)
      line="$(grep -vE "$noise|^ERROR" <<<"$text" | tail -n 1 | cut -c 1-200)"
      [ -z "$line$failed" ] || ssh="$failed${line%.}: "
      ;;
  esac
  case "$text" in
    *ERROR*) text="$(sed -n '/ERROR/,$p' <<<"$text")" ;;
    *) text="$(grep -vE "$noise" <<<"$text" | tail -n 5)" ;;
  esac
  text="$(tr -s '\n ' ' ' <<<"$text" | cut -c 1-300)"
  text="${text% }"
  printf '%s%s\n' "$ssh" "${text:-${failed:+${failed% }: }the command failed; its output is above}"
}
# Print a fault and the advice for it.
why() { say "${1#* } -> $(faults | sed -n "s/^${1%% *};[^;]*; //p")"; }
# Succeed if the fault may be temporary. Even `missing` may be temporary: ssh may miss a VM that `describe` finds.
may_pass() { [[ "${1%% *}" =~ ^(missing|network|busy|refused|internal|other|command)$ ]]; }

DELAYS='5 10 20 40 80 160 320 600 600 600 600 600' # seconds between tries, an hour in all
# Call gcloud, and retry after a delay if the fault may be temporary. If all tries fail, print why and return 1.
patiently() {
  local delay fault
  for delay in $DELAYS ''; do
    if "$@"; then return 0; fi
    fault="$(fault)"
    if [ -z "$delay" ] || ! may_pass "$fault"; then break; fi
    say "gcloud fails: ${fault#* }; trying again in $delay seconds"
    sleep "$delay"
  done
  why "$fault"
  return 1
}
# ---------------------------------------------------------------- Google Cloud: find, create and delete a slice
# Print the state of the VM in $zone. Without a VM, print the state of its queued request.
state_now() {
  local now=''
  now="$(vm describe --format='value(state)')" || is_missing || return 1
  if [ -z "$now" ]; then
    # Unless --queued or $1 is given, the user need not have the permission to see requests.
    now="$(queued_resource describe --format='value(state.state)')" || is_missing ||
      { [ -z "${1:-$queued}" ] && is_denied; } || return 1
  fi
  printf '%s\n' "$now"
}
is_missing() { [[ "$(fault)" = missing* ]]; }
is_denied() { [[ "$(fault)" = permission* ]]; }

# Set $zone to the zone of the slice, or to '' if there is none. Set $unseen to the zones where gcloud could not look.
find_slice() {
  local now fault
  unseen=''
  for zone in ${zones//,/ }; do
    if now="$(patiently state_now)"; then
      [ -z "$now$dry_run" ] || return 0
      continue
    fi
    fault="$(fault)"
    case "${fault%% *}" in usage | login | project | billing | api) exit 1 ;; esac # other zones would fail, too
    # If a VM here were missed, a second one would be created elsewhere, and paid for.
    if may_pass "$fault"; then die "gcloud cannot tell whether $name is in $zone" 1; fi
    say "skipping $zone, where gcloud could not look"
    unseen="$unseen $zone"
  done
  zone=''
}

# Find the slice, or exit if there is none.
need_slice() {
  find_slice
  [ -n "$zone$unseen" ] || die "there is no $name in $zones; make it: $(again up)"
  [ -n "$zone" ] || die "$name may be in$unseen, where gcloud could not look" 1
  maybe_paid=" $zone"
}

# Exit if the slice that was found has another type, and so perhaps another number of workers.
refuse_other_type() {
  local found
  [ -z "$dry_run" ] || return 0
  found="$(patiently type_now)" || exit 1
  found="${found##*/}"
  [ "${found:-$type}" = "$type" ] || die "$name is a $found, not a $type; give --name a name that no other VM has"
}

# Print the type of the VM in $zone. A queued request may have no VM yet.
type_now() { vm describe --format='value(acceleratorType)' || is_missing; }

create() {
  say "creating $name, $hosts hosts with $devices devices, in $zone"
  set -- --accelerator-type="$type" ${spot:+--spot} ${create_flags[@]+"${create_flags[@]}"}
  if [ -n "$queued" ]; then
    queued_resource create --node-id="$name" --runtime-version="$image" "$@" >&2
  else
    vm create --version="$image" "$@" >&2
  fi
}

# Create the slice. If gcloud fails, look for the slice anyway: gcloud gives up after half an hour, but the slice may
# still be created later. If there is no slice, returns 2 to retry without a limit, 3 to retry a few times, else 1.
create_or_find() {
  local fault now
  if create; then return 0; fi
  fault="$(fault)"
  if now="$(patiently state_now)" && [ -z "$now" ]; then
    why "$fault"
    case "${fault%% *}" in
      capacity | busy | network) return 2 ;;
      internal) return 3 ;;
      usage) maybe_paid="${maybe_paid// $zone/}" && exit 1 ;;
      *) return 1 ;;
    esac
  fi
  say "gcloud gave up, but $name may exist; its state: ${now:-unknown}"
}

# Delete the VM in $zone and its queued request, if they exist. If that fails, say why and return 1.
delete() {
  local failed=''
  say "deleting $name in $zone"
  patiently delete_queued_resource || failed=1
  patiently delete_vm || failed=1
  [ -z "$failed" ] || return 1
  maybe_paid="${maybe_paid// $zone/}"
}
delete_vm() { vm delete >&2 || is_missing; }
delete_queued_resource() {
  if queued_resource delete --force >&2 || is_missing; then return 0; fi
  if [ -n "$queued$all" ] || ! is_denied; then return 1; fi
  # A user who may neither delete nor see queued requests has made none.
  ! queued_resource describe >&2 && { is_denied || is_missing; }
}

# Wait until the slice in $zone is READY. If it was preempted, delete what is left, and return 1. If it is gone, return
# 1. If its queued request has FAILED, delete what is left, and return 2. Exit with a reason if waiting cannot help.
# With `again`, a run has lost its spot VM, but not its bucket: a VM that is stopped, or not READY for half an hour,
# counts as preempted.
wait_until_ready() { # [again]
  local now before='-' previous polls=0 error
  [ -z "$dry_run" ] || return 0
  while :; do
    now="$(patiently state_now)" || exit 1
    previous="$before"
    if [ "$now" != "$before" ]; then
      say "$name in $zone is ${now:-gone}"
      before="$now" polls=0
    fi
    # The last poll gives up, or with `again` counts the VM as preempted.
    case "${1:-}:$now:$polls" in again:STOP*:* | again:*:179) now=PREEMPTED ;; esac
    case "$now" in
      READY) return 0 ;;
      FAILED)
        error="$(queued_resource describe --format='value(state.failedData.error)')" || :
        error="$(fault "ERROR: the queued request failed: ${error:-gcloud gives no reason}")"
        why "$error"
        delete || exit 1
        # A later request would fail for the same reason.
        case "${error%% *}" in quota | permission | billing | api) exit 1 ;; esac
        return 2
        ;;
      PREEMPTED | TERMINATED | SUSPENDED)
        # Only a spot VM is preempted. Without --spot, the new VM would cost more.
        [ -n "$spot" ] || [ "$now" != PREEMPTED ] ||
          die "$name was a spot VM and is preempted; to create another, add --spot; or delete it first: $(again down)"
        delete || exit 1
        return 1
        ;;
      '')
        maybe_paid="${maybe_paid// $zone/}"
        # A queued request stays until it is deleted.
        case "$previous" in
          ACCEPTED | PROVISIONING | WAITING*) die "$name was deleted while this command waited" 1 ;;
        esac
        return 1
        ;;
      STOP*)
        die "$name is stopped; start it: gcloud compute tpus tpu-vm start $name --zone=$zone; or delete it with \
its disk: $(again down)"
        ;;
      ACCEPTED | PROVISIONING | WAITING*) polls=0 ;; # wait in these states without a limit
    esac
    polls=$((polls + 1))
    if [ "$polls" = 180 ]; then
      die "$name has been $now for half an hour; go on waiting: $(again up); or delete it: $(again down)" 1
    fi
    sleep 10
  done
}

# Get a READY slice: the existing one, or a new one in the first zone that has room. For `again`, see wait_until_ready.
up() { # [again]
  local worth_waiting code pause=60 failures=0
  find_slice
  if [ -n "$zone" ] && [ -z "$dry_run" ]; then
    maybe_paid=" $zone"
    refuse_other_type
    if wait_until_ready "$@"; then return; fi
  fi
  while :; do
    worth_waiting=''
    for zone in ${zones//,/ }; do
      maybe_paid="$maybe_paid $zone"
      code=0
      create_or_find || code=$?
      if [ "$code" = 0 ]; then
        wait_until_ready "$@" || code=$?
        [ "$code" != 0 ] || return 0
        worth_waiting=1
        if [ "$code" = 2 ]; then failures=$((failures + 1)); fi
      else
        maybe_paid="${maybe_paid// $zone/}"
        case "$code" in 2 | 3) worth_waiting=1 ;; esac
        if [ "$code" = 3 ]; then failures=$((failures + 1)); fi
      fi
    done
    [ -n "$worth_waiting" ] || exit 1
    [ "$failures" -lt 10 ] || die "$failures requests for $name failed; look at the errors above" 1
    # The next request may fail for the same reason, so wait longer each time.
    if [ "$failures" -gt 0 ]; then pause=$((pause < 300 ? pause * 2 : 600)); fi
    say "trying again in $pause seconds"
    sleep "$pause"
  done
}

# When the launcher ends, name the zones where something may still cost money, and after a failure also the log.
at_end() { # EXIT_CODE
  local zone
  trap '' INT # print all of it, even after a second Ctrl-C
  if [ "$1" != 0 ] && [ -s "$log" ]; then say "all calls of gcloud: $log"; fi
  for zone in $maybe_paid; do
    [ -n "$dry_run" ] || say "$name in $zone may still exist and cost money; delete it: $(again down)"
  done
  rm -rf "$scratch"
}
# ---------------------------------------------------------------- Google Cloud: a run on a slice
# Run command $2 in ~/podgrpo on worker $1, or on `all`. It must be safe to repeat: gcloud runs it again if ssh breaks.
workers() {
  reach ssh "$name" --worker="$1" --command="umask 077; mkdir -p podgrpo && cd podgrpo || exit; $2"
}

# Like `workers`, but then print what gcloud and ssh wrote to stderr.
pass_on() {
  local code=0
  workers "$@" || code=$?
  cat "$scratch/errors" >&2
  return "$code"
}

# Run a command on workers, and retry while the connection or gcloud fails. Returns 75 if the slice is not READY.
persistently() {
  local delay code fault now
  for delay in $DELAYS ''; do
    code=0
    "$@" || code=$?
    if [ "$code" = 0 ]; then return 0; fi
    fault="$(fault)"
    # gcloud exits with the command's code, or with 255 if ssh failed.
    if [ "$code" != 255 ] && [ "${fault%% *}" = command ]; then break; fi
    now="$(patiently state_now)" || return 1
    if [ "$now" != READY ]; then
      say "$name in $zone is ${now:-gone}"
      return 75
    fi
    if [ -z "$delay" ] || ! may_pass "$fault"; then break; fi
    # A new VM's ssh keys arrive within five minutes, so give up if ssh is refused after that.
    if [ "${fault%% *}" = refused ] && [ "$delay" -gt 160 ]; then break; fi
    say "the connection fails: ${fault#* }; trying again in $delay seconds"
    sleep "$delay"
  done
  why "$fault"
  return 1
}

# Exit unless `pack` can list this tree's files and name their commit. Check this before a VM is created and paid for.
check_git() {
  local said
  said="$(git -C "$here" rev-parse HEAD 2>&1 >/dev/null)" ||
    die "git cannot list the files to send (${said%%$'\n'*}); clone podgrpo with git, or run in $here: \
git init && git add -A && git commit -m podgrpo"
}

# Pack this tree into $to_send, without the files that git ignores. Pack it once: after a preemption, the same tree is
# sent again. Check each command here, because `send` is called in conditions, where errexit is off.
pack() {
  local packed="$to_send/tree.tgz" size
  if [ -z "$dry_run" ] && [ -f "$packed" ]; then return; fi
  run mkdir -p "$to_send" || exit
  # Leave out tracked files that were deleted.
  # shellcheck disable=SC2016 # another shell expands $f
  shell "$(printf 'cd %q && git ls-files -coz --exclude-standard | xargs -0 sh -c %q sh >%q' "$here" \
    'for f; do [ ! -e "$f" ] || printf "%s\0" "$f"; done' "$to_send/run.sent")" ||
    die "$here is not a git checkout, so git cannot list the files to send"
  shell "$(printf 'git -C %q describe --always --dirty --abbrev=40 >%q' "$here" "$to_send/run.commit")" || exit
  # On a Mac, leave out extended attributes: each worker's tar would print a line about them for every file.
  run env COPYFILE_DISABLE=1 tar -C "$here" --no-xattrs --null -T "$to_send/run.sent" -czf "$packed.unfinished" ||
    die 'this tree could not be packed, and nothing was sent; see the output of tar' 1
  run mv "$packed.unfinished" "$packed" || exit
  [ -z "$dry_run" ] || return 0
  size="$(($(wc -c <"$packed") / 1000000))"
  say "this tree has $size MB, packed"
  if [ "$size" -gt 100 ]; then
    say "that is a lot to send to $hosts workers; add unneeded files to .gitignore; the largest:"
    (cd "$here" && xargs -0 du -k <"$to_send/run.sent" | sort -rn | head -n 5) >&2 || :
  fi
}

# Succeed if the path is in a git repository inside this tree. `pack` sends such a repository as one directory.
is_in_repository() {
  git -C "$here" ls-files -co --exclude-standard |
    path="$1" awk '/\/$/ && index(ENVIRON["path"], $0) == 1 { found = 1 } END { exit !found }'
}

# Exit if a flag names a file or directory of this tree that `pack` leaves out.
check_sent() { # FLAGS...
  local word flag='' path paths
  for word in "$@"; do
    case "$word" in --*=*) flag="${word%%=*}" word="${word#*=}" ;; --*) flag="$word" && continue ;; esac
    case "$flag" in --data | --eval_data | --model | --adapter) ;; *) continue ;; esac
    paths=("$word")
    [ "$flag" != --eval_data ] || IFS=, read -r -a paths <<<"$word" # several sets, as name=path
    for path in ${paths[@]+"${paths[@]}"}; do
      [ "$flag" != --eval_data ] || path="${path#*=}"
      # A path outside the tree may exist on the workers, and a name that is not in the tree may be a hub id.
      if [ -z "$path" ] || [[ "$path" = /* ]] || [[ "$path" = ..* ]] || [ ! -e "$here/$path" ]; then
        [ ! -e "$path" ] || say "$flag $path must exist on the workers: only paths relative to $here are sent"
        continue
      fi
      [ -n "$(git -C "$here" ls-files -co --exclude-standard -- "$path")" ] || is_in_repository "$path" ||
        die "$flag $path is not sent to the workers, because git ignores it; move it where git does not"
    done
  done
}

# Print `busy` for each worker where a run is going on.
print_busy() { persistently workers all 'flock -n -s run.lock true || echo busy'; }

# Send this tree and .env to all workers, and install there.
send() { # FLAGS..., which may need more packages
  local secrets=forget files=("$to_send/tree.tgz" "$to_send/run.sent" "$to_send/run.commit")
  print_busy >"$scratch/busy" || return
  # The first ssh from a machine also prints ssh-keygen's output, so compare complete lines.
  if grep -qx busy "$scratch/busy"; then
    die "$name already has a run; follow it: $(again logs); or end it: $(again stop)"
  fi
  pack
  if [ -f "$here/.env" ]; then files+=("$here/.env") secrets=keep; else say 'there is no .env to send'; fi
  say "sending this tree to $hosts workers"
  persistently reach scp "${files[@]}" "$name:podgrpo/" --worker=all >&2 || return
  say 'installing there, about 2 minutes the first time'
  # If gcloud repeats the command, the lock makes the second call wait for the first one.
  persistently workers all "exec 8>setup.lock; flock 8; tar -xzf tree.tgz infra/cloud/worker.sh
    bash infra/cloud/worker.sh unpack $secrets $(printf '%q ' "$@") 8>&-"
}

# Start train.py on all workers. Returns 75 if the slice is not READY.
start() { # FLAGS...
  local code=0
  run_id="$$.$(date +%s)"
  say "starting train.py on $hosts workers"
  persistently workers all "bash infra/cloud/worker.sh start $(printf '%q ' "$run_id" "$@")" || code=$?
  case "$code" in
    0 | 75) ;;
    # If one worker does not start, stop the others, which would wait for it.
    *) workers all "bash infra/cloud/worker.sh stop $run_id $run_id" || : ;;
  esac
  return "$code"
}

# Print the logs until train.py has ended on all workers. Returns the first failure's code; 75 if the VM isn't READY.
follow() { # LINE of worker 0's log to begin with
  local now=READY first="$1" rest=20 broken=0 worker code ended="$scratch/ended" seen="$scratch/seen"
  trap 'say "detached; the run goes on; follow it: $(follow_again); or end it: $(again stop)"; exit 130' INT
  while :; do
    : >"$ended"
    echo 0 >"$seen"
    workers all "bash infra/cloud/worker.sh follow +$first $rest $run_id" | watch_ends "$ended" "$seen" || :
    [ -z "$dry_run" ] || return 0
    [ "$(sort -u "$ended" | wc -l)" -lt "$hosts" ] || break
    now="$(patiently state_now)" || die "$WATCH_ENDS: $(follow_again)" 1
    [ "$now" = READY ] || break
    # After the run has ended on some workers, do not wait for a worker that cannot be reached.
    if [ -s "$ended" ]; then broken=$((broken + 1)); fi
    [ "$broken" -lt 10 ] || die "the run has ended on some workers, and others cannot be reached: $(again status)" 1
    say 'the connection broke; following again' && sleep 5
    first=$((first + $(cat "$seen"))) rest=0
  done
  trap 'exit 130' INT
  [ "$now" = READY ] || return 75
  read -r worker code <<<"$(sort -k 4 "$ended" | awk '$3 != 0 { print $1, $3; exit }')" # [wN] exit CODE TIME ID
  [ -n "$worker" ] || return 0
  # Do not trust text from a VM. 75 has another meaning here.
  case "$code" in '' | 75 | *[!0-9]*) code=1 ;; esac
  if [ -n "$spot" ] && [ "$code" != 2 ] && is_preempted; then return 75; fi
  say "$worker failed first, with exit code $code; its last lines:"
  workers "${worker//[^0-9]/}" 'tail -n 20 run.log' >&2 || :
  return "$code"
}

# Succeed if the VM leaves READY within ten minutes. When a spot VM is preempted, its run fails first, usually from
# SIGTERM, while the API still says READY. Google turns the VM off 30 seconds after it gives notice. So if the workers
# can run a command both before and after such a pause, the VM is not being preempted.
is_preempted() {
  local now look worked=0 end=$((SECONDS + 600))
  for ((look = 0; look < 20 && SECONDS < end; look++)); do
    if workers all true; then worked=$((worked + 1)); else worked=0; fi
    [ "$worked" -lt 2 ] || return 1
    [ "$look" != 0 ] || say 'the run has ended; checking for up to 10 minutes whether its VM is being preempted'
    sleep 30
    if now="$(patiently state_now)" && [ "$now" != READY ]; then return 0; fi
  done
  return 1
}

# Pass on the workers' output. Write the `exit` line of each to file $1, and the number of worker 0's lines to file $2.
# An `exit` line ends in the run's ID: an answer of the model may also have a line that begins with "exit".
watch_ends() {
  local line ended="$1" lines=0
  while IFS= read -r line; do
    printf '%s\n' "$line"
    case "$line" in '[w0] exit '*" $run_id") ;; '[w0] '*) lines=$((lines + 1)) && echo "$lines" >"$2" ;; esac
    case "$line" in '[w'[0-9]*'] exit '*" $run_id") printf '%s\n' "$line" >>"$ended" ;; *) continue ;; esac
    # After a failure, the other workers would only wait: stop them. After SIGINT or SIGTERM (128 + n), let each save.
    case "$line" in *'] exit 130 '* | *'] exit 143 '*) continue ;; esac
    if [ "$(cut -d ' ' -f 3 "$ended" | grep -vxc -e 0 -e 130 -e 143)" = 1 ]; then stop_rest & fi
  done
}

# Stop the workers whose run has not ended by itself after 5 seconds.
stop_rest() {
  local scratch="$scratch/stop" # the call that follows the logs still uses $scratch
  mkdir -p "$scratch"
  sleep 5
  workers all "bash infra/cloud/worker.sh stop $run_id $run_id" >/dev/null 2>&1 || :
}

# Copy the run's results from worker 0 to a folder in out/$name, and make its report.html, unless a bucket has them.
fetch() {
  local out from to="out/$name" copied="out/$name/fetching" new
  persistently workers 0 'bash infra/cloud/worker.sh results' >"$scratch/results" || return
  out="$(tail -n 1 "$scratch/results")"
  [ -z "$dry_run" ] || out=.fetch/RUN
  case "$out" in
    gs://*) say "the results of the run are in $out" && return ;;
    # Copy the directory that holds NAME, not NAME: older versions of scp allow no spaces in the path on the worker.
    .fetch/*) from=.fetch out="${out#.fetch/}" new="$copied/.fetch/$out" ;;
    *) from="results/$out" new="$copied/$out" ;; # an older commit is on the workers
  esac
  case "$out" in
    */* | .*) die "worker 0 names its results $out, which is not the name of a directory" 1 ;;
  esac
  say "fetching ${out:-the results} to $to"
  run rm -rf "$copied" && run mkdir -p "$copied"
  persistently reach scp --recurse "$name:podgrpo/$from" "$copied" --worker=0 >&2 || return
  [ -z "$dry_run" ] || return 0
  # Keep the results of another run with the same name. If this run was fetched before, bring its results up to date.
  if [ -e "$to/$out" ] && ! cmp -s "$new/config.json" "$to/$out/config.json"; then
    mv "$to/$out" "$to/$out.old-$(date +%Y%m%d-%H%M%S)" || return
  fi
  mkdir -p "$to/$out" && cp -R "$new/." "$to/$out" && rm -rf "$copied" || return
  say "the results of the run are in $to/$out"
  # The results are here even if their page cannot be made, or if this machine has no .venv yet.
  if [ -f "$to/$out/metrics.jsonl" ] && { [ ! -f "$venv/installed" ] || ! (cmd_report "$to/$out" >&2); }; then
    say "to look at them: bash launch.sh report $(printf %q "$to/$out")"
  fi
}

RESUMES='With --out gs://..., the command that started the run resumes it'
WATCH_ENDS='no longer following; the run may go on'
# Take a run to its end, even if its VM is repaired or, with --spot, preempted. Each life of the run lasts until the run
# ends or its VM fails. $1 is the action that begins the first life.
live_and_finish() { # up|start|follow LINE FLAGS...
  local code now life="$1" line="$2"
  shift 2
  while :; do
    code=0
    one_life "$life" "$line" "$@" || code=$?
    [ "$code" = 75 ] || break
    now="$(patiently state_now)" || die "$WATCH_ENDS: $(follow_again)" 1
    case "$now" in
      READY | REPAIRING | RESTARTING | REIMAGING | CREATING | STARTING | UNKNOWN)
        say "$name is $now; following it again"
        ;;
      # A preempted VM stays PREEMPTED until it is deleted, so another command has deleted this one.
      '' | DELETING) die "$name was deleted, and its run ended with it. $RESUMES" 1 ;;
      *)
        [ -n "$spot" ] || die "$name is $now; it is recreated only with --spot. $RESUMES" 1
        say "recreating $name"
        ;;
    esac
    life=again line=1
  done
  if [ "$code" = 0 ]; then
    fetch || {
      [ $? != 75 ] || die 'the run has finished, but its VM is gone, and so are its results, unless --out is gs://...' 1
      die "the run has finished, but its results are not here: $(again fetch)" 1
    }
    if [ -n "$delete_when_done" ]; then delete || exit 1; fi
  fi
  exit "$code"
}

# Succeed if a run with these flags keeps its checkpoints in a bucket. If --out is repeated, the last one counts.
is_in_bucket() { # FLAGS...
  local out=''
  while [ $# -gt 0 ]; do
    case "$1" in --out) out="${2:-}" ;; --out=*) out="${1#*=}" ;; esac
    shift
  done
  [[ "$out" = gs://* ]]
}

one_life() { # up|again|start|follow LINE FLAGS...
  local life="$1" line="$2"
  shift 2
  # The disks of a VM that is stopped or repaired keep the checkpoints. Delete the VM only if a bucket has them, too.
  case "$life" in
    again) if is_in_bucket "$@"; then up ${spot:+again}; else up; fi ;;
    up) up ;;
  esac
  if [ "$life" = again ]; then
    # The run may have survived a repair.
    print_busy >"$scratch/busy" || return
    if grep -qx busy "$scratch/busy"; then life=follow; else life=up; fi
  fi
  if [ "$life" = up ]; then
    send "$@" || return
  fi
  if [ "$life" != follow ]; then
    start "$@" || return
  fi
  follow "$line"
}
# ---------------------------------------------------------------- Google Cloud: the actions
cmd_tpu() { # ACTION ARGUMENTS...
  local action="$1"
  # zone: the slice's, once known. unseen: see find_slice. maybe_paid: zones where something may cost money. all: not
  # empty if others' requests are deleted, too. run_id: the followed run's ID. to_send: directory of the packed tree.
  # log: log of all calls of gcloud. alpha: `alpha` if ssh needs `gcloud alpha`. at_end reads some of them, so they are
  # global: after a failed command, bash drops local variables before at_end runs.
  zone='' unseen='' maybe_paid='' all='' run_id='' to_send="$scratch/tree" log='' alpha=''
  case " ${ssh_flags[*]-} " in *' --tunnel-through-iap '*) alpha=alpha ;; esac
  shift
  [[ "$name" =~ ^[a-z]([-a-z0-9]*[a-z0-9])?$ ]] ||
    die "--name $name cannot name a VM; use small letters, digits and -, with a letter first and no - at the end"
  [ -n "${zones//[, ]/}" ] || die "--zone $zones names no zone; give one, such as --zone ${all_zones%%,*}"
  # These actions send this tree, or send it again after a preemption.
  case "$action$spot" in train* | setup* | test* | run1 | logs1) check_git && check_env ;; esac
  case "$action" in
    train | run)
      check_words "$@"
      check_sent "$@"
      [ -z "$spot" ] || is_in_bucket "$@" ||
        say 'after a preemption, a run begins again at its first step, unless --out is gs://...'
      # The flags that check the slice's size come first, then the defaults, then the user's flags, which win.
      set -- --require_processes "$hosts" --require_devices "$devices" --start_timeout 900 "${job[@]}" "$@"
      ;;
    test | ssh) ;;
    *) [ $# = 0 ] || die "$action does not take $1" ;;
  esac
  if [ -n "$dry_run" ]; then
    to_send="${TMPDIR:-/tmp}/$name" # so that the printed commands can be pasted later
  else
    command -v gcloud >/dev/null || die 'no gcloud; see cloud.google.com/sdk/docs'
    log="$here/out/launch/$name-$(date +%Y%m%d-%H%M%S)-$$.log"
    { mkdir -p "$here/out/launch" && touch "$log"; } 2>/dev/null ||
      die "cannot write to $here/out/launch, where the log belongs; look at its permissions, and for a full disk"
  fi
  trap 'at_end $?' EXIT
  trap 'exit 130' INT # without this, Ctrl-C may skip the EXIT trap
  "cmd_tpu_$action" "$@"
  exit
}

cmd_tpu_train() { live_and_finish up 1 "$@"; }

cmd_tpu_up() { up; }

cmd_tpu_setup() {
  up
  send || exit 1
}

cmd_tpu_run() {
  need_slice
  refuse_other_type
  live_and_finish start 1 "$@"
}

cmd_tpu_logs() {
  local lines='' word words=() there="$scratch/there" mark="record-$$-$RANDOM" print
  need_slice
  refuse_other_type
  # If this VM is preempted, the run needs its flags again on a new VM. Read them as data: each word ends in a NUL.
  print="printf '\\0%s\\0%s\\0%s\\0' $mark \"\$(wc -l <run.log)\" \"\$(cat run.id)\" && cat run.flags"
  persistently workers 0 "[ ! -f run.id ] || { $print; }" >"$there" || {
    [ $? != 75 ] || say "the run may have ended with it. $RESUMES"
    exit 1
  }
  # Take what follows the last mark: ssh-keygen may have printed before it, and so may a try whose connection broke.
  while IFS= read -r -d '' word; do
    if [ "$word" = "$mark" ]; then words=(); else words+=("$word"); fi
  done <"$there"
  if [ -z "$dry_run" ]; then
    [ ${#words[@]} -gt 0 ] || die "no run was started there: $(again run)" 1
    [ ${#words[@]} -gt 2 ] || die "run.flags on worker 0 has no flags" 1
    lines="${words[0]}" run_id="${words[1]}"
  fi
  case "$lines$run_id" in *[!0-9.]*) die "run.log or run.id on worker 0 cannot be read" 1 ;; esac
  # Print the last 50 lines of the log first.
  live_and_finish follow $((lines > 50 ? lines - 49 : 1)) ${words[@]+"${words[@]:2}"}
}

cmd_tpu_status() {
  local now
  need_slice
  now="$(patiently state_now)" || exit 1
  say "$name in $zone is $now"
  case "$now" in READY | '') persistently workers all 'bash infra/cloud/worker.sh status' || exit 1 ;; esac
}

# Open a shell on one worker, or run a command on one worker or all.
cmd_tpu_ssh() { # [WORKER|all] [COMMAND...]
  local worker="${1:-0}"
  need_slice
  maybe_paid=''
  if [ $# -gt 1 ]; then
    pass_on "$worker" "${*:2}"
    return
  fi
  [ -t 0 ] || [ -n "$dry_run" ] || die 'ssh without a command needs a terminal'
  run gcloud ${alpha:+"$alpha"} compute tpus tpu-vm ssh "$name" --worker="$worker" --zone="$zone" \
    ${ssh_flags[@]+"${ssh_flags[@]}"}
}

cmd_tpu_stop() { need_slice; persistently workers all "bash infra/cloud/worker.sh stop '' $$.$(date +%s)" || exit 1; }

cmd_tpu_fetch() { need_slice; fetch || exit 1; }

cmd_tpu_test() {
  local alone=''
  up
  send || exit 1
  [ $# -gt 0 ] || set -- test_kernel.py tests/test_model.py tests/test_rollout.py tests/test_sampling.py
  # Without these variables, worker 0 would wait for the other workers. If there are several, each has four devices.
  if [ "$hosts" -gt 1 ]; then
    alone='TPU_PROCESS_BOUNDS=1,1,1 TPU_CHIPS_PER_PROCESS_BOUNDS=2,2,1 TPU_VISIBLE_DEVICES=0,1,2,3 '
  fi
  pass_on 0 "${alone}bash infra/cloud/worker.sh test $(printf '%q ' "$@")"
}

# Delete the VMs and queued requests with this name in some zones. Set $unknown to the zones where gcloud could not
# look. Add to $found the zones that had a VM or a request.
delete_in() { # ZONES LOOK..., the command that prints a state
  local now there='' zones_here="$1"
  shift
  unknown=''
  for zone in $zones_here; do
    if ! now="$("$@" queued)"; then
      unknown="$unknown $zone"
    elif [ -n "$now$dry_run" ]; then
      say "$name in $zone is ${now:-there}"
      there="$there $zone"
    fi
  done
  [ -n "$there" ] || return 0
  [ -n "$yes$dry_run" ] || read -r -p "delete it? [y/N] " yes || :
  [[ "$yes" = [yY]* ]] || [ -n "$dry_run" ] || die 'nothing is deleted; --yes deletes without asking'
  found="$found$there" maybe_paid="$maybe_paid$there"
  for zone in $there; do delete || :; done
}

# Delete the VMs and queued requests with this name, in all zones.
cmd_tpu_down() {
  local found='' unknown='' all=1
  # While one zone does not answer, a VM in another costs money: look once in all zones, then retry where that failed.
  delete_in "${zones//,/ }" state_now
  [ -z "$unknown" ] || delete_in "$unknown" patiently state_now
  [ -z "$maybe_paid" ] || exit 1
  [ -z "$unknown" ] || die "$name may be in$unknown, where gcloud could not look" 1
  [ -n "$found" ] || die "there is no $name in $zones"
}

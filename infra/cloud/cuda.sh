#!/usr/bin/env bash
# NVIDIA GPUs: which CUDA to install, and how to compile for absent GPUs. launch.sh sources this file.
#
#   $venv    the virtual environment that CUDA is installed into

# Print the major version of this machine's driver, or nothing if nvidia-smi finds no GPU.
driver() {
  local found
  # nvidia-smi prints the same line for each GPU.
  found="$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null)" || found=''
  case "${found%%.*}" in '' | *[!0-9]*) ;; *) printf '%s' "${found%%.*}" ;; esac
}

# Succeed if a GPU of this machine has a compute capability below 7.5, such as a V100.
has_old_gpu() {
  nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null |
    awk '$1 > 0 && $1 < 7.5 { found = 1 } END { exit !found }'
}

# Print jax's extra for the CUDA version that this machine supports: CUDA 13 needs driver 580 and compute capability
# 7.5, CUDA 12 needs driver 525 (docs.jax.dev/en/latest/installation.html, docs.nvidia.com/deploy/cuda-compatibility).
# $CUDA, if it is set, overrides the choice.
cuda() {
  local driver
  driver="$(driver)"
  if [ -z "${CUDA:-}" ] && [ -n "$driver" ]; then
    [ "$driver" -ge 525 ] || die "NVIDIA driver $driver is too old: CUDA 12 needs 525 or newer, and CUDA 13 needs 580"
    if [ "$driver" -lt 580 ] || has_old_gpu; then CUDA=12; fi
  fi
  case "${CUDA:-13}" in 12 | 13) ;; *) die "CUDA=$CUDA is neither 12 nor 13" ;; esac
  printf 'cuda%s' "${CUDA:-13}"
}

# Succeed if JAX's plugin for CUDA $1 is in .venv.
has_plugin() { compgen -G "$venv/lib/python3*/site-packages/jax_plugins/xla_cuda$1" >/dev/null; }

# Before .venv gets jax's extra $1, remove the plugin for the other CUDA version, as JAX accepts only one plugin. Also
# remove the other version's cuDNN, as both cuDNN packages have files of the same names.
drop_other_cuda() {
  local other
  case "$1" in cuda12) other=13 ;; cuda13) other=12 ;; *) return 0 ;; esac
  if has_plugin "$other"; then
    # If the installation that follows is cut short, the next launch must not take it for complete.
    run rm -f "$venv/installed"
    run "$venv/bin/python" -I -m pip uninstall -q -y \
      "jax-cuda$other-plugin" "jax-cuda$other-pjrt" "nvidia-cudnn-cu$other"
  fi
}

# Exit unless plan supports the number of GPUs in $1, such as h100-8.
check_gpus() {
  local count="${1#*-}"
  [[ " 1 2 4 " = *" $count "* ]] || [[ "$count" =~ ^[1-9][0-9]*$ && $((count % 8)) = 0 ]] ||
    die "there is no $1; the number after ${1%%-*}- must be 1, 2, 4, 8 or a multiple of 8"
}

# Install the compiler for $1, such as h100-8: JAX's CUDA plugin, and cuDNN, whose version JAX reads. Compilation needs
# no driver. If .venv already has the plugin for CUDA 12, use CUDA 12. jax's extra pins the plugin to jax's version.
setup_absent_gpus() {
  local cuda=13
  case "$(uname -sm)" in
    'Linux x86_64' | 'Linux aarch64') ;;
    *) die "JAX's CUDA plugin, which compiles for $1, is for Linux only" ;;
  esac
  if has_plugin 12; then cuda=12; fi
  local ready="from importlib.metadata import version as v; import nvidia.cudnn"
  ready="$ready; assert v('jax') == v('jax-cuda$cuda-plugin') == v('jax-cuda$cuda-pjrt')"
  if "$venv/bin/python" -c "$ready" 2>/dev/null; then return; fi
  say "installing the compiler for $1, JAX's CUDA $cuda plugin and cuDNN: 0.7 GB to download, 1.3 GB in .venv"
  say 'from then on, set JAX_PLATFORMS=cpu whenever you run .venv/bin/python on a CPU'
  pip_install "jax[cuda$cuda-local]" || exit
  # --no-deps: cuDNN depends on cuBLAS, which compilation does not need.
  pip_install --no-deps "nvidia-cudnn-cu$cuda" || exit
}

# Shared by the scripts of this folder; sourced, never run.
# shellcheck shell=bash
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repo=$(dirname "$here")
engine=${CADENZA_ENGINE:-docker}
cluster=cadenza

die() { # EXIT_CODE MESSAGE…
  printf '%s: %s\n' "$(basename "$0")" "${*:2}" >&2
  exit "$1"
}

# The releases of Slurm are those of Debian.
# shellcheck disable=SC2034  # suite and base_image are used by ensure-docker and build
case ${SLURM:-26.05} in
  26.05) suite=forky image=cadenza-node:latest ;;
  24.11) suite=trixie image=cadenza-node:24.11 ;;
  *) die 2 "SLURM is '$SLURM': it may be 24.11 or 26.05" ;;
esac
base_image=debian:$suite-slim
debs=$repo/dist/debs
if [[ $suite != forky ]]; then debs+=-$SLURM; fi
image=${CADENZA_IMAGE:-$image}

say() { printf '%s\n' "$*" >&2; }

# One line that is rewritten on a terminal; elsewhere only what changed is printed.
progress() {
  [[ ${progress_last:-} == "$*" ]] && return
  progress_last=$*
  if [[ -t 2 ]]; then printf '\r\033[K%s' "$*" >&2; else say "$*"; fi
}
progress_end() { if [[ -t 2 ]]; then printf '\r\033[K' >&2; fi; }

usage() { # the comment at the head of the calling script
  sed -n '2,/^[^#]/{/^# shellcheck/d; /^#/s/^# \{0,1\}//p}' "$0"
  exit "${1:-0}"
}

state_dir() { printf '%s/%s' "${CADENZA_STATE:-$repo/.cluster}" "$cluster"; }

container_of() { printf '%s-%s' "$cluster" "$1"; }

containers() { # names of this cluster's containers, without the cluster's name
  "$engine" ps -a --filter "label=cadenza.cluster=$cluster" --format '{{.Names}}' | sed "s/^$cluster-//" | sort
}

# Options of every `run`. podman raises limits above the host's unless told, which a nested root may not do.
run_options=()
if [[ $engine == podman ]]; then
  run_options=(--ulimit "nofile=$(ulimit -Hn):$(ulimit -Hn)" --ulimit nproc=16384:16384)
fi

# The image with Debian's packages that `build-packages` makes of an image.
packaged() { sed 's/\(:[^:]*\)\?$/-packages\1/' <<<"$1"; }

engine_works() { "$engine" info >/dev/null 2>&1; }

image_exists() { "$engine" image inspect "$1" >/dev/null 2>&1; }

# The options of `up` and `configure`; sourced with the script's arguments.
# shellcheck shell=bash disable=SC2034  # the variables are the sourcing script's
nodes=2
gpus=4
lanes=2
cpus=24
memory_mb=64000
unmanaged=0
autostart=true
extra_configs=()

number() { # OPTION VALUE LEAST
  [[ ${2:-} =~ ^[0-9]+$ ]] && (($2 >= $3)) || die 2 "$1 needs a number, at least $3, not '${2:-}'"
  printf '%s' "$2"
}

while (($#)); do
  [[ $1 != --* || $1 == --help || $1 == --no-cadenza ]] || (($# >= 2)) || die 2 "$1 needs a value (see --help)"
  case $1 in
    --name) cluster=$2 ;;
    --nodes) nodes=$(number "$1" "${2:-}" 1) ;;
    --gpus-per-node) gpus=$(number "$1" "${2:-}" 1) ;;
    --lanes) lanes=$(number "$1" "${2:-}" 1) ;;
    --cpus) cpus=$(number "$1" "${2:-}" 1) ;;
    --memory-mb) memory_mb=$(number "$1" "${2:-}" 1000) ;;
    --unmanaged-nodes) unmanaged=$(number "$1" "${2:-}" 0) ;;
    --config) [[ -r ${2:-} ]] || die 2 "--config: cannot read '${2:-}'" && extra_configs+=("$2") ;;
    --no-cadenza) autostart=false && shift && continue ;;
    --help) usage 0 ;;
    *) die 2 "unknown option '$1' (see --help)" ;;
  esac
  shift 2
done
[[ $cluster =~ ^[a-z][a-z0-9-]*$ ]] || die 2 "--name: '$cluster' is not of the form [a-z][a-z0-9-]*"

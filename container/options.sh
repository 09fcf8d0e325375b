# The options of `up` and `configure`; sourced with the script's arguments.
# shellcheck shell=bash disable=SC2034  # the variables are the sourcing script's
controllers=1
nodes=2
gpus=4
gpu_types=a100
lanes=2
cpus=24
memory_mb=64000
full_memory=false
node_limit_mb=0
unmanaged=0
state_mb=0
gpu_memory_mb=64
autostart=true
from_packages=false
auth=slurm
configless=false
login=false
prometheus=false
extra_configs=()

number() { # OPTION VALUE LEAST
  [[ ${2:-} =~ ^[0-9]+$ ]] && (($2 >= $3)) || die 2 "$1 needs a number, at least $3, not '${2:-}'"
  printf '%s' "$2"
}

numbers() { # OPTION LIST LEAST
  local entry list=()
  for entry in ${2//,/ }; do list+=("$(number "$1" "$entry" "$3")") || exit; done
  ((${#list[@]})) || die 2 "$1 needs numbers, at least $3, not '$2'"
  (IFS=, && printf '%s' "${list[*]}")
}

# The entry of a list for node 1, 2 …, from its beginning again when the nodes are more.
entry_of() { # LIST HOSTNAME
  local entries
  IFS=, read -ra entries <<<"$1"
  printf '%s' "${entries[(${2#node} - 1) % ${#entries[@]}]}"
}

while (($#)); do
  [[ $1 != --* || $1 =~ ^--(help|no-cadenza|from-packages|configless|full-memory|login|prometheus)$ ]] || (($# >= 2)) || die 2 "$1 needs a value (see --help)"
  case $1 in
    --name) cluster=$2 ;;
    --controllers) [[ ${2:-} =~ ^[12]$ ]] && controllers=$2 || die 2 "--controllers: 1 or 2, not '${2:-}'" ;;
    --nodes) nodes=$(number "$1" "${2:-}" 1) ;;
    --gpus-per-node) gpus=$(numbers "$1" "${2:-}" 1) ;;
    --gpu-types) [[ ${2:-} =~ ^[a-z0-9_]+(,[a-z0-9_]+)*$ ]] && gpu_types=$2 || die 2 "--gpu-types: not a list: '$2'" ;;
    --lanes) lanes=$(number "$1" "${2:-}" 1) ;;
    --cpus) cpus=$(number "$1" "${2:-}" 1) ;;
    --memory-mb) memory_mb=$(number "$1" "${2:-}" 1000) ;;
    --node-limit-mb) node_limit_mb=$(number "$1" "${2:-}" 500) ;;
    --unmanaged-nodes) unmanaged=$(number "$1" "${2:-}" 0) ;;
    --state-mb) state_mb=$(number "$1" "${2:-}" 1) ;;
    --gpu-memory-mb) gpu_memory_mb=$(number "$1" "${2:-}" 0) ;;
    --config) [[ -r ${2:-} ]] || die 2 "--config: cannot read '${2:-}'" && extra_configs+=("$2") ;;
    --auth) [[ ${2:-} =~ ^(slurm|munge)$ ]] && auth=$2 || die 2 "--auth: slurm or munge, not '${2:-}'" ;;
    --configless) configless=true && shift && continue ;;
    --full-memory) full_memory=true && shift && continue ;;
    --login) login=true && shift && continue ;;
    --prometheus) prometheus=true && shift && continue ;;
    --no-cadenza) autostart=false && shift && continue ;;
    --from-packages) from_packages=true && shift && continue ;;
    --help) usage 0 ;;
    *) die 2 "unknown option '$1' (see --help)" ;;
  esac
  shift 2
done
if $from_packages; then image=$(packaged "$image"); fi
[[ $cluster =~ ^[a-z][a-z0-9-]*$ ]] || die 2 "--name: '$cluster' is not of the form [a-z][a-z0-9-]*"

"""The values in Slurm's answers, each with one meaning for all readers (pure).

Sources: https://slurm.schedmd.com/squeue.html, sinfo.html, sacct.html and gres.html; the data parsers v0.0.42 to 46.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from msgspec import Struct

from cadenza.policies.core.model import JobState

Raw: TypeAlias = Mapping[str, Any]
"""A job or node under the names of pyslurm's properties."""
T = TypeVar("T")

MAX_HOSTS = 2**16
"""Names that a list of nodes may stand for."""
NEVER_S = 4_294_967_294
"""Slurm's time for unknown (``NO_VAL``); later moments are no times either."""
MB = {"": 1.0, "K": 2.0**-10, "M": 1.0, "G": 2.0**10, "T": 2.0**20, "P": 2.0**30}
COUNTED = re.compile(
    r"(?:^|,)(?P<name>[^,=()]+?)(?:[:=](?P<count>\d{1,12}(?:\.\d{1,6})?)(?P<unit>[KMGTP]?))?(?:\([^)]*\))?(?=,|$)",
    re.ASCII,
)
"""A resource such as ``gres/gpu:a100:2``, ``gpu:a100:4(S:0-1)``, ``mem=62.50G`` in a list."""
NEEDED = re.compile(r"(?:^|,)(?P<part>(?:cpu|mem|gres/gpu(?::[^,=]*)?)=(?!\d{1,12}(?:\.\d{1,6})?[KMGTP]?(?:,|$))[^,]*)")
"""A part of a list of TRES that is read and holds no count."""
DIVIDED = re.compile(r"(?:^|,)(?:shard|mps):[^(),]*\((?=[\d-])([\d/,-]+)\)", re.ASCII)
HOSTS = re.compile(r"[^,\[\]]+(?:\[[^\[\]]*\][^,\[\]]*)*")
RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?::(\d{1,4}))?)?", re.ASCII)
SPAN = re.compile(r"(?:(\d{1,9})-)?(?:(\d{1,9}):)?(\d{1,9}):(\d{1,2})(?:\.\d+)?", re.ASCII)


class Number(Struct, Generic[T], frozen=True):
    """A number that Slurm may leave unset, or that has no limit."""

    set: bool = False
    infinite: bool = False
    number: T | None = None

    @property
    def value(self) -> T | None:
        """Return the number, None without one."""
        return self.number if self.set and not self.infinite else None


# --- Lists of resources and of nodes ---------------------------------------------------------------------


def counts(text: str) -> dict[str, int]:
    """Return the resources of a list by name, memory in MB; one without a count is 1.

    >>> counts("cpu=2,mem=62.50G,gres/gpu:a100:3"), counts("gpu:(null):2(IDX:0-1),gpu:t4:no_consume:1,shard:1K")
    ({'cpu': 2, 'mem': 64000, 'gres/gpu:a100': 3}, {'gpu': 2, 'gpu:t4': 1, 'shard': 1024})
    """
    found = COUNTED.finditer(text.replace(":(null)", "").replace(":no_consume", ""))
    return {one["name"]: int(float(one["count"] or 1) * _unit(one["name"], one["unit"] or "")) for one in found}


def _unit(name: str, unit: str) -> float:
    """Return the factor of a unit: MB for memory, a number for anything else."""
    return MB[unit] if name == "mem" or not unit else MB[unit] * 2**20


def tres(text: str) -> dict[str, int]:
    """Return the counts of a list of TRES; ValueError if CPUs, memory or GPUs have no number there."""
    wrong = NEEDED.search(text)
    if wrong is not None:
        raise ValueError(f"{wrong['part'][:80]!r} is not NAME=COUNT")
    return counts(text)


def hosts(text: str) -> list[str]:
    """Return the names of a list of nodes; ValueError for a list that is none, or stands for too many.

    >>> hosts("n[1-2,08-09]x,gpu1-l1"), hosts("n[0-6:3]")
    (['n1x', 'n2x', 'n08x', 'n09x', 'gpu1-l1'], ['n0', 'n3', 'n6'])
    """
    names: list[str] = []
    words = HOSTS.findall(text)
    if ",".join(words) != text:
        raise ValueError(f"{text[:80]!r} is no list of nodes")
    for word in words:
        choices = [_numbers(part) if at % 2 else [part] for at, part in enumerate(re.split(r"[\[\]]", word))]
        if len(names) + prod(map(len, choices)) > MAX_HOSTS:
            raise ValueError(f"more than {MAX_HOSTS} nodes")
        names += map("".join, product(*choices))
    return names


def _numbers(text: str) -> list[str]:
    """Return the numbers of ranges such as ``1-2,08,0-9:3``, with their leading zeros."""
    numbers: list[str] = []
    for part in text.split(","):
        found = RANGE.fullmatch(part)
        step = int(found[3] or 1) if found else 0
        if found is None or not step:
            raise ValueError(f"{part[:80]!r} is no range of nodes")
        begin, end = int(found[1]), int(found[2] or found[1])
        if (end - begin) // step + len(numbers) >= MAX_HOSTS:
            raise ValueError(f"more than {MAX_HOSTS} nodes")
        numbers += [f"{number:0{len(found[1])}d}" for number in range(begin, end + 1, step)]
    return numbers


@lru_cache(4096)
def node_names(text: str) -> frozenset[str]:
    """Return the names in a list of nodes; nothing for other text, as ``None assigned`` of a job that never started."""
    try:
        return frozenset(hosts(text)) if " " not in text else frozenset()
    except ValueError:
        return frozenset()


# --- GPUs ------------------------------------------------------------------------------------------------


def gpu_count(resources: Mapping[str, Any]) -> int:
    """Return the GPUs among counted resources ``gpu``, ``gres/gpu``, ``gres:gpu`` or the same with ``:TYPE``."""
    gpus = {_bare(name): int(count) for name, count in resources.items() if _is_gpu(name)}
    # Slurm lists a typed GPU twice, as ``gpu`` and as ``gpu:a100``: the untyped entry is the sum.
    return gpus.get("gpu") or sum(gpus.values())


def gpu_types(resources: Mapping[str, Any]) -> list[str]:
    """Return the GPU types that are named among counted resources, in order."""
    found = {_bare(name).partition(":")[2] for name, count in resources.items() if _is_gpu(name) and count}
    return sorted(found - {""})


def gpu_type(resources: Mapping[str, Any]) -> str:
    """Return the first GPU type named among counted resources, or ""."""
    return next(iter(gpu_types(resources)), "")


def _bare(name: str) -> str:
    return name.removeprefix("gres/").removeprefix("gres:")


def _is_gpu(name: str) -> bool:
    return _bare(name).split(":")[0] == "gpu"


def job_gpus(raw: Raw) -> int:
    """Return a job's number of GPUs: those that it has, or those that it asked for while it has none."""
    # ``*_tres`` counts every form of request, given AccountingStorageTRES=gres/gpu. Without that there are what Slurm
    # has given on each node, and the requests per node, task, socket or job.
    has = gpu_count(raw.get("allocated_tres") or {}) or sum(gpus_each(raw))
    return has or gpu_count(raw.get("requested_tres") or {}) or gpu_count(wanted(raw))


def gpus_each(raw: Raw) -> list[int]:
    """Return the GPUs that a job has on each of its nodes, in their order; empty where Slurm does not say."""
    return [gpu_count(counts(text)) for text in raw.get("gres_detail") or ()]


def wanted(raw: Raw) -> dict[str, int]:
    """Return the GPUs of a job's request by name, with their type where it names one."""
    nodes = raw.get("num_nodes") or 1
    factors = (
        ("gres_per_node", nodes), ("tres_per_node", nodes), ("tres_per_task", raw.get("ntasks") or 1),
        ("tres_per_socket", nodes * (raw.get("sockets_per_node") or 1)), ("tres_per_job", 1),
    )  # fmt: skip
    for name, factor in factors:
        if found := {key: int(count) * factor for key, count in (raw.get(name) or {}).items() if _is_gpu(key)}:
            return found
    return {}


def wanted_type(raw: Raw) -> str:
    """Return the GPU type that a job asked for, as ``--gres=gpu:a100:1`` does, or ""."""
    return gpu_type(wanted(raw)) or gpu_type(raw.get("requested_tres") or {})


def node_gpus_used(raw: Raw) -> int:
    """Return the GPUs of a node that Slurm has given out."""
    return gpu_count(raw.get("allocated_tres") or {}) or gpu_count(raw.get("allocated_gres") or {})


def divided_gpus(text: str) -> int:
    """Return the GPUs of which jobs have parts (gres/shard, gres/mps), by what is in use of a node's resources.

    The list has the parts of each GPU that are in use, ``-`` for one that a job has as a whole (_node_gres_used() of
    Slurm's gres.c).

    >>> divided_gpus("gpu:a100:1(IDX:3),shard:a100:3(1/8,2/8,0/8,-/8)"), divided_gpus("gpu:a100:2(IDX:0-1)")
    (2, 0)
    """
    return sum(part[0] not in "0-" for parts in DIVIDED.findall(text) for part in parts.split(","))


# --- States ----------------------------------------------------------------------------------------------

FLAGS = (
    "COMPLETING", "STAGE_OUT", "CONFIGURING", "EXPEDITING", "RESIZING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD",
    "SPECIAL_EXIT", "STOPPED", "REVOKED", "RESV_DEL_HOLD", "SIGNALING",
)  # fmt: skip
"""Flags that stand for a job's state, the first of several (job_state_string() of Slurm's slurm_protocol_defs.c)."""
# squeue(1), JOB STATE CODES. A flag such as CONFIGURING hides the base state, which is then running. EXPEDITING is a
# pending job with the highest priority of all: its requeue is to start at once (sbatch(1), --requeue=expedite).
_STATES: Mapping[str, JobState] = {
    "PENDING": "PENDING", "REQUEUE_HOLD": "PENDING", "RESV_DEL_HOLD": "PENDING", "SPECIAL_EXIT": "PENDING",
    "EXPEDITING": "PENDING",
    "RUNNING": "RUNNING", "CONFIGURING": "RUNNING", "RESIZING": "RUNNING", "SIGNALING": "RUNNING",
    "STOPPED": "RUNNING", "POWER_UP_NODE": "RUNNING", "SUSPENDED": "SUSPENDED",
}  # fmt: skip
_LEAVING = frozenset({"COMPLETING", "REQUEUED", "REQUEUE_FED", "STAGE_OUT", "UPDATE_DB"})
# sinfo(1), NODE STATE CODES.
_UP = frozenset({"IDLE", "MIXED", "ALLOCATED"})
_LOST = frozenset({"FAIL", "FAILING", "REBOOT_ISSUED", "INVALID_REG"})
_ASLEEP = frozenset({"POWERED_DOWN", "POWERING_DOWN", "POWERING_UP"})

NodeState: TypeAlias = Literal["up", "asleep", "gone"]
"""up: Slurm starts jobs there, unless it is drained; asleep: Slurm wakes it for a job by itself, or wakes it now; gone:
none of them."""


def state_of(states: Collection[str]) -> str:
    """Return the one state that stands for a job's base state and flags.

    >>> state_of(("RUNNING", "COMPLETING")), state_of(("PENDING", "EXPEDITING"))
    ('COMPLETING', 'EXPEDITING')
    """
    return next((flag for flag in FLAGS if flag in states), next(iter(states)))


def job_state(state: str) -> JobState | None:
    """Return our state for Slurm's state: OTHER while the job ends, None when it is gone."""
    if state in _STATES:
        return _STATES[state]
    return "OTHER" if state in _LEAVING else None


def node_state(states: Iterable[str]) -> NodeState:
    """Return whether Slurm would start jobs on a node now, or once it has woken it; ``states``: the base and its flags.

    >>> node_state(["IDLE", "CLOUD"]), node_state(["IDLE", "CLOUD", "POWERED_DOWN"]), node_state(["DOWN", "CLOUD"])
    ('up', 'asleep', 'gone')
    """
    # CLOUD only says where a node comes from, and so counts for nothing here.
    found = frozenset(states)
    if not found & _UP or found & _LOST:
        return "gone"
    # A node that powers up does not respond yet (power_save.c); one that is powered down has failed if it does not.
    if "NOT_RESPONDING" in found:
        return "asleep" if "POWERING_UP" in found else "gone"
    return "asleep" if found & _ASLEEP else "up"


# --- Times -----------------------------------------------------------------------------------------------


def span_s(text: str) -> float:
    """Return a time span such as 1-02:03:04 in seconds; ValueError for other text."""
    found = SPAN.fullmatch(text)
    if found is None:
        raise ValueError(f"{text[:80]!r} is not a time span such as 1-02:03:04")
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def known_s(at_s: float | None) -> float | None:
    """Return a moment that Slurm tells, in seconds since the epoch; None for its values for unknown."""
    return float(at_s) if at_s is not None and 0 < at_s < NEVER_S else None

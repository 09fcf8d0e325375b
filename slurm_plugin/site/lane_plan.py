"""Lanes for the hosts of a partition: the lines of slurm.conf by Slurm's own answers, and what lacks of them (pure)."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from cadenza.policies.core.errors import InputError
from cadenza.policies.inputs.csv_table import quoted
from cadenza.slurm_plugin.gateway.slurm_json import MOST_NAMED, NotSlurms, Refused, raw_records, records
from cadenza.slurm_plugin.gateway.slurm_values import counts, gpu_count, hosts
from cadenza.slurm_plugin.gateway.translate import lane_of
from cadenza.slurm_plugin.site.checks import Finding, Rule, rules_for

UNSET = ("", "(null)", "N/A", "NONE")
BASE_PORT = 6830
"""The slurmd of lane k listens on the port k above it, or on the next free one. Slurm's daemons have 6817 to 6820."""
WEIGHT_STEP = 100
"""By this much the Weight of a lane exceeds that of the lane below it: Slurm fills lane 0 of all hosts first."""
MAX_WEIGHT = 2**32 - 16
"""The largest weight of a node (slurm.conf(5)): Slurm refuses a file with a larger one."""
SINGLE = frozenset({"SelectType", "SelectTypeParameters", "JobRequeue"})
"""Settings with one value; the others of the rules are lists to which a value is added."""
LANE_RULES: tuple[Rule, ...] = (
    (
        "FAIL", "PrologFlags", r"(?i)^(?=.*\balloc\b)(?=.*\bcontain\b)",
        "the plugin does not learn a job's GPUs on each host", "PrologFlags=Alloc,Contain",
    ),
    ("FAIL", "SlurmdSpoolDir", "%n", "the lanes of a host would share it", "SlurmdSpoolDir=/var/spool/slurmd.%n"),
    ("FAIL", "SlurmdPidFile", "%n", "the lanes of a host would share it", "SlurmdPidFile=/run/slurmd.%n.pid"),
)  # fmt: skip
OWN_SETTINGS = ("SlurmdSpoolDir", "SlurmdPidFile", "AuthInfo")
"""Settings that the slurmds of a host cannot share."""
SOCKET_RULE: Rule = (
    "FAIL", "AuthInfo", r"\bdisable_sack\b",
    "the slurmds of a host clash on one socket: sackd has it instead", "AuthInfo=disable_sack",
)  # fmt: skip

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
WORD = r"[\w.:+=/%@~-]{0,255}"
NAMES = {"name": NAME, "hostname": f"({NAME})?"}
WRITABLE = NAMES | {
    "address": WORD, "cpus": r"[1-9]\d{0,4}", "real_memory": r"[1-9]\d{0,12}", "specialized_cpus": r"[\d,-]{0,4096}",
    "features": WORD, "gres": r"[\w.:,()/-]{0,4096}",
}  # fmt: skip
"""Values of a node's fields that may become part of a command, and of a line of slurm.conf."""
PAIR = re.compile(r'(?<![\w.])([\w.]{1,64})\s{0,64}[-*+/]?=\s{0,64}(?:"([^"]*)"|(\S+))(?=\s|$)')
"""A setting of Slurm's files, with blanks around the sign and quotes if need be (parse_config.c)."""

Text: TypeAlias = Annotated[str, Meta(max_length=2**16)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**43)]


class SlurmNode(msgspec.Struct, frozen=True):
    """A node as ``scontrol show node --json`` describes it, of which a line of slurm.conf is made.

    Of most nodes nothing is written: ``unwritable`` tells what keeps a node from it.
    """

    name: Annotated[str, Meta(min_length=1, max_length=255)]
    cpus: Count = 0
    real_memory: Count = 0
    hostname: Text = ""
    address: Text = ""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    boards: Count = 1
    sockets: Count = 1
    cores: Count = 1
    threads: Count = 1
    temporary_disk: Count = 0
    specialized_cores: Count = 0
    specialized_cpus: Text = ""
    specialized_memory: Count = 0
    weight: Count = 1
    features: Annotated[tuple[Text, ...], Meta(max_length=4096)] = ()
    gres: Text = ""
    partitions: Annotated[tuple[Text, ...], Meta(max_length=4096)] = ()

    def unwritable(self, fields: Mapping[str, str] = WRITABLE) -> str:
        """Return the first of the fields whose value cannot be written, with its value; empty if all can."""
        for name, pattern in fields.items():
            value = getattr(self, name)
            for word in value if isinstance(value, tuple) else (str(value),):
                if re.fullmatch(pattern, word, re.ASCII) is None:
                    return f"{name}: {quoted(word)}"
        return ""

    @property
    def has_gpus(self) -> bool:
        """Return whether Slurm counts GPUs there."""
        return gpu_count(counts(self.gres)) > 0

    @property
    def host(self) -> str:
        """Return the machine, which lanes share."""
        return self.hostname or self.name

    @property
    def lane(self) -> int:
        """Return the lane, by the same rule as the service."""
        return lane_of({"name": self.name, "hostname": self.host, "available_features": list(self.features)})

    def settings(self) -> dict[str, str]:
        """Return the words of the node's line in slurm.conf."""
        lone = self.sockets == self.cpus and self.cores == self.threads == 1
        words: dict[str, object] = {
            "NodeName": self.name,
            "NodeHostname": self.host if self.host != self.name else None,
            "NodeAddr": self.address if self.address not in (self.name, "") else None,
            "Port": self.port,
            "CPUs": self.cpus,
            "Boards": None if lone or self.boards == 1 else self.boards,
            "Sockets": None if lone else self.sockets,
            "CoresPerSocket": None if lone else self.cores,
            "ThreadsPerCore": None if lone else self.threads,
            "RealMemory": self.real_memory,
            "TmpDisk": self.temporary_disk or None,
            "CpuSpecList": self.specialized_cpus or None,
            "CoreSpecCount": None if self.specialized_cpus else self.specialized_cores or None,
            "MemSpecLimit": self.specialized_memory or None,
            "Gres": re.sub(r"\([^)]*\)", "", self.gres),
            "Feature": ",".join(self.features),
            "Weight": self.weight,
        }
        return {key: str(value) for key, value in words.items() if value is not None}


class LanePlan(msgspec.Struct, frozen=True):
    """The lines of slurm.conf that give the hosts of managed partitions their lanes."""

    lanes: int
    nodes: tuple[SlurmNode, ...]
    """All lanes of the chosen hosts, host by host."""
    settings: dict[str, str]
    """Settings that lack something, with their whole new values."""
    undecided: dict[str, str]
    """Settings that only the site can change, with the reason."""
    members: dict[str, tuple[str, ...]]
    """All nodes of each managed partition."""

    @property
    def hosts(self) -> list[str]:
        """Return the names of the hosts' first lanes."""
        return [node.name for node in self.nodes if node.lane == 0]

    def slurm_conf(self) -> list[str]:
        """Return the lines that take the place of the hosts' lines, and the settings. One lane needs no such lines."""
        lines = [
            *(f"# PartitionName={name} needs Nodes={','.join(nodes)}" for name, nodes in self.members.items()),
            *(" ".join(f"{key}={value}" for key, value in node.settings().items()) for node in self.nodes),
        ]
        return [
            *(lines if self.lanes > 1 else ()),
            *(f"{key}={value}" for key, value in self.settings.items()),
            *(f"# {key} is yours to change: {reason}" for key, reason in self.undecided.items()),
        ]

    def gres_conf(self, present: str) -> Iterator[str]:
        """Yield lines for the further lanes, like those for lane 0 that name their nodes.

        A line without names is for all nodes, so it needs no other.
        """
        named = [(_nodes_of(pairs), pairs) for pairs in settings_in(present)]
        known = {name for names, _ in named for name in names}
        for names, pairs in named:
            lanes = [
                node.name for node in self.nodes if node.lane and node.name not in known and self.first(node) in names
            ]
            if lanes:
                kept = (
                    f'{key}="{value}"' if re.search(r"\s", value) else f"{key}={value}"
                    for key, value in pairs
                    if key.lower() != "nodename"
                )  # fmt: skip
                yield f"NodeName={','.join(lanes)} {' '.join(kept)}"

    def first(self, lane: SlurmNode) -> str:
        """Return the name of lane 0 on a lane's host."""
        return next(node.name for node in self.nodes if node.host == lane.host and node.lane == 0)

    def lua_conf(self) -> list[str]:
        """Return the lines of /etc/cadenza/lua.conf."""
        return [f"partitions={','.join(self.members)}", f"lanes={self.lanes}"]


def decode_nodes(text: str) -> tuple[list[SlurmNode], list[Refused]]:
    """Return the nodes of an answer of ``scontrol show node --json``, and those that cannot be read.

    Raise InputError for any other text.
    """
    try:
        return records(raw_records(text, "nodes")[0], SlurmNode, "node", lambda node, _: node)
    except NotSlurms as error:
        raise InputError(f"scontrol show node --json: {error}") from None


def settings_in(text: str) -> Iterator[list[tuple[str, str]]]:
    r"""Yield the settings of each line of one of Slurm's files, as Slurm reads it (parse_config.c).

    >>> list(settings_in("Name = gpu \\\n File=/dev/nvidia[0-3]  # all\nNodeName=\"g1\" AutoDetect=nvml\n"))
    [[('Name', 'gpu'), ('File', '/dev/nvidia[0-3]')], [('NodeName', 'g1'), ('AutoDetect', 'nvml')]]
    """
    for line in re.sub(r"\\[ \t]*\r?\n", " ", text).splitlines():
        pairs = [(key, quoted or plain) for key, quoted, plain in PAIR.findall(re.sub(r"(?<!\\)#.*", "", line))]
        if pairs:
            yield pairs


def names_in(expression: str) -> list[str]:
    """Return the names of a list such as ``gpu[1-4]``; raise InputError for text that is none."""
    try:
        names = hosts(expression)
    except ValueError as error:
        raise InputError(f"{expression!r} is no list of nodes: {error}") from None
    if not names:
        raise InputError("an empty text is no list of nodes")
    return names


def plan_lanes(
    nodes: Sequence[SlurmNode], config: Mapping[str, str], managed: Collection[str], lanes: int,
    chosen: Collection[str], *, full_memory: bool = False,
) -> LanePlan:  # fmt: skip
    """Return the plan for the GPU hosts of the managed partitions, or for the chosen nodes among them.

    A host that has all lanes keeps their lines, so the plan of a finished site is the site itself; one lane is the host
    as it is. Raise InputError for a partition or node that Slurm does not have, and with further lanes for hosts that
    are in another partition too, and for a node of which a line of slurm.conf cannot be made.
    """
    by_host, firsts = _gpu_hosts(nodes, managed)
    for name in set(chosen) - {node.name for node in firsts}:
        raise InputError(f"Slurm has no node {name!r} with GPUs in {', '.join(managed)}")
    wanted = [node for node in firsts if not chosen or node.name in chosen]
    if lanes > 1 and (said := foreign_partitions(wanted, managed)):
        more = " ".join(f"--partition {name}" for name in _foreign(wanted, managed))
        raise InputError(f"{said}, which Cadenza would not manage: take them out of it, or give {more} too")
    planned: list[SlurmNode] = []
    for first in wanted:
        here = by_host[first.host] if lanes > 1 else {}
        _check_writable(here.values() or (first,), WRITABLE if here else NAMES)
        planned += _lanes_of(here, first, lanes, config, full_memory=full_memory) if here else (first,)
    members = {name: _members(name, nodes, planned) for name in managed}
    settings, undecided = _settings(config)
    if lanes == 1:
        settings = {key: value for key, value in settings.items() if key not in OWN_SETTINGS}
    return LanePlan(lanes, tuple(planned), settings, undecided, members)


def _gpu_hosts(
    nodes: Sequence[SlurmNode], managed: Collection[str]
) -> tuple[dict[str, dict[int, SlurmNode]], list[SlurmNode]]:
    """Return the hosts with GPUs by their lanes, and lane 0 of those in managed partitions; InputError without any."""
    by_host: defaultdict[str, dict[int, SlurmNode]] = defaultdict(dict)
    for node in nodes:
        if node.has_gpus:
            by_host[node.host].setdefault(node.lane, node)
    firsts = [present[0] for present in by_host.values() if 0 in present and set(managed) & set(present[0].partitions)]
    for name in managed:
        if not any(name in node.partitions for node in firsts):
            raise InputError(f"Slurm has no nodes with GPUs in a partition {name!r}")
    return by_host, firsts


def _check_writable(nodes: Iterable[SlurmNode], fields: Mapping[str, str]) -> None:
    for node in nodes:
        if reason := node.unwritable(fields):
            raise InputError(f"node {quoted(node.name)}: Slurm's files cannot hold its {reason}")


def foreign_partitions(nodes: Sequence[SlurmNode], managed: Collection[str]) -> str:
    """Return which of the nodes are in partitions that are not managed, and in which, the first few named."""
    names = [node.name for node in nodes if not set(node.partitions) <= set(managed)]
    if not names:
        return ""
    more = f" and {len(names) - MOST_NAMED} others" if len(names) > MOST_NAMED else ""
    others = _foreign(nodes, managed)
    partitions = f"the partition{'s' if len(others) > 1 else ''} {', '.join(others)}"
    return f"{', '.join(names[:MOST_NAMED])}{more} {'are' if len(names) > 1 else 'is'} in {partitions}"


def _foreign(nodes: Sequence[SlurmNode], managed: Collection[str]) -> list[str]:
    return sorted({name for node in nodes for name in node.partitions} - set(managed))


def _lanes_of(
    present: Mapping[int, SlurmNode], first: SlurmNode, lanes: int, config: Mapping[str, str], *, full_memory: bool
) -> Iterator[SlurmNode]:
    """Yield the lanes of one host; new ones are like the first, with all of its memory or an equal part each."""
    whole = set(present) == set(range(lanes))
    part_mb = first.real_memory if full_memory else sum(node.real_memory for node in present.values()) // lanes
    port = int(config["SlurmdPort"]) if first.port == 0 and config.get("SlurmdPort", "").isdecimal() else first.port
    features = tuple(word for word in first.features if not re.fullmatch(r"lane\d+", word))
    used = {node.port for node in present.values()}
    for lane in range(lanes):
        wanted = msgspec.structs.replace(
            first, port=port, real_memory=part_mb, features=(*features, f"lane{lane}"),
            weight=min(first.weight + WEIGHT_STEP * lane, max(first.weight, MAX_WEIGHT)),
        )  # fmt: skip
        if lane:
            free = next(number for number in range(BASE_PORT + lane, 2**16) if number not in used)
            used.add(free)
            wanted = msgspec.structs.replace(
                wanted, name=f"{first.name}-l{lane}", hostname=first.host, port=free,
                address=first.address or first.host,
            )  # fmt: skip
        old = present.get(lane)
        if old is not None:
            memory_mb = old.real_memory if whole else part_mb
            wanted = msgspec.structs.replace(
                wanted, name=old.name, port=old.port or wanted.port, weight=old.weight, real_memory=memory_mb
            )
        yield wanted


def _members(partition: str, nodes: Sequence[SlurmNode], planned: Sequence[SlurmNode]) -> tuple[str, ...]:
    """Return the nodes of a partition: those that it has, each followed by the new lanes of its host."""
    present = [node for node in nodes if partition in node.partitions]
    known, members = {node.name for node in present}, list[str]()
    for node in present:
        new = [lane.name for lane in planned if lane.host == node.host and lane.name not in known]
        members += [node.name, *(new if node.lane == 0 else ())]
    return tuple(members)


def _settings(config: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the settings to change with their new values, and those that the site decides about."""
    changed: dict[str, str] = {}
    undecided: dict[str, str] = {}
    socket = (SOCKET_RULE,) if config.get("AuthType") == "auth/slurm" else ()
    for _, key, good, effect, advice in (*rules_for(config), *LANE_RULES, *socket):
        value = changed.get(key, config.get(key, ""))
        if re.search(good, value):
            continue
        if key == "PreemptMode":
            undecided[key] = f"it is {value}: {effect}; {advice}"
        else:
            changed[key] = _value(key, "" if value in UNSET else value, advice.split()[0].partition("=")[2])
    return changed, undecided


def _value(key: str, present: str, wanted: str) -> str:
    """Return a setting's new value, which keeps the present one as far as it can."""
    if key == "SlurmdSpoolDir" and present:
        return f"{present}.%n"
    if key == "SlurmdPidFile" and present:
        return f"{present.removesuffix('.pid')}.%n.pid"
    if key == "SelectTypeParameters" and present:
        more = re.sub(r"(?i)\bCR_(CPU|CORE|SOCKET|BOARD)\b", r"\g<0>_MEMORY", present)
        return more if more != present else f"{present},CR_MEMORY"
    if key in SINGLE:
        return wanted
    words = present.split(",") if present else []
    return ",".join([*words, *(word for word in wanted.split(",") if word.lower() not in map(str.lower, words))])


def lacking(plan: LanePlan, nodes: Sequence[SlurmNode]) -> Iterator[Finding]:
    """Yield a finding for each setting, node and partition of a plan: Slurm has it or not."""
    for key, value in plan.settings.items():
        yield Finding("FAIL", key, "it lacks something", f"{key}={value}")
    for key, reason in plan.undecided.items():
        yield Finding("FAIL", key, reason)
    present = {node.name: node for node in nodes}
    for node in plan.nodes:
        old, new = present.get(node.name), node.settings()
        line = " ".join(f"{key}={value}" for key, value in new.items())
        if old is None:
            yield Finding("FAIL", node.name, "Slurm does not have this lane", line)
            continue
        now = old.settings()
        differ = [key for key in {**now, **new} if now.get(key) != new.get(key)]
        if differ:
            yield Finding("FAIL", node.name, f"{', '.join(differ)}: not as planned", line)
        else:
            yield Finding("OK", node.name, f"lane {node.lane} of {node.host}")
    for name, members in plan.members.items():
        missing = [member for member in members if member not in present or name not in present[member].partitions]
        if missing:
            advice = f"Nodes={','.join(members)}"
            yield Finding("FAIL", f"partition {name}", f"{', '.join(missing)} is not in it", advice)
        else:
            yield Finding("OK", f"partition {name}", f"{len(members)} nodes")


def _nodes_of(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Return the nodes that a line of gres.conf names."""
    value = next((value for key, value in pairs if key.lower() == "nodename"), "")
    return names_in(value) if value else []

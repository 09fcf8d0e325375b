"""Checks of ``cadenza doctor``: functions from facts to findings (pure)."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal, TypeAlias

import msgspec

from cadenza.policies.core.model import Host, Node
from cadenza.policies.core.profile import MB_PER_GB
from cadenza.policies.inputs.trace import TraceJob
from cadenza.policies.simulator.shareable import unshareable_jobs
from cadenza.slurm_plugin.gateway.source_gateway import release_of
from cadenza.slurm_plugin.service.settings import Settings
from cadenza.slurm_plugin.site.facts import Facts
from cadenza.slurm_plugin.site.site_priority import lacks

Level: TypeAlias = Literal["OK", "WARN", "FAIL"]
Rule: TypeAlias = tuple[Level, str, str, str, str]
"""Level of a fault, setting, pattern of good values, effect of others, and advice, which begins with a good line."""

STALE_AFTER_ROUNDS = 4
MIN_STALE_AFTER_S = 30.0
MIN_JOBS_TO_SHARE = 2
MAX_SLICES_TO_STOP = 2
"""Longest stop, in slices, that leaves a job that stops as late as it may without much more time than its share."""
OWN_FILES, FILES_A_HOST = 256, 2
"""Files that cadenzad needs for itself, and for each agent: a connection, and one that a restarted agent opens."""
REQUEUE_DELAY = (25, 11)
"""The first release of Slurm with the setting; for the others the gateway sets the time of a start."""

ONE_EACH = (
    *(("service", key) for key in ("bind", "store", "metrics")),
    *(("expert", key) for key in ("jobs_socket", "question_port")),
)
"""Keys in which two services of one machine must differ."""
MAX_NAMED = 4
"""Number of hosts that a finding names."""


class Finding(msgspec.Struct, frozen=True):
    """One result: the subject, the observation and the advice."""

    level: Level
    about: str
    observation: str
    advice: str = ""


def examine(facts: Facts) -> tuple[Finding, ...]:
    """Return all findings in the order of their repair."""
    return tuple(finding for check in CHECKS for finding in check(facts))


def failed(findings: Sequence[Finding]) -> bool:
    """Return True if a finding keeps Cadenza from working."""
    return any(finding.level == "FAIL" for finding in findings)


def configuration(facts: Facts) -> Iterator[Finding]:
    """Check the settings file and its managed partitions."""
    if problem := facts.problems.get("settings"):
        first = "`cadenza plan --partition NAME --file cadenza.toml` prints the first one"
        advice = first if "create it" in problem else "correct it, and look again by `cadenza config --check`"
        yield Finding("FAIL", "configuration", problem, advice)
        return
    table = facts.settings
    yield Finding("OK", "configuration", f"mode {table.service.mode}")
    if not table.guard.partitions:
        yield Finding("WARN", "partitions", "none is managed", 'name some: [guard] partitions = ["…"]')
    slice_s, timeout_s = table.sharing.slice_s, table.sharing.yield_timeout_s
    if timeout_s > MAX_SLICES_TO_STOP * slice_s:
        seen = f"{timeout_s:g} s exceed {MAX_SLICES_TO_STOP} slices of {slice_s:g} s: a job that stops late wins time"
        advice = f"set it to at most {MAX_SLICES_TO_STOP * slice_s:g}, and to more than the longest iteration"
        yield Finding("WARN", "sharing.yield_timeout_s", seen, advice)


def keys(facts: Facts) -> Iterator[Finding]:
    """Check the service's secret key and that each host has a key of its own, with the secret half there only."""
    for key in facts.keys:
        if key.mode is None:
            yield Finding("FAIL", "keys", f"{key.path} is missing or not accessible", "create it: cadenza keygen")
        elif key.secret and key.mode & 0o077:
            yield Finding("FAIL", "keys", f"{key.path} has mode {key.mode:o}", f"chmod 600 {key.path}")
        elif key.secret and key.host:
            advice = f"delete {key.path} once {key.host} has it"
            yield Finding("WARN", "keys", f"the secret key of {key.host} is still on this machine", advice)
        elif key.replaced:
            advice = f"copy agents/{key.host}.key_secret there and restart its agent"
            yield Finding("WARN", "keys", f"{key.host} still has its old key, which works until it has the new", advice)
        else:
            yield Finding("OK", "keys", key.path)
    yield from _keys_of_hosts(facts)


def _keys_of_hosts(facts: Facts) -> Iterator[Finding]:
    """Check that there are keys of hosts, and that none serves several."""
    hosts_of: defaultdict[str, set[str]] = defaultdict(set)
    for key in facts.keys:
        if key.host and key.key:
            hosts_of[key.key].add(key.host)
    for hosts in hosts_of.values():
        if len(hosts) > 1:
            names = " ".join(sorted(hosts))
            text = f"one key serves {names}: root of each speaks for all of them"
            yield Finding("WARN", "keys", text, f"cadenza keygen --rotate {names}")
    if facts.keys and not any(key.host and not key.secret for key in facts.keys):
        yield Finding("FAIL", "keys", "no host has a key", "create them: cadenza keygen HOST...")
    elif lacking := sorted({*facts.settings.service.relays} - {key.host for key in facts.keys}):
        text = f"relays without a key, whose users cannot ask cadenzad: {', '.join(lacking)}"
        yield Finding("FAIL", "keys", text, f"create it: cadenza keygen {' '.join(lacking)}, and reload cadenzad")


def versions(facts: Facts) -> Iterator[Finding]:
    """Check that Slurm, the source of the gateway and the plugin have the same release."""
    if facts.slurm is None:
        text = facts.problems.get("slurm", "")
        yield Finding("FAIL", "Slurm", text, "" if "not installed" in text else "is slurmctld up? `scontrol ping`")
        return
    text = facts.slurm.get("SLURM_VERSION", "")
    slurm = release_of(text)
    yield Finding("OK", "Slurm", text)
    yield _source(facts, slurm)
    if "json" not in facts.source and (facts.json or "json" in facts.problems):
        wrong = "" if facts.json else facts.problems["json"]
        text = wrong or f"{facts.json}; resizes, plan, watch and whatif read it"
        yield Finding("WARN" if wrong else "OK", "Slurm's JSON", text)
    plugin = _same("plugin", facts.plugin, slurm, facts, "make -C slurm_plugin/spank install")
    # Only a warning: without the plugin the flag is missing, but jobs can opt in by their comment.
    yield plugin if plugin.level == "OK" else msgspec.structs.replace(plugin, level="WARN")


def _same(
    part: str, release: tuple[int, ...] | None, slurm: tuple[int, ...] | None, facts: Facts, advice: str
) -> Finding:
    if not release:
        return Finding("FAIL", part, facts.problems.get(part, "not found"), f"{advice}; see docs/install.md")
    name = ".".join(f"{number:02d}" for number in release)
    if release != slurm:
        return Finding("FAIL", part, f"for Slurm {name}, but another release is running", advice)
    return Finding("OK", part, f"for Slurm {name}")


def _source(facts: Facts, slurm: tuple[int, ...] | None) -> Finding:
    """Return the source that the gateway reads and acts by, with its versions."""
    if "json" not in facts.source:
        return _same(
            "pyslurm", release_of(str(facts.source.get("pyslurm", ""))), slurm, facts, "build it for this Slurm"
        )
    text = f"Slurm's JSON {facts.source['json']}, commands of Slurm {facts.source['scontrol']}"
    return Finding("OK", "source", f"{text}: {facts.source['reason']}" if facts.source["reason"] else text)


def slurm_settings(facts: Facts) -> Iterator[Finding]:
    """Check the required and the recommended settings of slurm.conf."""
    config, good_so_far = facts.slurm or {}, set[str]()
    for level, key, good, effect, advice in rules_for(config) if config else ():
        value = config.get(key, "")
        if re.search(good, value):
            if key not in good_so_far:
                yield Finding("OK", key, value)
            good_so_far.add(key)
        else:
            yield Finding(level, key, f"{value or 'unset'}: {effect}", advice)
    if facts.state_full:
        effect = "is full: slurmctld takes no jobs, and forgets at its next start what it could not save"
        yield Finding("FAIL", "StateSaveLocation", f"{config['StateSaveLocation']} {effect}", "make room there")


def rules_for(config: Mapping[str, str]) -> Iterator[Rule]:
    """Yield the rules for the release of Slurm that a configuration is of."""
    release = release_of(config.get("SLURM_VERSION", "")) or REQUEUE_DELAY
    return (rule for rule in RULES if release >= REQUEUE_DELAY or "requeue_delay" not in rule[2])


def priority(facts: Facts) -> Iterator[Finding]:
    """Check that a SiteFactor orders Slurm's queue, where jobs are to make way for others."""
    if facts.slurm is None or not uses_factors(facts.settings):
        return
    found = tuple(lacks(facts.slurm))
    for one in found:
        yield Finding("FAIL" if one.fatal else "WARN", one.key, one.observation, " ".join(one.lines))
    if not found:
        yield Finding("OK", "priority", facts.slurm["PriorityType"])


def uses_factors(settings: Settings) -> bool:
    """Return True if the service orders jobs of Slurm's queue by their SiteFactor."""
    return settings.policy.share == "preemption" or settings.policy.place


def kill_switch(facts: Facts) -> Iterator[Finding]:
    """Say that the kill switch is set: a site that has forgotten it waits for nothing."""
    if facts.killed:
        text = f"{facts.settings.expert.kill_switch} exists: no action leaves, and no job makes way"
        yield Finding("WARN", "kill switch", text, f"rm {facts.settings.expert.kill_switch}")


def kill_wait(facts: Facts) -> Iterator[Finding]:
    """Compare the time that Slurm leaves a job after its SIGTERM with that of a checkpoint of the largest state."""
    match = re.match(r"(\d+)", (facts.slurm or {}).get("KillWait", ""))
    largest = facts.largest_state
    if match is None or largest is None:
        return
    limit_s, size = int(match[1]), f"the largest state so far (job {largest.job}, {largest.bytes >> 20} MB)"
    if largest.saved_bytes_s is None:
        speed = f"{largest.bytes / max(limit_s, 1) / (1 << 20):.0f} MB/s"
        yield Finding(
            "OK", "KillWait", f"{limit_s} s: enough to save {size} at {speed}; no checkpoint was measured yet"
        )
        return
    needed_s = math.ceil(largest.bytes / largest.saved_bytes_s)
    text = f"{limit_s} s; a checkpoint of {size} takes {needed_s} s at the measured speed"
    if needed_s <= limit_s:
        yield Finding("OK", "KillWait", text)
    else:
        advice = f"KillWait={needed_s}, or faster storage: a job that saves at its SIGTERM is killed before the end"
        yield Finding("WARN", "KillWait", text, advice)


def output_files(facts: Facts) -> Iterator[Finding]:
    """Warn where a job that comes back begins its output file anew."""
    config = facts.slurm or {}
    if "JobFileAppend" not in config:
        return
    if config["JobFileAppend"] != "0":
        yield Finding("OK", "JobFileAppend", config["JobFileAppend"])
    elif facts.plugin and facts.plugin == release_of(config.get("SLURM_VERSION", "")):
        yield Finding("OK", "JobFileAppend", "0: the plugin appends for jobs that opted in and come back")
    else:
        text = "0: Slurm truncates the output file of a job at each requeue, and no plugin of this release keeps it"
        yield Finding("WARN", "JobFileAppend", text, "JobFileAppend=1, or install the plugin on all nodes")


def suspends_by_signal(facts: Facts) -> Iterator[Finding]:
    """Warn where a user's other processes can wake a job that is suspended."""
    tracking = (facts.slurm or {}).get("ProctrackType", "")
    if facts.settings.sharing.suspend and facts.slurm and "cgroup" not in tracking:
        text = f"{tracking or 'unset'}: a suspend is a signal, which other processes of the user can take back"
        yield Finding("WARN", "ProctrackType", text, "ProctrackType=proctrack/cgroup")


def preemption(facts: Facts) -> Iterator[Finding]:
    """Warn where Slurm's preemption costs jobs the steps since their last checkpoint."""
    mode = (facts.slurm or {}).get("PreemptMode", "OFF")
    if mode != "OFF" and not facts.settings.agent.save_before_suspend_s:
        text = f"{mode}: Slurm kills a suspended job without a signal, and its steps since the last checkpoint are lost"
        yield Finding("WARN", "preemption", text, "[agent] save_before_suspend_s = 300, on all hosts")


def full_memory(facts: Facts) -> Iterator[Finding]:
    """Warn where Slurm does not keep a job to the memory that it asked for, and lanes count on that."""
    if facts.settings.service.lanes_memory == "full" and facts.slurm:
        kept = facts.slurm.get("ConstrainRAMSpace", "")
        if kept.lower() != "yes":
            text = f"{kept or 'unset'}: a job may take more than it asked for, and the kernel kills a neighbor for it"
            advice = "ConstrainRAMSpace=yes in cgroup.conf: see docs/second-lane.md"
            yield Finding("WARN", "ConstrainRAMSpace", text, advice)


RULES: tuple[Rule, ...] = (
    (
        "FAIL", "PreemptMode", r"^(?!.*(SUSPEND|GANG))\w",
        "Slurm would suspend and resume jobs by itself: that frees no GPU, and its resume ends Cadenza's suspend",
        "PreemptMode=OFF, REQUEUE or CANCEL; partitions and QOS may have REQUEUE or CANCEL too",
    ),
    ("FAIL", "SelectType", r"cons_tres", "GPUs are not counted", "SelectType=select/cons_tres"),
    ("FAIL", "GresTypes", r"\bgpu\b", "GPUs are not known", "GresTypes=gpu"),
    (
        "WARN", "SelectTypeParameters", r"(?i)memory", "jobs of several lanes may exceed the host's memory",
        "SelectTypeParameters=CR_CPU_Memory",
    ),
    (
        "FAIL", "AccountingStorageTRES", r"gres/gpu", "Slurm does not report how many GPUs a job has",
        "AccountingStorageTRES=gres/gpu",
    ),
    (
        "FAIL", "JobSubmitPlugins", r"\blua\b",
        "jobs that do not share may start on further lanes, and --cadenza does not reach the job's comment",
        "JobSubmitPlugins=lua with Cadenza's job_submit.lua",
    ),
    (
        "WARN", "SchedulerParameters", r"requeue_delay=0", "a requeued job starts two minutes later",
        "SchedulerParameters=requeue_delay=0",
    ),
    (
        "WARN", "SchedulerParameters", r"(batch_sched_delay|sched_interval)=[01]\b",
        "a moving job starts up to three seconds later",
        "SchedulerParameters=batch_sched_delay=0",
    ),
    (
        "WARN", "PreemptParameters", r"suspend_grace_time=0",
        "a job resumed within 2 s of its suspend is stopped late",
        "PreemptParameters=suspend_grace_time=0",
    ),
    ("WARN", "JobRequeue", r"^1$", "jobs cannot be requeued", "JobRequeue=1"),
)  # fmt: skip


def lanes(facts: Facts) -> Iterator[Finding]:
    """Check that further lanes match lane 0 and that their hosts are in managed partitions only."""
    if facts.cluster is None:
        unread = "nodes and partitions are not known, because Slurm was not read"
        yield Finding("FAIL", "cluster", facts.problems.get("cluster", unread))
        return
    hosts: defaultdict[str, list[Node]] = defaultdict(list)
    for node in facts.cluster.nodes:
        hosts[node.host].append(node)
    theirs = _all_hosts(facts, facts.others.values()) - _all_hosts(facts, [facts.settings])
    ours = ((host, nodes) for host, nodes in sorted(hosts.items()) if host not in theirs)
    shared = {host: nodes for host, nodes in ours if any(node.lane for node in nodes)}
    if not shared and _shares_without_lanes(facts):
        yield Finding("OK", "lanes", "one a host: jobs that keep checkpoints make way by leaving")
    elif not shared:
        advice = "without lanes Slurm never gives a GPU to two jobs: see docs/second-lane.md"
        yield Finding("WARN", "lanes", "no host has a second lane", advice)
    for host, nodes in shared.items():
        yield from _lanes_of(host, nodes, facts)


def _shares_without_lanes(facts: Facts) -> bool:
    """Return True if running jobs make way for the first of Slurm's queue."""
    return facts.settings.policy.share == "preemption"


def _lanes_of(host: str, nodes: Sequence[Node], facts: Facts) -> Iterator[Finding]:
    first = next((node for node in nodes if node.lane == 0), None)
    if first is None:
        yield Finding("FAIL", f"lanes of {host}", "lane 0 is missing", "add the node with Feature=lane0")
        return
    wrong = [node.name for node in nodes if (node.gpus, node.gpu_type) != (first.gpus, first.gpu_type)]
    foreign = {name for node in nodes for name in node.partitions} - facts.settings.guard.partitions
    if wrong:
        advice = f"give every lane Gres=gpu:{first.gpu_type or 'TYPE'}:{first.gpus}"
        yield Finding("FAIL", f"lanes of {host}", f"{', '.join(wrong)} has other GPUs than lane 0", advice)
    if foreign:
        names = ", ".join(sorted(foreign))
        advice = "take the host out of it, or manage it: [guard] partitions"
        yield Finding("FAIL", f"lanes of {host}", f"it is in the unmanaged partition {names}", advice)
    closed = [node for node in nodes if node.closed_reason and not node.drained]
    for node in closed:
        advice = f"no job is placed there until then: see `scontrol show node {node.name}` and the log of its slurmd"
        yield Finding("WARN", f"lanes of {host}", f"{node.name} {node.closed_reason}", advice)
    if not wrong and not foreign and not closed:
        yield Finding("OK", f"lanes of {host}", f"{len(nodes)} lanes of {first.gpus} GPUs")


def partitions(facts: Facts) -> Iterator[Finding]:
    """Check that every managed partition exists."""
    existing = {name for node in facts.cluster.nodes for name in node.partitions} if facts.cluster else set()
    for name in sorted(facts.settings.guard.partitions - existing) if existing else ():
        yield Finding("WARN", "partitions", f"{name} is managed and has no nodes", "check [guard] partitions")


def profiles(facts: Facts) -> Iterator[Finding]:
    """Check the profiles of jobs; each one that cannot be used has a reason."""
    for problem in facts.profile_problems:
        yield Finding("WARN", "profiles", problem, "correct or remove it; its jobs get their proportional share")
    if facts.profiles:
        yield Finding("OK", "profiles", f"{facts.profiles} in {facts.settings.profiles.directory}")


def service(facts: Facts) -> Iterator[Finding]:
    """Check that the service completes rounds and has room for its record."""
    for fault in facts.store_faults:
        yield Finding("FAIL", "store", fault, "make room there; [service] retention_gb bounds the record")
    if facts.standby:
        yield Finding("OK", "service", f"{facts.standby}: look at its host")
        return
    if facts.recorded is None:
        problem = facts.problems.get("recorded", "no round is on record")
        yield Finding("FAIL", "service", problem, "start cadenzad on this machine")
        return
    age = facts.now_s - facts.recorded.time_s
    late = age > max(STALE_AFTER_ROUNDS * facts.settings.service.poll_s, MIN_STALE_AFTER_S)
    text = f"last round {age:.0f} s ago"
    advice = "is cadenzad up?" if facts.slurm is not None else "it makes none without slurmctld"
    yield Finding("FAIL", "service", text, advice) if late else Finding("OK", "service", text)


def services(facts: Facts) -> Iterator[Finding]:
    """Refuse a second service that has a host in common with this one, or a file or an address."""
    own = _all_hosts(facts, [facts.settings])
    for path, other in facts.others.items():
        if isinstance(other, str):
            yield Finding("FAIL", "services", other, f"correct it: cadenza config --check --config {path}")
            continue
        common = sorted(own & _all_hosts(facts, [other]))
        same = [
            f"[{table}] {key}"
            for table, key in ONE_EACH
            if (mine := getattr(getattr(facts.settings, table), key)) and mine == getattr(getattr(other, table), key)
        ]
        if common:
            names = ", ".join(common[:MAX_NAMED]) + (" and others" if common[MAX_NAMED:] else "")
            text = f"{path} manages {names}, too: both services would give out the GPUs there"
            yield Finding("FAIL", "services", text, "[guard] partitions of the two must have no host in common")
        if same:
            text = f"{path} has the same {', '.join(same)}"
            yield Finding("FAIL", "services", text, "give each service its own: see docs/operation.md")
        if not common and not same:
            yield Finding("OK", "services", f"{path} manages other hosts")


def _all_hosts(facts: Facts, services: Iterable[Settings | str]) -> set[str]:
    """Return the hosts that have a node in a partition of these services."""
    managed = {name for one in services if isinstance(one, Settings) for name in one.guard.partitions}
    nodes = facts.cluster.nodes if facts.cluster is not None else ()
    return {node.host for node in nodes if not managed.isdisjoint(node.partitions)}


def controllers(facts: Facts) -> Iterator[Finding]:
    """Check that agents know the service of each controller: it acts only where slurmctld is in control."""
    named = sum(name.startswith("SlurmctldHost[") for name in facts.slurm or {})
    known = len(facts.settings.agent.service.split(","))
    if named > 1 and known < named:
        text = f"slurm.conf names {named}, [agent] service {known}: while another slurmctld is in control, none acts"
        yield Finding("WARN", "controllers", text, "run cadenzad on each, and name all of them there, with commas")
    elif named > 1:
        yield Finding("OK", "controllers", f"{named}; the service acts where slurmctld is in control")


def agents(facts: Facts) -> Iterator[Finding]:
    """Check that every managed host has an agent of this version and enough memory for its lanes."""
    if not facts.settings.sharing.suspend:
        text = "false: on hosts whose driver names no processes, a job's word alone says that it has left its GPUs"
        yield Finding("WARN", "sharing.suspend", text, "set it to true, or install nvidia-ml-py on the GPU hosts")
    if facts.recorded is None:
        return
    managed = facts.settings.guard.partitions
    nodes = [node for node in facts.recorded.nodes if node.gpus and managed & set(node.partitions)]
    lane_memory: defaultdict[str, int] = defaultdict(int)
    full = facts.settings.service.lanes_memory == "full"
    for node in nodes:
        lane_memory[node.host] = max(lane_memory[node.host], node.memory_mb + (0 if full else lane_memory[node.host]))
    hosts = {host.name: host for host in facts.recorded.hosts}
    for name in sorted(lane_memory):
        host = hosts.get(name)
        if host is None or not host.agent_alive:
            if host is not None and host.refused:
                advice = "install the same build on both, the service's first: docs/maintenance.md"
                yield Finding("FAIL", f"agent on {name}", f"it {host.refused}", advice)
            else:
                yield Finding("FAIL", f"agent on {name}", "it does not report", _missing_agent_advice(name, facts))
            continue
        yield from _reported_by(host)
        if host.agent_version != facts.cadenza:
            text = f"version {host.agent_version}, the service's is {facts.cadenza}"
            yield Finding("WARN", f"agent on {name}", text, "install the same version")
        elif 0 < host.memory_mb < lane_memory[name]:
            counts = "a lane counts" if full else "its lanes count"
            text = f"{counts} {lane_memory[name]} MB, the host has {host.memory_mb}"
            yield Finding("WARN", f"memory of {name}", text, "lower RealMemory of its lanes")
        else:
            yield Finding("OK", f"agent on {name}", f"version {host.agent_version}")


def sharing(facts: Facts) -> Iterator[Finding]:
    """Check that jobs of the queue that opted in can share GPUs, by their memory and their users, if they are to."""
    cluster, settings = facts.recorded or facts.cluster, facts.settings
    managed = settings.guard.partitions
    jobs = [job for job in cluster.jobs if job.options and job.gpus and job.partition in managed] if cluster else []
    lanes: defaultdict[str, list[Node]] = defaultdict(list)
    for node in cluster.nodes if cluster else ():
        if node.gpus and managed & set(node.partitions):
            lanes[node.host].append(node)
    alone = all(len(nodes) == 1 for nodes in lanes.values())
    if len(jobs) < MIN_JOBS_TO_SHARE or not lanes or (alone and _shares_without_lanes(facts)):
        return
    whole = [replace(nodes[0], memory_mb=sum(node.memory_mb for node in nodes)) for nodes in lanes.values()]
    rows = [
        TraceJob(job.key.id, 0.0, job.gpus, 1.0, user=job.user, memory_gb_per_gpu=job.memory_mb / job.gpus / MB_PER_GB)
        for job in jobs
    ]
    found = unshareable_jobs(rows, whole, between_users=settings.sharing.share_between_users)
    if found.users + found.memory + found.host_memory == len(rows):
        advice = (
            "ask users for less memory (--mem), or set share_between_users = true"
            if found.users
            else ("ask users for less memory (--mem): sharing jobs have the host's memory together")
        )
        yield Finding("WARN", "sharing", f"nothing in the queue can share: {found.text()}", advice)
    else:
        yield Finding("OK", "sharing", found.text() or f"all {len(rows)} jobs of the queue that opted in can share")


def _reported_by(host: Host) -> Iterator[Finding]:
    """Yield the faults of a host that its agent reports, functions that it lacks, and GPUs in use without a lease."""
    for fault in host.faults:
        advice = f"on {host.name}: make room for the agent's state, set the clock by NTP"
        yield Finding("FAIL", f"agent on {host.name}", fault, advice)
    for lack in host.lacks:
        advice = "see docs/users/unmodified.md and docs/tuning.md, or switch it off"
        yield Finding("WARN", f"agent on {host.name}", lack, advice)
    for taken in host.taken:
        advice = "end the process, or wait for its end: until then no job gets these GPUs"
        yield Finding("WARN", f"GPUs of {host.name}", taken, advice)


def _missing_agent_advice(name: str, facts: Facts) -> str:
    """Return the advice for a host whose agent does not report."""
    if all(key.host != name for key in facts.keys):
        return f"it has no key: cadenza keygen {name}, and reload cadenzad"
    keys = f"its [agent] keys must have agents/{name}.key_secret and this service.key"
    return f"start cadenza-agent on {name}; its [agent] service must name this machine, and {keys}"


def connections(facts: Facts) -> Iterator[Finding]:
    """Check that the service may open enough files for a connection to each agent."""
    hosts = len({node.host for node in facts.cluster.nodes if node.gpus}) if facts.cluster is not None else 0
    needed = OWN_FILES + FILES_A_HOST * hosts
    if facts.file_limit is not None and facts.file_limit < needed:
        text = f"cadenzad may open {facts.file_limit} files, {hosts} hosts need {needed}"
        yield Finding("WARN", "connections", text, "LimitNOFILE=65536 in its unit, see docs/systemd/cadenzad.service")


CHECKS = (
    configuration,
    keys,
    versions,
    slurm_settings,
    priority,
    kill_switch,
    preemption,
    output_files,
    suspends_by_signal,
    full_memory,
    kill_wait,
    lanes,
    partitions,
    profiles,
    service,
    services,
    controllers,
    agents,
    sharing,
    connections,
)

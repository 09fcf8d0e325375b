"""keygen, config, doctor, run and the entry itself."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
import zmq.auth
from cli_rig import cluster, job, write_config
from click.shell_completion import ShellComplete
from click.testing import CliRunner, Result

from cadenza.policies.core.model import ClusterSnapshot, Host, Job, Node
from cadenza.profiler.errors import CommandFailedError
from cadenza.sidecar.config import SECTIONS
from cadenza.slurm_plugin.cli.main import COMMANDS, main
from cadenza.slurm_plugin.cli.profile import measure
from cadenza.slurm_plugin.gateway.slurm_gateway import parse
from cadenza.slurm_plugin.service import settings
from cadenza.slurm_plugin.service.agents.curve_keys import make_keys
from cadenza.slurm_plugin.service.settings import Settings, load_settings
from cadenza.slurm_plugin.service.store.reader import LargestState, host_faults
from cadenza.slurm_plugin.site import facts as facts_of_site
from cadenza.slurm_plugin.site.checks import Finding, examine, failed
from cadenza.slurm_plugin.site.facts import Facts, KeyFile, _keys
from cadenza.slurm_plugin.site.upgrade_check import upgrade


def run(*words: str) -> Result:
    return CliRunner().invoke(main, list(words))


# --- keygen ----------------------------------------------------------------------------------------------


def test_keygen_writes_a_pair_for_each_and_keeps_the_secrets_secret(tmp_path: Path) -> None:
    assert run("keygen", "n1", "n2", "--out", str(tmp_path / "keys")).exit_code == 0
    for name in ("service", "agents/n1", "agents/n2"):
        public, secret = zmq.auth.load_certificate(tmp_path / "keys" / f"{name}.key_secret")
        assert secret
        assert zmq.auth.load_certificate(tmp_path / "keys" / f"{name}.key") == (public, None)
        assert stat.S_IMODE((tmp_path / "keys" / f"{name}.key_secret").stat().st_mode) == 0o600
    assert len({path.read_bytes() for path in (tmp_path / "keys").rglob("*.key")}) == 3


def test_keygen_writes_where_the_service_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "DEFAULT_PATH", write_config(tmp_path))
    assert run("keygen", "n1").stdout.splitlines()[-1] == f"{tmp_path}/keys/agents/n1.key_secret"


def test_keygen_does_not_replace_keys_unasked(tmp_path: Path) -> None:
    def made(*words: str) -> Result:
        return run("keygen", *words, "--out", str(tmp_path))

    assert made("n1").exit_code == 0
    files = [tmp_path / name for name in ("service.key", "agents/n1.key", "agents/n2.key")]
    before = [path.read_bytes() for path in files[:2]]
    assert "--force" in made().stderr
    assert "--rotate" in made("n1", "n2").stderr
    assert made("../n1").exit_code == 2
    assert [path.read_bytes() for path in files[:2]] == before
    assert not files[2].exists()
    assert made("n2").exit_code == 0, "a host is added"
    assert made("--force").exit_code == 0
    assert [path.read_bytes() == old for path, old in zip(files, before, strict=False)] == [False, True]


def test_keygen_rotates_a_key_and_keeps_the_one_that_the_agent_has(tmp_path: Path) -> None:
    def made(*words: str) -> str:
        assert run("keygen", "n1", *words, "--out", str(tmp_path)).exit_code == 0
        return (tmp_path / "agents" / "n1.key").read_text()

    first, old = made(), tmp_path / "agents" / "n1.key.old"
    second = made("--rotate")
    assert (second != first, old.read_text()) == (True, first)
    assert made("--rotate") != second
    assert old.read_text() == first, "the agent may not have come with the second"
    made("--force")
    assert not old.exists()


@pytest.mark.parametrize("words", [("--rotate",), ("--force", "n1"), ("--force",)])
def test_keys_for_which_there_is_no_room_leave_those_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    assert run("keygen", "n1", "--out", str(tmp_path)).exit_code == 0

    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def full(folder: str | Path, name: str) -> None:
        path = Path(folder) / f"{name}.key"
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    before = files()
    with monkeypatch.context() as patch:
        patch.setattr(zmq.auth, "create_certificates", full)
        assert run("keygen", *words, "--out", str(tmp_path)).exit_code == 3
    assert files() == before
    if os.geteuid() == 0:
        secret = tmp_path / "service.key_secret"
        os.chown(secret, 65534, 65534)
        assert run("keygen", "--force", "--out", str(tmp_path)).exit_code == 0
        assert (secret.stat().st_uid, secret.stat().st_mode & 0o777) == (65534, 0o600), "the service still reads it"


def test_keygen_rotates_the_keys_of_all_hosts(tmp_path: Path) -> None:
    keys = tmp_path / "agents"
    assert run("keygen", "n1", "n2.site", "--out", str(tmp_path)).exit_code == 0
    before = {path.name: path.read_text() for path in keys.glob("*.key")}
    assert run("keygen", "--rotate", "--out", str(tmp_path)).exit_code == 0
    assert {path.stem: path.read_text() for path in keys.glob("*.key.old")} == before
    assert {path.name for path in keys.glob("*.key") if path.read_text() != before[path.name]} == before.keys()
    assert (tmp_path / "service.key").exists()


# --- configuration ---------------------------------------------------------------------------------------


def test_check_config_accepts_and_advises(tmp_path: Path) -> None:
    path = tmp_path / "cadenza.toml"
    path.write_text("[sharing]\nslice_s = 3\n")
    done = run("config", "--check", str(path))
    assert done.exit_code == 0
    assert "no partition is managed" in done.stdout
    assert "[service] poll_s exceeds [sharing] slice_s" in done.stdout


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[sharing]\nslice = 3\n", "did you mean slice_s?"),
        ("[sharing]\nslice_s = -1\n", "sharing.slice_s"),
        ("[sharing\n", "not TOML"),
    ],
)
def test_check_config_names_file_and_key(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "cadenza.toml"
    path.write_text(text)
    done = run("config", "--check", str(path))
    assert done.exit_code == 2
    assert str(path) in done.stderr
    assert said in done.stderr


@pytest.mark.parametrize(
    ("driver", "slice_s", "warned"), [("unattached", 60, True), ("unattached", 20, False), ("off", 60, False)]
)
def test_stops_that_nccls_watchdog_would_not_survive_are_named(
    tmp_path: Path, driver: str, slice_s: int, warned: bool
) -> None:
    path = tmp_path / "cadenza.toml"
    path.write_text(f'[agent]\ndriver_checkpoint = "{driver}"\n[sharing]\nslice_s = {slice_s}\n')
    done = run("config", "--check", str(path))
    assert done.exit_code == 0
    assert ("may be frozen for 960 s, and NCCL's watchdog ends processes after 480 s" in done.output) == warned


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    done = run("config", "--check", str(tmp_path / "none.toml"))
    assert done.exit_code == 2
    assert "none.toml" in done.stderr


def test_all_errors_of_the_files_are_named_at_once_with_the_values_that_are_allowed(tmp_path: Path) -> None:
    path = tmp_path / "cadenza.toml"
    path.write_text(
        '[service]\nmode = "aply"\npoll_s = "x"\nstroe = 1\n[policy]\norder = "strf"\n[guard]\npartitions = ["a", 3]\n'
        '[agent]\nkeys = "a\\nb"\ndriver_checkpoint = 3\n[nonsense]\n'
    )
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "conf.d" / "10.toml").write_text("[sharing]\nslice_s = -1\n")
    done = run("config", "--check", str(path))
    assert done.exit_code == 2
    said = sorted(line.removeprefix(f"cadenza: {tmp_path}/") for line in done.stderr.splitlines())
    assert said == sorted([
        "cadenza.toml:2: service.mode: 'aply' is none of observe, apply",
        "cadenza.toml:3: service.poll_s: expected `float`, got `str`",
        "cadenza.toml:4: unknown key service.stroe; did you mean store?",
        "cadenza.toml:6: policy.order: no ordering is called 'strf'; did you mean 'srtf'?",
        "cadenza.toml:8: guard.partitions: expected `str`, got `int`",
        "cadenza.toml:10: agent.keys: 'a b' is not one printable line",
        "cadenza.toml:11: agent.driver_checkpoint: expected one of off, unattached, always",
        f"cadenza.toml:12: unknown section [nonsense]; known here: {', '.join(sorted(SECTIONS))}",
        "conf.d/10.toml:2: sharing.slice_s: expected `float` > 0.0",
    ])  # fmt: skip


def test_show_config_is_a_configuration_with_origins(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "conf.d" / "10-site.toml").write_text("[sharing]\nslice_s = 7.5\n")
    done = run("config", str(path))
    assert done.exit_code == 0
    shown = tomllib.loads(done.stdout)
    assert shown["sharing"]["slice_s"] == 7.5
    assert shown["guard"]["partitions"] == ["gpu"]
    again = tmp_path / "again.toml"
    again.write_text(done.stdout)
    assert load_settings(again) == load_settings(path)
    rows = {
        (row["section"], row["key"]): row for row in json.loads(run("config", "--json", str(path)).stdout)["settings"]
    }
    assert rows["sharing", "slice_s"]["origin"].endswith("10-site.toml")
    assert rows["sharing", "suspend"]["origin"] == "default"
    assert all(row["meaning"] for row in rows.values())
    assert list(shown["expert"]) == ["kill_switch"], "of [expert] only what is set"


# --- doctor ----------------------------------------------------------------------------------------------

SLURM = parse("""Configuration data as of 2026-11-21
AccountingStorageTRES   = cpu,mem,gres/gpu
GresTypes               = gpu
JobRequeue              = 1
JobSubmitPlugins        = lua
PreemptMode             = OFF
PreemptParameters       = suspend_grace_time=0
PrioritySiteFactorPlugin = (null)
PriorityType            = priority/multifactor
PriorityWeightAge       = 1000
PriorityWeightFairShare = 10000
PriorityWeightTRES      = (null)
ProctrackType           = proctrack/cgroup
SchedulerParameters     = bf_interval=1,requeue_delay=0,batch_sched_delay=0
SelectType              = select/cons_tres
SelectTypeParameters    = CR_CPU_MEMORY
SLURM_VERSION           = 26.05.5

Cgroup Support Configuration:
""")


def healthy(tmp_path: Path) -> Facts:
    settings = load_settings(write_config(tmp_path))
    seen = cluster()
    files = (
        KeyFile("/keys/service.key_secret", True, 0o600),
        KeyFile("/keys/agents/n1.key", False, 0o644, "n1", key="K"),
    )
    source = {"pyslurm": "26.5.0"}
    return Facts(settings, "0.1.0", seen.time_s + 1, files, SLURM, source, "v0.0.45", seen, seen, (26, 5))


def changed(facts: Facts, **changes: object) -> Facts:
    return Facts(**{**{name: getattr(facts, name) for name in Facts.__struct_fields__}, **changes})


def with_nodes(seen: ClusterSnapshot, *nodes: Node) -> ClusterSnapshot:
    return ClusterSnapshot(seen.time_s, nodes, seen.jobs, seen.hosts)


def test_doctor_says_when_nothing_in_the_queue_can_share(tmp_path: Path) -> None:
    facts = healthy(tmp_path)
    lean = [job(number, f"j{number}", None, memory_mb=4000) for number in (1, 2)]
    wide = [replace(one, memory_mb=20_000) for one in lean]
    others = [lean[0], replace(lean[1], user="bob")]

    def found(jobs: list[Job], *, between_users: bool = True) -> list[tuple[str, str]]:
        sharing = replace(facts.settings.sharing, share_between_users=between_users)
        seen = changed(
            facts,
            recorded=replace(facts.recorded, jobs=tuple(jobs)),
            settings=msgspec.structs.replace(facts.settings, sharing=sharing),
        )
        return [(one.level, one.observation) for one in examine(seen) if one.about == "sharing"]

    assert found(lean) == [("OK", "all 2 jobs of the queue that opted in can share")]
    assert found(lean[:1]) == []
    ((level, text),) = found(wide)
    assert level == "WARN"
    assert "nothing in the queue can share: 2 of 2 jobs can share no GPU: 2 ask for so much memory" in text
    assert found(others) == found(lean)
    ((level, text),) = found(others, between_users=False)
    assert (level, "2 have no other job of their user" in text) == ("WARN", True)


def test_doctor_misses_further_lanes_only_where_jobs_are_to_take_turns(tmp_path: Path) -> None:
    facts = healthy(tmp_path)
    assert facts.cluster is not None
    alone = with_nodes(facts.cluster, facts.cluster.nodes[0])
    two = replace(alone, jobs=tuple(job(number, f"j{number}", None) for number in (1, 2)))

    def levels(share: str) -> dict[str, str]:
        policy = msgspec.structs.replace(facts.settings.policy, share=share)
        settings = msgspec.structs.replace(facts.settings, policy=policy)
        seen = changed(facts, cluster=alone, recorded=two, settings=settings)
        return {one.about: one.level for one in examine(seen) if one.about in ("lanes", "sharing")}

    assert levels("preemption") == {"lanes": "OK"}
    assert levels("timeslice") == {"lanes": "WARN", "sharing": "OK"}


def test_doctor_finds_nothing_on_a_healthy_site(tmp_path: Path) -> None:
    findings = examine(healthy(tmp_path))
    assert {finding.level for finding in findings} == {"OK"}
    assert not failed(findings)


def test_doctor_shows_the_source_and_its_versions(tmp_path: Path) -> None:
    json_source = {"json": "v0.0.42", "scontrol": "24.11.5", "user": "u", "reason": "pyslurm cannot be imported"}
    slurm = {**SLURM, "SLURM_VERSION": "24.11.5", "SchedulerParameters": "batch_sched_delay=0"}
    findings = examine(changed(healthy(tmp_path), slurm=slurm, source=json_source, plugin=(24, 11)))
    assert {finding.level for finding in findings} == {"OK"}, "24.11 has no requeue_delay"
    (shown,) = (finding.observation for finding in findings if finding.about == "source")
    assert shown == "Slurm's JSON v0.0.42, commands of Slurm 24.11.5: pyslurm cannot be imported"
    (shown,) = (finding.observation for finding in examine(healthy(tmp_path)) if finding.about == "pyslurm")
    assert shown == "for Slurm 26.05"
    lists = "offer their JSON as v0.0.47, and Cadenza reads v0.0.42, v0.0.46"
    for seen, level, text in (
        (healthy(tmp_path), "OK", "v0.0.45; "),
        (changed(healthy(tmp_path), json=None, problems={"json": lists}), "WARN", lists),
    ):
        (found,) = (finding for finding in examine(seen) if finding.about == "Slurm's JSON")
        assert found.level == level
        assert found.observation.startswith(text)


def broken(name: str, facts: Facts) -> Facts:
    seen = facts.cluster
    assert seen is not None
    first, second = seen.nodes
    lane = {name: getattr(second, name) for name in ("name", "host", "lane", "cpus", "memory_mb")}
    return {
        "gang": lambda: changed(facts, slurm={**SLURM, "PreemptMode": "GANG,SUSPEND"}),
        "suspend": lambda: changed(facts, slurm={**SLURM, "PreemptMode": "SUSPEND"}),
        "no mode": lambda: changed(facts, slurm={**SLURM, "PreemptMode": ""}),
        "select": lambda: changed(facts, slurm={**SLURM, "SelectType": "select/linear"}),
        "pyslurm": lambda: changed(facts, source={"pyslurm": "25.11.2"}),
        "secret": lambda: changed(facts, keys=(KeyFile("/keys/service.key_secret", True, 0o644), facts.keys[1])),
        "no key": lambda: changed(facts, keys=facts.keys[:1]),
        "lane gpus": lambda: changed(facts, cluster=with_nodes(seen, first, Node(**lane, gpus=1, partitions=("gpu",)))),
        "lane 0": lambda: changed(facts, cluster=with_nodes(seen, second)),
        "foreign": lambda: changed(
            facts, cluster=with_nodes(seen, first, Node(**lane, gpus=2, gpu_type="a100", partitions=("gpu", "all")))
        ),
        "agent": lambda: changed(facts, recorded=ClusterSnapshot(seen.time_s, seen.nodes, (), (Host("n1", False),))),
        "service": lambda: changed(facts, now_s=seen.time_s + 3600),
        "disk": lambda: changed(facts, store_faults=("the disk of the store is full",)),
        "state": lambda: changed(facts, slurm={**SLURM, "StateSaveLocation": "/state"}, state_full=True),
        "host": lambda: changed(
            facts, recorded=replace(seen, hosts=(replace(seen.hosts[0], faults=("its clock is an hour ahead",)),))
        ),
        "slurm": lambda: changed(facts, slurm=None, problems={"slurm": "slurmctld is down"}),
    }[name]()


@pytest.mark.parametrize(
    ("name", "about"),
    [
        ("gang", "PreemptMode"), ("suspend", "PreemptMode"), ("no mode", "PreemptMode"),
        ("select", "SelectType"), ("pyslurm", "pyslurm"), ("secret", "keys"),
        ("no key", "keys"), ("lane gpus", "lanes of n1"), ("lane 0", "lanes of n1"), ("foreign", "lanes of n1"),
        ("agent", "agent on n1"), ("service", "service"), ("slurm", "Slurm"), ("disk", "store"),
        ("state", "StateSaveLocation"),
        ("host", "agent on n1"),
    ],
)  # fmt: skip
def test_doctor_names_what_is_wrong_and_what_to_do(tmp_path: Path, name: str, about: str) -> None:
    findings = examine(broken(name, healthy(tmp_path)))
    assert [finding.about for finding in findings if finding.level == "FAIL"] == [about]
    assert all(finding.advice for finding in findings if finding.level == "FAIL" and finding.about != "Slurm")


@pytest.mark.parametrize(
    ("changes", "found", "word"),
    [
        ({"PriorityType": "priority/basic"}, [("FAIL", "PriorityType")], "has no SiteFactor"),
        ({"PriorityWeightAge": "0", "PriorityWeightFairShare": "0"}, [("FAIL", "PriorityWeight*")], "priority 1"),
        ({"PriorityWeightFairShare": "0"}, [("WARN", "PriorityWeightPartition")], "just submitted"),
        ({"PriorityWeightFairShare": "0", "PriorityWeightTRES": "GRES/gpu=50"}, [], ""),
        ({"PrioritySiteFactorPlugin": "site_factor/example"}, [("FAIL", "PrioritySiteFactorPlugin")], "undoes"),
    ],
    ids=str,
)
def test_doctor_says_where_no_sitefactor_counts(
    tmp_path: Path, changes: dict[str, str], found: list[tuple[str, str]], word: str
) -> None:
    site = healthy(tmp_path)

    def faults(share: str) -> list[Finding]:
        policy = msgspec.structs.replace(site.settings.policy, share=share)
        settings = msgspec.structs.replace(site.settings, policy=policy)
        return [
            one for one in examine(changed(site, slurm={**SLURM, **changes}, settings=settings)) if one.level != "OK"
        ]

    assert [(one.level, one.about) for one in faults("preemption")] == found
    assert all(word in one.observation and "=" in one.advice for one in faults("preemption"))
    assert faults("timeslice") == [], "turns need no priority"


def test_doctor_says_that_the_kill_switch_is_set(tmp_path: Path) -> None:
    (found,) = [one for one in examine(changed(healthy(tmp_path), killed=True)) if one.level != "OK"]
    assert (found.level, found.about) == ("WARN", "kill switch")
    assert found.advice.startswith("rm ")


@pytest.mark.parametrize(
    ("value", "plugin", "level", "word"),
    [
        ("1", (26, 5), "OK", "1"), ("0", (26, 5), "OK", "the plugin appends"), ("0", None, "WARN", "truncates"),
        ("0", (25, 11), "WARN", "truncates"), ("1", None, "OK", "1"),
    ],
)  # fmt: skip
def test_doctor_warns_where_a_job_that_comes_back_loses_its_output(
    tmp_path: Path, value: str, plugin: tuple[int, int] | None, level: str, word: str
) -> None:
    site = changed(healthy(tmp_path), slurm={**SLURM, "JobFileAppend": value}, plugin=plugin)
    (found,) = (one for one in examine(site) if one.about == "JobFileAppend")
    assert (found.level, word in found.observation) == (level, True)
    assert found.advice.startswith("JobFileAppend=1" if level == "WARN" else "")


def test_doctor_warns_where_a_suspend_is_a_signal(tmp_path: Path) -> None:
    site = changed(healthy(tmp_path), slurm={**SLURM, "ProctrackType": "proctrack/linuxproc"})
    assert [one.about for one in examine(site) if one.level != "OK"] == ["ProctrackType"]


def test_doctor_knows_lanes_that_have_the_whole_memory_and_that_slurm_must_keep_jobs_to_theirs(tmp_path: Path) -> None:
    site = healthy(tmp_path)
    assert site.recorded is not None
    lanes_mb, kept = [node.memory_mb for node in site.recorded.nodes], {**SLURM, "ConstrainRAMSpace": "yes"}
    full = msgspec.structs.replace(site.settings.service, lanes_memory="full")
    settings = msgspec.structs.replace(site.settings, service=full)

    def warned(host_mb: int, **changes: object) -> list[tuple[str, str]]:
        host = replace(site.recorded.hosts[0], memory_mb=host_mb)  # type: ignore[union-attr]
        seen = changed(site, recorded=replace(site.recorded, hosts=(host,)), **changes)
        return [(one.about, one.observation.partition(":")[0]) for one in examine(seen) if one.level == "WARN"]

    of_host, total = "memory of n1", sum(lanes_mb)
    assert warned(total) == []
    assert warned(total - 1) == [(of_host, f"its lanes count {total} MB, the host has {total - 1}")]
    assert warned(max(lanes_mb), settings=settings, slurm=kept) == []
    few = max(lanes_mb) - 1
    assert warned(few, settings=settings, slurm=kept) == [(of_host, f"a lane counts {few + 1} MB, the host has {few}")]
    for words, said in (({"ConstrainRAMSpace": "no"}, "no"), ({}, "unset")):
        assert warned(total, settings=settings, slurm={**SLURM, **words}) == [("ConstrainRAMSpace", said)]


@pytest.mark.parametrize("mode", ["OFF", "REQUEUE", "CANCEL", "PRIORITY,REQUEUE", "WITHIN,CANCEL"])
def test_doctor_accepts_preemption_that_suspends_nothing(tmp_path: Path, mode: str) -> None:
    site = changed(healthy(tmp_path), slurm={**SLURM, "PreemptMode": mode})
    assert not failed(examine(site))
    warns = [finding.about for finding in examine(site) if finding.level == "WARN"]
    assert warns == ([] if mode == "OFF" else ["preemption"])
    agent = msgspec.structs.replace(site.settings.agent, save_before_suspend_s=300.0)
    saves = msgspec.structs.replace(site.settings, agent=agent)
    assert {finding.level for finding in examine(changed(site, settings=saves))} == {"OK"}


@pytest.mark.parametrize(
    ("facts", "text"), [({"up": False}, "is down"), ({"ending_s": 34.0}, "has a job that has been ending for 34 s")]
)
def test_doctor_names_a_lane_that_takes_no_jobs(tmp_path: Path, facts: dict[str, Any], text: str) -> None:
    site = healthy(tmp_path)
    assert site.cluster is not None
    first, second = site.cluster.nodes
    found = examine(changed(site, cluster=with_nodes(site.cluster, first, replace(second, **facts))))
    (warned,) = (one for one in found if one.about == "lanes of n1")
    assert (warned.level, warned.observation) == ("WARN", f"{second.name} {text}")
    assert f"scontrol show node {second.name}" in warned.advice


def test_doctor_passes_on_what_agents_lack_and_warns_of_hosts_without_a_key(tmp_path: Path) -> None:
    facts = healthy(tmp_path)
    seen = facts.recorded
    assert seen is not None
    lacks = replace(seen.hosts[0], lacks=("driver_checkpoint = always: cuda-bindings is missing",))
    found = examine(changed(facts, recorded=replace(seen, hosts=(lacks,))))
    assert [one.observation for one in found if one.level == "WARN"] == list(lacks.lacks)
    own = (KeyFile("/keys/agents/n2.key", False, 0o644, "n2"),)
    found = examine(changed(facts, keys=own, recorded=replace(seen, hosts=())))
    assert [one.advice for one in found if one.about == "agent on n1"] == [
        "it has no key: cadenza keygen n1, and reload cadenzad"
    ]


def test_doctor_says_of_a_slurmctld_that_is_stopped_that_it_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "slurm_load_ctl_conf error: Socket timed out on send/recv operation"
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "{said}" >&2\nexit 1\n')
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    seen = facts_of_site.gather(write_config(tmp_path))
    late = changed(healthy(tmp_path), now_s=1e12, slurm=None, problems=seen.problems)
    found = {one.about: one for one in examine(late)}
    assert found["Slurm"].observation == f"slurmctld does not answer: scontrol show config: {said}"
    assert found["service"].advice == "it makes none without slurmctld"
    none = "scontrol is not installed here; run this where Slurm's commands are"
    found = {one.about: one for one in examine(changed(late, problems={"slurm": none}, cluster=None))}
    assert (found["Slurm"].observation, found["Slurm"].advice) == (none, "")
    assert found["cluster"].observation == "nodes and partitions are not known, because Slurm was not read"


def test_doctor_names_a_relay_without_a_key(tmp_path: Path) -> None:
    facts = healthy(tmp_path)
    table = facts.settings.service
    for relays, named in ((("n1",), []), (("n1", "login1"), ["login1"])):
        service = msgspec.structs.replace(table, relays=relays)
        found = examine(changed(facts, settings=msgspec.structs.replace(facts.settings, service=service)))
        assert [one.observation.split(": ")[1] for one in found if one.observation.startswith("relays ")] == named


def test_doctor_names_both_versions_where_agent_and_service_refuse_each_other(tmp_path: Path) -> None:
    facts = healthy(tmp_path)
    seen = facts.recorded
    assert seen is not None
    old = replace(seen.hosts[0], agent_alive=False, refused="speaks wire version 1, the service 2")
    (found,) = (one for one in examine(changed(facts, recorded=replace(seen, hosts=(old,)))) if one.level == "FAIL")
    assert (found.about, found.observation) == ("agent on n1", "it speaks wire version 1, the service 2")
    assert "same build" in found.advice
    assert host_faults(replace(seen, hosts=(old,)), ["n1"]) == ("the agent of n1 speaks wire version 1, the service 2",)


def test_doctor_names_gpus_that_are_taken_and_says_where_a_jobs_word_is_all_there_is(tmp_path: Path) -> None:
    facts = healthy(tmp_path)
    seen = facts.recorded
    assert seen is not None
    taken = replace(seen.hosts[0], taken=("pid 7 of no job that is known uses GPU 0 without a lease",))
    (tmp_path / "word").mkdir()
    believing = load_settings(write_config(tmp_path / "word", "\n[sharing]\nsuspend = false\n"))
    found = examine(changed(facts, recorded=replace(seen, hosts=(taken,)), settings=believing))
    warned = {one.about: one.observation for one in found if one.level == "WARN"}
    assert warned["GPUs of n1"] == taken.taken[0]
    assert "a job's word alone" in warned["sharing.suspend"]


@pytest.mark.parametrize(
    ("saved_bytes_s", "level", "text"),
    [
        (None, "OK", "30 s: enough to save the largest state so far (job 7, 61440 MB) at 2048 MB/s; no checkpoint was"),
        (2.0 * (1 << 30), "OK", "30 s; a checkpoint of the largest state so far (job 7, 61440 MB) takes 30 s at the"),
        (1.5 * (1 << 30), "WARN", "30 s; a checkpoint of the largest state so far (job 7, 61440 MB) takes 40 s at the"),
    ],
)
def test_doctor_compares_kill_wait_with_a_checkpoint_of_the_largest_state(
    tmp_path: Path, saved_bytes_s: float | None, level: str, text: str
) -> None:
    largest = LargestState(7, 60 << 30, saved_bytes_s)
    facts = changed(healthy(tmp_path), slurm={**SLURM, "KillWait": "30 sec"}, largest_state=largest)
    (found,) = (one for one in examine(facts) if one.about == "KillWait")
    assert found.level == level
    assert found.observation.startswith(text)
    assert found.advice.startswith("KillWait=40, or" if level == "WARN" else "")
    assert all(one.about != "KillWait" for one in examine(changed(facts, largest_state=None)))


@pytest.mark.parametrize(
    ("running", "to", "expected"),
    [
        ("26.05.5", (26, 11), {("OK", "Slurm"), ("OK", "Slurm's JSON"), ("WARN", "pyslurm"), ("WARN", "plugin")}),
        ("26.05.5", (26, 5), {("OK", "Slurm"), ("OK", "Slurm's JSON")}),
        ("24.11.5", (26, 5), {("OK", "Slurm"), ("OK", "Slurm's JSON"), ("WARN", "SchedulerParameters")}),
        ("24.11.5", (26, 11), {("FAIL", "Slurm"), ("OK", "Slurm's JSON")}),
        ("26.05.5", (24, 11), {("FAIL", "Slurm"), ("OK", "Slurm's JSON")}),
        ("28.05.1", (28, 11), {("OK", "Slurm"), ("FAIL", "Slurm's JSON")}),
    ],
)
def test_doctor_says_what_an_upgrade_of_slurm_would_meet(
    tmp_path: Path, running: str, to: tuple[int, int], expected: set[tuple[str, str]]
) -> None:
    slurm = {**SLURM, "SLURM_VERSION": running, "SchedulerParameters": "bf_interval=1"}
    found = {(one.level, one.about) for one in upgrade(changed(healthy(tmp_path), slurm=slurm), to)}
    assert expected <= found
    assert (("WARN", "SchedulerParameters") in found) == (running < "25.11")


def test_doctor_takes_releases_of_slurm_only(tmp_path: Path) -> None:
    done = run("doctor", "--to", "26.5", "--config", str(write_config(tmp_path)))
    assert done.exit_code == 2
    assert "'26.5' is no release such as 26.05" in done.stderr


@pytest.mark.parametrize(
    ("hosts", "service", "level"),
    [
        (("ctl",), "tcp://ctl:1", None),
        (("ctl", "ctl2"), "tcp://ctl:1", "WARN"),
        (("ctl", "ctl2"), "tcp://ctl:1,tcp://ctl2:1", "OK"),
    ],
)
def test_doctor_wants_the_service_of_each_controller_named(
    tmp_path: Path, hosts: tuple[str, ...], service: str, level: str | None
) -> None:
    facts = healthy(tmp_path)
    settings = msgspec.structs.replace(
        facts.settings, agent=msgspec.structs.replace(facts.settings.agent, service=service)
    )
    named = {f"SlurmctldHost[{at}]": host for at, host in enumerate(hosts)}
    found = examine(changed(facts, settings=settings, slurm={**SLURM, **named}))
    assert [one.level for one in found if one.about == "controllers"] == ([level] if level else [])


def test_doctor_does_not_miss_rounds_of_a_service_in_standby(tmp_path: Path) -> None:
    old = changed(healthy(tmp_path), now_s=healthy(tmp_path).now_s + 5000)
    for standby, level in (("", "FAIL"), ("stands by: slurmctld of ctl2 is in control", "OK")):
        found = examine(changed(old, standby=standby))
        assert [one.level for one in found if one.about == "service"] == [level]


OWN = 'bind = "tcp://*:6851"\n[expert]\njobs_socket = "/run/cadenzad-b/jobs.sock"\n'


@pytest.mark.parametrize(
    ("partition", "service", "found"),
    [
        ("other", OWN, [("OK", "manages other hosts")]),
        ("gpu", OWN, [("FAIL", "manages n1, n2, too: both services would give out the GPUs there")]),
        ("all", OWN, [("FAIL", "manages n2, too: both services would give out the GPUs there")]),
        ("other", "", [("FAIL", "has the same [service] bind, [expert] jobs_socket")]),
        ("other", "bind = 1\n", [("FAIL", "bind: expected `str`, got `int`")]),
        ("", OWN, []),
    ],
)
def test_doctor_refuses_a_second_service_with_a_host_in_common(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, partition: str, service: str, found: list[tuple[str, str]]
) -> None:
    monkeypatch.setattr(facts_of_site, "DEFAULT_PATH", tmp_path / "cadenza.toml")
    base = healthy(tmp_path)
    folder = tmp_path / "b"
    folder.mkdir()
    names = json.dumps([partition] if partition else [])
    (folder / "cadenza.toml").write_text(f'[service]\nstore = "b.db"\n{service}[guard]\npartitions = {names}\n')
    nodes = (*base.cluster.nodes, lane("n2", "gpu", "all"), lane("n3", "other"), lane("n3-l1", "other"))
    seen = with_nodes(base.cluster, *nodes)
    others = facts_of_site.gather(tmp_path / "cadenza.toml").others
    findings = examine(changed(base, cluster=seen, others=others))
    assert [(one.level, one.observation.split("toml ")[-1].split("service.")[-1]) for one in findings
            if one.about == "services"] == found  # fmt: skip
    assert facts_of_site.gather(folder / "cadenza.toml").others.keys() == {str(tmp_path / "cadenza.toml")}
    known = any(isinstance(one, Settings) and "other" in one.guard.partitions for one in others.values())
    assert ("lanes of n3" in {one.about for one in findings}) != known, "no service of this machine manages it"


def lane(name: str, *partitions: str) -> Node:
    return Node(name, name.partition("-")[0], int("-" in name), 8, 16000, 2, "a100", partitions)


@pytest.mark.parametrize(("slice_s", "timeout_s", "late"), [(10, 20, False), (10, 21, True), (60, 120, False)])
def test_doctor_warns_where_a_job_that_stops_late_wins_gpu_time(
    tmp_path: Path, slice_s: int, timeout_s: int, late: bool
) -> None:
    more = f"\n[sharing]\nslice_s = {slice_s}\nyield_timeout_s = {timeout_s}\n"
    (tmp_path / "late").mkdir()
    settings = load_settings(write_config(tmp_path / "late", more))
    warned = [one for one in examine(changed(healthy(tmp_path), settings=settings)) if one.level == "WARN"]
    assert [one.about for one in warned] == ["sharing.yield_timeout_s"] * late
    assert all(f"at most {2 * slice_s}" in one.advice for one in warned)


def test_doctor_reads_the_keys_and_says_which_one_serves_several_hosts(tmp_path: Path) -> None:
    facts = healthy(tmp_path)
    keys = Path(facts.settings.service.keys)
    assert [(Path(one.path).name, one.mode) for one in _keys(facts.settings)] == [("service.key_secret", None)]
    make_keys(keys, ("n1", "n2"))
    make_keys(keys, ("n2",), rotate=True)
    (keys / "agents" / "n2.key_secret").unlink()
    (keys / "agents" / "n3.key").write_bytes((keys / "agents" / "n1.key").read_bytes())
    found = {one.observation: one for one in examine(changed(facts, keys=_keys(facts.settings)))}
    warned = [text for text, one in found.items() if one.level == "WARN" and one.about == "keys"]
    assert warned == [
        "n2 still has its old key, which works until it has the new",
        "the secret key of n1 is still on this machine",
        "one key serves n1 n3: root of each speaks for all of them",
    ]
    assert not failed(tuple(found.values()))


def test_doctor_counts_the_files_of_a_service_with_many_agents(tmp_path: Path) -> None:
    facts = healthy(tmp_path)
    seen = facts.cluster
    assert seen is not None
    many = with_nodes(seen, *(replace(seen.nodes[0], name=f"n{number}", host=f"n{number}") for number in range(500)))
    for limit, warned in ((1024, True), (65536, False), (None, False)):
        found = examine(changed(facts, cluster=many, file_limit=limit))
        assert any(one.about == "connections" for one in found) is warned, limit


def test_doctor_saves_what_a_bug_report_needs(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    done = run("doctor", "--save", str(file), "--config", str(write_config(tmp_path)))
    assert done.exit_code == 1
    assert f"written: {file}" in done.stderr
    saved = json.loads(file.read_bytes())
    assert {"Slurm", "keys"} <= {one["about"] for one in saved["findings"]}
    assert ("guard", "partitions") in {(row["section"], row["key"]) for row in saved["settings"]}
    assert "scontrol" in saved["slurm"], "why Slurm's answer is not there"


def test_doctor_runs_where_nothing_is_installed(tmp_path: Path) -> None:
    done = run("doctor", "--json", "--config", str(write_config(tmp_path)))
    assert done.exit_code == 1
    rows = json.loads(done.stdout)["rows"]
    assert {"Slurm", "keys", "service"} <= {row["about"] for row in rows if row["level"] == "FAIL"}


# --- the entry -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for rows in COMMANDS.values() for name in rows])
def test_every_command_has_help_and_its_line_in_the_list(name: str) -> None:
    assert run(name, "--help").exit_code == 0
    assert name in run("--help").stdout


def leaves(command: click.Command, ctx: click.Context) -> Iterator[tuple[str, list[click.Parameter]]]:
    """Yield each command that does something, and its options."""
    if isinstance(command, click.Group):
        for name in command.list_commands(ctx):
            inner = command.get_command(ctx, name)
            assert inner is not None
            yield from leaves(inner, click.Context(inner, info_name=name, parent=ctx))
    else:
        yield ctx.command_path, [one for one in command.params if isinstance(one, click.Option)]


def test_there_are_21_commands_in_four_groups_and_104_options_at_most() -> None:
    found = dict(leaves(main, click.Context(main, info_name="cadenza")))
    assert list(COMMANDS) == ["Users", "Evaluate", "Operate", "Install"]
    assert len(found) <= 21, list(found)
    assert sum(map(len, found.values())) <= 104


def test_the_help_of_every_command_fits_80_columns_and_cuts_no_sentence() -> None:
    for path in ("", *(path.partition(" ")[2] for path, _ in leaves(main, click.Context(main, info_name="cadenza")))):
        text = CliRunner().invoke(main, [*path.split(), "--help"], terminal_width=80).stdout
        assert re.search(r"[a-z]\.\.\.$", text, re.MULTILINE) is None, path
        assert [line for line in text.splitlines() if len(line) > 80] == [], path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("tpo",), "no command 'tpo'; did you mean top?"),
        (("wat",), "no command 'wat'; did you mean watch?"),
        (("frobnicate",), "no command 'frobnicate'; see `main --help`"),
        (("sweep", "stat"), "no command 'stat'; did you mean status?"),
        (("simulate", "--set", "weigths=none"), "no key 'weigths'; did you mean weights?"),
        (("simulate", "--set", "x=1"), "no key 'x'; known here: weights, baseline,"),
        (("simulate", "--set", "turns"), "turns has no value: give turns=fair|order"),
        (("profile", "run", "--set", "turns=x", "true"), "--set turns: 'x' is not a valid integer"),
        (("profile", "run", "--set", "samples=0", "true"), "--set samples: 0 is not in the range x>=1"),
    ],
)
def test_a_wrong_name_is_met_with_the_nearest_one(words: tuple[str, ...], said: str) -> None:
    done = run(*words)
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run("keygen", "n1", "--out", str(tmp_path / "file" / "keys"))
    assert (done.exit_code, done.stderr) == (3, f"cadenza: {tmp_path}/file/keys: Not a directory\n")
    assert isinstance(run("--debug", "keygen", "n1", "--out", str(tmp_path / "file" / "keys")).exception, OSError)


def test_a_profiled_command_that_fails_shows_its_own_last_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise CommandFailedError("python train.py: exit code 1; its output is in p.log and ends with", "epoch 0", "bad")

    monkeypatch.setattr(measure, "_session", fail)
    done = run("profile", "run", "--", "python", "train.py")
    assert done.exit_code == 1
    first = "cadenza: python train.py: exit code 1; its output is in p.log and ends with"
    assert done.stderr.splitlines() == [first, "  epoch 0", "  bad"]


def test_color_is_left_out_where_a_site_wants_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value, colored in (("NO_COLOR", "", True), ("NO_COLOR", "1", False)):
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv(variable, value)
        done = CliRunner().invoke(main, ["doctor", "--config", str(write_config(tmp_path))], color=True)
        assert ("\x1b[31m" in done.stdout) is colored, (variable, value)


def test_help_imports_nothing_slow() -> None:
    script = (
        "import sys; from cadenza.slurm_plugin.cli.main import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "print([name for name in ('rich', 'zmq', 'msgspec', 'torch', 'sqlite3') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_run_executes_the_command_and_returns_its_exit_code() -> None:
    words = ["-m", "cadenza.slurm_plugin.cli", "run", "--", sys.executable, "-c", "print('here'); raise SystemExit(5)"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("here\n", 5)


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    path = tmp_path / "cadenza.toml"
    path.write_text("[nonsense]\n")
    assert run("config", "--check", str(path)).stderr.count("\n") == 1
    assert run("--debug", "config", "--check", str(path)).exception.__class__.__name__ == "ConfigError"


def test_a_file_of_an_editor_of_windows_is_read_and_a_list_in_one_text_is_noted(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_bytes(b'\xef\xbb\xbf[guard]\npartitions = ["gpu,gpu2", "ok"]\n')
    done = run("config", "--check", str(path))
    assert done.exit_code == 0, done.stderr
    assert "[guard] partitions: 'gpu,gpu2' is no name of a partition" in done.stdout + done.stderr


def test_check_config_names_bad_profiles_and_idle_sections(tmp_path: Path) -> None:
    (tmp_path / "resnet.json").write_text('{"schema": "cadenza.profile/1", "model": "resnet", "iteration_s": NaN}')
    path = tmp_path / "cadenza.toml"
    path.write_text(
        '[policy]\nshare = "timeslice"\nallocate = "tune"\norder = "srtf"\nplace = true\n[gandiva]\npack = false\n'
        f'[profiles]\ndirectory = "{tmp_path}"\n'
    )
    done = run("config", "--check", str(path))
    assert done.exit_code == 0
    for said in (
        "profile not used: resnet.json: NaN is not a number",
        "holds no profile",
        "[policy] place = true has no effect with share = 'timeslice'",
        "[gandiva] has no effect",
    ):
        assert said in done.stdout


def test_check_config_names_the_line_of_a_wrong_policy(tmp_path: Path) -> None:
    path = tmp_path / "cadenza.toml"
    path.write_text('[policy]\norder = "strf"\n')
    done = run("config", "--check", str(path))
    assert done.exit_code == 2
    assert f"{path}:2: policy.order: no ordering is called 'strf'; did you mean 'srtf'?" in done.stderr


def test_doctor_warns_of_profiles_that_are_not_used(tmp_path: Path) -> None:
    facts = changed(healthy(tmp_path), profiles=2, profile_problems=("resnet.json: model 'resnet': throughput: …",))
    found = [finding for finding in examine(facts) if finding.about == "profiles"]
    assert [finding.level for finding in found] == ["WARN", "OK"]


def test_the_shell_completes_commands_policies_and_keys() -> None:
    def completed(*words: str) -> list[str]:
        found = ShellComplete(main, {}, "cadenza", "_CADENZA_COMPLETE").get_completions(list(words[:-1]), words[-1])
        return [one.value for one in found]

    assert completed("wh") == ["why", "whatif"]
    assert completed("simulate", "--share", "g") == ["gandiva"]
    assert completed("profile", "run", "--set", "s") == ["samples=", "steps-per-epoch=", "storage-mb-s="]

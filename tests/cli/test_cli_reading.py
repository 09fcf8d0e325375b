"""top, why and release over a store that a real round wrote."""

from __future__ import annotations

import io
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from cli_rig import SNAPSHOT_FILE, cluster, fill, job, write_config
from click.testing import CliRunner, Result

from cadenza.policies.core.decision import Decision, Memory
from cadenza.policies.core.errors import EnvironmentLacks
from cadenza.policies.core.model import Gpu, JobKey, JobUsage, Lease, Progress, Share
from cadenza.policies.core.profile import Profile, linked
from cadenza.sidecar.clock import SystemClock
from cadenza.slurm_plugin.cli.common import JobId
from cadenza.slurm_plugin.cli.main import main
from cadenza.slurm_plugin.gateway import slurm_gateway, source_gateway
from cadenza.slurm_plugin.service.job_access import Viewer
from cadenza.slurm_plugin.service.own_jobs import own_part
from cadenza.slurm_plugin.service.settings import load_settings
from cadenza.slurm_plugin.service.store.reader import Round
from cadenza.slurm_plugin.service.store.record_codec import encode_snapshot
from cadenza.slurm_plugin.service.store.writer import SqliteStore
from cadenza.slurm_plugin.terminal import Terminal
from cadenza.slurm_plugin.views.cluster_view import Recent, build, closed_lanes
from cadenza.slurm_plugin.views.top_screen import Screen


def run(*words: str) -> Result:
    return CliRunner().invoke(main, list(words))


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(SNAPSHOT_FILE, str(tmp_path / "snapshot.json"))
    return write_config(tmp_path, 'mode = "apply"')


@pytest.fixture
def sharing(config: Path) -> Path:
    """Job 1 holds both GPUs, job 2 has yielded and is suspended, job 3 is pending."""
    waiting = job(3, "late", None, state="PENDING", nodes=())
    both = (job(1, "first", "held"), job(2, "second", "yielded", state="SUSPENDED"), waiting)
    fill(config, cluster(*both), apply=True)
    return config


def test_top_shows_who_holds_and_who_waits(sharing: Path) -> None:
    done = run("top", "--once", "--json", "--config", str(sharing))
    view = json.loads(done.stdout)
    assert done.exit_code == 0
    assert view["mode"] == "apply"
    assert view["agents"][0] == {
        "host": "n1", "alive": True, "version": "0.1.0", "memory_mb": 64000, "memory_free_mb": 60000,
    }  # fmt: skip
    assert [(gpu["holder"], gpu["waiting"]) for gpu in view["gpus"]] == [(1, [2]), (1, [2])]
    first, second, late = view["jobs"]
    assert (first["lane"], first["lease"], first["last_action"], first["share"]) == (0, "held", "yield", 0.5)
    assert first["reason"] == "its turn ends: job 2 is next on n1:gpu0-1"
    assert (second["lane"], second["slurm_state"], second["step"]) == (1, "SUSPENDED", 700)
    assert (late["lease"], late["slurm_state"], late["gpus_wanted"]) == ("", "PENDING", 2)
    assert (view["yields"], view["yield_p50_s"]) == (1, 0.025)


def test_top_shows_idle_gpus_and_the_jobs_that_could_use_them(config: Path) -> None:
    one = Gpu("n1", 0)
    holder = job(1, "first", "held")
    holder = replace(holder, lease=replace(holder.lease or Lease("held", ()), gpus=(one,), checkpoints=True))
    pending = job(3, "late", None, state="PENDING", nodes=())
    fill(config, cluster(holder, replace(pending, gpus=1), replace(pending, key=JobKey(4, 0), gpus=2)), apply=True)
    view = json.loads(run("top", "--once", "--json", "--config", str(config)).stdout)
    assert (view["idle_gpus"], view["waiting_that_fit"]) == (1, [3])
    assert (view["movable_jobs"], view["managed_jobs"]) == (1, 1)
    text = " ".join(run("top", "--once", "--config", str(config)).stdout.split())
    assert "idle GPUs 1, 1 jobs that fit wait" in text
    assert "can move 1/1" in text


def printed(view: object) -> str:
    """Return what a terminal of 80 columns shows."""
    out = Terminal(file=io.StringIO(), force_terminal=True, color_system=None, width=80)
    out.print(view)
    return out.file.getvalue()  # type: ignore[attr-defined]


def test_top_tells_a_user_which_gpus_others_have_and_not_who(config: Path) -> None:
    late = replace(job(3, "late", None, state="PENDING", nodes=(), user="bob"), gpus=1)
    held = job(1, "secret", "held")
    for lease, idle, fit, others in ((held.lease, 0, (), [True, True]), (None, 0, (), [False, False])):
        seen = cluster(replace(held, lease=lease), late)
        last = Round(1, seen.time_s, seen, Memory(), Decision((), Memory()), Memory(), 0.1, "")
        own = own_part(last, Viewer("bob", hosts=True), (), (), ())
        view = build(own.round(), Recent(hosts=own.hosts, others=dict(own.others)), seen.time_s)
        assert (view.idle_gpus, view.waiting_that_fit, [row.others for row in view.gpus]) == (idle, fit, others)
        text = printed(Screen(view))
        assert ("▶ another user's job" in text, "secret" in text, "idle GPUs 0" in text) == (any(others), False, True)
        own = own_part(last, Viewer("bob", ids=True, hosts=True), (), (), ())
        text = printed(Screen(build(own.round(), Recent(hosts=own.hosts, others=dict(own.others)), seen.time_s)))
        assert ("▶ 1 another user's job" in text, "secret" in text) == (any(others), False)


@pytest.mark.parametrize(
    "changes",
    [
        {"state_reason": "Dependency"},
        {"state_reason": "AssocGrpGRES"},
        {"partition": "other"},
        {"slurm_priority": 0},
        {"num_nodes": 2, "gpus": 2},
    ],
)
def test_top_calls_no_job_fitting_that_idle_gpus_would_not_start(config: Path, changes: dict[str, object]) -> None:
    pending = replace(job(7, "late", None, state="PENDING", nodes=()), gpus=1)
    fill(config, cluster(replace(pending, **changes), replace(pending, key=JobKey(8, 0))), apply=True)
    view = json.loads(run("top", "--once", "--json", "--config", str(config)).stdout)
    assert (view["idle_gpus"], view["waiting_that_fit"]) == (2, [8])


def test_top_names_a_lane_that_takes_no_jobs_while_its_hosts_other_lane_does(config: Path) -> None:
    seen = cluster(job(1, "first", "held"))
    first, second = seen.nodes
    fill(config, replace(seen, nodes=(first, replace(second, up=False))), apply=True)
    assert json.loads(run("top", "--once", "--json", "--config", str(config)).stdout)["closed"] == [
        f"{second.name} is down"
    ]
    text = " ".join(run("top", "--once", "--config", str(config)).stdout.split())
    assert f"{second.name} is down" in text


def test_top_names_a_host_that_slurm_has_lost_while_its_agent_reports(config: Path) -> None:
    seen = cluster(job(1, "first", "held"))
    lost = [replace(node, up=False) for node in seen.nodes]
    fill(config, replace(seen, nodes=tuple(lost)), apply=True)
    told = [f"{node.name} is down in Slurm, and its agent reports: look at its slurmd" for node in lost]
    assert json.loads(run("top", "--once", "--json", "--config", str(config)).stdout)["closed"] == told
    away = replace(seen, nodes=tuple(lost), hosts=tuple(replace(host, agent_alive=False) for host in seen.hosts))
    assert closed_lanes(away) == ()
    assert closed_lanes(replace(seen, nodes=tuple(replace(node, asleep=True) for node in lost))) == ()


def test_top_and_why_name_a_silent_agent_a_fault_of_a_host_and_a_full_disk(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = cluster(job(1, "first", "held"))
    fault = "its clock is 3600 s ahead of the service's"
    fill(config, replace(seen, hosts=(replace(seen.hosts[0], faults=(fault,)),)), apply=True)
    for command in (("top", "--once"), ("why", "1")):
        text = run(*command, "--config", str(config)).stdout
        assert f"n1: {fault}" in text
        assert "disk" not in text
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    for command in (("top", "--once"), ("why", "1")):
        assert "cadenza.db is full" in " ".join(run(*command, "--config", str(config)).stdout.split())
    assert "cadenza.db is full" in run("why", "77", "--config", str(config)).output
    fill(config, replace(seen, hosts=(replace(seen.hosts[0], agent_alive=False),)), apply=True)
    for command in (("top", "--once"), ("why", "1")):
        assert "the agent of n1 is silent" in run(*command, "--config", str(config)).stdout


def test_top_on_screen_names_every_job_without_color(sharing: Path) -> None:
    done = run("top", "--once", "--config", str(sharing))
    assert done.exit_code == 0
    assert "\x1b" not in done.stdout
    for text in ("▶ 1 first", "‖ 2 second", "n1:gpu0-1", "wants 2", "agents 1/1", "apply"):
        assert text in done.stdout


def test_top_before_the_first_round(config: Path) -> None:
    assert run("top", "--once", "--config", str(config)).exit_code == 3
    fill(config, cluster(), apply=True)
    assert run("top", "--once", "--config", str(config)).exit_code == 0


def test_why_tells_the_decision_and_the_measured_yield(sharing: Path) -> None:
    done = run("why", "1", "--config", str(sharing))
    assert done.exit_code == 0
    assert "job 1: its turn ends: job 2 is next on n1:gpu0-1" in done.stdout
    assert "yield: job 2 is next on n1:gpu0-1" in done.stdout
    assert "n1 yield in 25.0 ms, of which 21.0 ms to the boundary" in done.stdout
    assert done.output.endswith("docs/glossary.md\n"), "its words are explained there"
    found = json.loads(run("why", "1", "--json", "--config", str(sharing)).stdout)
    assert found["actions"][0]["allowed"] is True
    assert found["switches"][0]["boundary_s"] == 0.021
    assert found["summary"] == "its turn ends: job 2 is next on n1:gpu0-1"


def test_what_was_measured_is_told(config: Path) -> None:
    use = JobUsage(samples_s=2099.2, data_wait=0.031, gpu_percent=93.0, memory_low_mb=4100.0)
    first = job(1, "first", "held")
    assert first.lease is not None
    lease = replace(first.lease, use=use, requeue_owner="lightning")
    fill(config, cluster(replace(first, lease=lease), job(2, "second", "waiting")), apply=False)
    text = run("why", "1", "--config", str(config)).stdout
    assert "measured: 0.03 s an iteration, 2099 samples/s, 3% of it waiting for data, GPU 93 %, 4100 MB at" in text
    assert "lightning requeues it by itself" in text
    first_row, second_row = json.loads(run("top", "--once", "--json", "--config", str(config)).stdout)["jobs"]
    assert (first_row["use"]["data_wait"], first_row["requeue_owner"], second_row["use"]) == (0.031, "lightning", None)


def test_why_tells_of_profile_share_and_progress(config: Path) -> None:
    shapes = {"cpus_per_gpu": (1.0, 4.0), "memory_gb_per_gpu": (4.0,), "throughput": ((0.5,), (1.0,))}
    family = linked({gpu: Profile("resnet", 0.5, gpu=gpu, **shapes) for gpu in ("a100", "v100")})
    first = job(
        1, "first", "held", profile=family["a100"], profile_note="profile resnet (a.json), named by its model option",
        placement=(Share("n1", 2, 8, 4000),), progress=Progress(0.0, 200.0, 50.0, 60.0),
    )  # fmt: skip
    refused = job(2, "second", "waiting", profile_note="has its proportional share, for its profile may not be used: x")
    fill(config, cluster(first, refused), apply=False)
    text = run("why", "1", "--config", str(config)).stdout
    for said in ("profile resnet (a.json)", "has 8 CPUs and 4000 MB on n1", "25% done, 60 s with its GPUs"):
        assert said in text
    assert "proportional share, for its profile may not be used: x" in run("why", "2", "--config", str(config)).stdout
    shown = json.loads(run("why", "1", "--json", "--config", str(config)).stdout)["job"]
    assert (shown["profile"]["model"], shown["profile"]["siblings"]) == ("resnet", {})
    view = json.loads(run("top", "--once", "--json", "--config", str(config)).stdout)
    assert view["policy"] == "levels/none/preemption"


def test_why_tells_what_would_have_been_done_in_observe_only(config: Path) -> None:
    fill(config, cluster(job(1, "first", "held"), job(2, "second", "waiting")), apply=False)
    done = run("why", "1", "--config", str(config))
    assert "would yield: job 2 is next on n1:gpu0-1 [kept in: " in done.stdout
    assert "observe" in done.stdout


def test_why_of_an_unknown_job_fails_with_one_line(sharing: Path) -> None:
    done = run("why", "99", "--config", str(sharing))
    assert done.exit_code == 1
    assert "job 99: nothing on record" in done.stderr


def test_release_undoes_only_what_is_ours(sharing: Path, tmp_path: Path) -> None:
    theirs = job(4, "theirs", "yielded", state="SUSPENDED")
    ours = job(2, "second", "yielded", state="SUSPENDED")
    fill(sharing, cluster(job(1, "first", "held"), ours, theirs), apply=True)
    assert run("release", "4", "--config", str(sharing)).exit_code == 1
    done = run("release", "--all", "--json", "--config", str(sharing))
    assert [(row["action"], row["job"][0], row["ok"]) for row in json.loads(done.stdout)["rows"]] == [
        ("Unsuspend", 2, True)
    ]
    assert (tmp_path / "snapshot.log").read_text().splitlines()[-1] == "Unsuspend 2"
    assert "is paused" not in done.stderr
    assert not (tmp_path / "STOP").exists()
    said = run("release", "2", "--config", str(sharing))
    assert "unsuspend job 2: done" in said.stdout
    assert f"touch {tmp_path}/STOP" in said.stderr


def damage(config: Path, *changes: str) -> None:
    with closing(sqlite3.connect(load_settings(config).service.store, isolation_level=None)) as link:
        for change in changes:
            link.execute(change)


def test_release_needs_no_readable_round(sharing: Path) -> None:
    ours = job(2, "second", "yielded", state="SUSPENDED")
    fill(sharing, cluster(job(1, "first", "held"), ours), apply=True)
    damage(sharing, "UPDATE rounds SET snapshot = x'00', memory = x'00'", "PRAGMA user_version = 99")
    done = run("release", "--all", "--json", "--config", str(sharing))
    assert (done.exit_code, [row["action"] for row in json.loads(done.stdout)["rows"]]) == (0, ["Unsuspend"])


@pytest.mark.parametrize("lost", ["missing", "damaged"])
def test_release_without_its_record_undoes_what_slurm_says(sharing: Path, lost: str) -> None:
    """A SiteFactor of ours cannot be told from Slurm's answer, so every job that opted in gets none."""
    held = job(3, "late", None, state="PENDING", nodes=(), slurm_priority=0, held_at_restart=True)
    theirs = replace(job(4, "theirs", None, state="PENDING", nodes=(), slurm_priority=0), state_reason="JobHeldAdmin")
    out = replace(job(5, "out", None), options=None)
    fill(sharing, cluster(job(2, "second", "yielded", state="SUSPENDED"), held, theirs, out), apply=True)
    sharing.with_name("snapshot.json").write_bytes(encode_snapshot(cluster(held, theirs, out)))
    if lost == "missing":
        Path(load_settings(sharing).service.store).unlink()
    else:
        damage(sharing, "UPDATE undo SET record = x'00'")
    done = run("release", "--all", "--config", str(sharing))
    said = [f"setfactor job {number}: done" for number in (3, 4)]
    assert (done.exit_code, done.stdout.splitlines()) == (3, ["release job 3: done", *said])
    assert "suspends may be left" in done.stderr


def test_release_works_where_none_of_slurms_json_is_read(sharing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Upgraded:
        def read(self) -> None:
            raise EnvironmentLacks("this release of Slurm needs another Cadenza")

        def close(self) -> None:
            pass

    fill(sharing, cluster(job(2, "second", "yielded", state="SUSPENDED")), apply=True)
    by_text = slurm_gateway.open_gateway(load_settings(sharing).service.gateway)
    monkeypatch.setattr(slurm_gateway, "open_gateway", lambda _: Upgraded())
    monkeypatch.setattr(source_gateway, "over_text", lambda: by_text)
    done = run("release", "--all", "--config", str(sharing))
    assert (done.exit_code, done.stdout) == (0, "unsuspend job 2: done\n")


def test_release_sets_sitefactors_back(sharing: Path, tmp_path: Path) -> None:
    seen = cluster(job(1, "first", "held"), job(3, "late", None, state="PENDING", nodes=()))
    sharing.with_name("snapshot.json").write_bytes(encode_snapshot(seen))
    memory = Memory(factors={1: -500, 3: -20, 9: -1})
    with closing(SqliteStore(Path(load_settings(sharing).service.store), SystemClock())) as store:
        store.begin(seen, Decision((), memory), (), memory)
    assert run("release", "3", "--config", str(sharing)).stdout == "setfactor job 3: done\n"
    done = run("release", "--all", "--json", "--config", str(sharing))
    assert [(row["action"], row["job"][0], row["factor"]) for row in json.loads(done.stdout)["rows"]] == [
        ("SetFactor", 1, 0),
        ("SetFactor", 3, 0),
    ]
    assert run("release", "4", "--config", str(sharing)).exit_code == 1


def test_top_says_that_the_kill_switch_is_set(sharing: Path, tmp_path: Path) -> None:
    def said() -> list[str]:
        return list(json.loads(run("top", "--once", "--json", "--config", str(sharing)).stdout)["faults"])

    assert not any("kill switch" in one for one in said())
    (tmp_path / "STOP").touch()
    assert f"the kill switch is set, no action leaves: rm {tmp_path}/STOP" in said()
    assert run("top", "--once", "--config", str(sharing)).stdout.startswith("cadenza STOPPED")


def test_top_and_why_read_past_a_damaged_round(sharing: Path) -> None:
    damage(sharing, "UPDATE rounds SET snapshot = x'00' WHERE number = (SELECT max(number) FROM rounds)")
    assert run("top", "--once", "--config", str(sharing)).exit_code == 0
    assert "job 2 is next" in run("why", "1", "--config", str(sharing)).stdout


LOCKED = """
import sys; from pathlib import Path; from cadenza.slurm_plugin.service.failover.lock import StoreLock
lock = StoreLock(Path(sys.argv[1])); lock.take(); print("taken", flush=True); sys.stdin.read()
"""


def test_releasing_everything_pauses_a_service_that_acts(sharing: Path, tmp_path: Path) -> None:
    store = load_settings(sharing).service.store
    with subprocess.Popen((sys.executable, "-c", LOCKED, store), stdin=-1, stdout=-1) as service:
        assert service.stdout is not None
        service.stdout.readline()
        one = run("release", "2", "--config", str(sharing))
        assert (one.exit_code, (tmp_path / "STOP").exists()) == (0, False)
        done = run("release", "--all", "--config", str(sharing))
        assert done.exit_code == 0
        assert f"cadenzad is paused: {tmp_path}/STOP keeps it from acting" in done.stderr
        assert (tmp_path / "STOP").exists()
        assert "is paused" not in run("release", "--all", "--config", str(sharing)).stderr, "the switch of another user"
        service.communicate()


@pytest.mark.parametrize("words", [("release",), ("release", "7", "--all"), ("why",), ("top", "--interval", "0")])
def test_bad_usage_is_exit_code_2(words: tuple[str, ...], config: Path) -> None:
    assert run(*words, "--config", str(config)).exit_code == 2


def test_a_task_of_an_array_is_called_as_squeue_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """int() reads 7_3 as 73: another job. Slurm knows the task's own number."""
    scontrol = tmp_path / "scontrol"
    seven, three = ({"set": True, "infinite": False, "number": number} for number in (7, 3))
    task = {"job_id": 9, "job_state": ["PENDING"], "array_job_id": seven, "array_task_id": three}
    lines = [
        "[ \"$*\" = 'ping --json=list' ] && echo data_parser/v0.0.42",
        f"[ \"$*\" = 'show job 7_3 --json=v0.0.42' ] && echo '{json.dumps({'jobs': [task]})}'",
        f"[ \"$*\" = 'show job 7_4 --json=v0.0.42' ] && echo '{json.dumps({'jobs': [{'job_id': 'x'}]})}'",
        "[ \"$*\" = 'show job 7_5 --json=v0.0.42' ] && echo '{\"jobs\": 5}'",
        "exit 0",
    ]
    scontrol.write_text("\n".join(["#!/bin/sh", *lines]))
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert JobId().convert("7_3", None, None) == 9
    assert JobId().convert("73", None, None) == 73
    for wrong in ("0", "7_", "x", "-1", "1_000_000", "٣", "7_4", "7_5", "7_6"):
        with pytest.raises(click.BadParameter):
            JobId().convert(wrong, None, None)

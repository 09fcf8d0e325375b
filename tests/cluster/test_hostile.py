"""Hostile neighbors: whatever a user's job does, the job with which it shares a GPU keeps its turns.

All attacks run at once, each on a GPU of its own that it shares with an honest job of another user; one honest job has
an honest neighbor, for comparison. The flood attacks the agent of node1, so the comparison is on node2.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cluster import PYTHON, SHARED, wait_for
from harness import DAEMONS, Cluster

SETTINGS = """
[sharing]
yield_timeout_s = 1.0
"""
SOURCE = Path(__file__).with_name("hostile_job.py")
BEATS, END = "/tmp/hostile-beats", "/tmp/hostile-end"
DRIVER = "/opt/gpus/driver"
NAME = "\x1b[2J\x1b]0;owned\x07[red]<b>"
HOSTS = {"refuse": "node2", "flood": "node1", "lie": "node1", "comment": "node1", "leave": "node2", "forge": "node2"}
"""Mode of each hostile job, and its host; the mode of the honest neighbor on node2 is ``idle``."""
LASTING = ("flood", "lie", "comment", "leave", "forge")
"""Modes whose attack lasts; the job that refuses every stop has its GPU until it must give back its place."""
TURNS = 10
"""Turns of each honest job that are compared."""
MAX_LOSS = 0.1
MAX_ANSWER_S = 0.5
REFUSALS = 3
REGISTRATIONS = 4


@dataclass
class Scene:
    """The jobs by the mode of the hostile one, and facts that are gone when they end."""

    cluster: Cluster
    daemons: dict[str, int]
    """Pid of each daemon before the attacks."""
    honest: dict[str, int] = field(default_factory=dict)
    hostile: dict[str, int] = field(default_factory=dict)
    registrations: list[dict[str, Any]] = field(default_factory=list)
    held: dict[str, str] = field(default_factory=dict)
    """The job that an admin holds, as Slurm shows it at the end."""
    left: dict[str, str] = field(default_factory=dict)
    """The job that opted out, as Slurm shows it at the end."""
    texts: dict[str, str] = field(default_factory=dict)
    """Output of commands that show the jobs, and the daemons' logs."""

    def start(self, mode: str, host: str, command: str) -> None:
        """Start an honest job on lane 0 and then its neighbor on lane 1; Slurm gives both the first free GPU."""
        gpu = "--gres=gpu:1"
        self.honest[mode] = self.cluster.paced(
            f"honest-{mode}", iterations=10**6, options=(gpu, f"--nodelist={host}", "--cadenza")
        )
        self.hostile[mode] = self.cluster.sbatch(
            f"--job-name={NAME}{mode}", "--mem=500", gpu, f"--nodelist={host}-l1", "--cadenza", user="bob",
            command=f"exec {PYTHON} {SHARED}/{command}",
        )  # fmt: skip

    def stretches(self, job: int) -> list[tuple[float, float]]:
        """Return when a job had its GPU, as its agent logged it."""
        rows = self.cluster.sql(f"select from_s, to_s from leases where job = {job} order by from_s")
        return [(float(since), float(until)) for since, until in rows]

    def turns(self, mode: str) -> list[tuple[float, float]]:
        """Return the honest job's turns since its neighbor's first one."""
        theirs = self.stretches(self.hostile[mode])
        return [turn for turn in self.stretches(self.honest[mode]) if theirs and turn[0] > theirs[0][0]]

    def share(self, mode: str) -> float:
        """Return the honest job's part of the time of whole rounds of turns."""
        turns = self.turns(mode)[: TURNS + 1]
        return sum(until - since for since, until in turns[:-1]) / (turns[-1][0] - turns[0][0])

    def place_given_back(self) -> float:
        """Return the time at which the job that refuses was requeued; 0 if it was not yet."""
        job = self.hostile["refuse"]
        rows = self.cluster.sql(f"select min(at_s) from actions where job = {job} and kind = 'Requeue' and ok = 1")
        return float(rows[0][0] or 0.0)


def pids(cluster: Cluster) -> dict[str, int]:
    return {f"{container}: {program}": cluster.pid(container, program) for container, program in DAEMONS}


def plain(text: str) -> bool:
    """Return True if a text has no control characters."""
    return all(line.isprintable() for line in text.split("\n"))


@pytest.fixture(scope="module")
def scene(running_cluster: Cluster) -> Iterator[Scene]:
    """Run all attacks at once, until the last of them has had what it can get.

    The hosts have no driver, which would show who has left a GPU: the agents go by Slurm's suspend alone.
    """
    cluster = running_cluster
    cluster.reset()
    move_driver(cluster, DRIVER, f"{DRIVER}.away")
    cluster.configure(SETTINGS)
    wait_for("four idle lane nodes", cluster.ready, 60)
    cluster.put(f"{SHARED}/{SOURCE.name}", SOURCE.read_text())
    cluster.exec("node1", "rm", "-f", BEATS, END)
    scene = Scene(cluster, pids(cluster))
    # 1. An admin holds a job whose owner says that the hold is Cadenza's.
    held = cluster.sbatch("--gres=gpu:1", "--mem=500", "--cadenza", "--hold", user="bob", command="true")
    cluster.ctl("scontrol", "update", f"JobId={held}", "Priority=0")
    claim = 'Comment={"cadenza":{"share":true,"held":true}}'
    cluster.ctl("scontrol", "update", f"JobId={held}", claim, user="bob")
    # 2. Each hostile job shares one GPU with an honest one.
    scene.start("idle", "node2", "paced_job.py --iterations 1000000")
    for mode, host in HOSTS.items():
        victim = f" --victim {scene.honest['flood']}" if mode == "forge" else ""
        scene.start(mode, host, f"{SOURCE.name} {mode} --beats {BEATS} --end {END}{victim}")
    # 3. Root registers jobs during the flood.
    wait_for("the flood", lambda: scene.turns("flood"), 90)
    for _ in range(REGISTRATIONS):
        done = cluster.exec("node1", PYTHON, f"{SHARED}/{SOURCE.name}", "register")
        scene.registrations.append(json.loads(done.stdout))
    # 4. The turns to compare, and the end of the longest attack.
    compared = (*LASTING, "idle")
    wait_for("enough turns of each honest job", lambda: all(len(scene.turns(one)) > TURNS for one in compared), 180)
    wait_for("the place of the job that refuses", scene.place_given_back, 180)
    wait_for("the honest job's turn", lambda: cluster.lease(scene.honest["refuse"]).get("state") == "held")
    # 5. The job that lies ends in its own turn and one of its processes lives on; then the honest one ends in its own.
    cluster.exec("node1", "touch", END)
    wait_for("the job that lies to be gone", lambda: not cluster.ctl("squeue", "-h", "-j", str(scene.hostile["lie"])))
    began = len(scene.turns("lie"))
    wait_for("the honest job's turn", lambda: cluster.lease(scene.honest["lie"]).get("state") == "held")
    cluster.ctl("scancel", str(scene.honest["lie"]))
    wait_for("the record of that turn", lambda: len(scene.turns("lie")) > began)
    # 6. Facts that are gone when the jobs end.
    scene.held, scene.left = cluster.job(held), cluster.job(scene.hostile["leave"])
    shown = [("top", "--once"), *(("why", str(scene.hostile[mode])) for mode in LASTING), ("doctor",)]
    scene.texts = {" ".join(words): cluster.cadenza(*words, check=False).stdout for words in shown}
    for host, program in DAEMONS:
        scene.texts[f"log of {program} on {host}"] = cluster.exec(host, "cat", f"/var/log/cluster/{program}.log").stdout
    yield scene
    cluster.reset()
    move_driver(cluster, f"{DRIVER}.away", DRIVER)


def move_driver(cluster: Cluster, source: str, target: str) -> None:
    """Move NVML's library on the hosts, and start their agents anew."""
    for host in ("node1", "node2"):
        cluster.exec(host, "mv", source, target)
        cluster.service(host, "restart", "cadenza-agent")


@pytest.fixture
def cluster(scene: Scene) -> Cluster:
    """Return the cluster; a failed test is reported with its logs."""
    return scene.cluster


@pytest.mark.parametrize("mode", LASTING)
def test_an_honest_job_keeps_its_share_of_the_gpu(
    cluster: Cluster, scene: Scene, mode: str, measured: Callable[[str], None]
) -> None:
    share, idle = scene.share(mode), scene.share("idle")
    measured(f"{mode}: an honest job has {share / idle:.3f} of its share next to an honest neighbor ({idle:.3f})")
    assert share >= (1 - MAX_LOSS) * idle, cluster.log(scene.hostile[mode])


def test_no_daemon_ends(cluster: Cluster, scene: Scene) -> None:
    assert pids(cluster) == scene.daemons


def test_root_is_answered_during_the_flood(cluster: Cluster, scene: Scene) -> None:
    assert [one["answer"] for one in scene.registrations] == ["lease"] * REGISTRATIONS
    assert max(one["seconds"] for one in scene.registrations) <= MAX_ANSWER_S
    assert scene.texts["log of cadenza-agent on node1"].count(": refused pid=") > REGISTRATIONS


def test_a_job_that_claims_gpus_of_its_host_and_of_another_one_gets_its_own(cluster: Cluster, scene: Scene) -> None:
    job = scene.hostile["flood"]
    ((host, gpus),) = cluster.sql(f"select distinct host, gpus from leases where job = {job}")
    assert (host, len(json.loads(gpus))) == ("node1", 1)


def test_a_job_that_yields_in_words_only_is_frozen_before_the_next_lease(cluster: Cluster, scene: Scene) -> None:
    """Its process outlives the batch script, too: until it is gone, the GPU is not the next job's."""
    beats = [float(line) for line in cluster.exec("node1", "cat", BEATS).stdout.split()]
    theirs, mine = scene.stretches(scene.hostile["lie"]), scene.turns("lie")
    assert all(any(since <= beat <= until for beat in beats) for since, until in theirs), "it computes in its turns"
    inside = [(beat - since, until - beat) for beat in beats for since, until in mine if since <= beat <= until]
    assert inside == [], "seconds since the begin of the other job's turn, and to its end"


def test_a_job_that_refuses_every_stop_gives_its_place_back(cluster: Cluster, scene: Scene) -> None:
    job = scene.hostile["refuse"]
    ((reason,),) = cluster.sql(f"select reason from actions where job = {job} and kind = 'Requeue' order by id limit 1")
    assert f"did not stop {REFUSALS} times, and job {scene.honest['refuse']} waited" in reason
    notes = cluster.sql(f"select note from switches where job = {job} and kind = 'refused'")
    assert len(notes) >= REFUSALS
    assert all(plain(note) for (note,) in notes)


def test_a_job_that_changes_its_comment_at_every_round_keeps_its_turns_and_options(
    cluster: Cluster, scene: Scene
) -> None:
    changes = cluster.log(scene.hostile["comment"]).split("\n")
    assert len(changes) > TURNS, "Slurm took the changes"
    assert len(scene.stretches(scene.hostile["comment"])) > TURNS


def test_a_job_that_opts_out_on_a_further_lane_does_not_have_the_gpu_for_itself(scene: Scene) -> None:
    assert '"share":false' in scene.left["Comment"]
    assert len(scene.turns("leave")) > TURNS


def test_nothing_is_done_for_one_who_speaks_for_a_job_of_another_host(cluster: Cluster, scene: Scene) -> None:
    *_, answers = cluster.log(scene.hostile["forge"]).splitlines()  # after the plugin's word on its wait for the GPU
    assert json.loads(answers) == ["error"] * 6
    rows = cluster.sql(f"select distinct host from leases where job = {scene.honest['flood']}")
    assert rows == [["node1"]]


def test_an_admins_hold_stays(cluster: Cluster, scene: Scene) -> None:
    assert (scene.held["JobState"], scene.held["Reason"]) == ("PENDING", "JobHeldAdmin")
    assert cluster.sql(f"select kind from actions where job = {scene.held['JobId']}") == []


def test_names_and_texts_of_jobs_are_text_in_views_and_logs(scene: Scene) -> None:
    for where, text in scene.texts.items():
        assert plain(text), where
        assert not any(line.startswith("JOBID=1 forged") for line in text.split("\n")), where
    assert "[red]<b>flood" in scene.texts["top --once"], "markup is text"

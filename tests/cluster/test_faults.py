"""Deaths of daemons and hosts: no work is lost and no GPU has two users, whatever is killed."""

from __future__ import annotations

from cadenza.policies.sharing.turns.repair import REQUEUE_FORGOTTEN

from cluster import PYTHON, wait_for
from harness import FOREVER, FOUR_GPUS, PACED_JOB, Cluster


def pair(cluster: Cluster, iterations: int = 250, *arguments: str) -> tuple[int, int]:
    """Start two jobs on the same four GPUs of one host, and wait until both have yielded once."""
    ids = tuple(
        cluster.paced(f"fault-{lane}", *arguments, iterations=iterations, options=(*FOUR_GPUS, f"--nodelist={lane}"))
        for lane in ("node1", "node1-l1")
    )
    wait_for("turns between the two", lambda: all(yields(cluster, job) >= 1 for job in ids), 90)
    return ids[0], ids[1]


def yields(cluster: Cluster, job_id: int) -> int:
    return int(cluster.sql(f"select count(*) from switches where kind = 'yield' and job = {job_id}")[0][0])


def leases(cluster: Cluster, job_id: int) -> int:
    return int(cluster.sql(f"select count(*) from leases where job = {job_id}")[0][0])


def kill(cluster: Cluster, container: str, program: str) -> None:
    """``kill -9`` one daemon; its supervisor starts it again."""
    cluster.signal(container, "KILL", program)


def overlaps(cluster: Cluster, first: int) -> list[list[object]]:
    """Return the pairs of leases of different jobs that met on a GPU, as the agents logged them.

    ``first``: the calling test's first job. Earlier ones are not asked for: other tests pack jobs on purpose.
    """
    return cluster.sql(
        "select a.job, b.job, a.gpus, b.gpus, min(a.to_s, b.to_s) - max(a.from_s, b.from_s) "
        "from leases a join leases b on a.host = b.host and a.id < b.id and a.job <> b.job "
        f"where min(a.job, b.job) >= {first} and min(a.to_s, b.to_s) - max(a.from_s, b.from_s) > 0.0005 "
        "and exists (select 1 from json_each(a.gpus) g join json_each(b.gpus) h on g.value = h.value)"
    )


def unpinned(cluster: Cluster, job_id: int) -> bool:
    """Take away the host that the user had asked for, if releasing the requeued job has not done so."""
    if cluster.job(job_id).get("ReqNodeList") == "(null)":
        return True
    free = cluster.exec("ctl", "scontrol", "update", f"JobId={job_id}", "ReqNodeList=", check=False)
    return free.returncode == 0


def go_on(cluster: Cluster, jobs: tuple[int, int]) -> None:
    """Wait until both jobs have yielded once more."""
    before = [yields(cluster, job) for job in jobs]
    wait_for("turns", lambda: all(yields(cluster, job) > count for job, count in zip(jobs, before, strict=True)), 90)


def test_jobs_in_turns_outlive_whatever_is_killed(cluster: Cluster, kept: str) -> None:
    end = f"{kept}/end"
    jobs = pair(cluster, FOREVER, f"--until {end}")
    service, agent = ("ctl", "cadenzad"), ("node1", "cadenza-agent")
    for victims in ((service,), (agent,), (service, agent)):
        for container, program in victims:
            kill(cluster, container, program)
        go_on(cluster, jobs)
    # Between a yield and what follows in Slurm, no job is left stopped.
    wait_for(
        "one of them suspended in Slurm",
        lambda: any(cluster.state(job) == "SUSPENDED" for job in jobs), 60, interval=0.05,
    )  # fmt: skip
    kill(cluster, *service)
    go_on(cluster, jobs)
    cluster.service("ctl", "restart", "slurmctld")
    wait_for("slurmctld", lambda: "UP" in cluster.exec("ctl", "scontrol", "ping", check=False).stdout, 60)
    go_on(cluster, jobs)
    cluster.ctl("touch", end)
    cluster.wait_done(*jobs, timeout=120)
    assert [cluster.job(job)["Restarts"] for job in jobs] == ["0", "0"]
    assert overlaps(cluster, jobs[0]) == []


def test_the_agents_take_turns_while_the_service_is_away(cluster: Cluster) -> None:
    jobs = pair(cluster, 400)  # the agents wait for some seconds before they go on alone
    cluster.service("ctl", "stop", "cadenzad")
    cluster.wait_done(*jobs, timeout=120)
    cluster.service("ctl", "start", "cadenzad")
    wait_for("the agents' notes of that time", lambda: all(leases(cluster, job) >= 2 for job in jobs), 60)
    assert overlaps(cluster, jobs[0]) == []


PULSE = """
import os, signal, sqlite3, sys, time
job, slurmctld = map(int, sys.argv[1:])
store = sqlite3.connect("file:/var/lib/cadenzad/cadenza.db?mode=ro", uri=True, timeout=10)
query = "select 1 from actions where kind = 'Requeue' and ok = 1 and job = ?"
while not store.execute(query, (job,)).fetchall():
    pass
while True:
    os.kill(slurmctld, signal.SIGSTOP)
    time.sleep(0.5)
    os.kill(slurmctld, signal.SIGCONT)
    time.sleep(0.005)
"""
"""Let slurmctld run for a moment at a time once it has accepted the service's requeue of a job."""
UNSAVED = "/var/spool/slurmctld/job_state.new"
"""The file that slurmctld writes before it becomes its state of the jobs: where a directory is, it saves nothing."""


def test_a_requeue_of_ours_that_a_killed_slurmctld_forgot_is_ordered_again(cluster: Cluster, kept: str) -> None:
    """The stop has reached the job, but not its end slurmctld: it calls the job failed, and would start it no more."""
    job = cluster.paced(
        "fault-forgotten", "--checkpoint", f"{kept}/step", iterations=250, options=("--gres=gpu:1", "--cadenza")
    )
    wait_for("a job that saves checkpoints", lambda: cluster.lease(job).get("checkpoints"), 60)
    cluster.service("ctl", "restart", "slurmctld")  # it saves its state
    wait_for("slurmctld", lambda: "UP" in cluster.exec("ctl", "scontrol", "ping", check=False).stdout, 60)
    slurmctld = cluster.pid("ctl", "slurmctld")
    cluster.exec("ctl", "mkdir", UNSAVED)
    try:
        with cluster.stream("ctl", PYTHON, "-c", PULSE, str(job), str(slurmctld)):
            cluster.cadenza("move", str(job), "--to", "node2")
            runs = ("pgrep", "-f", f"^{PYTHON} {PACED_JOB}")
            wait_for("its end", lambda: not cluster.exec("node1", *runs, check=False).stdout, 60, interval=0.05)
            kill(cluster, "ctl", "slurmctld")  # which ends the pulses as well
    finally:
        cluster.exec("ctl", "rmdir", UNSAVED)
    wait_for(f"job {job} requeued again", lambda: cluster.job(job).get("Restarts") == "1", 30)
    cluster.wait_done(job)
    assert REQUEUE_FORGOTTEN in {reason for (reason,) in cluster.sql(f"select reason from actions where job = {job}")}


def test_a_lost_host_costs_its_jobs_a_restart_as_without_us_and_no_others(cluster: Cluster) -> None:
    """Slurm requeues what ran there, the yielded job too, and they finish on the other host."""
    lost = pair(cluster, 300)
    other = cluster.paced("fault-elsewhere", iterations=300, options=(*FOUR_GPUS, "--nodelist=node2"), user="bob")
    cluster.wait_state(other, "RUNNING")
    cluster.power("node1", "kill")
    try:
        for state in ("DRAIN", "DOWN"):  # drained first: an answer that node1 gave before it died would revive it
            cluster.ctl("scontrol", "update", "NodeName=node1,node1-l1", f"State={state}", "Reason=lost")
        for job in lost:
            wait_for(f"job {job} requeued", lambda job=job: cluster.job(job).get("Restarts") == "1", 60)
            wait_for(f"job {job} free to go elsewhere", lambda job=job: unpinned(cluster, job), 30)
        cluster.wait_done(other, *lost, timeout=200)
        assert overlaps(cluster, lost[0]) == []
    finally:
        cluster.power("node1", "start")
        wait_for("node1 back", lambda: cluster.running("node1", "cadenza-agent"), 60)
        cluster.ctl("scontrol", "update", "NodeName=node1,node1-l1", "State=RESUME", check=False)


def test_the_kill_switch_stops_everything_and_release_undoes_it(cluster: Cluster) -> None:
    jobs = pair(cluster)
    cluster.exec("ctl", "touch", "/etc/cadenza/STOP")
    try:
        cluster.cadenza("release", "--all")
        wait_for("no job suspended", lambda: not any(cluster.state(job) == "SUSPENDED" for job in jobs), 20)
        before = cluster.sql("select count(*) from actions where allowed = 1 and ok is not null")
        cluster.wait_done(*jobs, timeout=120)
        assert cluster.sql("select count(*) from actions where allowed = 1 and ok is not null") == before
    finally:
        cluster.exec("ctl", "rm", "-f", "/etc/cadenza/STOP")

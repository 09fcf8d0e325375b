"""Jobs that did not opt in are never touched and never share a GPU, in whatever order they come."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

import pytest

from cluster import wait_for
from harness import Cluster

CLAIM = "--claim-dir /tmp/fake-gpu"
"""Each job locks a file for each of its GPUs while it uses them; a second user makes it fail."""


def start(cluster: Cluster, name: str, gpus: int, iterations: int, *, managed: bool, lane: str = "") -> int:
    options = (f"--gres=gpu:{gpus}", *(("--cadenza",) if managed else ()), *((f"--nodelist={lane}",) if lane else ()))
    return cluster.paced(name, CLAIM, iterations=iterations, options=options, user="bob" if managed else "alice")


def touched(cluster: Cluster, job_id: int) -> list[list[object]]:
    return cluster.sql(f"select kind, reason from actions where job = {job_id}")


def accounting(cluster: Cluster, job_id: int) -> tuple[str, str, str]:
    """Return state, suspended time and restarts as Slurm accounts them."""

    def ended() -> list[str]:
        row = cluster.ctl("sacct", "-X", "-n", "-P", "-j", str(job_id), "-o", "State,Suspended,Restarts").strip()
        return row.split("|") if row and not row.startswith(("RUNNING", "PENDING")) else []

    state, suspended, restarts = wait_for(f"job {job_id} in sacct", ended, 30)
    return state, suspended, restarts


def assert_untouched(cluster: Cluster, *job_ids: int) -> None:
    for job_id in job_ids:
        assert touched(cluster, job_id) == []
        assert accounting(cluster, job_id) == ("COMPLETED", "00:00:00", "0")
        rows = cluster.sql(f"select count(*) from switches where job = {job_id}")
        assert rows == [[0]]


def holding(cluster: Cluster) -> dict[str, set[str]]:
    """Return, for each GPU, the jobs whose processes hold it at this moment, as the hosts' kernels say."""
    found: dict[str, set[str]] = {}
    for host in ("node1", "node2"):
        script = (
            "for p in /proc/[0-9]*; do for f in $(readlink $p/fd/* 2>/dev/null | grep ^/tmp/fake-gpu/ | sort -u); do "
            "tr '\\0' '\\n' < $p/environ 2>/dev/null | sed -n \"s|^SLURM_JOB_ID=|$f |p\"; done; done"
        )
        for line in cluster.exec(host, "sh", "-c", script).stdout.split("\n"):
            if line:
                path, job = line.split()
                found.setdefault(f"{host}:{path.rsplit('/', 1)[1]}", set()).add(job)
    return found


def test_a_mixed_run_leaves_the_others_alone(cluster: Cluster) -> None:
    """Unmanaged jobs before, between and after managed ones, on the same hosts and on a host of their own."""
    unmanaged = [start(cluster, "mix-first", 2, 300, managed=False)]
    managed = [start(cluster, f"mix-managed-{n}", gpus, 250, managed=True) for n, gpus in enumerate((4, 2, 4, 2, 4))]
    unmanaged += [start(cluster, f"mix-later-{n}", 2, 150, managed=False) for n in range(2)]
    unmanaged.append(cluster.paced("mix-plain", iterations=100, options=("--partition=plain", "--gres=gpu:1")))

    def sampled() -> bool:
        shared = {gpu: jobs for gpu, jobs in holding(cluster).items() if len(jobs) > 1}
        if shared:  # a look takes a while, and GPUs change hands during it: a second look must confirm it
            again = holding(cluster)
            for gpu, jobs in shared.items():
                assert len(jobs & again.get(gpu, set())) <= 1, f"{gpu} is used by jobs {sorted(jobs)}"
        return all(cluster.state(job) == "COMPLETED" for job in (*managed, *unmanaged))

    wait_for("every job done", sampled, 300, interval=1.0)
    assert_untouched(cluster, *unmanaged)
    taken_turns = cluster.sql(f"select count(*) from switches where job in ({','.join(map(str, managed))})")
    assert taken_turns[0][0] > 0


def test_an_unmanaged_job_gets_its_gpus_at_once_from_one_on_a_further_lane(cluster: Cluster) -> None:
    blocker = start(cluster, "way-blocker", 4, 150, managed=True, lane="node1")
    sharer = start(cluster, "way-sharer", 4, 600, managed=True, lane="node1-l1")
    cluster.wait_state(sharer, "RUNNING", "SUSPENDED")
    cluster.wait_done(blocker)
    wait_for("the sharer under way", lambda: holds(cluster, sharer), 60)
    plain = start(cluster, "way-plain", 4, 200, managed=False, lane="node1")
    cluster.wait_done(plain, sharer)
    assert_untouched(cluster, plain)
    waited = cluster.sql(
        f"select min(u.from_s) - (select max(m.to_s) from leases m where m.job = {sharer} "
        f"and m.to_s <= u.from_s + 0.001) from leases u where u.job = {plain}"
    )
    assert 0 <= waited[0][0] < 1.0


def holds(cluster: Cluster, job_id: int) -> bool:
    return any(str(job_id) in jobs for jobs in holding(cluster).values())


moment = datetime.fromisoformat


def waits(cluster: Cluster, managed: bool) -> list[float]:
    """Run one mix and return how long each unmanaged job waited for Slurm to start it, in seconds."""
    unmanaged, others = [], []
    for _ in range(3):
        others += [start(cluster, "waits-other", 4, 600, managed=managed) for _ in range(2)]
        unmanaged.append(start(cluster, "waits", 4, 400, managed=False))
    cluster.wait_done(*others, *unmanaged, timeout=300)
    rows = [cluster.job(job) for job in unmanaged]
    return [(moment(row["StartTime"]) - moment(row["SubmitTime"])).total_seconds() for row in rows]


def test_no_later_managed_job_takes_the_gpus_that_an_unmanaged_one_waits_for(cluster: Cluster) -> None:
    jobs = [start(cluster, f"order-{n}", 4, 150 if n % 3 else 100, managed=n % 3 != 0) for n in range(1, 7)]
    cluster.wait_done(*jobs)
    rows = [cluster.job(job) for job in jobs]
    for place, row in enumerate(rows):
        if place in {2, 5}:
            later = [other["StartTime"] for other in rows[place + 1 :] if other["NodeList"] in {"node1", "node2"}]
            assert all(moment(row["StartTime"]) <= moment(began) for began in later)
    assert_untouched(cluster, jobs[2], jobs[5])


@pytest.mark.measurement
def test_unmanaged_jobs_wait_no_longer_than_without_us(cluster: Cluster, measured: Callable[[str], None]) -> None:
    with_us = waits(cluster, managed=True)
    cluster.reset()
    without = waits(cluster, managed=False)
    measured(f"unmanaged jobs waited {with_us} s among managed jobs, {without} s among their own kind")
    assert sum(with_us) <= 1.05 * sum(without) + 2.0  # Slurm's times are whole seconds

"""Everyday jobs under the shipped policy: each works, or is left alone with a message (docs/users/jobs.md)."""

from __future__ import annotations

import re
import subprocess

from cluster import CONTAINER, wait_for
from harness import DEFAULT_POLICY, PACED_JOB, PYTHON, Cluster

ONE_GPU = ("--gres=gpu:1", "--cadenza")


def at_terminal(cluster: Cluster, *words: str, user: str = "alice") -> subprocess.CompletedProcess[str]:
    """Run a command on a terminal of its own, as ``srun --pty`` needs it."""
    return cluster.exec("ctl", "script", "-qec", " ".join(words), "/dev/null", user=user, check=False)


def background(cluster: Cluster, *words: str, user: str = "alice") -> subprocess.Popen[str]:
    """Start a command whose output comes later."""
    command = [CONTAINER / "exec", "--name", cluster.name, "--user", user, "ctl", *words]
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def waits_for(cluster: Cluster, job: int, sentence: str) -> None:
    """Wait until a job is pending with this sentence in ``cadenza why``."""
    wait_for(
        f"job {job} waits: {sentence}; {cluster.why(job).get('summary')}",
        lambda: cluster.state(job) == "PENDING" and sentence in cluster.why(job).get("summary", ""), 30,
    )  # fmt: skip


def test_arrays_keep_their_limit_and_lose_one_task(shipped: Cluster, kept: str) -> None:
    command = f"date +'+ %s.%N' >> {kept}/log; {PYTHON} {PACED_JOB} --iterations 30; date +'- %s.%N' >> {kept}/log"
    array = shipped.sbatch("--array=0-5%2", "--mem=500", *ONE_GPU, command=command)
    shipped.ctl("scancel", f"{array}_5", user="alice")
    begun = ("sh", "-c", f"test $(grep -c ^+ {kept}/log) -ge 2")
    wait_for("the first two tasks", lambda: shipped.exec("ctl", *begun, check=False).returncode == 0)
    shipped.ctl("scontrol", "requeue", f"{array}_0", user="alice")
    assert "holds node" in shipped.cadenza("why", f"{array}_1").stdout
    wait_for("its end", lambda: not shipped.ctl("squeue", "-h", "-j", str(array), check=False).strip(), 60)
    lines = sorted(shipped.ctl("cat", f"{kept}/log").split("\n")[:-1], key=lambda line: float(line[2:]))
    running = [sum(1 if line[0] == "+" else -1 for line in lines[:count]) for count in range(1, len(lines) + 1)]
    assert len([line for line in lines if line[0] == "+"]) == 6, "five tasks, and one of them twice"
    assert max(running) - 1 <= 2, "the requeued task's first end is not in the list"


def test_dependencies_and_begin_times(shipped: Cluster) -> None:
    first = shipped.paced("first", iterations=60, options=ONE_GPU)
    failing = shipped.sbatch("--mem=100", *ONE_GPU, command="false")
    after = shipped.paced("after", iterations=10, options=(*ONE_GPU, f"--dependency=afterok:{first}"))
    never = shipped.paced("never", iterations=10, options=(*ONE_GPU, f"--dependency=afterok:{failing}"))
    later = shipped.paced("later", iterations=10, options=(*ONE_GPU, "--begin=now+3"))
    waits_for(shipped, later, "BeginTime")
    assert "(Dependency)" in shipped.why(after)["summary"]
    waits_for(shipped, never, "DependencyNeverSatisfied")
    shipped.wait_done(first, after, later)
    assert shipped.job(after)["StartTime"] >= shipped.job(first)["EndTime"]


def test_interactive_jobs_start_on_lane_0(shipped: Cluster) -> None:
    where = "'echo $SLURMD_NODENAME gpu $CUDA_VISIBLE_DEVICES; tty'"
    done = at_terminal(shipped, "srun --pty --gres=gpu:1 --mem=100 --cadenza sh -c", where)
    assert done.returncode == 0
    assert "node1 gpu 0" in done.stdout
    assert "/dev/pts/" in done.stdout
    done = at_terminal(shipped, "salloc --gres=gpu:1 --mem=100 --cadenza srun sh -c", where)
    assert re.search("node[12] gpu 0", done.stdout)  # the first may still be completing
    # Where every GPU of lane 0 is in use it waits, although the further lanes are free.
    holders = [shipped.paced("holder", iterations=150, options=("--gres=gpu:4", "--cadenza")) for _ in range(2)]
    for holder in holders:
        shipped.wait_state(holder, "RUNNING")
    waiting = background(shipped, "srun", "--gres=gpu:1", "--mem=100", "--cadenza", "printenv", "SLURMD_NODENAME")
    (job,) = wait_for("it in the queue", lambda: shipped.ctl("squeue", "-h", "-t", "PD", "-o", "%i").split())
    waits_for(shipped, int(job), "waits in Slurm's queue")
    assert shipped.job(int(job))["Features"] == "lane0"
    assert waiting.communicate(timeout=60)[0].strip().endswith(("node1", "node2"))


def test_exclusive_heterogeneous_and_cron_jobs_are_left_alone(shipped: Cluster) -> None:
    exclusive = shipped.exec(
        "ctl", "sbatch", "--exclusive", "--mem=100", *ONE_GPU, "--wrap=true", "--chdir=/tmp", user="alice"
    )
    assert "left alone: --exclusive asks for whole nodes" in exclusive.stderr
    both = ("--mem=100", *ONE_GPU)
    het = shipped.exec("ctl", "sbatch", *both, ":", *both, "--chdir=/tmp", "--wrap=srun true", user="alice")
    assert "0: cadenza: this job is left alone: heterogeneous jobs are not shared" in het.stderr
    shipped.put("/tmp/cron", '#SCRON --gres=gpu:1 --mem=100 --comment={"cadenza":{"share":true}}\n* * * * * true\n')
    cron = shipped.exec("ctl", "scrontab", "/tmp/cron", user="alice")  # it passes no flag of a plugin on
    shipped.ctl("scrontab", "-r", user="alice")
    assert "left alone: cron jobs are not shared" in cron.stderr
    shipped.wait_done(*(int(done.stdout.split()[-1]) for done in (exclusive, het)))


def test_a_license_is_waited_for_and_kept(shipped: Cluster) -> None:
    jobs = [shipped.paced("licensed", iterations=20, options=(*ONE_GPU, "--licenses=solver:1")) for _ in range(2)]
    shipped.wait_done(*jobs)
    first, second = sorted(shipped.job(job)["StartTime"] for job in jobs)
    assert second >= min(shipped.job(job)["EndTime"] for job in jobs) >= first


def test_the_nodes_that_a_job_asks_for(shipped: Cluster) -> None:
    """They are Slurm's to give: constraint, excluded and named nodes."""
    wanted = {
        "--constraint=lane1": {"node1-l1", "node2-l1"},
        "--exclude=node1": {"node2", "node2-l1"},
        "--nodelist=node2": {"node2"},
    }
    jobs = {option: shipped.paced("asks", iterations=20, options=(*ONE_GPU, option)) for option in wanted}
    shipped.wait_done(*jobs.values())
    for option, nodes in wanted.items():
        assert shipped.job(jobs[option])["NodeList"] in nodes, option


def test_reservations(shipped: Cluster) -> None:
    """One of all lanes of a host keeps jobs of others off it, as one of a node does."""
    times = ("users=bob", "starttime=now", "duration=10")
    shipped.ctl("scontrol", "create", "reservation", "reservationname=course", "nodes=node1,node1-l1", *times)
    try:
        inside = shipped.paced("inside", iterations=50, options=(*ONE_GPU, "--reservation=course"), user="bob")
        outside = [shipped.paced("outside", iterations=30, options=("--gres=gpu:4", "--cadenza")) for _ in range(2)]
        shipped.wait_done(inside, *outside)
        assert shipped.job(inside)["NodeList"] == "node1"
        assert {shipped.job(job)["NodeList"] for job in outside} <= {"node2", "node2-l1"}
    finally:
        shipped.reset()
        shipped.ctl("scontrol", "delete", "reservationname=course")


def test_steps_have_parts_of_the_jobs_gpus(shipped: Cluster) -> None:
    step = f"srun --exact --ntasks=1 --mem=100 --gpus={{}} {PYTHON} {PACED_JOB} --iterations 20 &"
    show = "srun --exact --ntasks=1 --mem=50 --gpus=1 sh -c 'echo step $SLURM_STEP_GPUS; sleep 0.5' &"
    command = f"{step.format(1)} {step.format(3)} wait; {show} {show} wait; srun --gres=none true"
    job = shipped.sbatch("--gres=gpu:4", "--nodes=1", "--ntasks=4", "--mem=400", "--cadenza", command=command)
    shipped.wait_done(job)
    log = shipped.log(job)
    assert log.count('"restart": 0') == 2
    assert {"step 0", "step 1"} <= set(log.split("\n")), "side by side they have different GPUs"


def test_users_of_one_account_have_gpus_of_their_own(shipped: Cluster) -> None:
    gpus = []
    for user in ("alice", "bob"):
        job = shipped.paced("own", iterations=400, options=("--gres=gpu:2", "--cadenza"), user=user)
        lease = wait_for(
            f"the lease of job {job}", lambda job=job: (found := shipped.lease(job)).get("state") == "held" and found
        )
        gpus.append({tuple(gpu) for gpu in lease["gpus"]})
    assert not gpus[0] & gpus[1]


def test_a_task_that_waits_for_its_first_lease_says_so_where_its_user_looks(shipped: Cluster) -> None:
    """In a batch script's output file and at the terminal of srun; the holder never attaches, so it cannot yield."""
    shipped.configure(f"{DEFAULT_POLICY}[expert]\nmin_run_s = 5.0\n")  # as shipped: no waiting job is suspended sooner
    holder = shipped.sbatch("--nodelist=node1", "--gres=gpu:4", "--mem=100", "--cadenza", command="sleep 4")
    wait_for("the holder's lease", lambda: shipped.lease(holder).get("state") == "held")
    options = ("--nodelist=node1-l1", "--gres=gpu:2", "--mem=100", "--cadenza")
    batch = shipped.sbatch(*options, command="echo mine")
    shipped.wait_state(batch, "RUNNING")
    terminal = background(shipped, "srun", *options, "--constraint=lane1", "echo", "mine")
    said = terminal.communicate(timeout=60)[0]
    shipped.wait_done(batch)
    for output, number, gpus in ((shipped.log(batch), batch, "0,1"), (said, r"\d+", "2,3")):
        waits = rf"cadenza: job ({number}) waits for GPU {gpus} of node1-l1: .*job {holder}.* `scancel \1` gives up"
        announced = re.search(waits, output)
        assert announced, output
        assert f"cadenza: job {announced[1]} has its GPUs and goes on\n" in output[announced.end() :]
        assert "mine\n" in output[announced.end() :]

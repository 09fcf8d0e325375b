"""CPU limits: the cgroup in which a command runs, and the CPUs that it is given."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from cadenza.policies.core.errors import EnvironmentLacks, InputError
from cadenza.policies.inputs.interference import read_interference
from cadenza.profiler.errors import CommandFailedError
from cadenza.profiler.measure.cpu_limits import CGROUPS, Limit, Quota, open_quota, own_cpus, parents, pin
from cadenza.profiler.measure.offline_run import Offline, Request
from cadenza.profiler.measure.pairs import COLUMNS, Side, measure
from cadenza.profiler.measure.point import Rule, disturbed, slowest
from cadenza.profiler.measure.reaper import marked
from cadenza.profiler.model.batch_means import Window
from cadenza.sidecar.agent.ipc.pages import PageRecord
from cadenza.sidecar.clock import SystemClock

STEPS = Path(__file__).with_name("steps.py")


def every(grid: Sequence[float], times: Mapping[float, float]) -> float | None:
    """Search the whole grid, from the most CPUs down."""
    return next((cpus for cpus in reversed(grid) if cpus not in times), None)


def test_a_cgroup_stays_within_its_callers_limits(tmp_path):
    for folder in ("cpu/slurm/uid_0/job_7", "system.slice/job_7/step_0/user/task_0"):
        (tmp_path / folder).mkdir(parents=True)
    v1 = "5:memory:/slurm/job_7\n4:cpu:/slurm/uid_0/job_7\n0::/\n"
    v2 = "0::/system.slice/job_7/step_0/user/task_0\n"
    assert parents(v1, tmp_path)[0] == tmp_path / "cpu/slurm/uid_0/job_7"
    assert parents(v2, tmp_path) == [tmp_path / "system.slice/job_7/step_0/user"]
    assert parents("0::/\n", tmp_path) == [tmp_path]


def test_quotas_as_both_versions_write_them(tmp_path):
    for file in ("cpu.max", "cpu.max.burst", "cpu.weight"):
        (tmp_path / file).touch()
    two = Quota(tmp_path)
    two.set(1.5)
    assert (tmp_path / "cpu.max").read_text() == "150000 100000\n"
    assert (tmp_path / "cpu.max.burst").read_text() == "150000\n", "what the agent gives a job"
    two.set(None)
    assert (tmp_path / "cpu.max").read_text() == "max 100000\n"
    assert (tmp_path / "cpu.max.burst").read_text() == "0\n"
    (tmp_path / "cpu.max").unlink()
    (tmp_path / "cpu.cfs_quota_us").touch()
    one = Quota(tmp_path)
    one.set(0.25)
    assert (tmp_path / "cpu.cfs_quota_us").read_text() == "25000\n"


def test_without_a_cgroup_fractions_are_refused_and_said_why(tmp_path):
    own = tmp_path / "cgroup"
    own.write_text("0::/nowhere/at/all\n")
    assert open_quota("x", tmp_path / "none", own) is None
    limit = Limit([0, 1], None)
    limit.check([1, 2])
    with pytest.raises(EnvironmentLacks, match="cgroup"):
        limit.check([1.5])
    with pytest.raises(EnvironmentLacks, match="may use 2"):
        limit.check([3])


def test_affinity_reaches_every_thread_of_a_process():
    code = "import threading, time; [threading.Thread(target=time.sleep, args=(9,), daemon=True).start() for _ in 'ab']"
    with subprocess.Popen([sys.executable, "-c", code + "; print('on', flush=True); time.sleep(9)"], stdout=-1) as job:
        job.stdout.readline()
        pin(job.pid, own_cpus()[:1])
        threads = [int(each) for each in os.listdir(f"/proc/{job.pid}/task")]
        assert len(threads) == 3
        assert all(os.sched_getaffinity(each) == set(own_cpus()[:1]) for each in threads)
        job.kill()


def offline(tmp_path, *words, told=None, **more):
    rule = Rule(within=0.5, warm_up_s=0.0, warm_up_steps=2, window_s=0.02, window_steps=2, most_s=2.0, start_s=20)
    request = Request((sys.executable, *map(str, words)), tmp_path / "p.json", rule=rule, **more)
    return Offline(request, SystemClock(), (told if told is not None else []).append)


@pytest.mark.slow
def test_a_command_is_measured_ended_and_gone_on_with(tmp_path):
    told = []
    first = offline(tmp_path, STEPS, 0.002, told=told, cpus=(1.0,))
    state = first.run()
    first.close()
    assert [point.cpus for point in told] == [1.0]
    assert told[0].samples == 8
    assert 0.001 < told[0].iteration_s < 1
    again = offline(tmp_path, STEPS, 0.002, cpus=(1.0,), resume=True)
    assert again.run().points == state.points
    assert again.state.launches == 1
    again.close()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("-c", "import sys; sys.exit('no data')"), r"exit code 1; its output is in .*p\.log and ends with\nno data$"),
        ((STEPS, 0.001, 3), "ended before one point"),
    ],
)
def test_a_command_that_fails_or_is_too_short_is_named(tmp_path, words, says):
    one = offline(tmp_path, *words, cpus=(1.0,))
    with pytest.raises(CommandFailedError, match=says):
        one.run()
    one.close()


def test_a_command_that_is_not_there_is_named(tmp_path):
    request = Request(("/no/such/program",), tmp_path / "p.json", cpus=(1.0,))
    one = Offline(request, SystemClock(), print)
    with pytest.raises(InputError, match="/no/such/program: no such command"):
        one.run()
    one.close()


def test_the_slowest_rank_counts():
    def record(steps, seconds):
        return PageRecord(steps, steps, seconds, 0, 0.0, 0, 0, 0, (), (), fine=True)

    before = {1: record(0, 0.0), 2: record(5, 1.0)}
    after = {1: record(10, 1.0), 2: record(15, 3.0), 3: record(9, 9.0)}
    assert slowest(before, after) == Window(2.0, 10)


def test_what_disturbs_a_point():
    cpus = psutil.cpu_count()
    busy, stolen = Window(1.0, 10, others=1.0), Window(1.0, 10, stolen=0.2)
    assert disturbed(busy, cpus, alone=True)
    assert not disturbed(busy, cpus - 1, alone=True), "that one CPU is left over"
    assert not disturbed(busy, cpus, alone=False), "another command is meant to be there"
    assert disturbed(stolen, cpus, alone=True)
    assert disturbed(stolen, cpus, alone=False)
    assert not disturbed(Window(1.0, 10, stolen=0.01), cpus, alone=True)


@contextmanager
def profiling(folder, *words):
    """A profile that runs. A test that fails ends it too: Popen would wait for it, and it waits minutes for steps."""
    cli = (sys.executable, "-m", "cadenza.slurm_plugin.cli", "profile", "run", *words)
    with subprocess.Popen(cli, cwd=folder) as profile:
        try:
            yield profile
        finally:
            profile.kill()


def until(what, profile, probe):
    """Return what a probe of a running profile finds."""
    deadline = time.monotonic() + 120
    while not (found := probe()):
        assert profile.poll() is None, f"the profile ended before {what}"
        assert time.monotonic() < deadline, f"no {what}"
        time.sleep(0.01)
    return found


def words_of(process):
    """Return a process's command line; nothing of one that has ended since it was listed."""
    with suppress(psutil.Error):
        return process.cmdline()
    return []


def below(profile, *, recursive=False):
    """Return each process below a profile with its command line."""
    return [(child, words_of(child)) for child in psutil.Process(profile.pid).children(recursive=recursive)]


@pytest.mark.slow
def test_a_terminated_profile_ends_its_command(tmp_path):
    with profiling(
        tmp_path, "--set", "within=0.001", "--cpus", "1", "--", sys.executable, str(STEPS), "0.002"
    ) as profile:
        children = until("its command", profile, lambda: [
            child for child, words in below(profile) if str(STEPS) in words
        ])  # fmt: skip
        profile.terminate()
        assert profile.wait(30) == 143
    assert not psutil.wait_procs(children, 20)[1]


def started_by(profile):
    """Return all that is below a profile but what guards it, once there are two generations; else nothing."""
    found = [(child, words) for child, words in below(profile, recursive=True) if "reaper" not in str(words)]
    grown = any(words[-2:] == ["sleep", "600"] for _, words in found)
    return [child for child, _ in found] if grown else []


@pytest.mark.slow
def test_a_killed_profile_leaves_no_process_of_its_command_and_no_files(tmp_path):
    """Also none that has left the session and the family, nor one that ignores signals."""
    script = 'trap "" TERM; setsid sh -c "exec sleep 600" & setsid -f sleep 600; echo $CADENZA_SOCKET > socket; wait'
    told = tmp_path / "socket"
    with profiling(tmp_path, "--cpus", "1", "--", "sh", "-c", script) as profile:
        found = until("its processes", profile, lambda: started_by(profile))
        until("its socket", profile, lambda: told.exists() and told.read_text().strip())
        (guard,) = [child for child, words in below(profile) if "reaper" in str(words)]
        profile.kill()
        profile.wait()
    assert not psutil.wait_procs([*found, guard], 20)[1]
    assert not marked(f"CADENZA_SOCKET={told.read_text().strip()}".encode())
    assert not Path(told.read_text().strip()).parent.exists()
    own = Path("/proc/self/cgroup").read_text()
    assert not any((parent / f"cadenza-profile-{profile.pid}").exists() for parent in parents(own, CGROUPS))


@pytest.mark.slow
def test_every_point_has_a_run_of_its_own_where_that_is_asked_for(tmp_path):
    told = []
    one = offline(tmp_path, STEPS, 0.002, told=told, cpus=(1.0, 2.0), restart=True, search=every)
    state = one.run()
    one.close()
    assert [point.cpus for point in told] == [2.0, 1.0]
    assert state.launches == 2


@pytest.mark.slow
def test_what_a_job_has_is_told_to_ranks_that_are_there_and_that_come_later(tmp_path):
    """The command writes what its page says at each step; the page is told before a point, and when it is attached."""
    code = (
        "import sys, time; from cadenza.sidecar import client; session = client.attach()\n"
        "for _ in range(10**6):\n"
        "    time.sleep(0.002); session.boundary(1); print(session.tuning(), flush=True)\n"
    )
    one = offline(tmp_path, "-c", code, cpus=(1.0, 2.0), search=every, cache_gb=(0.5,))
    one.run()
    one.close()
    said = (tmp_path / "p.log").read_text().splitlines()
    assert list(dict.fromkeys(said)) == [
        "Tuning(cpus=2.0, cache_mb=None)", "Tuning(cpus=1.0, cache_mb=None)", "Tuning(cpus=2.0, cache_mb=512)",
    ]  # fmt: skip


@pytest.mark.slow
def test_two_commands_are_measured_alone_and_together(tmp_path):
    rule = Rule(within=0.5, warm_up_s=0.0, warm_up_steps=2, window_s=0.02, window_steps=2, most_s=0.3, start_s=20)
    sides = [Side(name, (sys.executable, str(STEPS), "0.002")) for name in ("a", "b")]
    pair = measure(sides, tmp_path / "log", SystemClock(), rule)
    assert all(seconds > 0.001 for seconds in (*pair.alone_s, *pair.together_s))
    assert all(0 < speed <= 1 for speed in pair.speeds)
    read = read_interference(f"{COLUMNS}\n{pair.row()}\n", "pairs.csv")
    assert read


def test_a_pair_with_a_command_that_ends_is_named(tmp_path):
    sides = [Side("a", (sys.executable, "-c", "0")), Side("b", (sys.executable, "-c", "0"))]
    with pytest.raises(CommandFailedError, match="train for longer"):
        measure(sides, tmp_path / "log", SystemClock(), Rule(start_s=20))

"""``cadenza report --since``, and measured decisions in why and top, over a store that real rounds wrote."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from cli_rig import FileGateway, cluster, job, write_config
from click.testing import CliRunner, Result
from msgspec.structs import replace as replace_struct

from cadenza.policies.core.actions import Action, Outcome, Tune
from cadenza.policies.core.decision import Decision, Memory
from cadenza.policies.core.model import Job, JobKey, Lease, Share, SiteRules
from cadenza.policies.guard import GuardSettings
from cadenza.policies.round import run_round
from cadenza.sidecar.clock import SystemClock
from cadenza.slurm_plugin.cli.main import main
from cadenza.slurm_plugin.service.accounting.usage import FirstStart
from cadenza.slurm_plugin.service.job_access import JobAccess, Viewer
from cadenza.slurm_plugin.service.owner_socket import OwnerSocket
from cadenza.slurm_plugin.service.settings import load_settings
from cadenza.slurm_plugin.service.store.record_codec import encode_snapshot
from cadenza.slurm_plugin.service.store.writer import SqliteStore
from cadenza.slurm_plugin.views.replayed_slurm import Cluster, queue_rules, replayed

STEP_S = 100.0
HAS, GETS = (Share("n1", 2, 4, 1000),), (Share("n1", 2, 8, 1000),)


def run(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


class Refusing(FileGateway):
    def apply(self, action: Action) -> Outcome:
        return Outcome(ok=isinstance(action, Tune))


def fill(folder: Path, end_s: float) -> None:
    """Run six rounds, the last at ``end_s``: ada trains on lane 0; eve starts on lane 1 in the third one."""
    store = SqliteStore(folder / "cadenza.db", SystemClock())
    gateway = Refusing(folder / "snapshot.json")
    guard = GuardSettings(enforce=True, partitions=frozenset({"gpu"}))
    for number in range(6):
        now_s = end_s - (5 - number) * STEP_S
        jobs = list(cluster_jobs(number, end_s))
        tune = (Tune(JobKey(1, 0), GETS, "its profile says so"),) if number == 1 else ()
        back = (Tune(JobKey(1, 0), HAS, "it brought nothing"),) if number == 4 else ()
        gateway.path.write_bytes(encode_snapshot(replace(cluster(*jobs), time_s=now_s)))
        decision = Decision((*tune, *back), Memory())
        run_round(gateway, SystemClock(), store, lambda _snapshot, _memory, decision=decision: decision, guard)
    store.close()


def cluster_jobs(number: int, end_s: float) -> tuple[Job, ...]:
    shared = max(number - 2, 0)
    steps, held_s = 100 * number + 1, STEP_S * number - STEP_S / 2 * shared
    first = job(1, "first", "held", start_s=end_s - 9000.0, submit_s=end_s - 9000.0, placement=HAS)
    assert first.lease is not None
    mine = Lease("held", first.lease.gpus, held_s, 1.0, step=steps, ready=True)
    first = replace(first, lease=mine, placement=GETS if 2 <= number <= 4 else HAS)
    pends = job(2, "second", None, user="eve", state="PENDING", nodes=(), start_s=None, submit_s=end_s - 4.5 * STEP_S)
    theirs = Lease("yielded", mine.gpus, STEP_S / 2 * shared, waited_s=1.0, ready=True)
    start_s = end_s - 3 * STEP_S
    runs = replace(pends, state="RUNNING", nodes=("n1-l1",), start_s=start_s, lease=theirs)
    other = job(4, "other", None, user="zoe", options=None, state="PENDING", nodes=())
    return first, *(() if number == 0 else (pends if number < 2 else runs,)), other


def start(
    number: int, at_s: float, wait_s: float, gpus: int, held_s: float | None = None, **more: object
) -> FirstStart:
    ended_s = None if held_s is None else at_s + held_s
    return FirstStart(number, "ada", at_s, gpus, wait_s, ended_s, partition="gpu", waited_s=held_s and wait_s,
                      held_s=held_s, **more)  # fmt: skip


def test_the_same_submissions_wait_in_a_replayed_slurm() -> None:
    """Job 1 had all GPUs when the period began; 2 made way for 3 and waited twice; 4 has not ended."""
    jobs = [
        start(1, -500.0, 9.0, 2, 1_500.0),
        replace_struct(start(2, 0.0, 0.0, 2, 400.0), waited_s=1_100.0),
        start(3, 100.0, 50.0, 2, 100.0, managed=True),
        start(4, 1_700.0, 100.0, 1),
        start(5, 10.0, 0.0, 3, 10.0),
    ]
    found = replayed(jobs, Cluster(cluster().nodes, SiteRules()), 0.0, 2_000.0)
    assert (found.jobs, found.left_out) == (4, 1), "no node has three GPUs"
    rows = {row.jobs: (row.ended, row.waited_s, row.slurm_waited_s) for row in found.rows}
    # Under Slurm job 2 waits for the end of 1 at 1,000 s, and 3, which comes at 50 s, for the end of 2 at 1,400 s.
    assert rows["all"] == (2, (1_100 + 50) / 2, pytest.approx((1_000 + 1_350) / 2, rel=0.1))
    assert rows["opted in"] == (1, 50.0, pytest.approx(1_350.0, rel=0.1))
    assert rows["did not opt in"][0] == 1


def test_the_weights_tiers_and_qos_of_the_last_round_order_the_replay() -> None:
    site = SiteRules(weights={"qos": 100}, tiers={"gpu": 2}, qos_priority={"high": 5})
    jobs = [
        start(1, -10.0, 0.0, 2, 500.0),
        start(2, 900.0, 890.0, 2, 100.0),
        start(3, 700.0, 680.0, 2, 100.0, qos="high"),
    ]
    waits = [
        {row.jobs: row.slurm_waited_s for row in replayed(jobs, Cluster(cluster().nodes, rules), 0.0, 2_000.0).rows}
        for rules in (SiteRules(), site)
    ]
    assert waits[0]["all"] == pytest.approx(waits[1]["all"], rel=0.1)
    assert (queue_rules(site).partitions["gpu"].tier, queue_rules(site).qos["high"].priority) == (2, 5)


def test_idle_gpus_waits_and_slowdown_by_number_of_gpus(tmp_path: Path) -> None:
    """A job waits for 100 s while both GPUs are idle, and runs for 200 s."""
    end_s = SystemClock().now() - 5.0
    times = [end_s - (4 - number) * STEP_S for number in range(5)]
    waits = job(1, "first", None, gpus=1, state="PENDING", nodes=(), start_s=None, submit_s=times[0])
    runs = replace(waits, state="RUNNING", nodes=("n1",), start_s=times[1])
    store, gateway = SqliteStore(tmp_path / "cadenza.db", SystemClock()), Refusing(tmp_path / "snapshot.json")
    for now_s, jobs in zip(times, ((waits,), (waits,), (runs,), (runs,), ()), strict=True):
        gateway.path.write_bytes(encode_snapshot(replace(cluster(*jobs), time_s=now_s)))
        run_round(gateway, SystemClock(), store, lambda _snapshot, _memory: Decision((), Memory()), GuardSettings())
    store.close()
    config = write_config(tmp_path)
    found = json.loads(run("report", "--since", "1d", "--config", config, "--json").stdout)
    assert found["idle_gpu_s"] == pytest.approx(200.0)
    (everyone, managed, width) = found["replay"]["rows"]
    assert (everyone["jobs"], managed["jobs"], width["jobs"]) == ("all", "opted in", "1 GPU")
    assert (everyone["ended"], everyone["waited_s"]) == (1, pytest.approx(100.0))
    assert everyone["slurm_waited_s"] == 0.0, "Slurm alone starts it on the idle GPUs"
    text = " ".join(run("report", "--since", "1d", "--config", config).stdout.split())
    assert "in a replayed Slurm of the same submissions they wait 0" in text
    assert found["idle_waiting_gpus"] == pytest.approx(200.0 / 400.0)
    (width,) = found["widths"]
    assert (width["width"], width["started"], width["ended"]) == ("1 GPU", 1, 1)
    assert width["wait_s"] == pytest.approx(100.0)
    assert width["bounded_slowdown"] == pytest.approx(300.0 / 200.0)
    shown = " ".join(run("report", "--since", "1d", "--config", config).stdout.split())
    assert "0.500 GPUs on average, 0.056 GPU hours, were idle while a job waited that fits" in shown
    assert "By number of GPUs, all jobs" in shown


@pytest.fixture
def config(tmp_path: Path) -> Path:
    fill(tmp_path, SystemClock().now() - 5.0)
    return write_config(tmp_path)


def test_hours_and_waiting_by_user(config: Path) -> None:
    done = run("report", "--since", "1d", "--config", config, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["schema"] == "cadenza.sharing/1"
    assert found["watched_s"] == pytest.approx(500.0)
    users = {row["user"]: row["sums"] for row in found["users"]}
    assert list(users) == ["ada", "eve"]
    assert users["ada"]["gpu_s"] == pytest.approx(2 * 350.0)
    assert users["eve"]["gpu_s"] == users["eve"]["further_gpu_s"] == pytest.approx(2 * 150.0)
    assert users["eve"]["queue_s"] == pytest.approx(150.0, abs=1.0)
    assert (users["ada"]["turn_s"], users["eve"]["turn_s"]) == (pytest.approx(150.0), pytest.approx(150.0))
    assert users["eve"]["saved_s"] == pytest.approx(300.0 - 150.0, abs=1.0)
    assert found["total"]["gpu_s"] == pytest.approx(sum(row["sums"]["gpu_s"] for row in found["jobs"]))
    assert found["total"]["gpu_s"] == pytest.approx(2 * 500.0)
    assert found["others"]["queue_s"] == pytest.approx(500.0)
    (tunes,) = [row for row in found["kinds"] if row["decided"]]
    assert (tunes["kind"], tunes["decided"], tunes["undone"]) == ("tune", 2, 1)
    assert found["undone"][0]["detail"] == "it brought nothing"


def test_one_user_on_screen_and_as_a_page(config: Path, tmp_path: Path) -> None:
    page = tmp_path / "week.html"
    done = run("report", "--since", "1d", "--user", "eve", "--config", config, "-o", page)
    assert done.exit_code == 0, done.output
    assert "Effect of sharing for eve" in done.stdout
    assert "By user" in done.stdout
    assert "ada" not in done.stdout
    assert f"written: {page}" in done.stdout
    assert "1 job of 1 user had 0.083 GPU hours" in page.read_text()
    all_users = run("report", "--since", "1d", "--config", config)
    assert "undone: it brought nothing" in " ".join(all_users.stdout.split())


def test_a_user_gets_the_report_on_their_own_jobs_from_the_service(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = OwnerSocket(tmp_path / "jobs.sock", tmp_path / "cadenza.db", SystemClock())
    server.start()
    words = f'[service]\nstore = "{tmp_path}/closed.db"\n[expert]\njobs_socket = "{tmp_path}/jobs.sock"\n'
    (tmp_path / "users.toml").write_text(words)
    try:
        for viewer, users in ((Viewer("eve"), {"eve"}), (Viewer("zoe", everything=True), {"ada", "eve"})):
            monkeypatch.setattr(JobAccess, "of_uid", lambda *_, viewer=viewer: viewer)
            found = json.loads(run("report", "--since", "1d", "--config", tmp_path / "users.toml", "--json").stdout)
            assert {row["user"] for row in found["users"]} == users
            assert {row["job"] for row in found["jobs"]} == {2} if users == {"eve"} else {1, 2}
    finally:
        server.close()


def test_why_and_top_show_what_was_measured(config: Path) -> None:
    why = run("why", 1, "--config", config)
    assert "tune from 4 CPUs 1000 MB on n1 to 8 CPUs 1000 MB on n1: 1 s an iteration before, 0.5 s after" in why.stdout
    assert "2.00x, undone: it brought nothing" in why.stdout
    shown = json.loads(run("why", 1, "--config", config, "--json").stdout)["effects"]
    assert [row["verdict"] for row in shown] == ["", "undone"]
    assert "undone: it brought nothing" in run("top", "--once", "--config", config).stdout
    view = json.loads(run("top", "--once", "--json", "--config", config).stdout)
    assert [row["was"] for row in view["effects"]] == ["8 CPUs 1000 MB on n1", "4 CPUs 1000 MB on n1"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--since", "soon"), "'soon': a time ago"),
        (("--since", "1d", "--until", "yesterday"), "'yesterday'"),
        (("--since", "1h", "--until", "2h"), "--until is not after --since"),
        (("--since", "1d", "--user", "nobody"), "--user nobody: no job of this user"),
        (("--since", "30d", "--until", "20d"), "nothing on record"),
        (("--since", "1d", "results.json"), "either RESULT.json files or --since"),
        (("--since", "1d", "--baseline", "x"), "--baseline goes with RESULT.json files only"),
        (("--user", "eve", "results.json"), "--user goes with --since only"),
        ((), "either RESULT.json files or --since"),
    ],
)
def test_bad_input_is_exit_code_2(config: Path, words: tuple[str, ...], said: str) -> None:
    more = ("--config", config) if "--since" in words else ()
    done = run("report", *words, *more)
    assert done.exit_code == 2, done.output
    assert said in " ".join(done.stderr.replace("│", " ").split())


def test_a_missing_store_is_exit_code_3(tmp_path: Path) -> None:
    done = run("report", "--since", "7d", "--config", write_config(tmp_path))
    assert done.exit_code == 3
    assert "no store there: run this on the machine of cadenzad" in done.stderr


def test_a_store_without_sums_says_so(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    SqliteStore(Path(load_settings(config).service.store), SystemClock()).close()
    done = run("report", "--since", "7d", "--config", config)
    assert done.exit_code == 2
    assert "is cadenzad running?" in done.stderr

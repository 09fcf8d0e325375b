"""The demo's lists and figures: small runs whose numbers are known."""

from __future__ import annotations

import tomllib
from dataclasses import fields, replace
from pathlib import Path

import metrics
import pytest
import timeline
from metrics import Result, Run, Stretch, Switch
from predict import predict
from screen import large_errors
from workload import WorkloadError, read_jobs

from cadenza.policies.ordering.levels import THRESHOLDS
from cadenza.slurm_plugin.service.settings import PolicyTable

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo"


def result(name: str, submit: float, hundredth: float, end: float, losses: str = "aa") -> Result:
    return Result(name, "alice", 1, submit, submit + 1, hundredth, end, 500, losses)


def run(*results: Result, stretches: tuple[Stretch, ...] = (), switches: tuple[Switch, ...] = ()) -> Run:
    return Run("a run", 2, results, stretches, switches)


def test_figures_of_two_jobs() -> None:
    stretches = (Stretch("a", "n1", (0, 1), 100, 110), Stretch("b", "n1", (0,), 110, 130))
    switches = (Switch("yield", 0.02, 0.03), Switch("yield", 0.04, 0.05), Switch("resume", 0.0, 0.01))
    found = metrics.figures(
        run(result("a", 100, 104, 110), result("b", 100, 116, 150), stretches=stretches, switches=switches)
    )
    assert found.time_to_100_s == 10
    assert (found.jct_mean_s, found.jct_p95_s, found.makespan_s) == (30, 50, 50)
    assert found.iterations_per_s == 20
    assert found.gpu_holding == 0.4
    assert (found.yields, found.boundary_p50_s, found.yield_p99_s, found.resume_p50_s) == (2, 0.02, 0.05, 0.01)


def test_percentiles_are_nearest_rank() -> None:
    values = list(range(1, 101))
    assert [metrics.percentile(values, part) for part in (0.5, 0.95, 0.99, 1.0)] == [50, 95, 99, 100]
    assert metrics.percentile([7], 0.01) == 7


def test_a_gpu_held_twice_is_found() -> None:
    first = Stretch("a", "n1", (0, 1), 0, 10)
    assert metrics.overlaps([first, Stretch("b", "n1", (1,), 9, 12)])
    for other in (
        Stretch("b", "n1", (1,), 10, 12), Stretch("b", "n1", (2,), 5, 12),
        Stretch("b", "n2", (1,), 5, 12), Stretch("a", "n1", (1,), 5, 12),
    ):  # fmt: skip
        assert not metrics.overlaps([first, other])


@pytest.mark.parametrize(
    ("field", "value", "failing"),
    [("time_to_100_s", 21.0, 0), ("jct_mean_s", 81.0, 1), ("jct_p95_s", 111.0, 2), ("iterations_per_s", 96.0, 3)],
)
def test_each_promise_fails_by_itself(field: str, value: float, failing: int) -> None:
    plain = metrics.Figures(16, 100, 80, 100, 100, 90, 0.9, 0, None, None, None, None, None, None)
    kept = replace(plain, time_to_100_s=20, jct_p95_s=110, iterations_per_s=97)
    assert all(check.ok for check in metrics.check_favorable(plain, kept))
    broken = metrics.check_favorable(plain, replace(kept, **{field: value}))
    assert [check.ok for check in broken] == [number != failing for number in range(4)]


def test_different_losses_are_named() -> None:
    plain = run(result("a", 0, 1, 2), result("b", 0, 1, 2))
    shared = run(result("a", 0, 1, 2), result("b", 0, 1, 2, losses="bb"))
    checks = metrics.check_runs(plain, shared)
    assert [check.ok for check in checks] == [False, True]
    assert "different: b" in checks[0].text


def test_the_plot_is_a_png(tmp_path: Path) -> None:
    stretches = (Stretch("a", "n1", (0, 1), 0, 20), Stretch("b", "n2", (3,), 5, 6))
    one = run(result("a", 0, 1, 20), result("b", 0, 1, 6), stretches=stretches)
    timeline.plot((one, one), tmp_path / "plots" / "a.png")
    assert (tmp_path / "plots" / "a.png").read_bytes().startswith(b"\x89PNG")


def test_the_prediction_keeps_the_promises_and_names_what_is_measured() -> None:
    jobs, settings = read_jobs(DEMO / "jobs.csv"), tomllib.loads((DEMO / "demo.toml").read_text())
    plain, shared = predict(jobs), predict(jobs, lanes=4, settings=settings)
    assert plain["time_to_100_s"] > metrics.MILESTONE_GAIN * shared["time_to_100_s"]
    assert shared["jct_mean_s"] <= metrics.MEAN_LIMIT * plain["jct_mean_s"]
    assert shared["jct_p95_s"] <= metrics.P95_LIMIT * plain["jct_p95_s"]
    assert shared["iterations_per_s"] >= metrics.RATE_LIMIT * plain["iterations_per_s"]
    assert set(plain) == set(shared) <= {field.name for field in fields(metrics.Figures)}


def test_the_demo_runs_the_shipped_policy() -> None:
    settings, policy = tomllib.loads((DEMO / "demo.toml").read_text()), PolicyTable()
    assert settings["policy"] == {"order": policy.order, "share": policy.share}
    assert set(settings["sharing"]) == {"share_between_users", "slice_s", "yield_timeout_s"}
    assert settings["sharing"]["share_between_users"], "Slurm starts a job on the first free lane, whoever is there"


def test_a_prediction_beyond_a_quarter_is_called_wrong() -> None:
    figures = metrics.Figures(16, 100, 80, 100, 100, 90, 0.9, 0, None, None, None, None, None, None)
    assert large_errors({"plain": figures}, {"plain": {"jct_mean_s": 100.0, "jct_p95_s": 124.0}}) == []
    (sentence,) = large_errors({"plain": figures}, {"plain": {"jct_mean_s": 101.0}})
    assert sentence == "the simulator is more than 25% off on plain: job completion time, mean +26%"


# --- the lists -------------------------------------------------------------------------------------------


def test_the_favorable_list_is_what_the_demo_says() -> None:
    jobs = read_jobs(DEMO / "jobs.csv")
    assert len(jobs) >= 12
    assert {job.gpus for job in jobs} == {1, 2, 4}
    assert {job.user for job in jobs} == {"alice", "bob"}
    assert {job.model for job in jobs} == {"mlp", "cnn", "transformer", "lstm"}
    assert any(job.ranks > 1 for job in jobs)
    first, later = jobs[:3], jobs[3:]
    assert sum(job.gpus for job in first) == 8, "the long jobs hold all GPUs"
    assert len(later) >= 3 * len(first)
    assert min(job.work_s for job in first) > 10 * max(job.work_s for job in later)
    assert all(job.submit_s * first[0].gpus > THRESHOLDS[0] for job in later), "a long job has left the first level"


def test_the_unfavorable_list_has_no_queue_and_equal_jobs() -> None:
    jobs = read_jobs(DEMO / "unfavorable.csv")
    names = {job.job for job in read_jobs(DEMO / "jobs.csv")}
    assert names.isdisjoint(job.job for job in jobs), "a job's report and checkpoints are found by its name"
    assert sum(job.gpus for job in jobs) == 8
    assert len({(job.iterations, job.iteration_s) for job in jobs}) == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("a,alice,0,1,1,mlp,ten,0.03,1", "ten"),
        ("a,alice,0,1,2,mlp,10,0.03,1", "a GPU for each rank"),
        ("a,alice,0,1", "2"),
    ],
)
def test_bad_rows_name_file_and_line(tmp_path: Path, row: str, message: str) -> None:
    path = tmp_path / "list.csv"
    path.write_text(f"job,user,submit_s,gpus,ranks,model,iterations,iteration_s,seed\n{row}\n")
    with pytest.raises(WorkloadError, match=message) as caught:
        read_jobs(path)
    assert f"{path}:2" in str(caught.value)


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    path = tmp_path / "list.csv"
    path.write_text("job,user\na,alice\n")
    with pytest.raises(WorkloadError, match="column gpus is missing"):
        read_jobs(path)

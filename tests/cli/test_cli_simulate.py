"""simulate: what it prints and writes, and one line with exit code 2 for every wrong value."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from unittest.mock import patch

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from cadenza.policies.core.errors import InputError
from cadenza.policies.guard import GuardSettings
from cadenza.policies.registry import ENTRIES
from cadenza.policies.simulator.result_file import decode
from cadenza.policies.simulator.run_values import GUARD
from cadenza.slurm_plugin.cli.main import main
from cadenza.slurm_plugin.cli.simulate.command import GROUPS, KEYS
from cadenza.slurm_plugin.service.settings import Settings
from cadenza.slurm_plugin.simulations.request import Request, read_request
from cadenza.slurm_plugin.simulations.runner import ProgressLines, SystemClock, progress_bar

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "simulate"
FIGURES = {
    "jobs", "avg_jct_h", "p50_jct_h", "p99_jct_h", "makespan_h", "time_to_100_iterations_s", "gpu_utilization",
    "migrations", "yields", "decision_ms", "wall_s",
}  # fmt: skip
PROPORTIONAL = ("--allocate", "proportional", "--share", "none")
SMALL = ("--workload", "synergy:jobs=40", "--nodes", "2x8:24:500", *PROPORTIONAL)


def run(*words: str) -> Result:
    return CliRunner().invoke(main, ["simulate", *words])


def example(*words: str, nodes: str = "2x4:16:128") -> Result:
    files = ("--trace", str(EXAMPLE / "jobs.csv"), "--profiles", str(EXAMPLE / "profiles.json"))
    return run(*files, "--set", f"costs={EXAMPLE / 'costs.toml'}", "--nodes", nodes, *words)


# --- What comes out --------------------------------------------------------------------------------------


def test_the_example_as_json() -> None:
    done = example(*PROPORTIONAL, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found.keys() >= FIGURES
    assert found["decision_ms"].keys() == {"p50", "p99", "max"}
    assert (found["jobs"], found["unfinished"], found["policy"]) == (8, 0, "fifo/proportional")
    assert 0 < found["avg_jct_h"] < found["makespan_h"]


def test_the_example_as_a_table() -> None:
    done = example("--order", "srtf", *PROPORTIONAL)
    assert done.exit_code == 0
    assert done.stdout.startswith("srtf/proportional  8 GPUs, 32 CPUs")
    assert "completion time, mean" in done.stdout
    assert done.stderr == ""


def test_every_run_is_compared_with_slurm_and_the_presets_with_strict_order() -> None:
    found = json.loads(example("--json").stdout)
    assert found["baseline"]["name"] == "slurm"
    assert found["ratio_to_baseline"]["avg_jct_h"] == pytest.approx(found["avg_jct_h"] / found["baseline"]["avg_jct_h"])
    assert {"mean_bounded_slowdown", "wait_1_gpu_h", "idle_waiting_gpus"} <= found["baseline"].keys()
    assert "RATIO" in example().stdout
    few = ("--workload", "synergy:jobs=20", "--set", "preset=synergy", "--json")
    assert json.loads(run(*few).stdout)["baseline"]["name"] == "strict"
    idle = json.loads(run(*few, "--set", "baseline=slurm").stdout)
    assert idle["baseline"]["name"] == "slurm"
    assert idle["ratio_to_baseline"]["time_to_100_iterations_s"] is None, "no ratio to next to nothing"


SITED = "".join(
    f"{number},{10 * number},{(4, 8, 2)[number % 3]},{900 + 100 * number},{'ab'[number % 2]},u{number % 5}\n"
    for number in range(30)
)


def test_every_gain_over_slurm_has_easys_next_to_it(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("job,submit_s,gpus,duration_s,account,user\n" + SITED)
    words = ("--trace", str(trace), "--nodes", "1x8:24:500")
    found = json.loads(run(*words, "--json").stdout)
    assert found["ratio_to_easy"]["avg_jct_h"] == pytest.approx(found["avg_jct_h"] / found["easy"]["avg_jct_h"])
    assert found["weights"] == {"age": 5000, "fairshare": 10_000, "jobsize": 1000, "partition": 0, "qos": 20_000}
    assert found["easy"]["avg_jct_h"] != found["baseline"]["avg_jct_h"]
    las = found["ideal_las"]["avg_jct_h"]
    assert found["ratio_to_ideal_las"]["avg_jct_h"] == pytest.approx(found["avg_jct_h"] / las)
    text = run(*words).stdout
    assert "easy" in text
    assert "ideal LAS, where every job can leave at no cost: mean " in text
    assert "times those of the ideal" in text
    assert "Slurm's order: age 5,000, fairshare 10,000, jobsize 1,000, qos 20,000" in text
    alone = json.loads(run(*words, "--share", "none", "--set", "weights=none", "--json").stdout)
    assert "baseline" not in alone
    assert "ratio_to_easy" in alone
    assert "submission (all weights are 0)" in run(*words, "--share", "none", "--set", "weights=none").stdout


def test_a_site_and_tiers_change_slurms_order(tmp_path: Path) -> None:
    trace, site = tmp_path / "t.csv", tmp_path / "site.toml"
    trace.write_text("job,submit_s,gpus,duration_s,account,qos,tier\n1,0,8,600,a,,\n2,1,8,600,a,,\n3,2,8,600,b,high,\n"
                     "4,3,8,600,b,,2\n5,4,8,600,c,,\n6,5,8,600,c,,\n")  # fmt: skip
    site.write_text("[qos.high]\npriority = 10\n[accounts.c]\ngpus = 4\n")
    rows = tmp_path / "rows.csv"
    words = ("--trace", str(trace), "--nodes", "1x8:24:500", "--share", "none", "--site", str(site))
    done = run(*words, "--per-job", str(rows), "--json")
    assert done.exit_code == 0, done.output
    found = {int(row["id"]): row["start_s"] for row in csv.DictReader(rows.open())}
    assert found == {1: "0.0", 4: "600.0", 3: "1200.0", 2: "1800.0", 5: "", 6: ""}
    assert json.loads(done.stdout)["unfinished"] == 2
    # A sharing policy acts in all partitions of the trace.
    shared = run("--trace", str(trace), "--nodes", "1x8:24:500", "--site", str(site), "--json")
    assert shared.exit_code == 0, shared.output


def test_a_job_may_take_one_of_several_types_of_gpu(tmp_path: Path) -> None:
    """Three jobs that take a100 or h100 share two nodes; the t4 stay idle."""
    trace = tmp_path / "t.csv"
    trace.write_text("job,submit_s,gpus,duration_s,gpu_type\n" + "".join(f"{n},0,4,600,A100|h100\n" for n in (1, 2, 3)))
    words = ("--trace", str(trace), "--nodes", "1x4:24:500:a100,1x4:24:500:h100,4x8:24:500:t4", "--share", "none")
    rows = tmp_path / "rows.csv"
    done = run(*words, "--per-job", str(rows))
    assert done.exit_code == 0, done.output
    assert sorted(float(row["start_s"]) >= 600 for row in csv.DictReader(rows.open())) == [False, False, True]
    refused = run(*words[:2], "--nodes", "4x8:24:500:t4")
    assert "job 1: no node has GPUs of type 'A100|h100'" in refused.stderr


def test_jobs_that_did_not_opt_in_are_drawn(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("job,submit_s,gpus,duration_s,account,user\n" + SITED)
    words = ("--trace", str(trace), "--nodes", "1x8:24:500", "--opted-in", "0.3")
    found = json.loads(run(*words, "--json").stdout)
    assert 0.1 < found["opted_in_jobs"] < 0.5
    assert found["movable_jobs"] == found["opted_in_jobs"]
    assert " of 30 jobs opted in" in run(*words).stdout
    none = json.loads(run(*words[:-1], "0", "--json").stdout)
    assert none["ratio_to_baseline"]["avg_jct_h"] == pytest.approx(1.0)
    assert none["restarts"] == none["migrations"] == 0
    both = tmp_path / "both.csv"
    both.write_text("job,submit_s,gpus,duration_s,managed\n1,0,1,9,no\n")
    refused = run("--trace", str(both), *words[2:])
    assert refused.stderr == "cadenza: --opted-in: does not go with the trace's column 'managed'\n"


def test_without_sharing_and_names_slurm_alone_runs() -> None:
    alone, shared = json.loads(example("--share", "none", "--json").stdout), json.loads(example("--json").stdout)
    assert "baseline" not in alone
    assert alone["avg_jct_h"] == shared["baseline"]["avg_jct_h"]
    strict = json.loads(example("--share", "none", "--set", "baseline=strict", "--json").stdout)
    assert strict["baseline"]["avg_jct_h"] >= strict["avg_jct_h"]


def test_the_jobs_that_can_move_and_share_are_counted(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    rows = [f"{number},{number},1,9000,{'yes' if number % 2 else 'no'}" for number in range(20)]
    trace.write_text("job,submit_s,gpus,duration_s,checkpoints\n" + "\n".join(rows) + "\n")
    words = ("--trace", str(trace), "--nodes", "1x4:16:128", "--lanes", "2")
    found = json.loads(run(*words, "--json").stdout)
    assert found["movable_jobs"] == 0.5
    assert found["unshareable"] == {"jobs": 20, "users": 0, "memory": 20, "host_memory": 0}
    text = run(*words).stdout
    assert "10 of 20 jobs can move" in text
    assert "20 of 20 jobs can share no GPU" in text
    assert "can share no GPU" not in run(*words[:4]).stdout, "with one lane none is to"


def test_failures_and_checkpoints_cost_time() -> None:
    failing = ("--set", f"failures={EXAMPLE / 'failures.csv'}", "--set", "checkpoint=300")
    plain = json.loads(example(*PROPORTIONAL, "--json").stdout)
    failed = json.loads(example(*PROPORTIONAL, "--json", *failing).stdout)
    assert failed["avg_jct_h"] > plain["avg_jct_h"]


def test_one_row_a_job_and_a_saved_file(tmp_path: Path) -> None:
    rows, file = tmp_path / "jobs.csv", tmp_path / "run.json"
    done = run(*SMALL, "--seed", "1,2", "--per-job", str(rows), "--save", str(file), "--label", "mine", "--json")
    assert done.exit_code == 0, done.output
    table = list(csv.DictReader(rows.open()))
    assert len(table) == 80
    assert {row["seed"] for row in table} == {"1", "2"}
    assert float(table[0]["jct_s"]) == float(table[0]["finish_s"]) - float(table[0]["submit_s"])
    saved = decode(file.read_bytes(), "run.json")
    assert (saved.label, saved.gpus, saved.cpus) == ("mine", 16, 48)
    assert [run.seed for run in saved.runs] == [1, 2]
    assert saved.arguments == ("--workload", "synergy:jobs=40", "--nodes", "2x8:24:500", "--seed", "1,2", *PROPORTIONAL)
    assert saved.classes["gnmt"] == "language"
    assert saved.runs[0].summary["avg_jct_h"] == json.loads(done.stdout)["runs"][0]["avg_jct_h"]


def test_several_seeds_give_means_with_intervals() -> None:
    each = [json.loads(run(*SMALL, "--seed", seed, "--json").stdout)["avg_jct_h"] for seed in ("1", "2", "3")]
    both = json.loads(run(*SMALL, "--seed", "1,2,3", "--json").stdout)
    assert both["avg_jct_h"] == pytest.approx(sum(each) / 3)
    assert both["interval95"]["avg_jct_h"] > 0
    assert both["seeds"] == [1, 2, 3]
    assert "±" in run(*SMALL, "--seed", "1,2,3").stdout


def test_a_seed_is_a_seed() -> None:
    def figures(*words: str) -> dict[str, object]:
        found = json.loads(run(*SMALL, "--json", *words).stdout)
        return {key: value for key, value in found.items() if key not in {"wall_s", "decision_ms", "seeds"}}

    assert figures("--seed", "42") == figures()
    assert figures("--seed", "1") != figures()


def test_a_window_ends_the_run_when_its_jobs_are_done() -> None:
    whole = json.loads(run(*SMALL, "--json").stdout)
    part = json.loads(run(*SMALL, "--json", "--set", "window=0:5").stdout)
    assert part["jobs"] == 5
    assert part["rounds"] < whole["rounds"]


def test_a_load_sweep() -> None:
    done = run(*SMALL, "--set", "load-sweep=0.5:1:0.5", "--seed", "1,2", "--json")
    found = json.loads(done.stdout)
    assert [row["load"] for row in found["sweep"]] == [0.5, 1.0]
    assert [(point["load"], point["seed"]) for point in found["points"]] == [(0.5, 1), (0.5, 2), (1, 1), (1, 2)]
    assert found["too_short"]
    assert found["highest_stable_load"] is None
    assert "too few jobs" in run(*SMALL, "--set", "load-sweep=0.5:1:0.5").stdout


def test_models_are_assigned_on_request(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("job,submit_s,gpus,duration_s\n" + "".join(f"{n},0,1,3600\n" for n in range(20)))
    rows = tmp_path / "rows.csv"
    done = run("--trace", str(trace), "--nodes", "1x8:24:500", "--set", "assign=50/0/50", *PROPORTIONAL,
               "--per-job", str(rows))  # fmt: skip
    assert done.exit_code == 0, done.output
    models = [row["model"] for row in csv.DictReader(rows.open())]
    assert models.count("m5") + models.count("deepspeech") == 10


def test_the_preset_starts_static_traces_at_one_second() -> None:
    trace = ("--trace", str(EXAMPLE / "jobs.csv"), "--profiles", str(EXAMPLE / "profiles.json"))
    done = run(*trace, "--nodes", "2x4:16:128", *PROPORTIONAL, "--set", "preset=synergy", "--json")
    assert json.loads(done.stdout)["makespan_h"] * 3600 % 300 == pytest.approx(0, abs=1e-6)


def test_turns_by_the_ordering_are_another_policy() -> None:
    few = ("--workload", "synergy:jobs=4", "--nodes", "1x4:24:500", *PROPORTIONAL[:2])
    shared = (*few, "--order", "srtf", "--share", "timeslice", "--json")
    fair, by_order = (json.loads(run(*shared, *turns).stdout) for turns in ((), ("--set", "turns=order")))
    assert fair["policy"] == "srtf/proportional/timeslice"
    assert by_order["policy"] == "srtf/proportional/timeslice, turns by order"


# --- The service's decision ------------------------------------------------------------------------------


def request(**words: str) -> Request:
    return read_request({"workload": "synergy:jobs=3", "nodes": "2x8:24:500", **words}, ())


def test_without_options_the_service_as_it_ships_is_simulated() -> None:
    plain, shipped = request(), Settings()
    table = shipped.policy
    assert plain.policy.name == f"{table.order}/{table.allocate}/{table.share}" == "levels/none/preemption"
    assert not shipped.policy.place
    assert not plain.setup.place
    assert plain.setup.phased_moves
    assert plain.setup.lanes == 1
    assert plain.setup.guard.min_run_s == shipped.expert.min_run_s
    assert plain.setup.guard.max_actions_per_round == GuardSettings().max_actions_per_round


def test_an_option_that_no_simulation_has_is_refused() -> None:
    with pytest.raises(InputError, match=r"simulate: unknown key 'shares'; did you mean 'share'\?"):
        request(shares="timeslice")


def test_options_named_as_settings_change_those() -> None:
    turns = request(share_between_users="yes", allocate="proportional", share="timeslice")
    assert turns.policy.name == "levels/proportional/timeslice"
    assert turns.setup.lanes == 2


@pytest.mark.parametrize("words", [{"share": "none"}, {"preset": "synergy"}])
def test_published_conventions_know_no_slurm(words: dict[str, str]) -> None:
    published = request(**words)
    assert published.policy.name == "fifo/cadenza"
    assert (published.setup.place, published.setup.phased_moves, published.setup.lanes) == (True, False, 1)
    assert published.setup.guard == GUARD


def test_jobs_of_different_users_share_only_on_request(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    rows = "".join(f"{number},0,8,600,30,user{number}\n" for number in (1, 2))
    trace.write_text("job,submit_s,gpus,duration_s,memory_gb_per_gpu,user\n" + rows)

    def yields(*words: str) -> int:
        done = run("--trace", str(trace), "--nodes", "1x8:24:500", "--share", "timeslice", "--json", *words)
        return int(json.loads(done.stdout)["yields"])

    assert yields() == 0
    assert yields("--set", "share-between-users=yes") > 4


# --- What goes wrong -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "simulate: give either --trace or --workload"),
        (("--trace", "x", "--workload", "synergy"), "simulate: give either --trace or --workload, not both"),
        (("--trace", "x"), "--nodes: is missing"),
        (("--trace", "nope.csv", "--nodes", "1x1:1:1"), "--trace: 'nope.csv' cannot be read: No such file"),
        (("--trace", "/", "--nodes", "1x1:1:1"), "--trace: '/' cannot be read: Is a directory"),
        (("--trace", "\0", "--nodes", "1x1:1:1"), "--trace: '\\x00' cannot be read"),
        (("--trace", "x", "--nodes", "1x1:1:1", "--seed", "1"), "--seed: goes with --workload"),
        (("--workload", "synergi"), "--workload: no workload is called 'synergi'; did you mean 'synergy'?"),
        (("--workload", "synergy:lode=1"), "--workload: workload synergy: unknown key 'lode'; did you mean 'load'?"),
        ((*SMALL, "--order", "fif"), "no ordering is called 'fif'; did you mean 'fifo'?"),
        ((*SMALL, "--allocate", "tun"), "no allocation is called 'tun'; did you mean 'tune'?"),
        ((*SMALL, "--share", "gandivo"), "no sharing is called 'gandivo'; did you mean 'gandiva'?"),
        ((*SMALL, "--set", "turns=order"), "--set turns: goes with --share timeslice or gandiva"),
        ((*SMALL, "--share", "gandiva", "--set", "turns=odd"), "--set turns: 'odd' is none of fair, order"),
        ((*SMALL, "--nodes", "4x8"), "--nodes: cluster '4x8': '4x8' is not NODESxGPUS"),
        ((*SMALL, "--lanes", "9"), "--lanes: '9' is not from 1 to 8"),
        ((*SMALL, "--set", "round=0"), "--set round: '0' is not from 1"),
        ((*SMALL, "--set", "round=nan"), "--set round: 'nan' is not a number"),
        ((*SMALL, "--set", "checkpoint=x"), "--set checkpoint: 'x' is not a number"),
        ((*SMALL, "--set", "preset=gandiva"), "--set preset: 'gandiva' is none of synergy"),
        ((*SMALL, "--set", "through-slurm=yes", "--set", "place=maybe"), "--set place: 'maybe' is none of yes, no"),
        ((*SMALL, "--set", "place=yes"), "--set place: goes with --set through-slurm=yes"),
        ((*SMALL, "--set", "weights=size=1"), "--set weights: 'size=1' is not NAME=NUMBER"),
        ((*SMALL, "--set", "weights=age=1,age=2"), "--set weights: age is there twice"),
        ((*SMALL, "--set", "weights=age=-1"), "--set weights: age: '-1' is not from 0"),
        ((*SMALL, "--opted-in", "30"), "--opted-in: '30' is not from 0 to 1"),
        ((*SMALL, "--site", "nope"), "--site: 'nope' cannot be read"),
        ((*SMALL, "--set", "share-between-users=1"), "--set share-between-users: '1' is none of yes, no"),
        ((*SMALL, "--set", "preset=synergy", "--set", "through-slurm=yes"), "--set through-slurm: does not go"),
        ((*SMALL, "--set", "window=5"), "--set window: '5' is not FROM:TO"),
        ((*SMALL, "--set", "window=5:5"), "--set window: '5:5' holds no position"),
        ((*SMALL, "--set", "window=5:500"), "--set window: ends at 500, and there are 40 jobs"),
        ((*SMALL, "--seed", "1,one"), "--seed: 'one' is not a whole number"),
        ((*SMALL, "--seed", "1,1"), "--seed: '1,1' names a seed twice"),
        ((*SMALL, "--set", "load-sweep=4:1:1"), "--set load-sweep: '4:1:1' ends below where it begins"),
        (("--workload", "gandiva", "--set", "load-sweep=1:2:1"), "--set load-sweep: goes with --workload synergy"),
        ((*SMALL, "--set", "load-sweep=1:2:1", "--per-job", "x"), "--per-job: does not go with --set load-sweep"),
        ((*SMALL, "--set", "assign=20/70/10"), "--set assign: goes with --trace"),
        ((*SMALL, "--set", "preset=synergy", "--set", "costs=x"), "--set costs: does not go with --set preset=synergy"),
        ((*SMALL, "--save", "/nowhere/x.json"), "--save: '/nowhere/x.json' is not a file in a folder that exists"),
        ((*SMALL, "--per-job", "/"), "--per-job: '/' is not a file in a folder that exists"),
        ((*SMALL, "--set", "costs=nope"), "--set costs: 'nope' cannot be read"),
        (("--workload", "synergy:jobs=9,gpus=synthetic,seed=3", "--nodes", "1x1:3:60"), "job "),
    ],
)
def test_every_wrong_value_is_one_line_and_exit_code_2(words: tuple[str, ...], said: str) -> None:
    done = run(*words)
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    assert done.stderr.startswith("cadenza: " + said)
    assert done.stderr.count("\n") == 1


def test_files_are_named_with_their_lines(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_bytes(b"job,submit_s,gpus,duration_s\n1,0,1,60\n2,0,x,60\n")
    done = run("--trace", str(trace), "--nodes", "1x1:1:1")
    assert (done.exit_code, done.stderr) == (2, f"cadenza: {trace}:3: gpus: 'x' is not a whole number\n")
    trace.write_bytes(b"job,submit_s\n\xff\xfe")
    done = run("--trace", str(trace), "--nodes", "1x1:1:1")
    assert (done.exit_code, done.stderr) == (2, f"cadenza: {trace}:2: not UTF-8 text (byte 13 is 0xff)\n")
    trace.write_bytes(b"job,submit_s,gpus,duration_s\n")
    assert run("--trace", str(trace), "--nodes", "1x1:1:1").stderr == f"cadenza: {trace}: has no jobs\n"


VALUED = [(f"--{name}", "") for options in GROUPS.values() for name, metavar, _ in options if metavar]
VALUED += [("--set", f"{key.name}=") for keys in KEYS.values() for key in keys]
WRONG = ["", "nan", "-1", "inf", "9" * 400, "0", "x", ":", ",", "\x00", "é", "1:2", "1,2", "yes", "no", "a=b"]


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(VALUED), st.sampled_from(WRONG)), min_size=1, max_size=3))
def test_no_values_make_it_crash(pairs: list[tuple[tuple[str, str], str]]) -> None:
    chosen = [pair for pair in pairs if pair[0][0] not in {"--save", "--per-job"}]
    given_words = [word for (option, key), value in chosen for word in (option, key + value)]
    done = run("--workload", "synergy:jobs=2", *PROPORTIONAL, *given_words)
    assert done.exit_code in {0, 2}, (given_words, done.output, done.exception)


def test_without_a_terminal_progress_is_a_line_once_in_a_while(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    with patch.object(SystemClock, "monotonic", lambda _: now[0]), progress_bar(quiet=False) as bar:
        assert isinstance(bar, ProgressLines)
        first, second = bar.add_task("slurm", total=40), bar.add_task("cadenza", total=40)
        for now[0] in (1.0, 9.0, 10.0, 11.0, 25.0):
            bar.update(first, completed=int(now[0]))
        bar.update(second, completed=7, description="cadenza, day 2")
    assert capsys.readouterr().err.splitlines() == [
        "slurm: 10 of 40 jobs have ended", "slurm: 25 of 40 jobs have ended", "cadenza, day 2: 7 of 40 jobs have ended"
    ]  # fmt: skip
    with progress_bar(quiet=True) as none:
        assert none is None


# --- Help ------------------------------------------------------------------------------------------------


def test_the_help_has_every_option_and_every_workloads_keys() -> None:
    text = run("--help").stdout
    for heading, options in GROUPS.items():
        assert f"{heading}:" in text
        assert all(f"--{name}" in text for name, _, _ in options)
    assert all(f"{key.name}={key.form}" in text for keys in KEYS.values() for key in keys)
    assert all(entry.name in text and entry.source in " ".join(text.split()) for entry in ENTRIES)
    assert "split=20/70/10" in text

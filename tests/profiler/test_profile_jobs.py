"""Real training jobs, profiled as a user does."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cadenza.profiler.measure.cpu_limits import own_cpus

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "cadenza.slurm_plugin.cli", "profile"]
CADENZA = [*COMMAND, "run", "--json", "--set", "within=30", "--set", "point-s=5"]
pytestmark = pytest.mark.slow


def profiled(tmp_path, *words):
    done = subprocess.run([*CADENZA, *map(str, words)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_job_bound_by_its_loader_is_profiled_drawn_and_read_back(tmp_path):
    most = len(own_cpus())
    images = ("--", sys.executable, ROOT / "examples/profile/images.py", "--data", tmp_path / "data")
    (tmp_path / "data").mkdir()
    size = ("--dataset", tmp_path / "data", "--set", "samples=256", "--set", f"node=1:{most}:8", "--png", "p.png")
    found = profiled(tmp_path, *size, "--set", "memory=0.1", *images)
    assert found["points"][0]["cpus"] == most
    assert found["points"][0]["samples"] == 32
    assert found["points"][0]["settled"] in (True, False)
    assert found["law"]["work_s"] > 0
    assert len(found["profile"]["memory_gb_per_gpu"]) >= 11
    assert found["cache_gb"]["0.1"]["measured_s"] > 0
    assert found["sbatch"][-1] == "#SBATCH --cadenza=model=images"
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    again = profiled(tmp_path, *size, "--set", "memory=0.1", "--resume", *images)
    assert again["points"] == found["points"]
    assert again["launches"] == found["launches"]
    shown = [*COMMAND, "show", "profile.json"]
    assert subprocess.run(shown, cwd=tmp_path, check=False).returncode == 0


def test_a_job_of_two_ranks_without_a_line_of_ours_counts_two(tmp_path):
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    train = (ROOT / "examples/train.py", "--no-attach", "--iterations", "1000000", "--iteration-s", "0.01")
    found = profiled(tmp_path, "--cpus", "2", "--set", "node=2:2:8", "--", *torchrun, *train)
    assert [point["ranks"] for point in found["points"]] == [2]
    assert found["profile"]["cpus_per_gpu"] == [1]


def test_a_computed_memory_point_beside_a_measured_one(tmp_path):
    """With storage of 4 MB/s and half of the 13 MB cached, a step waits for storage in both; the error is printed."""
    (tmp_path / "data").mkdir()
    slow, cpus = ("--storage-mb-s", "4"), ("--cpus", len(own_cpus()))
    images = ("--", sys.executable, ROOT / "examples/profile/images.py", "--data", tmp_path / "data", *slow)
    size = ("--dataset", tmp_path / "data", "--set", "samples=256", "--set", "storage-mb-s=4", *cpus)
    point = profiled(tmp_path, *size, "--set", "memory=0.0065", "--set", "point-s=8", *images)["cache_gb"]["0.0065"]
    error = point["computed_s"] / point["measured_s"] - 1
    print(f"computed {point['computed_s']:.3f} s, measured {point['measured_s']:.3f} s, error {error:+.1%}")
    assert point["computed_s"] > 0.15
    assert abs(error) < 0.6


def test_points_in_turns_are_visited_again_and_a_finished_profile_asks_for_no_more(tmp_path):
    steps = ("--", sys.executable, Path(__file__).with_name("steps.py"), "0.005")
    turns = ("--set", "turns=3", "--set", "point-s=2", "--cpus", str(len(own_cpus())))
    found = profiled(tmp_path, *turns, *steps)
    visits = json.loads((tmp_path / "profile.state.json").read_text())["points"]
    assert [visit["turn"] for visit in visits] == [0, 1, 2]
    assert found["points"][0]["steps"] == sum(visit["steps"] for visit in visits)
    assert profiled(tmp_path, *turns, "--resume", *steps)["launches"] == found["launches"] == 1


def test_a_pair_is_added_to_a_table_and_takes_the_place_of_an_older_one(tmp_path):
    steps = (sys.executable, str(Path(__file__).with_name("steps.py")), "0.005")
    short = ("--set", "within=50", "--set", "point-s=2", "--json", "--model", "a,b")
    (tmp_path / "pairs.csv").write_text("model,other,speed,other_speed\na,c,0.5,0.5\nb,a,0.1,0.1\n")
    words = [*COMMAND, "run", *short, "--set", f"beside={shlex.join(steps)}", "--", *steps]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert 0 < json.loads(done.stdout)["gain"] <= 2
    rows = (tmp_path / "pairs.csv").read_text().splitlines()
    assert rows[:2] == ["model,other,speed,other_speed", "a,c,0.5,0.5"]
    assert [row.startswith("a,b,") for row in rows[2:]] == [True]

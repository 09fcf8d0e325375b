"""The directory of profiles: whose profile is whose, what is refused and why, and files that change."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from profile_files import HUNGRY, SATED, write_profile
from service_rig import books, gateway_without_agents, job, node

from cadenza.policies.core.model import Job, Options
from cadenza.slurm_plugin.service.observe.enrichment import with_profiles
from cadenza.slurm_plugin.service.profiles.library import ProfileChoice, ProfileDirectory, slurm_type

A100 = frozenset({"a100"})


def directory(folder: Path) -> ProfileDirectory:
    found = ProfileDirectory(folder)
    found.refresh()
    return found


def of(folder: Path, one: Job, here: frozenset[str] = A100) -> ProfileChoice:
    return directory(folder).library.choose(one, here, here)


# --- Whose ---------------------------------------------------------------------------------------------


def test_the_model_option_goes_before_command_name_and_model_name(tmp_path: Path) -> None:
    write_profile(tmp_path, "a.json", model="by-name", match={"name": "train*"})
    write_profile(tmp_path, "b.json", model="by-command", match={"command": "*/resnet/*.sh *"})
    write_profile(tmp_path, "c.json", model="train7")
    write_profile(tmp_path, "d.json")
    about = {"name": "train7", "command": "/home/ada/resnet/go.sh --lr 1"}
    for options, fields, model in [
        (Options(model="resnet"), about, "resnet"),
        (Options(), about, "by-command"),
        (Options(), {**about, "command": ""}, "by-name"),
        (Options(), {"name": "gnmt"}, None),
    ]:
        found = of(tmp_path, job(1, options=options, **fields))
        assert (found.profile.model if found.profile else None) == model
    assert of(tmp_path, job(1, name="by-name")).profile is not None  # a model is the name of its jobs, too
    write_profile(tmp_path, "b.json", model="both", match={"name": "other", "command": "*"})
    assert "a.json" in of(tmp_path, job(1, **about)).note


def test_a_model_that_nobody_measured_is_said_so(tmp_path: Path) -> None:
    write_profile(tmp_path)
    profile, note = of(tmp_path, job(1, options=Options(model="resnt"), name="resnet"))
    assert profile is None
    assert "'resnt'; did you mean 'resnet'?" in note
    assert of(tmp_path / "none", job(1)) == (None, "")


def test_each_gpu_type_has_its_own_and_foreign_ones_are_not_used(tmp_path: Path) -> None:
    write_profile(tmp_path, "1.json", gpu="NVIDIA A100-SXM4-80GB", iteration_s=0.5)
    write_profile(tmp_path, "2.json", gpu="v100", iteration_s=1.0)
    one = job(1, options=Options(model="resnet"))
    library = directory(tmp_path).library
    types = frozenset({"a100", "v100", "h100"})
    on_a100, on_v100 = library.choose(one, ["a100"], types).profile, library.choose(one, ["v100"], types).profile
    assert on_a100 is not None
    assert on_v100 is not None
    assert (on_a100.iteration_s, on_v100.iteration_s) == (0.5, 1.0)
    assert on_a100.on("v100") is on_v100
    profile, note = library.choose(one, ["h100"], types)
    assert profile is None
    assert "is for NVIDIA A100-SXM4-80GB, v100, and its nodes have h100" in note
    assert library.choose(one, [""], frozenset({""})).profile is not None  # nodes that name no type


@pytest.mark.parametrize(
    ("gpu", "name"),
    [("a100", "a100"), ("A100", "a100"), ("Tesla V100-PCIE-16GB", "v100"), ("H100", "H100"), ("", "")],
)
def test_names_of_gpus(gpu: str, name: str) -> None:
    assert slurm_type(gpu, ["a100", "v100", ""]) == name


# --- Refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"schema": "cadenza.profile/9"}, "schema"),
        ({"schema": None}, "key 'schema' is missing"),
        ({"throughput": [[0.25, 0.25], [0.5, 0.5], [1.0, 1.0], [0.4, 0.4]]}, "slower with 8 CPUs a GPU than with 4"),
        ({"throughput": [[0.25, 0.2], [0.5, 0.5], [1.0, 1.0], [2.0, 2.0]]}, "slower with 16 GB a GPU than 4"),
        ({"throughput": [[0.0, 0.0], [0.5, 0.5], [1.0, 1.0], [2.0, 2.0]]}, "a number above 0"),
        ({"throughput": [[float("nan")] * 2] * 4}, "NaN is not a number that JSON has"),
        ({"throughput": [[0.1, 0.1], [0.2, 0.2], [0.3, 0.3], [0.4, 0.4]]}, "relative to the proportional share"),
        ({"throughput": [[1.0, 1.0]]}, "must have 4 rows"),
        ({"speed": 3}, "unknown key 'speed'"),
        ({"gpu": "h100"}, "is for h100, and its nodes have a100"),
    ],
)
def test_a_bad_profile_leaves_the_proportional_share_and_says_why(
    tmp_path: Path, changes: dict[str, object], why: str
) -> None:
    write_profile(tmp_path, **changes)
    write_profile(tmp_path, "gnmt.json", SATED)
    profile, note = of(tmp_path, job(1, options=Options(model="resnet")))
    assert profile is None
    assert note.startswith("has its proportional share")
    assert why in note
    assert "resnet.json" in note
    assert of(tmp_path, job(1, options=Options(model="gnmt"))).profile is not None


def test_a_file_that_is_no_json_counts_for_the_model_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "resnet.json").write_text("{")
    assert "resnet.json:1: not JSON" in of(tmp_path, job(1, options=Options(model="resnet"))).note
    (tmp_path / "resnet.json").write_bytes(b"\xff")
    assert "cannot be read" in of(tmp_path, job(1, options=Options(model="resnet"))).note


def test_noise_is_no_dip_and_a_second_profile_of_a_model_is_refused(tmp_path: Path) -> None:
    write_profile(tmp_path, "a.json", throughput=[[0.25, 0.25], [0.5, 0.49], [1.0, 1.0], [0.98, 0.97]])
    write_profile(tmp_path, "b.json")
    found = directory(tmp_path)
    assert list(found.library.problems) == ["b.json: model 'resnet' is already in a.json"]
    assert "a.json" in of(tmp_path, job(1, options=Options(model="resnet"))).note


# --- Changes -------------------------------------------------------------------------------------------


def test_only_what_changed_is_read_again(tmp_path: Path) -> None:
    path = write_profile(tmp_path)
    write_profile(tmp_path, "gnmt.json", SATED)
    found = directory(tmp_path)
    gnmt = next(entry.profile for entry in found.library.entries if entry.model == "gnmt")
    assert not found.refresh()
    write_profile(tmp_path, iteration_s=0.75)
    os.utime(path, ns=(1, 1))
    assert found.refresh()
    by_model = {entry.model: entry.profile for entry in found.library.entries}
    assert by_model["gnmt"] is gnmt
    assert by_model["resnet"] is not None
    assert by_model["resnet"].iteration_s == 0.75
    path.unlink()
    assert found.refresh()
    assert [entry.model for entry in found.library.entries] == ["gnmt"]


def test_jobs_of_one_model_share_their_profile(tmp_path: Path) -> None:
    write_profile(tmp_path)
    wish = Options(model=HUNGRY["model"])
    nodes = (node("n1", gpu_type="a100"), node("n2", gpu_type="v100"))
    jobs = (job(1, options=wish), job(2, options=wish), job(3, "n2", options=wish), job(4, options=None))
    seen = with_profiles(books(*jobs, nodes=nodes), directory(tmp_path).library, {}, {"a100": 80.0, "": 16.0})
    first, second, third, other = seen.jobs
    assert first.profile is not None
    assert first.profile is second.profile
    assert third.profile is None
    assert "v100" in third.profile_note
    assert (other.profile, other.progress, other.placement) == (None, None, ())
    assert [node.gpu_memory_gb for node in seen.nodes] == [80.0, 16.0]


def test_a_waiting_job_that_stays_the_same_is_completed_once_until_profiles_change(tmp_path: Path) -> None:
    waiting, runs = job(1, state="PENDING", slurm_priority=5, name="resnet"), job(2, node="n1", name="other")
    now = [replace(books(waiting, runs), time_s=100.0)]
    gateway = gateway_without_agents(SimpleNamespace(read=lambda: now[0]), tmp_path)
    first = gateway.read()
    now[0] = replace(now[0], time_s=115.0)
    second = gateway.read()
    assert second.jobs[0] is first.jobs[0]
    assert second.jobs[0].progress is not None
    assert second.jobs[1].progress is not None
    assert second.jobs[1].progress.at_s == 115.0
    # 1. A change of Slurm's, and a profile for it, which may be corrected each round.
    now[0] = replace(now[0], jobs=(replace(waiting, slurm_priority=6), runs))
    assert gateway.read().jobs[0].slurm_priority == 6
    write_profile(tmp_path)
    third = gateway.read()
    assert third.jobs[0].profile is not None
    assert gateway.read().jobs[0] is not third.jobs[0]

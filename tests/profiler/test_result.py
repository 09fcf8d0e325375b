"""From points to a profile that its reader takes, and to words; and which profiles are refused, with file and key."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from test_limits import every

from cadenza.policies.core.errors import InputError
from cadenza.policies.core.profile import Reference
from cadenza.policies.inputs.profiles import check, read_profiles, write_profiles
from cadenza.policies.inputs.published import synergy_profiles
from cadenza.profiler.measure import finished_points as files
from cadenza.profiler.measure.environment import model_of, parse_node
from cadenza.profiler.measure.finished_points import State
from cadenza.profiler.measure.offline_run import Request, grid_of
from cadenza.profiler.measure.point import Point
from cadenza.profiler.model.bisection import next_point
from cadenza.profiler.model.memory import Data
from cadenza.profiler.model.roofline import Law
from cadenza.profiler.profile_builder import Subject, best_cpus, conclude, gain, sbatch, words
from cadenza.profiler.validation import require_usable
from cadenza.slurm_plugin.cli.main import main

NODE = Reference(8, 24, 500)
GRID = [float(cpus) for cpus in range(1, 25)]


def measured(law, gpus=1, noise=0.0, grid=GRID):
    state = State(["train"], "here")
    while (cpus := next_point(grid, state.times())) is not None:
        seconds = law.time_s(cpus / gpus) * (1 + noise * (-1) ** len(state.points))
        state.points.append(Point(cpus, seconds, 0.001, 100, 5.0, 0.1, samples=32.0, memory_gb=2.0))
    return state


def found(law, *, gpus=1, data=None, noise=0.0, grid=GRID):
    return conclude(measured(law, gpus, noise, grid), grid, Subject("res18", gpus, NODE, "V100", "image", data))


def test_the_words_and_lines_of_a_job_that_gains():
    one = found(Law(0.278, 2.5))
    assert words(one) == "with 9 CPUs per GPU: 3.0x faster than the proportional share (3); more buys nothing"
    assert sbatch(one)[1:] == ["#SBATCH --cpus-per-task=9", "#SBATCH --mem=3G", "#SBATCH --cadenza=model=res18"]


def test_time_that_a_hypervisor_took_is_told():
    state = measured(Law(0.278, 2.5))
    state.points[0] = structs.replace(state.points[0], stolen=0.2)
    one = conclude(state, GRID, Subject("res18", 1, NODE, "V100", "image", None))
    said = "this virtual machine's host gave up to 20% of its CPU time to others"
    assert f"{said}: --set turns=8 measures the points in turns" in one.notes
    state.points[-1] = structs.replace(state.points[-1], turn=1)
    assert said in conclude(state, GRID, Subject("res18", 1, NODE, "V100", "image", None)).notes


def test_a_job_that_needs_less_than_its_share_gives_the_rest_away():
    assert words(found(Law(0.5, 0.4))) == (
        "with 1 CPU per GPU: as fast as with any more; the other 2 of its share can serve other jobs"
    )


def test_a_job_that_would_use_more_than_was_measured():
    one = found(Law(0.1, 10), grid=[1.0, 2.0, 4.0, 8.0])
    assert words(one).endswith("more than 8 were not measured, and may help")


def test_cpus_are_counted_for_each_gpu_and_asked_for_together():
    one = found(Law(0.1, 0.6), gpus=4, grid=[4.0 * each for each in range(1, 13)])
    assert best_cpus(one) == 6
    assert gain(one) == pytest.approx(2, rel=0.02)
    assert "#SBATCH --cpus-per-task=24" in sbatch(one)


@given(
    st.builds(Law, st.floats(0.01, 1), st.floats(0.01, 10)),
    st.sampled_from([1, 2, 4]),
    st.floats(0, 0.03),
    st.booleans(),
)
@settings(max_examples=40)
def test_every_profile_is_read_back_and_usable(law, gpus, noise, with_data):
    grid = [float(gpus * each) for each in range(1, 9)]
    data = Data(40.0, 50.0, 2.0, 300.0, 9000.0) if with_data else None
    one = found(law, gpus=gpus, data=data, noise=noise, grid=grid)
    check(one.profile, "p.json")
    require_usable(one.profile, "p.json", "V100")
    text = write_profiles({"res18": one.profile}, note="x")
    back = read_profiles(text, "p.json")["res18"]
    assert back.throughput == one.profile.throughput
    assert back.speed(3, 62.5) == pytest.approx(1)


def test_less_memory_means_more_storage_and_less_speed():
    one = found(Law(0.1, 0.6), data=Data(100.0, 100.0, 4.0, 500.0, 10_000.0)).profile
    full, none = one.throughput[-1][-1], one.throughput[-1][0]
    assert full / none == pytest.approx(0.2 / 0.1, rel=0.02)
    assert one.storage_mb_s[-1][0] == 500
    assert one.storage_mb_s[-1][-1] == 0


def test_the_published_profiles_are_usable():
    for profile in synergy_profiles().values():
        require_usable(profile, "synergy.json", "any")


def refused(profile, gpu=""):
    with pytest.raises(InputError) as error:
        require_usable(profile, "p.json", gpu)
    return str(error.value)


def test_a_profile_that_falls_or_is_of_another_gpu_is_refused():
    good = found(Law(0.1, 0.6)).profile
    values = [list(row) for row in good.throughput]
    values[5][0] = 0.5
    falling = replace(good, throughput=tuple(map(tuple, values)))
    assert refused(falling).startswith("p.json: model 'res18': throughput at ")
    assert "gpu: was measured on 'V100', not on 'H100'" in refused(good, "H100")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"schema": "cadenza.profile/9"}, "schema"),
        ({"iteration_s": 0}, "iteration_s"),
        ({"throughput": [[0.5], [0.0]]}, "throughput"),
        ({"throughput": [[1.0], [0.5]]}, "throughput at 1 GB"),
        ({"cpus_per_gpu": [2, 1]}, "cpus_per_gpu"),
        ({"color": 1}, "color"),
    ],
)
def test_show_names_file_and_key_of_a_bad_profile(tmp_path, change, says):
    good = {
        "schema": "cadenza.profile/1", "model": "m", "iteration_s": 0.1,
        "reference": {"gpus": 1, "cpus": 1, "memory_gb": 1},
        "cpus_per_gpu": [1, 2], "memory_gb_per_gpu": [1], "throughput": [[1.0], [1.5]],
    }  # fmt: skip
    path = tmp_path / "p.json"
    path.write_text(json.dumps(good))
    assert CliRunner().invoke(main, ["profile", "show", str(path)]).exit_code == 0
    path.write_text(json.dumps(good | change))
    ended = CliRunner().invoke(main, ["profile", "show", str(path)])
    assert ended.exit_code == 2
    assert str(path) in ended.output
    assert says in ended.output
    listed = CliRunner().invoke(main, ["profile", "show", "--json", str(path)])
    assert (listed.exit_code, says in json.loads(listed.stdout)["errors"][0]) == (2, True)


def test_not_a_number_is_no_json(tmp_path):
    path = tmp_path / "p.json"
    path.write_text('{"schema": "cadenza.profile/1", "iteration_s": NaN}')
    ended = CliRunner().invoke(main, ["profile", "show", str(path)])
    assert ended.exit_code == 2
    assert "NaN" in ended.output


def test_show_and_compare(tmp_path):
    paths = []
    for name, law in (("a", Law(0.1, 0.6)), ("b", Law(0.05, 0.6))):
        path = tmp_path / f"{name}.json"
        path.write_text(write_profiles({"res18": found(law).profile}))
        paths.append(str(path))
    shown = CliRunner().invoke(main, ["profile", "show", *paths])
    assert shown.exit_code == 0
    assert "res18 on V100" in shown.output
    assert "to the first" in shown.output
    compared = json.loads(CliRunner().invoke(main, ["profile", "show", "--json", *paths]).output)["comparison"]
    assert [row["relative"] for row in compared] == pytest.approx([1, 2], rel=0.05)
    assert CliRunner().invoke(main, ["profile", "show", str(tmp_path / "none.json")]).exit_code == 2


def test_the_state_comes_back_whole_and_only_to_its_own_command(tmp_path):
    path = files.path_of(tmp_path / "profile.json")
    state = measured(Law(0.1, 0.6))
    files.save(path, state)
    assert files.load(path, ["train"], "here") == state
    with pytest.raises(InputError, match="command"):
        files.load(path, ["other"], "here")
    path.write_text('{"command": 3}')
    with pytest.raises(InputError, match="command"):
        files.load(path, ["train"], "here")
    assert files.load(tmp_path / "none", ["train"], "here").points == []


def test_the_grid_is_whole_numbers_for_each_gpu_and_the_share(tmp_path):
    request = Request(("x",), tmp_path, share=3)
    assert grid_of(request, 8, 2) == [2, 4, 6, 8]
    assert grid_of(replace(request, share=2.5), 9, 2) == [2, 4, 5, 6, 8]
    assert grid_of(replace(request, cpus=(0.5, 1.0)), 8, 2) == [0.5, 1.0]
    assert every([1.0, 2.0, 3.0], {3.0: 1.0}) == 2.0


def test_names_and_nodes():
    assert model_of(("./train",)) == "train"
    for bad in ("8:24", "0:1:1", "a:b:c", "8:-1:4"):
        with pytest.raises(InputError, match=r"node|CPUs"):
            parse_node(bad)

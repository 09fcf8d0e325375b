"""``cadenza report`` as it is called: files in, page out, and what it says of files that it cannot use."""

from __future__ import annotations

import copy
import json
import subprocess
import sys

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from report_rig import toy

from cadenza.policies.core.errors import InputError
from cadenza.policies.simulator.result_file import encode
from cadenza.slurm_plugin.cli.main import main
from cadenza.slurm_plugin.report.charts import charts
from cadenza.slurm_plugin.report.compare import compare, plain
from cadenza.slurm_plugin.report.draw import NARROW, draw
from cadenza.slurm_plugin.report.loader import load

SAVED = json.loads(encode(toy("a", seeds=(1, 2), jobs=12, loads=(2, 4))))


def call(*words):
    return CliRunner().invoke(main, ["report", *map(str, words)])


def write(folder, name, value):
    path = folder / name
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


@pytest.fixture
def files(tmp_path):
    return [
        write(tmp_path, f"{label}.json", encode(toy(label, jobs=30, speed=speed)).decode())
        for label, speed in (("a", 1.0), ("b", 1.3))
    ]


def test_it_writes_the_page_and_says_what_is_on_it(files, tmp_path):
    out = tmp_path / "page.html"
    done = call(*files, "-o", out, "--title", "A & B")
    assert done.exit_code == 0, done.output
    assert "b: Jobs take" in done.output
    assert "<h1>A &amp; B</h1>" in out.read_text()


def test_json_has_the_figures_by_their_saved_names(files, tmp_path):
    done = call(*files, "-o", tmp_path / "page.html", "--baseline", "b", "--json")
    told = json.loads(done.stdout)
    assert told["schema"] == "cadenza.report/1"
    assert [result["label"] for result in told["results"]] == ["b", "a"]
    saved = json.loads(files[0].read_text())["runs"][0]["summary"]
    assert told["results"][1]["figures"]["avg_jct_h"]["mean"] == saved["avg_jct_h"]
    assert told["results"][1]["figures"]["avg_jct_h"]["verdict"] == "worse"
    assert told["results"][1]["speed_up"]["jobs"] == 30


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        (("label",), 7, "label: expected `str`, got `int`"),
        (("schema",), "cadenza.simulation/9", "schema"),
        (("runs", 0, "jobs", 3, "gpus"), "two", "runs[0].jobs[3].gpus"),
        (("runs", 0, "jobs", 3, "gpus"), 0, "runs[0].jobs[3].gpus: 0"),
        (("runs", 1, "jobs", 3, "finish_s"), -5, "runs[1].jobs[3].finish_s: -5"),
        (("runs", 0, "jobs", 3, "id"), 1, "runs[0].jobs[3].id: 1 appears twice"),
        (("runs", 0, "jobs", 0, "submit_s"), 1e300, "runs[0].jobs[0].submit_s"),
        (("runs", 0, "samples", 5), [0, 1, 1, 1, 1, 1], "runs[0].samples[5]: 0 s is before"),
        (("runs", 0, "samples", 5), [0, 1], "runs[0].samples[5]"),
        (("runs", 0, "summary", "avg_jct_h"), -1, "runs[0].summary.avg_jct_h: -1.0"),
        (("sweep", 0, "load"), 0, "sweep[0]: load"),
        (("gpus",), 0, "gpus: 0"),
        (("runs",), [], "runs[0]"),
    ],
)
def test_a_bad_file_is_named_with_its_key(tmp_path, path, value, told):
    bad = copy.deepcopy(SAVED)
    at = bad
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    if told == "runs[0]":
        bad["sweep"], told = [], "runs: the file has neither"
    done = call(write(tmp_path, "bad.json", bad), "-o", tmp_path / "page.html")
    assert done.exit_code == 2
    assert f"bad.json: {told}" in done.output.replace("...", "[0]")
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("text", "told"), [("", "not JSON"), ("{", "not JSON"), ("[]", "top level"), ("\x00", "not JSON")]
)
def test_what_is_no_result_at_all(tmp_path, text, told):
    done = call(write(tmp_path, "x.json", text))
    assert done.exit_code == 2
    assert "x.json: " in done.output
    assert told in done.output


def test_files_that_cannot_be_read_or_written(files, tmp_path):
    assert call(tmp_path / "none.json").exit_code == 2
    assert "none.json: cannot be read" in call(tmp_path / "none.json").output
    done = call(*files, "-o", tmp_path / "no" / "page.html")
    assert done.exit_code == 1
    assert "cannot be written" in done.output
    assert call().exit_code == 2
    assert call(*files, "--baseline", "z").exit_code == 2


def test_a_missing_matplotlib_is_named_with_its_extra(files, tmp_path):
    script = (
        "import sys; sys.modules['matplotlib'] = None; from cadenza.slurm_plugin.cli.main import main; "
        "main(sys.argv[1:], prog_name='cadenza')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "report", str(files[0])],
        capture_output=True, text=True, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert done.returncode == 3
    assert "plots" in done.stderr


def test_the_help_costs_no_matplotlib_and_no_numpy():
    script = (
        "import sys; from cadenza.slurm_plugin.cli.main import main; "
        "main(['report', '--help'], standalone_mode=False); "
        "assert not {'matplotlib', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**18), 10**18), st.floats(allow_nan=False), st.text(max_size=8),
    st.sampled_from([0, 1, 1e-9, 1e12, [], {}, [[]], -1]),
)  # fmt: skip


def paths(value, at=()):
    yield at
    steps = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, inside in steps:
        yield from paths(inside, (*at, step))


def load_or_refuse(data):
    try:
        return load(data, "bad.json")
    except InputError as error:
        if not str(error).startswith("bad.json: "):
            raise
        return None


PATHS = [path for path in paths(SAVED) if path]


@settings(max_examples=25)
@given(st.lists(st.tuples(st.sampled_from(PATHS), VALUES), min_size=1, max_size=3), st.booleans())
def test_any_change_is_refused_with_the_files_name_or_drawn(changes, remove):
    bad = copy.deepcopy(SAVED)
    for path, value in changes:
        at = bad
        try:
            for step in path[:-1]:
                at = at[step]
            if remove and isinstance(at, dict):
                del at[path[-1]]
            else:
                at[path[-1]] = value
        except (KeyError, IndexError, TypeError):
            continue
    file = load_or_refuse(json.dumps(bad).encode())
    if file is None:
        return
    found = compare([file, load(encode(toy("other", seeds=(1, 2), jobs=12)), "other.json")], None)
    json.dumps(plain(found, "page.html"), default=str)
    for chart in charts(found, 20):
        draw(chart, NARROW)


@settings(max_examples=30)
@given(st.binary(max_size=60))
def test_any_bytes_are_refused_with_the_files_name(data):
    with pytest.raises(InputError, match=r"^bad\.json: "):
        load(data, "bad.json")

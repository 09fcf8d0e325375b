"""Input of a sweep: files, plans, the words for sbatch; every error names its place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from cadenza.policies.core.errors import InputError
from cadenza.slurm_plugin.cli.main import main
from cadenza.slurm_plugin.sweep.configs import read_request
from cadenza.slurm_plugin.sweep.sbatch_arguments import check_words, fill
from cadenza.slurm_plugin.sweep.slurm_commands import Slurm, comment_of, is_behind, with_place

WRAP = "--wrap=train {lr}"


def run(*words: str):
    return CliRunner().invoke(main, ["sweep", "run", *words])


def test_a_grid_is_every_combination(tmp_path: Path) -> None:
    path = tmp_path / "lr sweep.toml"
    path.write_text('goal = "min"\n[grid]\nlr = [0.1, 0.2]\nopt = ["sgd", "adam"]\n')
    request = read_request(path)
    assert request.plan["name"] == "lr-sweep"
    assert request.configs == [{"lr": lr, "opt": opt} for lr in (0.1, 0.2) for opt in ("sgd", "adam")]


def test_lists_keep_their_order_and_their_values(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("# ours\nlr,opt\n1e-3,sgd\n\n0.10,adam\n")
    assert read_request(tmp_path / "a.csv").configs == [{"lr": "1e-3", "opt": "sgd"}, {"lr": "0.10", "opt": "adam"}]
    (tmp_path / "a.jsonl").write_text('{"lr": 0.1, "nesterov": true}\n\n{"lr": 1}\n')
    assert read_request(tmp_path / "a.jsonl").configs == [{"lr": 0.1, "nesterov": True}, {"lr": 1}]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.csv", "lr,width\n1,2\n3\n", "a.csv:3: has 1 cells"),
        ("a.csv", "lr,2x\n1,2\n", "a.csv:2: '2x' is not a name"),
        ("a.csv", "number\n1\n", "a.csv:2: 'number' is set by the sweep itself"),
        ("a.csv", "lr\n", "no configuration"),
        ("a.jsonl", '{"lr": 1}\n{"lr": }\n', "a.jsonl:2: not JSON"),
        ("a.jsonl", '{"lr": [1]}\n', "a.jsonl:1: lr: wanted is a text"),
        ("a.jsonl", "[1]\n", "a.jsonl:1: wanted is an object"),
        ("a.toml", "goal = 'max'\n[stop]\nrul = 'asha'\n[grid]\nlr = [1]\n", "a.toml:3: unknown key stop.rul; did you"),
        ("a.toml", "goal = 'mex'\n[grid]\nlr = [1]\n", "a.toml:1: goal"),
        ("a.toml", "[stop]\nreduction = 1\n[grid]\nlr = [1]\n", "a.toml:2: stop.reduction"),
        ("a.toml", "[grid]\nlr = []\n", "a.toml:1: grid"),
        ("a.toml", "goal = 'max'\n", "one of configs, grid and study"),
        ("a.toml", "study = 'x'\ntrials = 3\n[space]\nlr = {low = 2, high = 1}\n", "a.toml:4: lr: low = 2 is more"),
        ("a.toml", "study = 'x'\ntrials = 3\n[space]\nlr = {lo = 1}\n", "a.toml:4: lr: wanted is a list"),
        ("a.toml", "trials = 3\n[grid]\nlr = [1]\n", "a.toml:1: trials belongs to a study"),
        ("a.toml", "poll_s = -1\n[grid]\nlr = [1]\n", "a.toml:1: poll_s"),
        ("a.toml", "[stop]\nrule = 'curve'\n[grid]\nlr = [1]\n", "[stop] steps is missing"),
        ("a.toml", "[stop]\nrule = 'asho'\n[grid]\nlr = [1]\n", "did you mean asha?"),
        ("a.toml", "[stop]\nrule = 'no.module:f'\n[grid]\nlr = [1]\n", "no.module"),
        ("a.txt", "lr\n1\n", "wanted is a name that ends with"),
    ],
)
def test_a_wrong_file_is_exit_code_2_and_leaves_nothing(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    done = run(str(tmp_path / name), "--dir", str(tmp_path / "sweep"), "--", WRAP)
    assert done.exit_code == 2, done.output
    assert said in done.stderr
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "are missing"),
        (("--comment=x", WRAP), "--comment"),
        (("--array=0-3", WRAP), "--array"),
        (("--export=NONE", WRAP), "--export=ALL"),
        (("--wrap=train {lrr}", "{lr}"), "did you mean {lr}?"),
        (("--wrap=train",), "name the configuration's values"),
    ],
)
def test_words_that_a_sweep_cannot_have(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    (tmp_path / "a.csv").write_text("lr\n1\n")
    done = run(str(tmp_path / "a.csv"), "--dir", str(tmp_path / "sweep"), "--", *words)
    assert done.exit_code == 2
    assert said in done.stderr


def test_values_go_into_placeholders_or_become_arguments(tmp_path: Path) -> None:
    config, known = {"lr": 0.1, "fast": True}, {"number": 3, "sweep": "s-1"}
    assert fill(["-o", "{sweep}-{number}.log", "t.sh"], config, known) == [
        "-o", "s-1-3.log", "t.sh", "--lr", "0.1", "--fast", "true",
    ]  # fmt: skip
    assert fill(["--wrap=t {lr} ${HOME} {other}"], config, known) == ["--wrap=t 0.1 ${HOME} {other}"]
    script = tmp_path / "t.sh"
    script.write_text("")
    check_words(["-p", "gpu", str(script), "--comment", "the script's own"], ["lr"])
    with pytest.raises(InputError, match="--comment"):
        check_words(["-p", "gpu", "--comment", "ours", str(script)], ["lr"])


@given(st.integers(-1000, 1000), st.lists(st.booleans(), max_size=8))
def test_a_comment_keeps_what_is_not_ours_and_goes_back_to_what_it_was(priority: int, places: list[bool]) -> None:
    before = f'{{"own":[1,2],"cadenza":{{"v":1,"share":true,"priority":{priority}}},"sweep":"x"}}'
    comment = before
    for behind in places:
        changed = with_place(comment, behind=behind)
        assert (changed is None) == (is_behind(comment) == behind)
        comment = changed or comment
    back = with_place(comment, behind=False) or comment
    assert set(back) == set(before)
    assert f'"priority":{priority}' in back
    assert '"own":[1,2]' in back


def test_a_comment_is_written_over_the_one_that_was_seen_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = '{"sweep":"s","cadenza":{"v":1,"share":true}}'
    reordered = '{"cadenza":{"v":1,"share":true},"sweep":"s"}'
    for name, text in (
        ("squeue", f"cat <<'END'\n7|{seen}\n8|{reordered}\n9|mine\nEND"),
        ("scontrol", f'echo "$@" >>{tmp_path}/calls'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    written = Slurm().set_comment({7: seen, 8: seen, 9: seen, 10: seen}, "new")
    assert (written.done, written.lost) == ({7, 8}, {9}), "job 10 has left the queue"
    assert (tmp_path / "calls").read_text() == "update JobId=7,8 Comment=new\n"


def test_what_is_no_comment_of_ours_is_left_alone() -> None:
    for comment in ("", "plain", "[1]", '{"cadenza":1}', comment_of("x", share=False)):
        assert with_place(comment, behind=True) is None


def test_without_slurm_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "a.csv").write_text("lr\n1\n")
    done = run(str(tmp_path / "a.csv"), "--dir", str(tmp_path / "sweep"), "--", WRAP)
    assert done.exit_code == 3
    assert "squeue is missing" in done.stderr

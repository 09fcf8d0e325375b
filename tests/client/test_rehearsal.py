"""A rehearsal names what a move does not bring back, and says nothing where all comes back."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from cadenza.sidecar.client.bootstrap import rehearsal, rehearsal_compare, run_script
from cadenza.sidecar.client.bootstrap.rehearsal import Start, compare
from cadenza.sidecar.client.bootstrap.rehearsal_agent import Outcome, ScriptedAgent
from cadenza.sidecar.client.bootstrap.rehearsal_compare import Record, Unrecordable
from cadenza.sidecar.client.session.checkpoint_request import NO_CHECKPOINT

STEPS = 8


def state(step: int) -> dict[str, Any]:
    return {"optimizer": 0, "rates": ["0.1"], "parameters": [10 * step, 10 * step + 1], "state": step}


def made(step: int, **others: Any) -> dict[str, Any]:
    generators = {"torch": step, "python": 1}
    return {**state(step), "losses": [repr(1 / step)], "buffers": {"mean": step}, "generators": generators, **others}


def record(first: int, last: int, **begin: Any) -> Record:
    """The record of a process that goes on at step ``first`` and makes the steps up to ``last``."""
    before = {"label": "SGD 1", "names": ["a.weight", "a.bias"], **state(first - 1), **begin}
    return Record([made(step) for step in range(first, last + 1)], {0: before}, before)


def start(one: Record, status: int | None = None, **outcome: Any) -> Start:
    return Start(Outcome(status, **outcome), {0: one}, Path("/dev/null"))


def found(*starts: Start, status: int | None = None, loses: bool = False) -> tuple[bool, str]:
    verdict = compare(start(record(1, STEPS), status), starts, loses=loses)
    return verdict.identical, "\n".join(verdict.lines)


def test_a_job_that_goes_on_as_if_nothing_had_been_is_identical() -> None:
    assert found(start(record(1, 4)), start(record(5, STEPS))) == (True, "")
    assert found(start(record(1, 3)), start(record(4, 5)), start(record(6, 7))) == (True, "")


def test_what_differs_is_named_with_its_step() -> None:
    after = record(5, STEPS)
    after.steps[1] = made(6, losses=["0.5"], parameters=[60, 1], rates=["0.05"], buffers={"mean": 3})
    identical, text = found(start(record(1, 4)), start(after))
    assert not identical
    for part in (
        "differs from step 6 on", "learning rate is 0.05 in place of 0.1", "loss is 0.5 in place of 0.166667",
        "first in a.bias (1 of 2)", "buffers: mean",
    ):  # fmt: skip
        assert part in text


def test_a_first_step_that_differs_asks_for_the_data() -> None:
    after = record(5, STEPS)
    after.steps[0] = made(5, losses=["0.5"])
    assert "is the data's position restored?" in found(start(record(1, 4)), start(after))[1]


def test_state_that_an_optimizer_has_lost_is_named() -> None:
    _, text = found(start(record(1, 4)), start(record(5, STEPS, state=0)))
    assert "not restored: the state of SGD 1" in text
    _, text = found(start(record(1, 4)), start(record(5, STEPS, parameters=[40, 7])))
    assert "not restored: parameters that are not restored: a.bias" in text


def test_a_start_from_nothing_and_one_that_trains_nothing_are_no_moves() -> None:
    identical, text = found(start(record(1, 4)), start(record(1, 4)))
    assert not identical
    assert "restore() was not called" in text
    assert found(start(record(1, 4)), start(Record(), 0)) == (False, "the restarted script trained nothing")
    assert "failed with status 3" in found(start(record(1, 4)), start(Record(), 3))[1]


def test_steps_that_are_made_again_are_a_fault_unless_the_script_saves_by_itself() -> None:
    starts = start(record(1, 4)), start(record(3, STEPS))
    assert found(*starts) == (False, "an older checkpoint was restored: the steps 3 to 4 are made again")
    assert found(*starts, loses=True) == (True, "the steps 3 to 4 are made again")


def test_a_run_that_ends_with_another_number_of_steps_differs() -> None:
    text = "it ended after 7 steps, the run alone after 8"
    assert found(start(record(1, 4)), start(record(5, 7), 0), status=0) == (False, text)


def test_a_generator_without_a_seed_is_left_to_what_comes_of_it() -> None:
    first, after = record(1, 4), record(5, STEPS)
    for number, one in enumerate((*first.steps, *after.steps)):
        one["generators"] = {**one["generators"], "python": 100 + number}
    assert found(start(first), start(after)) == (True, "")


def test_two_runs_that_differ_by_themselves_are_told_from_a_move() -> None:
    first = record(1, 4)
    first.steps[0] = made(1, losses=["0.25"])
    assert "two runs of this command differ by themselves, from step 1 on" in found(start(first))[1]


def test_a_line_that_was_cut_off_is_left_out_and_two_trainings_of_a_rank_are_refused(tmp_path: Path) -> None:
    lines = [{"kind": "begin", **record(1, 1).begins[0]}, {"kind": "step", **made(1)}]
    text = "\n".join(map(json.dumps, lines))
    (tmp_path / "0.0.77.jsonl").write_text(text + '\n{"kind": "st')
    assert len(rehearsal_compare.read(tmp_path, 0)[0].steps) == 1
    (tmp_path / "0.0.78.jsonl").write_text(text)
    with pytest.raises(Unrecordable, match="two processes of rank 0"):
        rehearsal_compare.read(tmp_path, 0)


class Played:
    """A rehearsal whose starts are given."""

    loses = False

    def __init__(self, first: Start) -> None:
        self.first = first

    def alone(self, steps: int) -> Start:
        return start(record(1, steps), boundaries=steps)

    def moved(self, number: int, _steps: int, _order_at: int) -> Start:
        return start(record(5, STEPS)) if number else self.first


def test_the_verdict_names_what_was_compared_and_what_a_script_without_checkpoints_needs() -> None:
    verdict = rehearsal._rehearse(Played(start(record(1, 4), saved={})), STEPS)  # type: ignore[arg-type]
    assert verdict.identical
    assert verdict.lines == ["identical: after the move, steps 5 to 8 have the losses and parameters of the run alone"]
    (line,) = rehearsal._rehearse(Played(start(record(1, 4), reasons=[NO_CHECKPOINT])), STEPS).lines  # type: ignore[arg-type]
    assert "cadenza run --saves" in line
    assert "--steps" not in line


# --- the agent, with ranks that need no torch -------------------------------------------------------------------

RANK = """
import subprocess, sys, time
from pathlib import Path
from cadenza.sidecar import client

sleeper = subprocess.Popen(["sleep", "300"], start_new_session=True)
Path(sys.argv[1]).write_text(str(sleeper.pid))
session = client.attach()
while session.step < 1000:
    if session.step == int(sys.argv[2]):
        session.call(on_checkpoint=lambda: sys.argv[1])
    time.sleep(0.002)
    session.boundary()
"""


def play(tmp_path: Path, saver_at: int, **others: str) -> tuple[Outcome, int]:
    """Run a rank that has a saver from a step on; return how it ended, and the pid of the process that it left."""
    kept = tmp_path / "kept"
    path = tmp_path / "agent.sock"
    agent = ScriptedAgent(path, 20, {})
    environ = {"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "1", "CADENZA_SOCKET": str(path), **others}
    deadline = time.monotonic() + 30
    outcome = agent.run(
        [sys.executable, "-c", RANK, str(kept), str(saver_at)], environ, tmp_path / "output",
        lambda: agent.outcome.boundaries + (1000 if time.monotonic() > deadline else 0), 400,
    )  # fmt: skip
    return outcome, int(kept.read_text())


def test_a_checkpoint_is_ordered_at_its_boundary_and_no_process_is_left_of_the_job(tmp_path: Path) -> None:
    outcome, left = play(tmp_path, 0)
    assert outcome.saved is not None
    assert (outcome.saved["step"], outcome.saved["paths"]) == (20, [str(tmp_path / "kept")])
    status = Path(f"/proc/{left}/stat")
    assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] in "ZX"


def test_the_order_waits_until_the_job_can_save(tmp_path: Path) -> None:
    outcome, _ = play(tmp_path, 60)
    assert outcome.saved is not None
    assert outcome.saved["step"] >= 60
    assert len(outcome.reasons) == 1
    assert "no checkpoint to save" in outcome.reasons[0]


def test_a_job_that_cannot_save_says_why(tmp_path: Path) -> None:
    outcome, _ = play(tmp_path, -1)
    assert outcome.saved is None
    assert outcome.status is None
    assert "no checkpoint to save" in "".join(outcome.reasons)


# --- the command ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--rehearse-move", "needs a command"),
        ("--rehearse-move --steps 1 -- python", "takes a number from 2 on"),
        ("--steps x --rehearse-move python", "takes a number from 2 on"),
        ("--rehearse-move -- /usr/bin/srun python train.py", "srun starts processes on other hosts"),
        ("--rehearse-move -- no-such-command", "there is no such command"),
        ("--rehearse-move --saves out/*.pt -- python", "each run needs checkpoints of its own"),
        ("--rehearse-move --saves=out/*.pt -- python", "each run needs checkpoints of its own"),
        ("--steps=0 --rehearse-move -- python", "takes a number from 2 on"),
        ("--rehersal -- python train.py", "no option --rehersal; did you mean --rehearse-move?"),
        ("--rehearse-move --stepz 3 -- python", "no option --stepz; did you mean --steps?"),
        ("--zzz", "no option --zzz; see `cadenza run --help`"),
    ],
)
def test_bad_use_is_named(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_script.main(words.split()) == rehearsal.BAD_INPUT
    assert said in capsys.readouterr().err


def test_options_end_where_the_command_begins() -> None:
    assert run_script.split(["--graphs", "python", "--steps", "3"]) == (["--graphs"], ["python", "--steps", "3"])
    assert run_script.split(["--", "--graphs"]) == ([], ["--graphs"])


TRAIN = """
import sys, torch
from cadenza.sidecar import client

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
optimizer = torch.optim.Adam(model.parameters())
session = client.attach(model, optimizer)
keeper = client.checkpoint(sys.argv[1], model=model, optimizer=optimizer)
step = keeper.restore() or 0
batch = torch.randn(8, 4)
while step < 100:
    loss = model(batch).pow(2).mean()
    batch = torch.randn(8, 4)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    keeper.at(step)
    session.boundary()
"""


@pytest.mark.slow
def test_a_batch_that_was_fetched_ahead_is_found_from_end_to_end(tmp_path: Path) -> None:
    script, kept = tmp_path / "train.py", tmp_path / "kept"
    script.write_text(TRAIN)
    run = [sys.executable, "-m", "cadenza.sidecar.client.bootstrap.run_script", "--rehearse-move", "--steps", "10"]
    done = subprocess.run([*run, "--", sys.executable, script, kept], capture_output=True, text=True, check=False)
    lines = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (rehearsal.DIFFERS, "")
    assert not kept.exists()
    place = int(next(line for line in lines if "killed after step" in line).partition("step ")[2].partition(";")[0])
    assert f"cadenza rehearsal: differs from step {place + 1} on" in lines
    assert "Was a batch fetched ahead?" in done.stderr
    assert "not restored" not in done.stderr


def test_a_reason_that_comes_after_the_one_that_an_order_met_is_heard_too(tmp_path: Path) -> None:
    agent = ScriptedAgent(tmp_path / "agent.sock", 1, {})
    rank: Any = None
    for reason in ("before any order", "", "its loader keeps its workers"):
        agent._answer(rank, {"type": "unready", "reason": reason})
        agent._note("its unit is not known")
    assert agent.outcome.reasons == ["its unit is not known", "its loader keeps its workers"]

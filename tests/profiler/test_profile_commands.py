"""Commands that cannot be measured: the error says why, with the output of that run alone."""

from __future__ import annotations

import sys

import pytest
from click.testing import CliRunner

from cadenza.profiler.errors import CommandFailedError
from cadenza.profiler.measure.environment import model_of
from cadenza.profiler.measure.offline_run import Offline, Request
from cadenza.sidecar.clock import SystemClock
from cadenza.slurm_plugin.cli.main import main

ATTACHES = "from cadenza.sidecar import client; client.attach(); client.boundary()"


@pytest.mark.parametrize(
    ("script", "reason"),
    [("print('hello')", "no process of it has made a step"), (ATTACHES, "let it train for longer")],
)
def test_a_command_that_ends_early_is_told_what_it_lacks(tmp_path, script, reason):
    (tmp_path / "profile.log").write_text("the output of another profile\n")
    request = Request((sys.executable, "-c", script), tmp_path / "profile.json", cpus=(1,))
    profile = Offline(request, SystemClock(), print)
    try:
        with pytest.raises(CommandFailedError) as failed:
            profile.run()
    finally:
        profile.close()
    assert reason in str(failed.value)
    assert "another profile" not in str(failed.value)


@pytest.mark.parametrize(
    ("words", "name"),
    [("env A=1 python train/run.py", "run"), ("env -i A=1 /opt/bin/train --epochs 3", "train"), ("python -m a.b", "b")],
)
def test_a_profile_is_named_after_the_script(words, name):
    assert model_of(tuple(words.split())) == name


def test_an_option_that_there_is_not_is_no_command():
    refused = CliRunner().invoke(main, ["profile", "run", "--within", "1", "--", "python", "train.py"])
    assert refused.exit_code == 2
    assert "no option --within: see cadenza profile run --help" in refused.output

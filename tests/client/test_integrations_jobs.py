"""The frameworks' examples under the real agent, unchanged and with callbacks, with many yields."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from client_peer import PATIENCE_S, slurm_environment
from framework_jobs import RUNS
from intruder import Intruder
from registered_job import registered
from test_client_agent import Agent

Runs = dict[tuple[str, str], dict[str, Any]]
SCRIPT = Path(__file__).with_name("framework_jobs.py")
NAMES = list(RUNS)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """All runs of one process under ``cadenza run``, while another job comes and goes on its GPU."""
    agent = Agent(tmp_path_factory.mktemp("agent"))
    environment = slurm_environment(agent.socket, OMP_NUM_THREADS="1")
    script = ["-m", "cadenza.sidecar.client.bootstrap.run_script", "--", sys.executable, str(SCRIPT)]
    command = registered(agent.socket, 4711, [0], sys.executable, *script)
    try:
        with Intruder(agent) as intruder:
            done = subprocess.run(
                [*command, str(intruder.visits)],
                env=environment, capture_output=True, text=True, check=True, timeout=4 * PATIENCE_S,
            )  # fmt: skip
    finally:
        agent.down()
    runs = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"run"')]
    return {tuple(one["run"]): one for one in runs}


@pytest.mark.parametrize("name", NAMES)
def test_yields_leave_no_trace_in_losses_and_parameters(shared: Runs, name: str) -> None:
    for kind in ("unchanged", "callback"):
        assert shared[kind, name]["yields"] > 0
        for result in ("steps", "losses", "parameters_sha256"):
            assert shared[kind, name][result] == shared["alone", name][result]


@pytest.mark.parametrize("name", NAMES)
def test_signal_handlers_are_what_they_were(shared: Runs, name: str) -> None:
    assert shared["unchanged", name]["handlers"]
    assert shared["callback", name]["handlers"]


@pytest.mark.parametrize("name", ["lightning_train", "hf_trainer"])
def test_a_callback_leaves_when_its_run_ends(shared: Runs, name: str) -> None:
    assert shared["callback", name]["left"]

"""``cadenza doctor --gpu``: over a stand-in for NVML, and on a machine without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_rig import write_config
from msgspec.structs import replace

from cadenza.sidecar.agent.driver.driver_trial import rule_problem
from cadenza.sidecar.agent.driver.trial_record import EngineTrial, Record, keep, objection, read
from cadenza.slurm_plugin.site.node_gpus import NodeFacts, NodeGpu, examine_gpus, gather_gpus, try_gpu

GOOD = NodeGpu(0, "H100", "GPU-0", 80 << 30, compute_mode=0, mig=False, persistent=True, processes=(7,))
ENGINE = EngineTrial(torch="2.13.0", bytes=1 << 30, out_s=0.4, back_s=0.02, kept_bytes=0, pinned=True)
NODE = NodeFacts(1, (GOOD,), driver="580.65.06", cuda=13000, bindings=True, engine=ENGINE)
STUB = Path(__file__).resolve().parents[1] / "agent" / "stub_driver.c"


def levels(facts: NodeFacts, mode: str = "off") -> dict[str, str]:
    return {found.about: found.level for found in examine_gpus(facts, mode)}


def test_a_good_node_has_nothing_to_mend() -> None:
    good = dict.fromkeys(("GPU 0", "process checkpoints", "offload engine", "pinned memory"), "OK")
    assert levels(NODE, "unattached") == good


@pytest.mark.parametrize(
    ("changes", "level", "said"),
    [
        ({"compute_mode": 3}, "FAIL", "compute mode is exclusive process"),
        ({"fault": "GPU is lost"}, "FAIL", "has failed: GPU is lost"),
        ({"mig": True}, "WARN", "divided (MIG)"),
        ({"persistent": False}, "WARN", "persistence mode is off"),
        ({"processes": None}, "WARN", "does not name its processes"),
        ({"foreign": (7,)}, "WARN", "pid 7, which is none of this machine's"),
        ({"compute_mode": None, "mig": None, "persistent": None}, "OK", "1 process seen"),
    ],
)
def test_a_gpu_that_cannot_be_shared_well_is_named(changes: dict[str, Any], level: str, said: str) -> None:
    (found,) = [
        one for one in examine_gpus(replace(NODE, gpus=(replace(GOOD, **changes),)), "off") if "GPU" in one.about
    ]
    assert (found.about, found.level) == ("GPU 0", level)
    assert said in found.observation


@pytest.mark.parametrize(
    ("changes", "mode", "level"),
    [
        ({"cuda": 12040}, "off", "OK"), ({"cuda": 12040}, "unattached", "FAIL"), ({"cuda": 0}, "off", "WARN"),
        ({"bindings": False}, "always", "FAIL"), ({"bindings": False}, "off", "OK"),
        ({"objection": "the trial failed"}, "unattached", "FAIL"), ({"objection": "no trial yet"}, "off", "OK"),
        ({"cuda": 12080}, "always", "OK"),
    ],
)  # fmt: skip
def test_process_checkpoints_are_a_problem_only_where_they_are_wanted(
    changes: dict[str, Any], mode: str, level: str
) -> None:
    assert levels(replace(NODE, **changes), mode)["process checkpoints"] == level


@pytest.mark.parametrize(
    ("engine", "level", "said"),
    [
        (ENGINE, "OK", "1024 MB out in 0.40 s, back in 0.02 s; 0 MB stayed by torch, 0 MB by NVML"),
        (replace(ENGINE, kept_bytes=None), "OK", "not shown by NVML"),
        (replace(ENGINE, pinned=False), "WARN", "a trial passed"),
        (EngineTrial(not_run="/bin/python3: it has no torch"), "WARN", "not run: /bin/python3: it has no torch"),
        (EngineTrial(failed="the content differs"), "FAIL", "the trial failed: the content differs"),
    ],
)
def test_the_trial_of_the_engine_is_told_with_its_figures(engine: EngineTrial, level: str, said: str) -> None:
    (found,) = [one for one in examine_gpus(replace(NODE, engine=engine), "off") if one.about == "offload engine"]
    assert found.level == level
    assert said in found.observation


@pytest.mark.parametrize("kept", [EngineTrial(failed="the content differs"), ENGINE])
def test_the_last_trial_of_the_engine_counts_until_another_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: EngineTrial
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    keep(tmp_path, Record("580.65.06", engine=kept))
    facts = try_gpu(replace(NODE, gpus=(replace(GOOD, processes=()),), bindings=False), tmp_path, "/no/python")
    assert facts.engine == read(tmp_path).engine == kept
    assert read(tmp_path).failed == "cuda-bindings is missing"
    keep(tmp_path, Record("580.65.06", engine=kept))
    assert objection(tmp_path, "580.65.06").endswith(kept.failed)
    assert bool(objection(tmp_path, "580.65.06")) == bool(kept.failed)
    other = try_gpu(replace(NODE, gpus=(replace(GOOD, processes=()),), driver="590", bindings=False), tmp_path, "/none")
    assert other.engine.not_run == "/none: No such file or directory"


def test_the_other_rows_come_without_nvml_too() -> None:
    bare = NodeFacts(0, nvml_problem="NVML: library not found", memlock_bytes=64 << 10)
    assert levels(bare) == {"GPUs": "WARN", "pinned memory": "WARN"}
    (advice,) = (one.advice for one in examine_gpus(bare, "off") if one.about == "pinned memory")
    assert advice.endswith(", and PropagateResourceLimitsExcept=MEMLOCK in slurm.conf")
    assert levels(replace(bare, device_files=4)) == {"GPUs": "FAIL", "pinned memory": "WARN"}
    assert levels(replace(NODE, device_files=2))["GPUs"] == "FAIL"
    assert levels(replace(NODE, memlock_bytes=80 << 30))["pinned memory"] == "OK"


def test_what_nvml_says_of_a_machine_without_gpus_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    (tmp_path / "nvidiactl").touch()
    facts = gather_gpus(tmp_path)
    assert facts.device_files == 1
    assert facts.nvml_problem or facts.gpus


@pytest.mark.parametrize(
    ("plain", "managed", "problem"),
    [
        (2 << 20, 130 << 20, ""), (2 << 20, None, ""),
        (130 << 20, 260 << 20, "all jobs would be refused"), (0, 2 << 20, "jobs that have some would be stopped"),
    ],
)  # fmt: skip
def test_a_trial_fails_where_managed_memory_cannot_be_told_from_other(
    plain: int, managed: int | None, problem: str
) -> None:
    assert rule_problem(plain, managed).endswith(problem)
    assert bool(rule_problem(plain, managed)) == bool(problem)


@pytest.mark.slow
def test_the_command_reads_a_node_through_nvml_and_tries_its_driver(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings", reason="needs the extra `driver`")
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(tmp_path / name), str(STUB), "-ldl"], check=True)
    stub, state = tmp_path / "stub", tmp_path / "state"
    for folder in (stub / "gpu", stub / "state", stub / "fail", state):
        folder.mkdir(parents=True)
    command = [sys.executable, "-m", "cadenza.slurm_plugin.cli", "doctor", "--gpu", "--json", "--python", "/none"]
    config = write_config(tmp_path, '[agent]\ndriver_checkpoint = "unattached"\n')
    config.write_text(f'expert.state_dir = "{state}"\n{config.read_text()}')
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "CUDA_STUB": str(stub)}

    def seen() -> tuple[int, dict[str, dict[str, str]]]:
        done = subprocess.run(
            [*command, "--config", str(config)], env=environment, stdout=subprocess.PIPE, text=True, check=False
        )
        return done.returncode, {row["about"]: row for row in json.loads(done.stdout)["rows"]}

    def tried(fault: str) -> tuple[int, str]:
        (stub / fault).write_text("1")
        code, rows = seen()
        (stub / fault).unlink()
        return code, rows["process checkpoints"]["observation"]

    # 1. A driver that spoils or keeps memory fails the trial, and the agent will not use it.
    code, said = tried("spoil")
    assert (code, "driver 580.65.06, CUDA 13.0: the trial failed" in said) == (1, True)
    assert "content after a restore: different" in said
    assert "128 MB stay on the GPU" in tried("kept")[1]
    assert objection(state, "580.65.06").startswith("the trial failed")
    # 2. A good one passes it, which is kept.
    code, rows = seen()
    assert (code, rows["GPU 0"]["observation"]) == (0, "stand-in, 81920 MiB, 0 processes seen")
    assert rows["process checkpoints"]["observation"].endswith("a trial passed; agent.driver_checkpoint is unattached")
    assert rows["offload engine"]["observation"] == "not run: /none: No such file or directory"
    assert (objection(state, "580.65.06"), "580.65.07" in objection(state, "580.65.07")) == ("", True)
    calls = [line.split()[0] for line in (stub / "log").read_text().splitlines()]
    assert calls[-4:] == ["lock", "checkpoint", "restore", "unlock"]
    # 3. Where a process has the GPU it is left alone, and the last record counts.
    (stub / "gpu" / str(os.getpid())).write_text("400")
    (stub / "compute").write_text("3")
    code, rows = seen()
    assert (code, rows["GPU 0"]["level"], rows["process checkpoints"]["level"]) == (1, "FAIL", "OK")
    assert "nvidia-smi -i 0 -c DEFAULT" in rows["GPU 0"]["advice"]
    (state / "driver_trial.json").write_text("[]")
    assert "not tried now: no GPU of this host is free of processes" in seen()[1]["process checkpoints"]["observation"]

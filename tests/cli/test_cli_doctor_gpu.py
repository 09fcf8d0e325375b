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

from cadenza.slurm_plugin.cli.site.node_gpus import NodeFacts, NodeGpu, examine_gpus, gather_gpus

GOOD = NodeGpu(0, "H100", 80 << 30, compute_mode=0, mig=False, persistent=True, processes=(7,))
NODE = NodeFacts(1, (GOOD,), driver="580.65.06", cuda=13000, bindings=True)
STUB = Path(__file__).resolve().parents[1] / "agent" / "stub_driver.c"


def levels(facts: NodeFacts, mode: str = "off") -> dict[str, str]:
    return {found.about: found.level for found in examine_gpus(facts, mode)}


def test_a_good_node_has_nothing_to_mend() -> None:
    assert levels(NODE, "unattached") == {"GPU 0": "OK", "process checkpoints": "OK", "pinned memory": "OK"}


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
        ({"bindings": False}, "always", "FAIL"), ({"bindings": False}, "off", "OK"), ({"cuda": 12080}, "always", "OK"),
    ],
)  # fmt: skip
def test_process_checkpoints_are_a_problem_only_where_they_are_wanted(
    changes: dict[str, Any], mode: str, level: str
) -> None:
    assert levels(replace(NODE, **changes), mode)["process checkpoints"] == level


def test_the_other_rows_come_without_nvml_too() -> None:
    bare = NodeFacts(0, nvml_problem="NVML: library not found", memlock_bytes=64 << 10)
    assert levels(bare) == {"GPUs": "WARN", "pinned memory": "WARN"}
    assert levels(replace(bare, device_files=4)) == {"GPUs": "FAIL", "pinned memory": "WARN"}
    assert levels(replace(NODE, device_files=2))["GPUs"] == "FAIL"
    assert levels(replace(NODE, memlock_bytes=80 << 30))["pinned memory"] == "OK"


def test_what_nvml_says_of_a_machine_without_gpus_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    (tmp_path / "nvidiactl").touch()
    facts = gather_gpus(tmp_path)
    assert facts.device_files == 1
    assert facts.nvml_problem or facts.gpus


@pytest.mark.slow
def test_the_command_reads_a_node_through_nvml(tmp_path: Path) -> None:
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(tmp_path / name), str(STUB), "-ldl"], check=True)
    stub = tmp_path / "stub"
    (stub / "gpu").mkdir(parents=True)
    (stub / "gpu" / str(os.getpid())).write_text("400")
    command = [sys.executable, "-m", "cadenza.slurm_plugin.cli", "doctor", "--gpu", "--json"]
    command += ["--config", str(write_config(tmp_path))]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "CUDA_STUB": str(stub)}

    def seen() -> tuple[int, dict[str, dict[str, str]]]:
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
        return done.returncode, {row["about"]: row for row in json.loads(done.stdout)}

    code, rows = seen()
    assert (code, rows["GPU 0"]["observation"]) == (0, "stand-in, 81920 MiB, 1 process seen")
    assert "driver 580.65.06, CUDA 13.0" in rows["process checkpoints"]["observation"]
    (stub / "compute").write_text("3")
    code, rows = seen()
    assert (code, rows["GPU 0"]["level"]) == (1, "FAIL")
    assert "nvidia-smi -i 0 -c DEFAULT" in rows["GPU 0"]["advice"]

"""A gateway whose worker is a real process with a stand-in for pyslurm on its path."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gateway_rig import HERE, MakeGateway

from cadenza.slurm_plugin.gateway.source_gateway import SlurmGateway
from cadenza.slurm_plugin.gateway.supervisor import Supervisor, WorkerSettings


@pytest.fixture
def calls(tmp_path: Path) -> Callable[[], list[str]]:
    """Return the calls that have reached Slurm, in order."""
    log = tmp_path / "calls"
    return lambda: log.read_text().splitlines() if log.exists() else []


@pytest.fixture
def gateway_with(tmp_path: Path) -> Iterator[MakeGateway]:
    """Make a gateway; keyword arguments go to WorkerSettings, ``trouble`` and ``once`` to the stand-in."""
    made: list[SlurmGateway] = []

    def make(trouble: str = "", *, once: bool = False, **settings: object) -> SlurmGateway:
        (tmp_path / "bin").mkdir(exist_ok=True)
        scontrol = tmp_path / "bin" / "scontrol"
        scontrol.write_text(f'#!/bin/sh\ncase "$*" in *show*) ;; *) echo scontrol "$@" >>{tmp_path}/calls ;; esac\n')
        scontrol.chmod(0o755)
        environment = {
            **os.environ,
            "PYTHONPATH": str(HERE / "fake_pyslurm"),
            "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
            "PYSLURM_LOG": str(tmp_path / "calls"),
            "PYSLURM_TROUBLE": trouble,
        }
        if once:
            environment["PYSLURM_TROUBLE_ONCE"] = str(tmp_path / "once")
        settings.setdefault("request_timeout_s", 5.0)
        made.append(SlurmGateway(Supervisor(WorkerSettings(environment=environment, **settings))))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for gateway in made:
        gateway.close()

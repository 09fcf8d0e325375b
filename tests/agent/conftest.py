"""Fixtures of the agent's tests."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_rig import Agent


@pytest.fixture
def new_agent(tmp_path: Path) -> Iterator[Callable[..., Agent]]:
    """Make agents with given settings; they end with the test."""
    made: list[Agent] = []

    def make(**settings: Any) -> Agent:
        made.append(Agent(tmp_path, **settings))
        if settings.get("driver_checkpoint", "off") != "off":
            made[-1].accept_driver()
        return made[-1]

    yield make
    for agent in made:
        agent.close()


@pytest.fixture
def agent(new_agent: Callable[..., Agent]) -> Agent:
    """Return a running agent without a service."""
    return new_agent().up()


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the stub under the names of the driver's libraries."""
    directory = tmp_path_factory.mktemp("libraries")
    source = Path(__file__).with_name("stub_driver.c")
    library = directory / "libcuda.so.1"
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(["gcc", *flags, "-o", library, source, "-ldl"], check=True)
    shutil.copy(library, directory / "libnvidia-ml.so.1")
    return directory

"""Fixtures of the agent's tests."""

from __future__ import annotations

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
        return made[-1]

    yield make
    for agent in made:
        agent.close()


@pytest.fixture
def agent(new_agent: Callable[..., Agent]) -> Agent:
    """Return a running agent without a service."""
    return new_agent().up()

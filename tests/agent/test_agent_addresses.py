"""An agent that starts and closes: its link to the library of addresses that stay, and its wake-up pipe."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cadenza.sidecar.agent.addresses import link
from cadenza.sidecar.agent.daemon import Daemon
from cadenza.sidecar.agent_settings import AgentSettings, ExpertTable


def test_an_agent_links_its_packages_library_beside_its_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library, run = tmp_path / "package" / link.LIBRARY.name, tmp_path / "run"
    monkeypatch.setattr(link, "LIBRARY", library)
    library.parent.mkdir()
    library.touch()
    settings = AgentSettings(
        expert=ExpertTable(host="n1", socket=str(run / "agent.sock"), state_dir=str(tmp_path / "state"))
    )
    (tmp_path / "state").mkdir()
    Daemon(settings, "1").close()
    assert (run / library.name).readlink() == library


def test_a_link_is_replaced_and_one_to_nothing_goes(tmp_path: Path) -> None:
    first, second = (tmp_path / name / link.LIBRARY.name for name in ("old", "new"))
    second.parent.mkdir()
    second.touch()
    (tmp_path / second.name).symlink_to(first)
    link.link(second, tmp_path)
    assert (tmp_path / second.name).readlink() == second
    second.unlink()
    link.link(second, tmp_path)
    assert not (tmp_path / second.name).is_symlink()


def test_an_agent_goes_on_without_a_link(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    library = tmp_path / link.LIBRARY.name
    library.touch()
    link.link(library, tmp_path / "none")
    assert "jobs find no library" in caplog.text


def test_a_thread_that_outlives_the_agent_writes_into_no_other_file(tmp_path: Path) -> None:
    settings = AgentSettings(
        expert=ExpertTable(host="n1", socket=str(tmp_path / "agent.sock"), state_dir=str(tmp_path))
    )
    daemon = Daemon(settings, "1")
    daemon.close()
    ours, theirs = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    number = os.dup2(theirs, daemon._wakeup[1])  # what is opened next has the numbers that the agent gave back
    daemon._wake()
    with pytest.raises(BlockingIOError):
        os.read(ours, 1)
    for one in {ours, theirs, number}:
        os.close(one)

"""Rounds with and without clients of the pages are timed in one run."""

from __future__ import annotations

import re
import sys

import pytest
import web_clients

from cadenza.sidecar import clock


@pytest.mark.slow
def test_clients_get_pages_in_the_first_rounds_and_none_later(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(clock, "now", clock.now)  # put back at the end: the site has a clock of its own
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(web_clients, "PAUSE_S", 0.5)
    monkeypatch.setattr(web_clients, "BLOCK", 3)
    monkeypatch.setattr(web_clients, "MOST", 1e9)
    words = ["--hosts=20", "--jobs=200", "--rounds=3", "--clients=4"]
    monkeypatch.setattr(sys, "argv", ["web_clients.py", *words])
    assert web_clients.main() == 0
    printed = capsys.readouterr().out
    assert int(re.match(r"(\d+) answers", printed)[1]) >= 4  # type: ignore[index]
    assert printed.count("\n| on the clock |") == 1

"""Log records in the journal have fields by which a job's lines are found."""

from __future__ import annotations

import logging
import socket
import struct
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest

from cadenza.policies.core.actions import DrainNode, Outcome, Requeue
from cadenza.policies.core.model import JobKey
from cadenza.sidecar import daemon_log
from cadenza.sidecar.daemon_log import JournalHandler, set_up_logging
from cadenza.slurm_plugin.service.action_log import log_action

log = logging.getLogger("test.journal")


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[socket.socket]:
    """A socket in the place of journald's, with the root logger on it."""
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as there:
        there.bind(path)
        there.settimeout(10)
        handler = JournalHandler("cadenza-agent", path)
        handler.setFormatter(logging.Formatter("%(message)s"))
        root, level = logging.getLogger(), logging.getLogger().level
        root.addHandler(handler)
        root.setLevel(logging.INFO)
        yield there
        root.removeHandler(handler)
        root.setLevel(level)
        handler.close()


def fields(journal: socket.socket) -> dict[str, str]:
    """Return a datagram's fields as journald reads them."""
    rest, found = journal.recv(2**17), {}
    while rest:
        name, _, rest = rest.partition(b"\n")
        size = struct.unpack("<Q", rest[:8])[0]
        found[name.decode()] = rest[8 : 8 + size].decode()
        assert rest[8 + size : 9 + size] == b"\n"
        rest = rest[9 + size :]
    return found


def test_a_line_has_the_job_that_it_names(journal: socket.socket) -> None:
    log.warning("yield failed JOBID=%s rank=%d: no\nCADENZA_JOB=9", JobKey(24, 1), 0)
    assert fields(journal) == {
        "MESSAGE": "yield failed JOBID=24.1 rank=0: no\nCADENZA_JOB=9",
        "CADENZA_JOB": "24",
        "PRIORITY": "4",
        "SYSLOG_IDENTIFIER": "cadenza-agent",
        "LOGGER": "test.journal",
    }
    log.info("ready")
    assert fields(journal).keys() == {"MESSAGE", "PRIORITY", "SYSLOG_IDENTIFIER", "LOGGER"}


def test_an_action_is_found_by_its_job_kind_and_node(journal: socket.socket) -> None:
    log_action(Requeue(JobKey(24, 0), hold=False, reason="to make room"), Outcome(ok=False, error="gone"))
    found = fields(journal)
    assert found["MESSAGE"] == "JOBID=24 ACTION=Requeue REASON=to make room ERROR=gone"
    assert (found["CADENZA_JOB"], found["CADENZA_ACTION"], found["CADENZA_REASON"]) == ("24", "Requeue", "to make room")
    assert found["PRIORITY"] == "4"
    log_action(DrainNode("n1-l1", "silent"), Outcome(ok=True))
    found = fields(journal)
    assert (found["CADENZA_NODE"], found["PRIORITY"], "CADENZA_JOB" in found) == ("n1-l1", "6", False)


def test_what_journald_does_not_take_goes_to_standard_error(tmp_path: Path) -> None:
    handler, text = JournalHandler("cadenzad", str(tmp_path / "nobody")), StringIO()
    handler.setStream(text)
    handler.handle(logging.LogRecord("a", logging.ERROR, "", 1, "no journald", (), None))
    assert text.getvalue() == "no journald\n"
    handler.close()


def test_nor_does_a_text_without_end(journal: socket.socket) -> None:
    text = StringIO()
    handler = JournalHandler("cadenzad", journal.getsockname())
    handler.setStream(text)
    handler.handle(logging.LogRecord("a", logging.ERROR, "", 1, "x" * 2**20, (), None))
    assert len(text.getvalue()) == 2**20 + 1
    handler.close()


def test_only_under_systemd_the_journal_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_log.logging, "basicConfig", lambda **_: None)
    monkeypatch.delenv("JOURNAL_STREAM", raising=False)
    assert type(set_up_logging("cadenzad", debug=False)) is logging.StreamHandler
    monkeypatch.setenv("JOURNAL_STREAM", "8:1")
    handler = set_up_logging("cadenzad", debug=False)
    assert type(handler) is JournalHandler
    handler.close()

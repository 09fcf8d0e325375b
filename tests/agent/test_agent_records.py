"""Record files: who writes them, where, and what is refused."""

from __future__ import annotations

import io
import json
import os
import signal
import stat
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_rig import Agent, until

from cadenza.sidecar.agent.leases.lease_table import Lease, Process
from cadenza.sidecar.agent.telemetry import record_writer, records
from cadenza.sidecar.agent.telemetry.record_writer import RecordRefusedError, append, open_directory, open_file
from cadenza.sidecar.agent.telemetry.records import Owner, Records, owner_of, user_directory
from cadenza.sidecar.agent_settings import AgentSettings, AgentTable, ExpertTable
from cadenza.sidecar.orders import JobTelemetry

USER = 4242 if os.geteuid() == 0 else os.geteuid()
"""User of the recorded job: another one than the agent's if the tests run as root."""


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


# --- the whole way ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_job_that_asks_gets_its_records(
    new_agent: Callable[..., Agent], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = new_agent(telemetry_s=0.2).up()
    monkeypatch.setenv("CADENZA_RECORDS", str(tmp_path / "run"))
    agent.rank(1, "--gpus", "[0]", "--iteration-s", "0.005").wait_for("run")
    monkeypatch.delenv("CADENZA_RECORDS")
    agent.rank(2, "--gpus", "[1]").wait_for("run")
    file = tmp_path / "run" / "1.n1.jsonl"
    until(lambda: file.exists() and len(rows(file)) >= 4, f"four rows: {agent.log()}")
    last = rows(file)[3]
    assert (last["v"], last["job"], last["restart"], last["host"]) == (1, 1, 0, "n1")
    assert last["step"] > 0
    assert last["telemetry"]["iterations"] > 0
    assert last["telemetry"]["processes"] == 1
    assert last["telemetry"]["rss_mb"] > 1
    assert last["telemetry"]["iteration_p50_s"] >= 0.004
    assert [one.name for one in (tmp_path / "run").iterdir()] == ["1.n1.jsonl"], "job 2 did not ask"
    assert not file.stat().st_mode & 0o077


@pytest.mark.slow
def test_a_directory_that_is_refused_costs_a_line_in_the_log(
    new_agent: Callable[..., Agent], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    agent = new_agent(telemetry_s=0.1).up()
    monkeypatch.setenv("CADENZA_RECORDS", str(tmp_path / "link"))
    rank = agent.rank(1)
    rank.wait_for("run")
    until(lambda: "its recorder has ended" in agent.log(), f"the refusal: {agent.log()}")
    assert f"{tmp_path / 'link'}: a link or no directory" in agent.log()
    assert rank.running
    assert agent.leases()[1]["state"] == "held"


def owner_gid() -> int:
    return USER if os.geteuid() == 0 else os.getegid()


class Job:
    """A user's process, as the agent's lease has it."""

    def __init__(self, **environment: str) -> None:
        rights = {"user": USER, "group": USER, "extra_groups": []} if os.geteuid() == 0 else {}
        self.process = subprocess.Popen(["/bin/sleep", "60"], env=environment, **rights)
        self.lease = Lease(5, 1, USER, (), 0.0)
        self.lease.processes = (Process(self.process.pid, 1),)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that every user may look into."""
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o711)
        yield Path(made)


@pytest.fixture
def new_job() -> Iterator[Callable[..., Job]]:
    made: list[Job] = []

    def start(**environment: str) -> Job:
        made.append(Job(**environment))
        return made[-1]

    yield start
    for job in made:
        job.end()


def kept(records: str = "request", state: Path = Path("/none")) -> AgentSettings:
    """Return settings that keep the records of all jobs below ``state``, or of those that ask."""
    return AgentSettings(AgentTable(records=records), ExpertTable(host="n1", state_dir=str(state)))


def written(job: Job, file: Path, settings: AgentSettings) -> os.stat_result:
    """Have one row written and return the file's status."""
    taken = Records(settings)
    until(lambda: owner_of(job.process.pid).uid == USER, "the job's process to be the user's")
    taken.write(job.lease, 1.5, 3, JobTelemetry(window_s=5.0, iterations=2))
    taken.close()
    assert rows(file) == [
        {"v": 1, "at_s": 1.5, "job": 5, "restart": 1, "host": "n1", "step": 3,
         "telemetry": {"window_s": 5.0, "iterations": 2}}
    ]  # fmt: skip
    return file.stat()


def test_a_users_records_are_written_as_the_user(new_job: Callable[..., Job], place: Path) -> None:
    home = place / "home"
    home.mkdir(mode=0o700)
    os.chown(home, USER, owner_gid())
    status = written(new_job(CADENZA_RECORDS=str(home)), home / "5.1.n1.jsonl", kept())
    assert (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (USER, owner_gid(), 0o600)


def test_every_job_is_recorded_where_the_admin_says_so(new_job: Callable[..., Job], place: Path) -> None:
    base = place / "records"
    status = written(new_job(), base / str(USER) / "5.1.n1.jsonl", kept("jsonl", place))
    assert (status.st_uid, base.stat().st_uid) == (USER, os.geteuid())
    assert stat.S_IMODE((base / str(USER)).stat().st_mode) == 0o700


def test_root_does_not_lend_its_rights(new_job: Callable[..., Job], place: Path) -> None:
    (place / "roots").mkdir()
    (place / "roots").chmod(0)
    job = new_job(CADENZA_RECORDS=str(place / "roots" / "deeper"))
    taken = Records(kept())
    until(lambda: owner_of(job.process.pid).uid == USER, "the job's process to be the user's")
    taken.write(job.lease, 1.5, 3, JobTelemetry(window_s=5.0))
    taken.close()
    (place / "roots").chmod(0o700)
    assert not list((place / "roots").iterdir())


@pytest.mark.parametrize("records", ["off", "request"])
def test_who_does_not_ask_is_not_recorded(tmp_path: Path, records: str) -> None:
    taken = Records(kept(records, tmp_path))
    lease = Lease(5, 0, os.getuid(), (), 0.0)
    lease.processes = (Process(os.getpid(), 1),)
    taken.write(lease, 1.5, 3, JobTelemetry(window_s=5.0))
    taken.close()
    assert not (tmp_path / "records").exists()


def test_a_recorder_that_is_stuck_loses_rows_and_holds_nobody_up(tmp_path: Path) -> None:
    taken = Records(kept("jsonl", tmp_path))
    lease = Lease(5, 0, os.getuid(), (), 0.0)
    lease.processes = (Process(os.getpid(), 1),)
    taken.write(lease, 0.0, 0, JobTelemetry(window_s=5.0))
    recorder_process = taken._jobs[lease.key].recorder
    assert recorder_process is not None
    recorder_process.send_signal(signal.SIGSTOP)
    for number in range(1, 2000):
        taken.write(lease, 0.0, number, JobTelemetry(window_s=5.0))
    recorder_process.send_signal(signal.SIGCONT)
    taken.close()
    steps = [row["step"] for row in rows(tmp_path / "records" / str(os.getuid()) / "5.n1.jsonl")]
    assert 100 < len(steps) < 2000
    assert steps == sorted(steps)


def test_a_process_whose_memory_does_not_answer_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with an environment in a file of the user's own file system (FUSE)."""
    answers, real = threading.Event(), owner_of
    monkeypatch.setattr(records, "owner_of", lambda pid: real(os.getpid()) if pid == 2 or answers.wait(60) else None)
    taken = Records(kept("jsonl", tmp_path))
    hangs, good = (Lease(job, 0, os.getuid(), (), 0.0, processes=(Process(job, 1),)) for job in (1, 2))
    for number in range(20):
        for lease in (hangs, good):
            taken.write(lease, 0.0, number, JobTelemetry(window_s=5.0))
    file = tmp_path / "records" / str(os.getuid()) / "1.n1.jsonl"
    assert not file.exists()
    assert sum(one.name == "cadenza-records" for one in threading.enumerate()) == 1, "one waits for each such job"
    answers.set()
    until(lambda: taken.write(hangs, 0.0, 20, JobTelemetry(window_s=5.0)) or file.exists(), "its records later")
    taken.close()
    assert len(rows(file.with_name("2.n1.jsonl"))) == 20


# --- what is refused -------------------------------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path: Path) -> int:
    return open_directory(str(tmp_path / "records"))


def test_a_link_in_the_files_place_is_refused(tmp_path: Path, directory: int) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious\n")
    (tmp_path / "records" / "1.jsonl").symlink_to(victim)
    with pytest.raises(RecordRefusedError, match="remove it"):
        append(io.BytesIO(b"{}\n"), directory, "1.jsonl", 100)
    assert victim.read_text() == "precious\n"


def test_a_dangling_link_makes_no_file(tmp_path: Path, directory: int) -> None:
    (tmp_path / "records" / "1.jsonl").symlink_to(tmp_path / "new")
    with pytest.raises(RecordRefusedError, match="remove it"):
        open_file(directory, "1.jsonl")
    assert not (tmp_path / "new").exists()


def test_a_file_with_a_second_name_is_refused(tmp_path: Path, directory: int) -> None:
    (tmp_path / "victim").write_text("precious\n")
    (tmp_path / "records" / "1.jsonl").hardlink_to(tmp_path / "victim")
    with pytest.raises(RecordRefusedError, match="one name"):
        open_file(directory, "1.jsonl")


def test_a_pipe_in_the_files_place_is_refused(tmp_path: Path, directory: int) -> None:
    os.mkfifo(tmp_path / "records" / "1.jsonl")
    with pytest.raises(RecordRefusedError, match="remove it"):
        open_file(directory, "1.jsonl")


def test_a_link_in_the_directorys_place_is_refused(tmp_path: Path, directory: int) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "records")
    with pytest.raises(RecordRefusedError, match="a link"):
        open_directory(str(tmp_path / "link"))


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_directory_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(mode)
    with pytest.raises(RecordRefusedError, match="writable for it alone"):
        open_directory(str(tmp_path / "open"))


@pytest.mark.parametrize("mode", [0o775, 0o777])
def test_a_base_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base").chmod(mode)
    with pytest.raises(PermissionError, match="writable for it alone"):
        user_directory(tmp_path / "base", Owner(os.getuid(), os.getgid(), (), ""))


def test_a_link_in_the_users_place_is_not_handed_over(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "victim").mkdir()
    (tmp_path / "base" / "7").symlink_to(tmp_path / "victim")
    made = user_directory(tmp_path / "base", Owner(7, 7, (), ""))
    assert (tmp_path / "victim").stat().st_uid == os.geteuid()
    with pytest.raises(RecordRefusedError):
        open_directory(str(made))


# --- the file --------------------------------------------------------------------------------------------------


def test_a_full_file_is_rotated_and_a_later_recorder_goes_on(tmp_path: Path, directory: int) -> None:
    for start in (0, 5):
        lines = b"".join(b'{"n": %d}\n' % number for number in range(start, start + 5))
        append(io.BytesIO(lines), directory, "1.jsonl", 32)
    made = tmp_path / "records"
    assert sorted(one.name for one in made.iterdir()) == ["1.jsonl", "1.jsonl.1"]
    assert [row["n"] for row in rows(made / "1.jsonl.1") + rows(made / "1.jsonl")] == [6, 7, 8, 9]
    assert all(one.stat().st_size <= 32 for one in made.iterdir())


def test_the_recorder_says_what_is_wrong_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert record_writer.main(["recorder"]) == 2
    monkeypatch.setattr(record_writer, "become", lambda *_: None)
    assert record_writer.main(["recorder", "1", "1", "", str(tmp_path / "no\nE" / "su\x1bch"), "1.jsonl", "100"]) == 1
    usage, failure = capsys.readouterr().err.splitlines()
    assert usage.startswith("usage:")
    assert failure.startswith("no records of 1.jsonl in")


def test_a_process_says_whose_it_is() -> None:
    me = owner_of(os.getpid())
    assert me is not None
    assert (me.uid, me.gid) == (os.getuid(), os.getgid())
    assert set(me.groups) == set(os.getgroups())
    assert owner_of(2**22 + 1) is None


@pytest.mark.parametrize(("value", "directory"), [("/data/me", "/data/me"), ("relative", ""), ("", "")])
def test_only_an_absolute_directory_is_taken(monkeypatch: pytest.MonkeyPatch, value: str, directory: str) -> None:
    real = Path.read_bytes
    told = f"A=1\0{records.RECORDS_ENV}={value}\0".encode()
    monkeypatch.setattr(Path, "read_bytes", lambda path: told if path.name == "environ" else real(path))
    owner = owner_of(os.getpid())
    assert owner is not None
    assert owner.directory == directory

"""``cadenza backup``: a lost controller's settings, keys and record are restored, and what is ours is undone."""

from __future__ import annotations

import errno
import io
import os
import shutil
import sqlite3
import tarfile
from pathlib import Path

import pytest
from cli_rig import SNAPSHOT_FILE, cluster, fill, job, write_config
from click.testing import CliRunner

from cadenza.slurm_plugin.cli import backup_command
from cadenza.slurm_plugin.cli.main import main
from cadenza.slurm_plugin.errors import AlreadyRunningError
from cadenza.slurm_plugin.service.failover.lock import StoreLock
from cadenza.slurm_plugin.service.store.reader import StoreReader

ASLEEP = cluster(job(1, "first", "held"), job(2, "second", "yielded", state="SUSPENDED"))


def run(*words: object, code: int = 0) -> str:
    done = CliRunner().invoke(main, [str(word) for word in words])
    assert done.exit_code == code, done.output
    return done.output


class Controller:
    """A controller's files, and a backup of them outside."""

    def __init__(self, folder: Path) -> None:
        self.home, self.file = folder / "ctl", folder / "cadenza.tar.gz"
        self.home.mkdir()
        self.config = write_config(self.home, 'mode = "apply"')
        self.store, self.keys = self.home / "cadenza.db", self.home / "keys"
        run("keygen", "n1", "--out", self.keys)
        fill(self.config, ASLEEP, apply=True)
        (self.home / "conf.d").mkdir()
        (self.home / "conf.d" / "site.toml").write_text("[service]\npoll_s = 7.0\n")
        self.before = self.files()

    def files(self) -> dict[str, bytes]:
        plain = (path for path in self.home.rglob("*") if path.is_file() and "cadenza.db" not in path.name)
        return {str(path.relative_to(self.home)): path.read_bytes() for path in plain if path.suffix != ".log"}

    def lost(self) -> None:
        snapshot = (self.home / "snapshot.json").read_bytes()
        shutil.rmtree(self.home)
        self.home.mkdir()
        (self.home / "snapshot.json").write_bytes(snapshot)  # Slurm's state


@pytest.fixture
def controller(tmp_path: Path) -> Controller:
    return Controller(tmp_path)


def test_a_lost_controller_is_restored_and_what_is_ours_is_undone(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("backup", controller.file, "--config", controller.config)
    assert controller.file.stat().st_mode & 0o777 == 0o600
    controller.lost()
    said = run("backup", controller.file, "--restore", "--config", controller.config)
    assert "cadenza release --all" in said
    assert controller.files() == controller.before
    assert (controller.keys / "service.key_secret").stat().st_mode & 0o777 == 0o600
    assert controller.store.stat().st_mode & 0o777 == 0o640
    with StoreReader(controller.store) as reader:
        last = reader.round()
        assert last is not None
        assert [one.key.id for one in last.snapshot.jobs] == [1, 2]
    monkeypatch.setenv(SNAPSHOT_FILE, str(controller.home / "snapshot.json"))
    run("release", "--all", "--config", controller.config)
    assert "Unsuspend 2" in (controller.home / "snapshot.log").read_text()


def test_a_dry_run_names_files_and_writes_none(controller: Controller) -> None:
    assert str(controller.keys / "service.key_secret") in run(
        "backup", controller.file, "--dry-run", "--config", controller.config
    )
    assert not controller.file.exists()
    run("backup", controller.file, "--config", controller.config)
    controller.lost()
    said = run("backup", controller.file, "--restore", "--dry-run", "--config", controller.config)
    assert str(controller.home / "conf.d" / "site.toml") in said
    assert [path.name for path in controller.home.iterdir()] == ["snapshot.json"]


def test_what_is_there_is_kept_beside_and_equal_files_stay(controller: Controller) -> None:
    run("backup", controller.file, "--config", controller.config)
    (controller.home / "conf.d" / "site.toml").write_text("[service]\npoll_s = 9.0\n")
    said = run("backup", controller.file, "--restore", "--config", controller.config)
    (aside,) = (controller.home / "conf.d").glob("site.toml.aside-*")
    assert "poll_s = 9.0" in aside.read_text()
    assert str(controller.keys) not in said
    assert list(controller.home.glob("cadenza.db.aside-*"))


def test_a_running_service_is_not_restored_over(controller: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    run("backup", controller.file, "--config", controller.config)

    def taken(_lock: StoreLock, _patience_s: float = 0.0) -> None:
        raise AlreadyRunningError("cadenzad with pid 7 owns this store; stop it first")

    monkeypatch.setattr(StoreLock, "take", taken)
    (controller.home / "conf.d" / "site.toml").unlink()
    assert "stop it first" in run("backup", controller.file, "--restore", "--config", controller.config, code=1)
    assert not (controller.home / "conf.d" / "site.toml").exists()


@pytest.mark.parametrize("name", ["../evil", "/evil", "config/../../evil", "bin/evil"])
def test_a_file_that_is_no_backup_writes_nothing(controller: Controller, name: str) -> None:
    with tarfile.open(controller.file, "w:gz") as archive:
        archive.addfile(tarfile.TarInfo(name), io.BytesIO())
    said = run("backup", controller.file, "--restore", "--config", controller.config, code=2)
    assert f"{name} is no file of a backup" in said
    controller.file.write_text("text")
    assert "is no backup of" in run("backup", controller.file, "--restore", "--config", controller.config, code=2)
    assert controller.files() == controller.before


def test_a_damaged_store_is_not_restored(controller: Controller) -> None:
    run("backup", controller.file, "--config", controller.config)
    damaged = controller.file.with_name("damaged.tar.gz")
    with tarfile.open(controller.file) as source, tarfile.open(damaged, "w:gz") as target:
        for member in source:
            data = source.extractfile(member).read()  # type: ignore[union-attr]
            if member.name.startswith("store/"):
                data = data[:4096] + bytes(len(data) - 4096)
            target.addfile(member, io.BytesIO(data))
    assert "its store is damaged" in run("backup", damaged, "--restore", "--config", controller.config, code=2)
    assert controller.files() == controller.before


def test_settings_and_keys_that_are_links_are_saved_as_files(controller: Controller) -> None:
    real = controller.home.with_name("cadenza.toml")
    controller.config.rename(real)
    controller.config.symlink_to(real)
    second = controller.keys / "agents" / "n2.key"
    second.hardlink_to(controller.keys / "agents" / "n1.key")
    before = controller.files()
    run("backup", controller.file, "--config", controller.config)
    controller.lost()
    real.unlink()
    run("backup", controller.file, "--restore", "--config", controller.config)
    assert controller.files() == before


def test_a_link_that_leads_nowhere_makes_room(controller: Controller) -> None:
    run("backup", controller.file, "--config", controller.config)
    controller.config.unlink()
    controller.config.symlink_to(controller.home / "none")
    run("backup", controller.file, "--restore", "--config", controller.config)
    assert controller.files() == controller.before


def test_a_full_disk_leaves_what_was_there(controller: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    run("backup", controller.file, "--config", controller.config)
    (controller.home / "conf.d" / "site.toml").write_text("[service]\npoll_s = 9.0\n")
    store = controller.store.read_bytes()

    def full(*paths: Path) -> None:
        Path(paths[-1]).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device", str(paths[-1]))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", full)
        run("backup", controller.file, "--restore", "--config", controller.config, code=3)
    assert controller.store.read_bytes() == store
    controller.config.write_text("# other\n" + controller.config.read_text())
    before = controller.files()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", _full)
        run("backup", controller.file, "--restore", "--config", controller.config, code=3)
    assert controller.files() == before


def _full(path: Path, _data: bytes) -> int:
    with path.open("wb") as out:
        out.write(b"half")
    raise OSError(errno.ENOSPC, "No space left on device", str(path))


def test_a_device_is_not_replaced(controller: Controller) -> None:
    pipe = controller.file.with_name("pipe")
    os.mkfifo(pipe)
    assert "no file that a backup" in run("backup", pipe, "--config", controller.config, code=2)
    assert pipe.is_fifo()


def test_a_name_with_an_empty_part_stays_below_its_folder(controller: Controller) -> None:
    run("backup", controller.file, "--config", controller.config)
    outside, other = controller.home.with_name("evil"), controller.file.with_name("other.tar.gz")
    with tarfile.open(controller.file) as source, tarfile.open(other, "w:gz") as target:
        for member in source:
            target.addfile(member, source.extractfile(member))
        target.addfile(tarfile.TarInfo(f"config/{outside}"), io.BytesIO())
    run("backup", other, "--restore", "--config", controller.config)
    assert not outside.exists()


@pytest.mark.parametrize(
    "fault", [OSError(errno.ENOSPC, "No space left on device"), sqlite3.OperationalError("database or disk is full")]
)
def test_a_backup_for_which_there_is_no_room_leaves_the_one_before(
    controller: Controller, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    run("backup", controller.file, "--config", controller.config)
    before = controller.file.read_bytes()

    def full(*_: object) -> None:
        raise fault

    monkeypatch.setattr(backup_command, "_copy_store", full)
    assert str(fault) in run("backup", controller.file, "--config", controller.config, code=3)
    assert controller.file.read_bytes() == before
    assert [path.name for path in controller.file.parent.glob(".*")] == []

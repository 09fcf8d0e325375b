"""``cadenza backup``: what a lost controller cannot be rebuilt from, in one file, and its restore elsewhere."""

from __future__ import annotations

import io
import os
import shutil
import sqlite3
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path, PurePosixPath

import click
import msgspec

from cadenza.policies.core.errors import InputError
from cadenza.sidecar.clock import SystemClock, local
from cadenza.sidecar.config import DEFAULT_PATH
from cadenza.slurm_plugin.cli.common import config_option, say
from cadenza.slurm_plugin.errors import StoreError
from cadenza.slurm_plugin.service.failover.lock import StoreLock
from cadenza.slurm_plugin.service.settings import load_settings
from cadenza.slurm_plugin.service.store.schema import MODE, open_readonly, open_writable, put_aside, read_undo

KEPT = ("undo", "settings", "learned", "watched", "first_starts", "hours", "starts", "effects")
"""Tables of the store that are in a backup as a whole; of the rounds the last one."""
FOLDERS = (("config",), ("keys",))
MAX_FILE, MAX_FILES = 1 << 20, 100_000
"""Bytes of a file of settings or keys, and files."""
SECRET, PLAIN = 0o600, 0o644


class Manifest(msgspec.Struct, frozen=True):
    """The first file of a backup."""

    at_s: float
    host: str
    config: str
    """Path of the settings."""
    store: str
    keys: str
    schema: str = "cadenza.backup/1"


@click.command("backup")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--restore", "restoring", is_flag=True, help="Write what FILE has to its places on this machine.")
@click.option("--dry-run", is_flag=True, help="Name the files, and write none.")
@config_option
def command(*, file: Path, restoring: bool, dry_run: bool, config: Path | None) -> None:
    """Save the service's settings, keys and record of what it has to undo to FILE, or restore them.

    The record has what is Cadenza's in Slurm, the last round, learned profiles and the sums of reports. The service may
    run. FILE has secret keys: only its owner can read it.

    A restore needs a cadenzad that is stopped. Files that differ are kept by a new name. After it, either
    `cadenza release --all` undoes what the record has, or the next cadenzad goes on with it.
    """
    if restoring:
        _restore(file, config or DEFAULT_PATH, dry_run=dry_run)
    else:
        _save(file, config or DEFAULT_PATH, dry_run=dry_run)


# --- the backup --------------------------------------------------------------------------------------------


def _save(file: Path, config: Path, *, dry_run: bool) -> None:
    """Write a backup in place of an earlier one; it is whole or not there."""
    service = load_settings(config).service
    store, keys = Path(service.store), Path(service.keys)
    paths = list(_files(config, keys))
    if dry_run:
        say(*(str(path) for _, path in paths), str(store))
        return
    manifest = Manifest(SystemClock().now(), os.uname().nodename, str(config), str(store), str(keys))
    if file.exists() and not file.is_file():
        raise InputError(f"{file} is no file that a backup could take the place of")
    draft = _draft(file)
    with _gone_on_error(draft), tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "store.db"
        _copy_store(store, copy)
        # A file of a site's may be a link, which elsewhere leads nowhere.
        with tarfile.open(draft, "w:gz", dereference=True) as archive:
            text = msgspec.json.encode(manifest)
            head = tarfile.TarInfo("manifest.json")
            head.size = len(text)
            archive.addfile(head, io.BytesIO(text))
            for name, path in paths:
                archive.add(path, name, recursive=False)
            archive.add(copy, "store/cadenza.db")
        _replace(draft, file)
    say(f"{file}: {len(paths)} files and the store, {file.stat().st_size / 1e6:.1f} MB")


def _files(config: Path, keys: Path) -> Iterator[tuple[str, Path]]:
    """Yield the settings and the keys, by their names in a backup."""
    places = {"config": config.parent, "keys": keys}
    found = {
        "config": [config, *(config.parent / "conf.d").glob("*.toml")],
        "keys": [*keys.glob("*.key*"), *(keys / "agents").glob("*.key*")],
    }
    for kind, paths in found.items():
        for path in sorted(path for path in paths if path.is_file()):
            yield f"{kind}/{path.relative_to(places[kind]).as_posix()}", path


def _copy_store(store: Path, copy: Path) -> None:
    """Copy what a store has to keep as it is at one moment, also while the service writes."""
    newest = "SELECT max(number) FROM rounds"
    last = f"SELECT * FROM rounds WHERE number IN ({newest} UNION SELECT base FROM rounds WHERE number = ({newest}))"  # noqa: S608
    with closing(open_readonly(store)) as source, closing(open_writable(copy)) as target:
        source.execute("BEGIN")
        for table, query in {**{name: f"SELECT * FROM {name}" for name in KEPT}, "rounds": last}.items():  # noqa: S608
            rows = source.execute(query)
            marks = ", ".join("?" * len(rows.description))
            target.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)  # noqa: S608 (names are ours)
        target.execute("PRAGMA journal_mode=DELETE")


# --- the restore -------------------------------------------------------------------------------------------


def _restore(file: Path, config: Path, *, dry_run: bool) -> None:
    """Check a backup as a whole, then write its files where its settings have them."""
    now_s = SystemClock().now()
    with tempfile.TemporaryDirectory() as folder:
        # 1. The whole file is read and checked before anything is written.
        copy = Path(folder) / "cadenza.db"
        manifest, members = _read(file, copy)
        places = _places(manifest, config)
        store = Path(manifest.store)
        say(f"backup of {manifest.host}, {local(manifest.at_s)}")
        _check(copy, file)
        read_undo(copy)
        # 2. No service may write here until it is done.
        lock = StoreLock(store)
        if not dry_run:
            lock.take()
        try:
            for name, data in members.items():
                kind, *rest = PurePosixPath(name).parts
                owner = store.parent if name.endswith("_secret") else None
                _write(places[kind].joinpath(*rest), data, owner, now_s, dry_run=dry_run)
            if dry_run:
                say(str(store))
                return
            draft = _draft(store)
            with _gone_on_error(draft):
                shutil.copyfile(copy, draft)
                draft.chmod(MODE)
                _give(store.parent, draft, lock.path)
                if any(store.with_name(store.name + suffix).exists() for suffix in ("", "-wal", "-shm")):
                    say(f"{store}: the one before is {put_aside(store, now_s)}")
                _replace(draft, store)
        finally:
            lock.release()
    say(f"restored; `cadenza release --all` undoes what {store} has on record, or start cadenzad to go on with it")


def _places(manifest: Manifest, config: Path) -> dict[str, Path]:
    """Return the folder of each kind of file; the settings go to where this machine reads them."""
    return {"config": config.parent, "keys": Path(manifest.keys)}


def _read(file: Path, copy: Path) -> tuple[Manifest, dict[str, bytes]]:
    """Return a backup's manifest and files, and write its store to ``copy``; raise InputError for another file."""
    try:
        with tarfile.open(file, "r:gz") as archive:
            members = dict(_members(archive, copy))
        manifest = msgspec.json.decode(members.pop("manifest.json", b""), type=Manifest)
        fault = "" if manifest.schema == "cadenza.backup/1" and copy.exists() else "another schema, or no store"
    except (tarfile.TarError, EOFError, ValueError, msgspec.MsgspecError) as error:
        fault = str(error)
    if fault:
        raise InputError(f"{file} is no backup of `cadenza backup`: {fault}")
    return manifest, members


def _members(archive: tarfile.TarFile, copy: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the files of a backup by name, and write its store to ``copy``; raise ValueError for any other file."""
    for count, member in enumerate(archive):
        parts = PurePosixPath(member.name).parts
        content = archive.extractfile(member) if member.isfile() else None
        if content is not None and member.name == "store/cadenza.db":
            with copy.open("wb") as out:
                shutil.copyfileobj(content, out)
            continue
        known = member.name == "manifest.json" or (parts[:1] in FOLDERS and ".." not in parts)
        if content is None or not known or member.size > MAX_FILE or count >= MAX_FILES:
            raise ValueError(f"{member.name} is no file of a backup")
        yield member.name, content.read()


def _check(copy: Path, file: Path) -> None:
    try:
        with closing(sqlite3.connect(copy)) as link:
            verdict = link.execute("PRAGMA quick_check(1)").fetchone()[0]
    except sqlite3.DatabaseError as error:
        verdict = str(error)
    if verdict != "ok":
        raise InputError(f"{file}: its store is damaged: {verdict}")


def _write(path: Path, data: bytes, owner: Path | None, now_s: float, *, dry_run: bool) -> None:
    """Write one file unless it is there as it is; another one of its name is kept by a new name.

    ``owner``: a folder of the service's user, for files that it alone reads.
    """
    if path.is_file() and path.read_bytes() == data:
        return
    say(str(path))
    if dry_run:
        return
    made = not path.parent.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = _draft(path)
    with _gone_on_error(draft):
        draft.write_bytes(data)
        if owner is None:
            draft.chmod(PLAIN)
        else:
            _give(owner, draft, *([path.parent] if made else []))
        if os.path.lexists(path):
            path.rename(path.with_name(f"{path.name}.aside-{int(now_s)}"))
        _replace(draft, path)


def _draft(path: Path) -> Path:
    """Make the file that is written before it takes its place at once; only its owner can read it."""
    draft = path.with_name(f".{path.name}.new")
    draft.unlink(missing_ok=True)
    draft.touch(SECRET, exist_ok=False)
    return draft


@contextmanager
def _gone_on_error(draft: Path) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        draft.unlink(missing_ok=True)
        if isinstance(error, sqlite3.Error) or (isinstance(error, OSError) and error.filename is None):
            raise StoreError(f"{draft}: {error}") from None  # as on a full disk
        raise


def _replace(draft: Path, path: Path) -> None:
    """Give a file that is on the disk its place."""
    with draft.open("rb") as written:
        os.fsync(written.fileno())
    draft.replace(path)


def _give(owner: Path, *paths: Path) -> None:
    """Give files to the owner of a folder: the service does not run as root."""
    found = owner.stat()
    for path in paths:
        with suppress(PermissionError):
            os.chown(path, found.st_uid, found.st_gid)

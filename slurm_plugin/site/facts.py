"""Facts for ``cadenza doctor``, gathered on this machine; a missing part is a fact, not an error."""

from __future__ import annotations

import ctypes
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

import msgspec
import zmq.auth

from cadenza.policies.core.errors import CadenzaError
from cadenza.policies.core.model import ClusterSnapshot
from cadenza.sidecar.clock import SystemClock
from cadenza.sidecar.config import DEFAULT_PATH, ConfigError
from cadenza.slurm_plugin.errors import SlurmUnavailable
from cadenza.slurm_plugin.gateway.commands import Refusal, json_format
from cadenza.slurm_plugin.gateway.slurm_gateway import slurm_config
from cadenza.slurm_plugin.gateway.source_gateway import automatic, over_json, over_pyslurm
from cadenza.slurm_plugin.service.agents.curve_keys import AGENT_FOLDER, PUBLIC, REPLACED, SECRET
from cadenza.slurm_plugin.service.failover.controllers import Controllers
from cadenza.slurm_plugin.service.failover.lock import StoreLock
from cadenza.slurm_plugin.service.profiles.library import ProfileDirectory
from cadenza.slurm_plugin.service.settings import Settings, guard_settings, load_settings
from cadenza.slurm_plugin.service.store.reader import FULL_BYTES, LargestState, StoreReader

T = TypeVar("T")

PLUGIN = "cadenza.so"
RTLD_LAZY = 1
"""Mode of dlopen that leaves the plugin's calls into Slurm unresolved."""


class KeyFile(msgspec.Struct, frozen=True):
    """One key file; ``mode`` is None if the file is missing or not accessible."""

    path: str
    secret: bool
    mode: int | None
    host: str = ""
    """The host of an agent's key."""
    replaced: bool = False
    """True for a key that works until the host's agent has come with the new one."""
    key: str = ""
    """The public key."""


class Facts(msgspec.Struct, frozen=True):
    """Input of all checks; ``problems`` has the error of each part that is None, by the part's name."""

    settings: Settings
    cadenza: str
    now_s: float
    keys: tuple[KeyFile, ...] = ()
    slurm: dict[str, str] | None = None
    source: dict[str, str | int] = {}
    """Greeting of the source that the gateway reads and acts by: its versions."""
    json: str | None = None
    """Version of Slurm's JSON that both sides know; None where Slurm does not answer or offers none."""
    cluster: ClusterSnapshot | None = None
    """Slurm's current answer, without leases and agents."""
    recorded: ClusterSnapshot | None = None
    """The service's last round."""
    plugin: tuple[int, int] | None = None
    """Slurm version that cadenza.so was built for."""
    problems: dict[str, str] = {}
    profiles: int = 0
    """Number of usable profiles."""
    profile_problems: tuple[str, ...] = ()
    store_faults: tuple[str, ...] = ()
    """Faults of the file system that has the store."""
    state_full: bool = False
    """The file system of StateSaveLocation has no room."""
    file_limit: int | None = None
    """Files that the running cadenzad may have open; None: not known."""
    largest_state: LargestState | None = None
    """The largest state of a job in the store."""
    killed: bool = False
    """The kill switch is set."""
    standby: str = ""
    """Reason for which the service of another controller acts in place of this one's; empty if this one's acts."""
    others: dict[str, Settings | str] = {}
    """Settings of further services by their file, or why they cannot be read."""


def gather(config: Path | None) -> Facts:
    """Read every part once; a wrong configuration file is a problem, and the defaults replace it."""
    problems: dict[str, str] = {}

    def attempt(part: str, read: Callable[[], T]) -> T | None:
        try:
            return read()
        except SlurmUnavailable as error:  # one that is stopped takes connections, and Slurm's word is of its socket
            problems[part] = f"slurmctld does not answer: {error}"
            return None
        except (CadenzaError, Refusal, OSError, ValueError) as error:
            problems[part] = str(error)
            return None

    settings = attempt("settings", lambda: load_settings(config or DEFAULT_PATH)) or Settings()
    profiles = ProfileDirectory(Path(settings.profiles.directory) if settings.profiles.directory else None)
    profiles.refresh()
    slurm = attempt("slurm", slurm_config)
    with {"pyslurm": over_pyslurm, "json": over_json}.get(settings.service.gateway, automatic)() as gateway:
        greeting = attempt("pyslurm", gateway.greeting) or {}
        cluster = attempt("cluster", gateway.read) if greeting else None
    return Facts(
        settings, version("cadenza"), SystemClock().now(), _keys(settings), slurm, greeting,
        attempt("json", json_format) if slurm is not None else None,
        cluster, attempt("recorded", lambda: getattr(_stored(settings, StoreReader.round), "snapshot", None)),
        attempt("plugin", lambda: built_for(slurm or {})), problems,
        sum(entry.profile is not None for entry in profiles.library.entries), tuple(profiles.library.problems),
        attempt("store", lambda: _stored(settings, StoreReader.faults)) or (),
        attempt("state", lambda: _full((slurm or {}).get("StateSaveLocation", ""))) or False,
        attempt("file limit", lambda: _file_limit(settings)),
        attempt("largest state", lambda: _stored(settings, StoreReader.largest_state)),
        guard_settings(settings).killed,
        Controllers(socket.gethostname()).standby_reason() if slurm is not None else "",
        dict(_others(config or DEFAULT_PATH)),
    )  # fmt: skip


def _others(own: Path) -> Iterator[tuple[str, Settings | str]]:
    """Yield the settings of other services, each of which has a folder of its own next to the default file."""
    files = {DEFAULT_PATH, *DEFAULT_PATH.parent.glob(f"*/{DEFAULT_PATH.name}")} - {own}
    for path in sorted(path for path in files if path.exists()):
        try:
            settings = load_settings(path)
        except ConfigError as error:
            yield str(path), str(error)
        else:
            if settings.guard.partitions:  # without any it is a file for agents
                yield str(path), settings


def _stored(settings: Settings, read: Callable[[StoreReader], T]) -> T:
    with StoreReader(Path(settings.service.store)) as reader:
        return read(reader)


def _full(folder: str) -> bool:
    """Return True for a folder of this machine without room; a login host has none of this name."""
    return folder != "" and Path(folder).is_dir() and shutil.disk_usage(folder).free < FULL_BYTES


def _keys(settings: Settings) -> tuple[KeyFile, ...]:
    """Return the service's secret key and all files of the hosts' keys."""
    folder = Path(settings.service.keys)
    own, agents = folder / f"service{SECRET}", folder / AGENT_FOLDER
    files = [KeyFile(str(own), secret=True, mode=_mode(own))]
    for ending in (PUBLIC, REPLACED, SECRET):
        for path in sorted(agents.glob(f"*{ending}")):
            host, secret = path.name.removesuffix(ending), ending == SECRET
            files.append(KeyFile(str(path), secret, _mode(path), host, ending == REPLACED, _public_key(path)))
    return tuple(files)


def _public_key(path: Path) -> str:
    """Return the public key in a key file; empty if there is none that can be read."""
    try:
        return zmq.auth.load_certificate(path)[0].decode()
    except (OSError, ValueError):
        return ""


def _file_limit(settings: Settings) -> int | None:
    """Return the number of files that the running cadenzad may have open; None if it is not known."""
    pid = StoreLock(Path(settings.service.store)).owner()
    if pid is None:
        return None
    limits = Path(f"/proc/{pid}/limits").read_text(encoding="ascii")
    found = re.search(r"Max open files\s+(\d+)", limits)
    return int(found[1]) if found else None


def _mode(path: Path) -> int | None:
    try:
        return path.stat().st_mode & 0o777
    except OSError:
        return None


def built_for(slurm: dict[str, str]) -> tuple[int, int]:
    """Return the Slurm version in the plugin's ``plugin_version``, which Slurm itself compares.

    Raise OSError if the plugin is not in Slurm's plugin directory or cannot be read.
    """
    folders = [Path(name) for name in re.split(r"[:,]", slurm.get("PluginDir", "")) if name]
    path = next((folder / PLUGIN for folder in folders if (folder / PLUGIN).exists()), None)
    if path is None:
        where = ", ".join(map(str, folders)) or "an unknown plugin directory"
        raise OSError(f"{PLUGIN} is not in {where}")
    library = path.with_name("libslurmfull.so")
    if library.exists():  # what a plugin calls has to be there at once where it is linked with -z now, as Debian's are
        ctypes.CDLL(str(library), mode=RTLD_LAZY | ctypes.RTLD_GLOBAL)
    number = ctypes.c_uint.in_dll(ctypes.CDLL(str(path), mode=RTLD_LAZY), "plugin_version").value
    return number >> 16 & 0xFF, number >> 8 & 0xFF

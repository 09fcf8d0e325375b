"""``cadenza plan --remove``: what is left of Cadenza on this machine and in Slurm."""

from __future__ import annotations

import pwd
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from cadenza.policies.core.errors import CadenzaError, InputError
from cadenza.sidecar.config import DEFAULT_PATH, ConfigError
from cadenza.slurm_plugin.cli.common import emit, say
from cadenza.slurm_plugin.gateway.slurm_gateway import TIMEOUT_S, answer_of, json_of, slurm_config
from cadenza.slurm_plugin.service.settings import Settings, load_settings
from cadenza.slurm_plugin.site.lane_plan import SlurmNode, decode_nodes, names_in

USER = "cadenza"
"""The service's user, as in its unit."""
MAX_BYTES = 2**24
UNITS = Path("/etc/systemd/system")
LANE_NAME = re.compile(r".+-l\d+")


class Leftover(msgspec.Struct, frozen=True):
    """One thing that is left, and how it goes."""

    left: str
    removal: str


def show_leftovers(config: Path | None, *, as_json: bool) -> int:
    """List what is left of Cadenza, and how each part is removed.

    Return the exit code: 1 if more than the programs themselves is left, and 3 if Slurm did not answer.
    """
    try:
        settings = load_settings(config)
    except ConfigError:
        settings = Settings()
    left, silent = list[Leftover](), ""
    slurm: dict[str, str] = {}
    try:
        slurm = slurm_config()
        left += in_slurm(decode_nodes(json_of(("scontrol", "--all", "show", "node"), TIMEOUT_S))[0])
        left += in_accounting(slurm)
    except CadenzaError as error:
        silent = str(error)
    left += on_this_machine(settings, (config or DEFAULT_PATH).parent)
    left += in_slurms_files(Path(slurm.get("SLURM_CONF", "/etc/slurm/slurm.conf")).parent)
    left += plugins(slurm.get("PluginDir", ""))
    programs = f"the programs: {Path(sys.argv[0]).resolve()}"
    program = Leftover(programs, "apt-get purge 'cadenza*', or rm -r /opt/cadenza")
    if as_json:
        emit("cadenza.leftovers/1", [*left, program])
    else:
        for one in (*left, program):
            say(one.left, f"       -> {one.removal}")
    if silent:
        say(f"{silent}: what Slurm has was not looked at", err=True)
        return 3
    return int(bool(left))


def in_slurm(nodes: Sequence[SlurmNode]) -> Iterator[Leftover]:
    """Yield the lanes that slurmctld has."""
    lanes = [node.name for node in nodes if node.lane]
    if lanes:
        yield Leftover(f"lanes in Slurm: {','.join(lanes)}", "take their lines out of slurm.conf, restart its daemons")
    first = [node.name for node in nodes if "lane0" in node.features]
    if first:
        yield Leftover(f"Feature=lane0 in Slurm: {','.join(first)}", "give these nodes their former lines")


def in_accounting(config: Mapping[str, str]) -> Iterator[Leftover]:
    """Yield the service's user in Slurm's accounting."""
    if config.get("AccountingStorageType", "").endswith("slurmdbd"):
        question = ("sacctmgr", "--noheader", "--parsable2", "show", "user", USER, "format=user")
        if answer_of(question, TIMEOUT_S).strip():
            yield Leftover(f"the user {USER} in Slurm's accounting", f"sacctmgr delete user {USER}")


def on_this_machine(settings: Settings, own: Path, units: Path = UNITS) -> Iterator[Leftover]:
    """Yield the folders of the daemons, units that were put there by hand, and the service's user."""
    folders = {
        own, Path(settings.service.store).parent, Path(settings.expert.jobs_socket).parent,
        Path(settings.expert.state_dir), Path(settings.expert.socket).parent,
    }  # fmt: skip
    for unit in (*sorted(units.glob("cadenza*.service")), units / "slurmd@.service"):
        if "cadenza" in text_of(unit):
            name = unit.name.replace("@.", "@*.")
            yield Leftover(f"the unit {unit}", f"systemctl disable --now '{name}' && rm {unit}")
    for folder in sorted(folders):
        if folder.exists():
            yield Leftover(f"the folder {folder}", f"rm -r {folder}")
    try:
        pwd.getpwnam(USER)
    except KeyError:
        return
    yield Leftover(f"the user {USER}", f"userdel {USER}")


def in_slurms_files(folder: Path) -> Iterator[Leftover]:
    """Yield the lines of Slurm's files that name Cadenza or a lane."""
    for path in (*sorted(folder.glob("*")), *sorted(folder.glob("plugstack.conf.d/*"))):
        if path.is_symlink() and not path.exists() and "cadenza" in str(path.readlink()):
            # slurmctld does not start without its script, and no one notices until then.
            yield Leftover(f"{path} is a link to {path.readlink()}, which is gone", f"rm {path}, JobSubmitPlugins= too")
            continue
        rows = text_of(path).splitlines() if path.is_file() else []
        found = [number for number, row in enumerate(rows, 1) if "cadenza" in row.lower() or _names_lanes(row)]
        if found:
            removal = "take the line out, or remove the file if it is Cadenza's"
            yield Leftover(f"{path}:{found[0]} names Cadenza or a lane", removal)


def _names_lanes(row: str) -> bool:
    named = re.match(r"(?i)\s*NodeName=(\S+)", row)
    try:
        return named is not None and any(LANE_NAME.fullmatch(name) for name in names_in(named[1]))
    except InputError:
        return False


def text_of(path: Path) -> str:
    """Return the text of a small file; empty if it cannot be read."""
    try:
        return path.read_text(errors="replace") if path.stat().st_size <= MAX_BYTES else ""
    except OSError:
        return ""


def plugins(directories: str) -> Iterator[Leftover]:
    """Yield the SPANK plugin in Slurm's plugin directories."""
    for folder in filter(None, re.split(r"[:,]", directories)):
        path = Path(folder) / "cadenza.so"
        if path.exists():
            yield Leftover(f"the plugin {path}", f"apt-get purge 'cadenza-slurm*', or rm {path}")

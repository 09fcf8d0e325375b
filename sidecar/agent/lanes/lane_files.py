"""The folder of a lane's slurmd: the site's configuration as links, with paths and GPUs of the lane's own.

slurmd reads every file from the folder of the slurm.conf that it is given (slurmd(8), -f). Jobs of the lane find it by
SLURM_CONF, so it is readable to everyone.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path

from cadenza.policies.core.text import printable
from cadenza.sidecar.agent.errors import LaneError
from cadenza.sidecar.orders import LaneOrder

SITE_FOLDERS = (Path("/etc/slurm"), Path("/run/slurm/conf"))
"""Folders with the configuration of lane 0; the second one where it is configless (slurm.conf(5))."""
OWN_PATHS = ("SlurmdSpoolDir", "SlurmdPidFile", "SlurmdLogFile")
"""Settings of which each slurmd of a host needs a value of its own."""
UNSET = ("", "(null)", "None")
BINARIES = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
TIMEOUT_S = 60.0
MAX_MESSAGE = 300
_NODES = re.compile(r"\bNodeName=(\S+)\s*", re.IGNORECASE)
_SETTING = re.compile(r"^(\w+)\s*=\s*(.*?)\s*$", re.MULTILINE)


def prepare(folder: Path, order: LaneOrder) -> Path:
    """Write a lane's folder and return the path of its slurm.conf; raise LaneError naming the obstacle.

    Links and files are replaced one by one, since jobs of the lane may be reading them.
    """
    try:
        site = next(place for place in SITE_FOLDERS if (place / "slurm.conf").is_file())
        settings = dict(_SETTING.findall(output("scontrol", "show", "config")))
        gres = (site / "gres.conf").read_text(encoding="utf-8", errors="replace")
        folder.mkdir(parents=True, exist_ok=True)
        folder.parent.chmod(0o755)
        # Jobs of the lane have this folder in SLURM_CONF, and read it as their users.
        folder.chmod(0o755)
        link_site(folder)
        own, lines = folder / "slurm.conf", own_settings(settings)
        # Of two lines with one key Slurm takes the later one, without a word.
        text = "\n".join((f"Include {site}/slurm.conf", *lines, ""))
        _replace(own, partial(_write, text) if lines else partial(_link, site / "slurm.conf"))
        _replace(folder / "gres.conf", partial(_write, lane_gres(gres, order.first, _expand)))
    except StopIteration:
        raise LaneError(f"no slurm.conf in {' or '.join(map(str, SITE_FOLDERS))}") from None
    except OSError as error:
        raise LaneError(f"{error.filename}: {error.strerror}") from None
    return own


def link_site(folder: Path) -> None:
    """Link the site's files that a lane's folder lacks; raise LaneError.

    The site may add one while the lane is open. A slurmd that lacks it at the next reconfigure is deaf for a minute.
    """
    try:
        for place in SITE_FOLDERS:
            for path in place.iterdir() if place.is_dir() else ():
                if path.name not in ("slurm.conf", "gres.conf") and not (folder / path.name).exists():
                    _replace(folder / path.name, partial(_link, path))
    except OSError as error:
        raise LaneError(f"{error.filename}: {error.strerror}") from None


def own_settings(settings: Mapping[str, str]) -> list[str]:
    """Return the lines that a slurm.conf lacks for a second slurmd on the host, from Slurm's settings in force.

    None are needed where the paths have ``%n``, the node's name, and no slurmd serves the socket of auth/slurm.
    """
    values = ((key, settings.get(key, "")) for key in OWN_PATHS)
    lines = [f"{key}={value}.%n" for key, value in values if value not in UNSET and "%n" not in value]
    info = settings.get("AuthInfo", "")
    if settings.get("AuthType") == "auth/slurm" and "disable_sack" not in info:
        lines.append("AuthInfo=" + ",".join((*((info,) if info not in UNSET else ()), "disable_sack")))
    return lines


def lane_gres(text: str, first: str, expand: Callable[[str], Collection[str]]) -> str:
    """Return the lines of a gres.conf that hold for the node ``first``, without its name: a lane has the same GPUs.

    ``expand`` returns the names of a list such as ``gpu[1-4]``. Raise LaneError where there are none.
    """
    lines = []
    for line in text.replace("\\\n", " ").splitlines():
        words = line.partition("#")[0].strip()
        if re.match(r"include\b", words, re.IGNORECASE):
            raise LaneError(
                f"gres.conf has {printable(words, MAX_MESSAGE)!r}, and a lane cannot tell whose lines follow"
            )
        named = _NODES.search(words)
        if words and (named is None or first in expand(named[1])):
            lines.append(_NODES.sub("", words))
    if not any(re.search(r"\b(Name=gpu|AutoDetect=\w)", line, re.IGNORECASE) for line in lines):
        raise LaneError(f"gres.conf has no line with the GPUs of {first}")
    return "\n".join((*lines, ""))


def output(*words: str) -> str:
    """Return the output of a command of Slurm or systemd; raise LaneError with its last words when it fails."""
    program = shutil.which(words[0], path=BINARIES)
    if program is None:
        raise LaneError(f"{words[0]} is not installed on this host")
    try:
        done = subprocess.run(
            (program, *words[1:]),
            capture_output=True,
            stdin=subprocess.DEVNULL,
            env={"PATH": BINARIES},
            timeout=TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaneError(printable(f"{words[0]}: {error}", MAX_MESSAGE)) from None
    if done.returncode:
        last = (done.stderr.decode(errors="replace").strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise LaneError(printable(f"{words[0]}: {last}", MAX_MESSAGE))
    return done.stdout.decode(errors="replace")


def _expand(names: str) -> Collection[str]:
    return output("scontrol", "show", "hostnames", names).split()


def _link(target: Path, draft: Path) -> None:
    draft.symlink_to(target)


def _write(text: str, draft: Path) -> None:
    draft.write_text(text, encoding="utf-8")
    draft.chmod(0o644)


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Put a file or link in place at once."""
    draft = path.with_name(f".{path.name}.new")
    draft.unlink(missing_ok=True)
    write(draft)
    draft.replace(path)

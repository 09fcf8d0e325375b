"""``cadenza config``: the settings in force, checked and explained key by key."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec

from cadenza.policies.sharing.turns.fair_queue import MAX_FAIR_WAITS_BEHIND
from cadenza.sidecar.config import DEFAULT_PATH, read
from cadenza.slurm_plugin.cli.common import emit, json_option, say
from cadenza.slurm_plugin.service import settings_reference
from cadenza.slurm_plugin.service.profiles.library import ProfileDirectory
from cadenza.slurm_plugin.service.settings import Settings, load_settings

NCCL_LIMIT_S = 480.0
"""Shortest limit of NCCL's watchdog by default (torch: TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC)."""
PAIR = 2
"""Jobs that share a GPU at least."""
PLACERS = ("gandiva", "none")
"""Sharings that may choose the nodes of waiting jobs."""


class Row(msgspec.Struct, frozen=True):
    """One setting; ``origin`` is a file or ``default``."""

    section: str
    key: str
    value: Any
    origin: str
    meaning: str


@click.command("config")
@click.argument("file", type=click.Path(path_type=Path), required=False)
@click.option("--check", is_flag=True, help="Print the verdict alone, without the settings.")
@json_option
def command(*, file: Path | None, check: bool, as_json: bool) -> None:
    """Check FILE (default: /etc/cadenza/cadenza.toml) and its conf.d, and print every setting in force.

    The output is a configuration file: each setting with its meaning and the file it comes from; of [expert] what is
    set. All errors of the
    files are named with their keys and lines, and then the exit code is 2. Notes do not change it.
    """
    path = file or (DEFAULT_PATH if check or DEFAULT_PATH.exists() else None)
    settings = load_settings(path)
    notes = [*advice(settings), *policy_advice(settings)]
    if as_json:
        settings_rows = () if check else tuple(rows(path))
        emit("cadenza.config/1", {"file": str(path or ""), "notes": notes, "settings": settings_rows})
        return
    if not check:
        say(*lines(list(rows(path))))
    head = f"{path or 'no file, so the defaults'}: OK, mode {settings.service.mode}"
    say(head, *(f"  note: {line}" for line in notes), err=not check)


def policy_advice(settings: Settings) -> Iterator[str]:
    """Yield problems of the profiles, and policy settings without effect."""
    table, folder = settings.policy, settings.profiles.directory
    directory = ProfileDirectory(Path(folder) if folder else None)
    directory.refresh()
    yield from (f"profile not used: {problem}" for problem in directory.library.problems)
    usable = sum(entry.profile is not None for entry in directory.library.entries)
    if settings.expert.size_pending and settings.profiled and not usable:
        yield f"[policy] allocate = {table.allocate!r} and [profiles] directory {folder!r} holds no profile"
    if usable and not settings.allocates:
        yield '[policy] allocate = "none": profiles are shown and change nothing'
    if table.place and table.share not in PLACERS:
        yield f"[policy] place = true has no effect with share = {table.share!r}: Slurm chooses the nodes"
    if table.place and table.share == "none" and not settings.allocates:
        yield '[policy] place = true with share = "none" needs an allocation, whose rounds choose the nodes'
    if settings.gandiva != type(settings.gandiva)() and table.share != "gandiva":
        yield f"[gandiva] has no effect with [policy] share = {table.share!r}"


def advice(settings: Settings) -> Iterator[str]:
    """Yield settings that are valid and probably not intended."""
    if not settings.guard.partitions:
        yield "[guard] partitions is empty: no partition is managed, so the service does nothing"
    for name in sorted(name for name in settings.guard.partitions if re.search(r"[,\s]", name)):
        yield f"[guard] partitions: {name!r} is no name of a partition; write each in quotes of its own"
    if not settings.agent.service:
        yield "[agent] service is empty: agents take turns locally and the service does not see them"
    if settings.expert.min_run_s > settings.sharing.slice_s:
        yield "[expert] min_run_s exceeds [sharing] slice_s: turns last min_run_s"
    if settings.service.poll_s > settings.sharing.slice_s:
        yield "[service] poll_s exceeds [sharing] slice_s: turns last poll_s"
    longest_s = 2 * MAX_FAIR_WAITS_BEHIND * PAIR * settings.sharing.slice_s
    if settings.agent.driver_checkpoint != "off" and longest_s > NCCL_LIMIT_S:
        yield (
            f"[agent] driver_checkpoint = {settings.agent.driver_checkpoint!r}: with [sharing] slice_s = "
            f"{settings.sharing.slice_s:g} one of two jobs may be frozen for {longest_s:.0f} s, and NCCL's watchdog "
            f"ends processes after {NCCL_LIMIT_S:g} s: jobs with NCCL are frozen only if they turn it off"
        )
    if Path(settings.expert.kill_switch).exists():
        yield f"the kill switch {settings.expert.kill_switch} exists: the service takes no action"


def rows(config: Path | None) -> Iterator[Row]:
    """Yield all settings in the order of their tables, of [expert] what is set; raise ConfigError for a wrong file."""
    settings = load_settings(config)
    path = config or DEFAULT_PATH
    origin = read(path)[1] if path.exists() else {}
    for entry in settings_reference.rows():
        value = getattr(getattr(settings, entry.section), entry.key)
        source = str(origin.get((entry.section, entry.key)) or "default")
        if entry.section == "expert" and source == "default":
            continue
        yield Row(entry.section, entry.key, msgspec.to_builtins(value, order="deterministic"), source, entry.doc)


def lines(settings: list[Row]) -> Iterator[str]:
    """Yield the settings as TOML, each under a comment; the JSON of their values is TOML, too."""
    section = ""
    for row in settings:
        if row.section != section:
            if section:
                yield ""
            yield f"[{row.section}]"
            section = row.section
        yield f"# {row.meaning} ({row.origin})"
        yield f"{row.key} = {msgspec.json.encode(row.value).decode()}"

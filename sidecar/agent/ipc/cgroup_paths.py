"""Paths of a job's control groups, read from /proc/PID/cgroup of its processes.

Slurm's groups of a job (cgroup_v2.html, cgroups.html): with version 2 ``[NODE_]slurmstepd.scope/job_ID/step_N/…``,
where Slurm 26.05 has a SLUID instead of ``job_ID``; with version 1 ``slurm[_NODE]/uid_U/job_ID/step_N/…``
below each controller. In each the job's group is the parent of the first ``step_…``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cadenza.sidecar.agent.ipc.processes import is_stepd, text_of

MOUNT = Path("sys/fs/cgroup")
STEP = "step_"
ANCHORS = ("", "freezer", "memory", "devices", "cpuset", "cpu")
"""Controllers whose group of a job lists its processes, the most reliable first ("" is version 2)."""


@dataclass(frozen=True)
class Groups:
    """The control groups of one process. ``paths`` are inside the mounts, by controller; "" is version 2."""

    root: Path
    paths: dict[str, Path] = field(default_factory=dict)

    def mount(self, controller: str) -> Path:
        """Return the mount point of a controller's tree."""
        if controller:
            return self.root / MOUNT / controller
        # systemd's hybrid layout mounts version 2 here, next to the controllers of version 1.
        hybrid = self.root / MOUNT / "unified"
        return hybrid if hybrid.is_dir() else self.root / MOUNT

    def job(self, controller: str) -> Path | None:
        """Return the job's group as a directory; None if Slurm has none there."""
        inside = _job_of(self.paths.get(controller))
        folder = self.mount(controller) / inside if inside is not None else None
        return folder if folder is not None and folder.is_dir() else None

    def outside(self, controller: str) -> Path | None:
        """Return the directory of Slurm's own tree, or that of the process if it is outside of it."""
        inside = self.paths.get(controller)
        if inside is None:
            return None
        names = inside.parts
        slurm = next((i for i, name in enumerate(names) if name == "slurm" or name.startswith("slurm_")), len(names))
        ours = next((i for i, name in enumerate(names) if name.startswith("cadenza_")), len(names))
        folder = self.mount(controller).joinpath(*names[: min(slurm, ours)])
        return folder if folder.is_dir() else None

    def home(self, controller: str) -> Path | None:
        """Return the process's proper group in a controller: its path in the most reliable of the others."""
        for anchor in ANCHORS:
            inside = self.paths.get(anchor)
            if anchor not in {"", controller} and inside is not None and _job_of(inside) is not None:
                folder = self.mount(controller) / inside
                return next((one for one in (folder, *folder.parents) if (one / "cgroup.procs").exists()), None)
        return self.outside(controller)

    def members(self) -> frozenset[int]:
        """Return the processes in the most reliable of the job's groups; empty without a group.

        slurmstepd is left out.
        """
        folder = next((group for anchor in ANCHORS if (group := self.job(anchor)) is not None), None)
        if folder is None:
            return frozenset()
        return frozenset(pid for pid in processes(folder) if not is_stepd(pid, self.root))

    def slurm_job(self) -> str:
        """Return ``CONTROLLER:PATH`` of the job's group in Slurm's own tree, "" outside of it.

        A process is placed there by slurmd, which runs as root, and cannot leave. slurmstepd itself counts too. The
        path alone proves nothing where users have trees of their own: compare it with that of a process of root's.
        """
        for anchor in ANCHORS:
            if (inside := _group_of_job(self.paths.get(anchor))) is not None:
                return f"{anchor}:{inside}"
        return ""

    def frozen(self) -> bool:
        """Return True if the freezer holds the process, by its own group or by one above it (version 1 or 2)."""
        # Both files show the effective state: a frozen group above counts, too (freezer-subsystem.rst, cgroup-v2.rst).
        if (inside := self.paths.get("freezer")) is not None:
            return text_of(self.mount("freezer") / inside / "freezer.state") == "FROZEN"
        inside = self.paths.get("")
        return inside is not None and "frozen 1" in text_of(self.mount("") / inside / "cgroup.events").splitlines()

    def all_jobs(self) -> Iterator[Path]:
        """Yield the groups of all of Slurm's jobs on this host, in the most reliable tree."""
        for anchor in ANCHORS:
            job = self.job(anchor)
            if job is not None:
                top = job.parents[2] if anchor else job.parents[1]
                pattern = "slurm*/uid_*/job_*" if anchor else "*slurmstepd.scope/*"
                yield from (one for one in top.glob(pattern) if any(one.glob(f"{STEP}*")))
                return


def members_of(group: str, root: Path = Path("/")) -> frozenset[int]:
    """Return the processes in a job's group, as :meth:`Groups.slurm_job` names it, without slurmstepd's own."""
    return frozenset(pid for pid in processes_of(group, root) if not is_stepd(pid, root))


def processes_of(group: str, root: Path = Path("/")) -> Iterator[int]:
    """Yield the processes in a job's group, slurmstepd's own among them."""
    controller, _, inside = group.partition(":")
    if inside:
        yield from processes(Groups(root).mount(controller) / inside)


def thawed_members_of(group: str, root: Path = Path("/")) -> Iterator[int]:
    """Yield the processes in a job's group that no freezer holds, slurmstepd's own among them."""
    controller, _, inside = group.partition(":")
    for folder in below(Groups(root).mount(controller) / inside):
        frozen = (
            text_of(folder / "freezer.state") == "FROZEN"
            or "frozen 1" in text_of(folder / "cgroup.events").splitlines()
        )
        if not frozen:
            yield from (int(line) for line in text_of(folder / "cgroup.procs").splitlines() if line.isdigit())


def processes(folder: Path) -> Iterator[int]:
    """Yield the processes of a group and of all below it."""
    for group in below(folder):
        for line in text_of(group / "cgroup.procs").splitlines():
            if line.isdigit():
                yield int(line)


def of(pid: int, root: Path = Path("/")) -> Groups:
    """Return the control groups of a process; none if it is gone."""
    paths = {}
    for line in text_of(root / f"proc/{pid}/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            paths[controller] = Path(path.strip().lstrip("/"))
    return Groups(root, paths)


def _job_of(inside: Path | None) -> Path | None:
    """Return the job's part of a path; None if it names no step of Slurm's."""
    names = inside.parts if inside is not None else ()
    step = next((i for i, name in enumerate(names) if name.startswith(STEP)), 0)
    in_slurm = any(name.startswith("slurm") or name.endswith("slurmstepd.scope") for name in names[: max(step - 1, 0)])
    return Path(*names[:step]) if step and in_slurm else None


def _group_of_job(inside: Path | None) -> Path | None:
    """Return the group of a job by its place in Slurm's tree, without asking for a step below it; None elsewhere."""
    names = inside.parts if inside is not None else ()
    for i, name in enumerate(names):
        if name.endswith("slurmstepd.scope") and len(names) > i + 1 and names[i + 1] != "system":
            return Path(*names[: i + 2])
        if name.startswith("slurm") and len(names) > i + 2 and names[i + 1].startswith("uid_"):
            return Path(*names[: i + 3])
    return None


def below(folder: Path) -> Iterator[Path]:
    """Yield a group and all groups below it, parents first; groups that vanish are left out."""
    yield folder
    with contextlib.suppress(OSError):
        for child in sorted(folder.iterdir()):
            if child.is_dir():
                yield from below(child)

"""A plain Slurm, to which the guide's blocks add Cadenza: in containers, or by what a subclass of Site says."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from guide_blocks import BUILDER, HOSTS, ROOT, USER, Block

from cluster import CONTAINER, DEBS, ENGINE, RELEASE, script, wait_for

SUITE = {"26.05": "forky", "24.11": "trixie"}[RELEASE]
IMAGE = f"cadenza-site:{SUITE}"
BASE = f"debian:{SUITE}-slim"
SHARED = "/home/shared"
GPUS = 4
UNASKED = "DEBIAN_FRONTEND=noninteractive"
AS_USER = ("setpriv", "--reuid=alice", "--regid=alice", "--init-groups", "--reset-env", "env", f"--chdir={SHARED}")
SLURM_CONF = """\
ClusterName=site
SlurmctldHost=ctl
AuthType=auth/munge
CredType=cred/munge
SlurmUser=slurm
StateSaveLocation=/var/lib/slurm/slurmctld
SlurmdSpoolDir=/var/lib/slurm/slurmd
SlurmdPidFile=/run/slurmd.pid
ProctrackType={tracking}
TaskPlugin={task}
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=bf_interval=1,sched_interval=1
# The nodes claim more hardware than the machine under them has.
SlurmdParameters=config_overrides
GresTypes=gpu
ReturnToService=2
MpiDefault=none
KillWait=5
MailProg=/bin/true
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=ctl
NodeName=gpu[1-2] CPUs=8 RealMemory=16000 Gres=gpu:a100:4
PartitionName=shared Nodes=gpu[1-2] Default=YES MaxTime=INFINITE
"""
FILES = {
    "gres.conf": "NodeName=gpu[1-2] Name=gpu Type=a100 File=/dev/nvidia[0-3]\n",
    "slurmdbd.conf": "DbdHost=ctl\nAuthType=auth/munge\nSlurmUser=slurm\nStorageType=accounting_storage/mysql\n"
    "StorageHost=localhost\nStorageUser=slurm\n",
    "plugstack.conf": "include /etc/slurm/plugstack.conf.d/*.conf\n",
}


class BlockFailedError(Exception):
    """A block ended with another exit code than 0; the message has its text and output."""


class Site(ABC):
    """A controller and two hosts of four GPUs, with a folder for Slurm's files that all of them see."""

    patience_s = 60
    """Seconds for what Slurm or a daemon does by itself."""
    logs = ""
    """Command that prints the ends of the daemons' logs."""

    @abstractmethod
    def up(self) -> None:
        """Start the machines, and wait until both nodes are idle."""

    @abstractmethod
    def down(self) -> None:
        """Remove the machines."""

    @abstractmethod
    def ran(self, machine: str, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run a command of root on a machine; return its exit code and, as ``stdout``, all that it printed."""

    def execute(self, block: Block) -> str:
        """Run a block on its machines, or write its file; return what it printed, or raise BlockFailedError."""
        text = block.text
        if block.title == BUILDER:
            return self._good(block, run_here(bash(text)))
        if block.language != "bash":  # a file of the controller's or of a user's
            path = shlex.quote(str(Path(SHARED) / block.title))
            text = f"install -D -m 644 /dev/null {path}; printf %s {shlex.quote(text)} >{path}"
            return self._good(block, self.ran("ctl", bash(text)))
        as_user = AS_USER if block.title == USER else ()
        return "".join(self._good(block, self.ran(machine, (*as_user, *bash(text)))) for machine in block.machines)

    def _good(self, block: Block, done: subprocess.CompletedProcess[str]) -> str:
        if done.returncode:
            said = f"{block} ended with exit code {done.returncode}:\n{block.text}\n{done.stdout[-8000:]}"
            raise BlockFailedError(said)
        return done.stdout

    def said(self, machine: str, command: str) -> str:
        """Return the output of a command of root, whatever its exit code."""
        return self.ran(machine, ("bash", "-c", command)).stdout

    def wait_idle(self) -> None:
        """Wait until both nodes are idle, and no others are there."""
        idle = ["idle"] * len(HOSTS)
        wait_for("two idle nodes", lambda: self.said("ctl", "sinfo -hN -o %T").split() == idle, self.patience_s)


class PlainSite(Site):
    """Three containers without systemd."""

    logs = "tail -n 40 /var/log/units/*.log"

    def __init__(self, name: str, folder: Path, *, wheels: bool = False) -> None:
        """With ``wheels`` the machines see what the page on wheels copies, and reach the index of packages."""
        self.name, self.folder, self.wheels = name, folder, wheels

    def up(self) -> None:
        script("ensure-docker")
        here = Path(__file__).parent
        build = [ENGINE, "build", "--quiet", "-t", IMAGE, "--target", "container"]
        build += ["--build-arg", f"BASE={BASE}", str(here)]
        subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
        self.down()
        slurm = self.folder / "slurm"
        (slurm / "plugstack.conf.d").mkdir(parents=True)
        groups = Path("/sys/fs/cgroup/freezer").is_dir()
        for name, text in slurm_files("cgroup/v1" if groups else "").items():
            (slurm / name).write_text(text)
        (self.folder / "home").mkdir()
        (self.folder / "home").chmod(0o1777)
        packages = self.folder / "wheels" if self.wheels else DEBS
        packages.mkdir(parents=True, exist_ok=True)
        subprocess.run([ENGINE, "network", "create", self._label, self._network], check=True, stdout=subprocess.DEVNULL)
        shared = [f"{slurm}:/etc/slurm", f"{self.folder}/home:{SHARED}", f"{packages}:/srv/cadenza:ro"]
        if self.wheels:
            shared += [f"{bundle}:{bundle}:ro" for bundle in {os.environ.get("PIP_CERT")} - {None}]
        for machine in ("ctl", *HOSTS):
            self._start(machine, [*shared, f"{CONTAINER}/image/bin:/opt/cluster:ro"])
        self.wait_idle()

    def _start(self, machine: str, volumes: list[str]) -> None:
        words = [ENGINE, "run", "--detach", "--init", "--name", self._container(machine), "--hostname", machine]
        words += [self._label, "--network", self._network, "--network-alias", machine, "--shm-size", "1g"]
        words += [word for volume in volumes for word in ("--volume", volume)]
        if machine in HOSTS:
            words += ["--cgroupns=private", "--security-opt", "apparmor=unconfined"]
            for capability in ("MKNOD", "SYS_ADMIN", "SYS_NICE", "SYS_PTRACE"):
                words += ["--cap-add", capability]
            for index in range(GPUS):
                words += ["--device-cgroup-rule", f"c 120:{index} rwm"]
        role = "host" if machine in HOSTS else "controller"
        subprocess.run([*words, IMAGE, role], check=True, stdout=subprocess.DEVNULL)

    def down(self) -> None:
        script("down", "--name", self.name)

    def execute(self, block: Block) -> str:
        """Run a block; what the build machine has made is then in the folder that all machines see."""
        printed = super().execute(block)
        if self.wheels and block.title == BUILDER:
            for wheel in (ROOT / "dist").glob("*.whl"):
                shutil.copy(wheel, self.folder / "wheels")
            for tree in ("slurm_plugin/spank", "slurm_plugin/lua", "docs/systemd"):
                shutil.copytree(ROOT / tree, self.folder / "wheels" / tree.removeprefix("docs/"))
        return printed

    def ran(self, machine: str, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
        index = [f"{name}={os.environ[name]}" for name in ("PIP_INDEX_URL", "PIP_CERT") if name in os.environ]
        known = [word for value in (UNASKED, *index) for word in ("--env", value)]
        return run_here([ENGINE, "exec", *known, self._container(machine), *words])

    def _container(self, machine: str) -> str:
        return f"{self.name}-{machine}"

    @property
    def _network(self) -> str:
        return f"cadenza-{self.name}"

    @property
    def _label(self) -> str:
        return f"--label=cadenza.cluster={self.name}"


def slurm_files(groups: str) -> dict[str, str]:
    """Return Slurm's files by name; ``groups`` is the plugin for control groups, empty where the machine has none."""
    tracking, task = ("cgroup", "cgroup") if groups else ("linuxproc", "none")
    conf = SLURM_CONF.format(tracking=f"proctrack/{tracking}", task=f"task/{task}")
    cgroup = f"CgroupPlugin={groups or 'disabled'}\nConstrainDevices={'yes' if groups else 'no'}\n"
    return {**FILES, "slurm.conf": conf, "cgroup.conf": cgroup}


def bash(text: str) -> tuple[str, ...]:
    """Return the command that runs a text and ends with its first error."""
    return ("bash", "-euo", "pipefail", "-c", text)


def run_here(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command on this machine; ``stdout`` is all that it printed."""
    return subprocess.run(
        words, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=600, check=False,
    )  # fmt: skip

"""A plain Slurm in containers, to which the guide's blocks add Cadenza."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from guide_blocks import BUILDER, HOSTS, ROOT, USER, Block

from cluster import CONTAINER, ENGINE, script, wait_for

IMAGE = "cadenza-site"
BASE = "debian:forky-slim"
SHARED = "/home/shared"
GPUS = 4
PATIENCE_S = 60
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


class PlainSite:
    """A controller and two hosts of four GPUs, with a folder for Slurm's files that all of them see."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder

    def up(self) -> None:
        """Build the image, start the machines, and wait until both nodes are idle."""
        script("ensure-docker")
        here = Path(__file__).parent
        build = [ENGINE, "build", "--quiet", "-t", IMAGE, "--build-arg", f"BASE={BASE}", str(here)]
        subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
        self.down()
        slurm = self.folder / "slurm"
        (slurm / "plugstack.conf.d").mkdir(parents=True)
        groups = Path("/sys/fs/cgroup/freezer").is_dir()
        tracking, task = ("cgroup", "cgroup") if groups else ("linuxproc", "none")
        conf = SLURM_CONF.format(tracking=f"proctrack/{tracking}", task=f"task/{task}")
        cgroup = f"CgroupPlugin={'cgroup/v1' if groups else 'disabled'}\nConstrainDevices={'yes' if groups else 'no'}\n"
        for name, text in {**FILES, "slurm.conf": conf, "cgroup.conf": cgroup}.items():
            (slurm / name).write_text(text)
        (self.folder / "home").mkdir()
        (self.folder / "home").chmod(0o1777)
        debs = ROOT / "dist" / "debs"
        debs.mkdir(parents=True, exist_ok=True)
        subprocess.run([ENGINE, "network", "create", self._label, self._network], check=True, stdout=subprocess.DEVNULL)
        shared = [f"{slurm}:/etc/slurm", f"{self.folder}/home:{SHARED}", f"{debs}:/srv/cadenza:ro"]
        for machine in ("ctl", *HOSTS):
            self._start(machine, [*shared, f"{CONTAINER}/image/bin:/opt/cluster:ro"])
        wait_for("two idle nodes", lambda: self.said("ctl", "sinfo -hN -o %T").split() == ["idle"] * 2, PATIENCE_S)

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
        """Remove the machines."""
        script("down", "--name", self.name)

    def execute(self, block: Block) -> str:
        """Run a block on its machines, or write its file; return what it printed, or raise BlockFailedError."""
        if block.language != "bash":
            (self.folder / "home" / Path(block.title).name).write_text(block.text)
            if block.title.startswith("/"):  # a file of the controller's
                self.said("ctl", f"install -D -m 644 {SHARED}/{Path(block.title).name} {block.title}")
            return ""
        if block.title == BUILDER:
            return outcome(["bash", "-euo", "pipefail", "-c", block.text], block)
        return "".join(outcome(self._words(machine, block), block) for machine in block.machines)

    def _words(self, machine: str, block: Block) -> list[str]:
        as_user = ["--user", "alice", "--workdir", SHARED] if block.title == USER else []
        return [ENGINE, "exec", *as_user, self._container(machine), "bash", "-euo", "pipefail", "-c", block.text]

    def said(self, machine: str, command: str) -> str:
        """Return the output of a command of root, whatever its exit code."""
        words = [ENGINE, "exec", self._container(machine), "bash", "-c", command]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    def _container(self, machine: str) -> str:
        return f"{self.name}-{machine}"

    @property
    def _network(self) -> str:
        return f"cadenza-{self.name}"

    @property
    def _label(self) -> str:
        return f"--label=cadenza.cluster={self.name}"


def outcome(words: list[str], block: Block) -> str:
    """Return the output of a block's command; raise BlockFailedError for another exit code than 0."""
    done = subprocess.run(
        words, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"}, timeout=600, check=False,
    )  # fmt: skip
    if done.returncode:
        raise BlockFailedError(f"{block} ended with exit code {done.returncode}:\n{block.text}\n{done.stdout[-8000:]}")
    return done.stdout

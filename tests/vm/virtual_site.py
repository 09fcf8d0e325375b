"""The plain Slurm of the guide on a virtual machine: three machines, each with a systemd, an address and a disk."""

from __future__ import annotations

import base64
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from guide_blocks import BUILDER, HOSTS, ROOT, Block
from plain_site import UNASKED, Site, slurm_files
from virtual_machine import BOOT_S, PATIENCE_S, Machine

SLURM, PACKAGES = "/srv/site/slurm", "/srv/site/packages"
"""Folders of the virtual machine that the machines of the site see as /etc/slurm and /srv/cadenza."""
BLOCK_S = 600
PIECE = 90_000
"""Characters of base64, a multiple of four, that go in one argument of a command."""


class VirtualSite(Site):
    """``container/vm --site``. Root of the virtual machine reaches its three machines by ssh."""

    patience_s = PATIENCE_S
    logs = "journalctl --no-pager -n 150 -u 'cadenza*' -u 'slurm*'"

    def __init__(self, console: Path) -> None:
        self._machine = Machine("site", console=console, options=("--site",))

    def up(self) -> None:
        self._on_host("systemctl", "is-system-running", "--wait", check=False)
        files = slurm_files("cgroup/v2")
        files["slurm.conf"] += "MessageTimeout=100\n"  # after 10 s Slurm would give up, in emulation too soon
        for name, text in files.items():
            self._machine.put(f"{SLURM}/{name}", text)
        machines = ("ctl", *HOSTS)
        self._on_host("systemctl", "start", *(f"machine@{machine}" for machine in machines))
        self._good_on("ctl", "systemctl", "enable", "--now", "munge", "mariadb")
        self._good_on("ctl", "open_accounts")
        for host in HOSTS:
            self._good_on(host, "systemctl", "enable", "--now", "munge", "slurmd")
        self.wait_idle()

    def down(self) -> None:
        self._machine.down()

    def execute(self, block: Block) -> str:
        """Run a block; what the build machine has made is carried into the folder that all machines see.

        It was made before, by `make test-vm`: beside a machine in emulation a build takes longer than a block may. The
        jobs of the guide take three and ten times as long, because a look takes as long as a turn in emulation.
        """
        if block.title == BUILDER:
            assert block.text == "make debs\n"
            for deb in (ROOT / "dist" / "debs").glob("*.deb"):  # the machines have no network
                self._carry(deb)
            return ""
        longer = block.text.replace("range(400)", "range(1200)").replace("step < 3000", "step < 30000")
        return super().execute(replace(block, text=longer))

    def _carry(self, file: Path) -> None:
        text = base64.b64encode(file.read_bytes()).decode()
        for start in range(0, len(text), PIECE):
            write = f'printf %s "$1" | base64 --decode {">>" if start else ">"}{PACKAGES}/{file.name}'
            self._on_host("sh", "-c", write, "sh", text[start : start + PIECE])

    def ran(self, machine: str, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
        command = shlex.join(["env", UNASKED, *words])
        done = self._machine.exec("", "ssh", machine, f"{command} 2>&1", check=False, timeout=BLOCK_S)
        return subprocess.CompletedProcess(words, done.returncode, done.stdout + done.stderr)

    def _on_host(self, *words: str, check: bool = True) -> None:
        self._machine.exec("", *words, check=check, timeout=BOOT_S)

    def _good_on(self, machine: str, *words: str) -> None:
        done = self.ran(machine, words)
        if done.returncode:
            raise RuntimeError(f"{machine}: {' '.join(words)} → {done.returncode}\n{done.stdout}")

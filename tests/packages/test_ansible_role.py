"""The role of packaging/ansible installs two hosts from the packages, and has nothing to do the second time.

Ansible reaches the containers by an ``ssh`` of the test's own, which is ``docker exec``. They have no systemd and no
Slurm that runs: the daemons and the accounting are left out.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import CONTAINER, DEBS, ENGINE, RELEASE, ROOT, script

SSH = """#!/bin/sh
# The last two words are the host and the command.
for word; do host=$command command=$word; done
exec ENGINE exec --interactive "$host" sh -c "$command"
"""
INVENTORY = """
[cadenza_controller]
ctl ansible_host={name}-ctl
[cadenza_gpu_hosts]
node1 ansible_host={name}-node1
[cadenza_login]
[all:vars]
ansible_user=root
ansible_python_interpreter=/usr/bin/python3
ansible_ssh_executable={ssh}
ansible_ssh_transfer_method=piped
ansible_pipelining=true
cadenza_packages={debs}
cadenza_slurm={release}
cadenza_accounting=false
cadenza_daemons=false
"""
KEYS = "/etc/cadenza/keys"

pytestmark = [pytest.mark.packages, pytest.mark.timeout(600)]


def engine(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run([ENGINE, *words], capture_output=True, text=True, check=check)


@pytest.fixture
def hosts() -> Iterator[str]:
    """The name of two containers, -ctl and -node1, with all that the packages depend on and without the packages."""
    script("build")
    built = subprocess.run([CONTAINER / "build-packages", DEBS], stdout=subprocess.PIPE, text=True, check=True)
    name, image = f"cadenzarole{os.getpid()}", built.stdout.strip()
    purge = "dpkg --purge $(dpkg-query -W -f '${Package} ' 'cadenza*') && rm -rf /etc/cadenza"
    try:
        for host in ("ctl", "node1"):
            engine("run", "--detach", "--name", f"{name}-{host}", "--entrypoint", "sleep", image, "600")
            engine("exec", f"{name}-{host}", "sh", "-c", purge)
        yield name
    finally:
        engine("rm", "--force", f"{name}-ctl", f"{name}-node1")


def test_the_role_installs_a_site_and_changes_nothing_the_second_time(hosts: str, tmp_path: Path) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text(SSH.replace("ENGINE", ENGINE))
    ssh.chmod(0o755)
    (tmp_path / "hosts").write_text(INVENTORY.format(name=hosts, ssh=ssh, debs=DEBS, release=RELEASE))
    first, second = play(tmp_path), play(tmp_path)
    assert first.keys() == second.keys() == {"ctl", "node1"}
    assert min(first.values()) >= 5
    assert set(second.values()) == {0}
    for host in ("ctl", "node1"):
        assert "cadenza-agent" in engine("exec", f"{hosts}-{host}", "cadenza-agent", "--version").stdout
        engine("exec", f"{hosts}-{host}", "cadenza", "config", "--check")
        assert "plugstack.conf.d" in engine("exec", f"{hosts}-{host}", "cat", "/etc/slurm/plugstack.conf").stdout
    stays = "stat -c %F $1 && dpkg --remove cadenza-slurm$0 && test -s $1"
    done = engine("exec", f"{hosts}-ctl", "sh", "-c", stays, RELEASE, "/etc/slurm/job_submit.lua")
    assert done.stdout.startswith("regular file\n")
    secret = f"{KEYS}/agents/node1.key_secret"
    assert engine("exec", f"{hosts}-node1", "stat", "-c%U %a", secret).stdout == "root 600\n"
    assert engine("exec", f"{hosts}-ctl", "test", "-e", secret, check=False).returncode == 1
    assert engine("exec", f"{hosts}-ctl", "stat", "-c%U %a", f"{KEYS}/service.key_secret").stdout == "cadenza 600\n"
    keys = {engine("exec", f"{hosts}-{host}", "cat", f"{KEYS}/service.key").stdout for host in ("ctl", "node1")}
    assert len(keys) == 1


def play(folder: Path) -> dict[str, int]:
    """Run the playbook and return the number of changes on each host."""
    command = [Path(sys.executable).with_name("ansible-playbook"), "-i", folder / "hosts", "packaging/ansible/site.yml"]
    environment = {**os.environ, "ANSIBLE_HOME": str(folder / "ansible"), "ANSIBLE_NOCOLOR": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    recap = re.findall(r"^(\w+) +: ok=\d+ +changed=(\d+) +unreachable=0 +failed=0 ", done.stdout, re.MULTILINE)
    return {host: int(changes) for host, changes in recap}

"""The agent's socket: who may say what, and what becomes of nonsense."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable

import pytest
from agent_rig import Agent, until

from cadenza.sidecar import wire

pytestmark = pytest.mark.slow  # a daemon each

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="changing the uid needs root")


def test_start_is_granted_at_once_and_is_on_disk(agent: Agent) -> None:
    assert agent.talk().start(7, [0, 1])["state"] == "granted"
    assert agent.leases()[7]["state"] == "held"
    assert agent.leases()[7]["gpus"] == [0, 1]


def test_overlapping_start_waits_and_is_told_why_until_the_holder_ends(agent: Agent) -> None:
    root = agent.talk()
    assert root.start(1, [0])["state"] == "granted"
    waiter = agent.talk()
    answer = waiter.start(2, [0, 1])
    assert answer["state"] == "wait"
    assert "job 1 cannot be stopped" in answer["reason"]
    root.send("end", job=1)
    waiter.until_granted(answer)
    assert set(agent.leases()) == {2}


def test_giveup_after_the_longest_wait(new_agent: Callable[..., Agent]) -> None:
    agent = new_agent(lease_wait_s=1.0).up()
    agent.talk().start(1, [0])
    waiter = agent.talk()
    assert waiter.start(2, [0])["state"] == "wait"
    answer = waiter.receive()
    assert answer["state"] == "giveup"
    assert "no lease within 1 s" in answer["reason"]


def test_jobs_without_gpus_in_common_hold_together(agent: Agent) -> None:
    assert agent.talk().start(1, [0])["state"] == "granted"
    assert agent.talk().start(2, [1])["state"] == "granted"
    assert agent.talk().start(3, [])["state"] == "granted"


NONSENSE = [
    (b"\xff\x00garbage", "not JSON"),
    (b"[1]", "not an object"),
    (b'{"v":99,"type":"start"}', "version 99"),
    (wire.encode("dance"), "unknown message type 'dance'"),
    (wire.encode("start", job="x"), "start: Expected `int`"),
    (wire.encode("start", job=1), "missing required field `uid`"),
    (wire.encode("attach", job=1, gpus=[-1]), "attach: Expected `int` >= 0"),
    (wire.encode("arrived", order=1, step=1), "has not attached"),
    (wire.encode("attach", job=1, node="\ud800"), "attach: Expected `str` matching"),
    (wire.encode("attach", job=1, requeue_owner="\ud800"), "attach: Expected `str` matching"),
    (wire.encode("attach", job=1, restart=2**63), "attach: Expected `int` <= 2147483648"),
    (wire.encode("yielded", copy_s=10**400), "yielded: "),
    (wire.encode("\ud800" * 9000), "unknown message type"),
    (b'{"v":1,"type":"yielded","copy_s":Infinity}', "Infinity is no number"),
    (b"[" * 60000, "not JSON"),
    (b" " * (wire.MAX_PACKET + 10), "not JSON"),
]


def test_nonsense_is_answered_and_harmless(agent: Agent) -> None:
    peer = agent.talk()
    peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    for packet, complaint in NONSENSE:
        peer.sock.send(packet)
        answer = peer.receive()
        assert answer["type"] == "error"
        assert complaint in answer["error"]
    assert peer.start(5, [0])["state"] == "granted"


def test_a_process_of_another_job_may_not_attach(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    agent.plugin(1, [0]).wait_for("start")
    child = agent.rank(1, "--stranger")
    assert "is no process of job 1" in child.wait_for("error")["error"]
    assert "refused pid=" in agent.log()


def test_a_child_of_a_registered_process_may_attach(agent: Agent) -> None:
    agent.talk().start(1, [0])
    assert agent.rank(1, "--stranger").wait_for("attached")["state"] == "held"


def test_a_process_makes_no_lease(agent: Agent) -> None:
    """Whatever it names, and whatever its environment says (A6)."""
    answer = agent.talk().ask("attach", job=8, gpus=[0, 1, 2, 3], restart=3)
    assert "job 8.3 is not registered on this host" in answer["error"]
    agent.talk().start(8, [0])
    agent.talk().ask("attach", job=8, gpus=[0, 1, 2, 3], hosts=4, node="n9")
    lease = agent.leases()[8]
    assert (lease["gpus"], lease["hosts"], lease["node"]) == ([0], 1, "n1")
    assert agent.talk().start(9, [1])["state"] == "granted"


def test_exclusive_use_needs_lane_0(agent: Agent) -> None:
    """A job on a further lane that does not share is sent back to be requeued (B5)."""
    answer = agent.talk().start(2, [0], managed=False, lane=1, node="n1-l1")
    assert answer["state"] == "giveup"
    assert "exclusive use of GPUs needs lane 0" in answer["reason"]
    assert agent.talk().start(3, [0])["state"] == "granted"


@as_root
def test_another_users_process_may_not_attach(agent: Agent) -> None:
    agent.talk().start(1, [0])
    agent.directory.chmod(0o755)
    for parent in list(agent.directory.parents)[:3]:
        parent.chmod(parent.stat().st_mode | 0o055)
    code = (
        "import os, socket, sys; os.setgid(65534); os.setuid(65534); "
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.connect(sys.argv[1]); "
        "p = lambda m: (s.send(m.encode()), print(s.recv(9999).decode()))\n"
        'p(\'{"v":1,"type":"attach","job":1}\')\n'
        'p(\'{"v":1,"type":"end","job":1}\')\n'
        'p(\'{"v":1,"type":"start","job":1,"uid":65534,"user":"x","node":"n","managed":true}\')\n'
    )
    environment = {**os.environ, "SLURM_JOB_ID": "1"}
    run = subprocess.run(
        [sys.executable, "-c", code, str(agent.socket)], capture_output=True, text=True, env=environment, check=True
    )
    attach, end, start = run.stdout.splitlines()
    assert f"not uid {NOBODY}'s" in attach
    assert f"end: uid {NOBODY} may not" in end
    assert f"start: uid {NOBODY} may not" in start
    assert agent.leases()[1]["uid"] == 0


def test_the_job_is_gone_when_its_batch_script_ends(agent: Agent) -> None:
    batch = agent.plugin(9, [0], step=4294967291)
    assert batch.wait_for("start")["state"] == "granted"
    waiter = agent.talk()
    answer = waiter.start(10, [0])
    batch.kill()
    waiter.until_granted(answer)
    assert "left JOBID=9: its batch script ended" in agent.log()


def test_sigterm_ends_the_agent_with_leases_on_disk(agent: Agent) -> None:
    agent.talk().start(1, [0])
    assert agent.down(signal.SIGTERM) == 0
    assert agent.leases()[1]["state"] == "held"


def test_a_second_agent_on_the_same_state_is_refused(agent: Agent) -> None:
    command = [sys.executable, "-m", "cadenza.sidecar.agent", "--config", str(agent.config)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "another agent is running on it" in run.stderr
    assert agent.talk().start(1, [0])["state"] == "granted"


def test_systemd_hears_from_the_agent(new_agent: Callable[..., Agent], monkeypatch: pytest.MonkeyPatch) -> None:
    agent = new_agent()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
        notified.settimeout(8)
        notified.bind(str(agent.directory / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(agent.directory / "notify"))
        agent.up()
        assert [notified.recv(100) for _ in range(2)] == [b"READY=1", b"WATCHDOG=1"]


def test_a_page_cannot_be_pulled_away(agent: Agent) -> None:
    agent.talk().start(1, [0])
    child = agent.rank(1, "--iteration-s", "0.01")
    child.wait_for("attached")
    fd = next(
        path for path in (f"/proc/{child.process.pid}/fd/{n}" for n in range(3, 20))
        if os.path.exists(path) and "cadenza-page" in os.readlink(path)
    )  # fmt: skip
    with open(fd, "r+b") as page, pytest.raises(PermissionError):
        page.truncate(0)
    until(lambda: agent.talk().start(2, [1])["state"] == "granted", "the agent lives")


def test_a_late_job_stays_late_through_a_restart_and_gets_its_lease_when_it_asks(agent: Agent) -> None:
    root, plugin = agent.talk(), agent.talk()
    assert plugin.start(1, [0, 1], late=True)["state"] == "late"
    plugin.close()
    assert root.start(2, [0])["state"] == "granted"
    agent.down()
    agent.up()
    assert (agent.leases()[1]["state"], agent.leases()[1]["late"]) == ("waiting", True)
    process = agent.talk()
    answer = process.ask("ask", job=1)
    assert answer["state"] == "wait"
    assert "job 2" in answer["reason"]
    agent.talk().send("end", job=2)
    process.until_granted(answer)
    assert (agent.leases()[1]["state"], agent.leases()[1]["late"]) == ("held", False)

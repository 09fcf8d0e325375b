"""The plugin's messages to an agent, read by the real agent's reader, and the limited wait."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spankstructs import ABSENT, GIVES_UP, GRANTED, SILENT, TELLER, Config, Job, job

from cadenza.sidecar import wire
from cadenza.sidecar.agent.ipc.messages import End, Start, parse
from cadenza.sidecar.agent.leases import handover

REFUSAL = wire.encode("error", error="no")


def lease(state: str) -> bytes:
    return wire.encode("lease", state=state)


class Peer:
    """An agent's socket. Each connection gets the next script: packets to send, seconds to pause, b"" to hang up."""

    def __init__(self, path: Path, scripts: list[list[bytes | float]]) -> None:
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(str(path))
        self.listener.listen(8)
        self.scripts = scripts
        self.received: list[bytes] = []
        self.closing = threading.Event()
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        for script in self.scripts:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self.play, args=(connection, script), daemon=True).start()

    def play(self, connection: socket.socket, script: list[bytes | float]) -> None:
        with connection, suppress(BrokenPipeError):
            self.received.append(connection.recv(wire.MAX_PACKET))
            for part in script:
                if isinstance(part, float):
                    self.closing.wait(part)
                elif not part:
                    return
                else:
                    connection.send(part)
            self.closing.wait(30)


@contextmanager
def peer(path: Path, *scripts: list[bytes | float]) -> Iterator[Peer]:
    agent = Peer(path, list(scripts))
    yield agent
    agent.closing.set()
    agent.listener.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "agent.sock"


def wait(
    library: ctypes.CDLL, path: Path, wanted: Job, *, wait_s: int = 1, told: list[bytes | None] | None = None
) -> int:
    said: list[bytes | None] = [] if told is None else told
    teller = TELLER(lambda _, reason: said.append(reason))
    return library.agent_wait(ctypes.byref(wanted), ctypes.byref(Config(str(path).encode(), wait_s)), teller)


def start_packet(library: ctypes.CDLL, wanted: Job) -> bytes:
    packet = ctypes.create_string_buffer(4096)
    length = library.start_message(ctypes.byref(wanted), packet, 4096)
    assert length == len(packet.value)
    return packet.value


def test_the_agent_reads_what_the_plugin_writes(library: ctypes.CDLL) -> None:
    assert parse(start_packet(library, job(lane=1, options="max_gpus=4,model=res18"))) == Start(
        job=7, restart=2, uid=1000, user="alice", node="node1-l1", lane=1, gpus=(0, 3), hosts=2, managed=True,
        step=0xFFFFFFFB, options="max_gpus=4,model=res18", cpus=6, memory_mb=2**40,
    )  # fmt: skip


def test_a_job_that_asks_by_itself_starts_at_once(library: ctypes.CDLL, path: Path) -> None:
    wanted = job(lane=1)
    wanted.late = True
    with peer(path, [lease("late")]) as agent:
        assert wait(library, path, wanted) == GRANTED
    message = parse(agent.received[0])
    assert isinstance(message, Start)
    assert message.late


@given(user=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40))
def test_no_user_name_breaks_a_packet(library: ctypes.CDLL, user: str) -> None:
    packet = wire.decode(start_packet(library, job(user=user)))
    assert packet["job"] == 7
    assert set(packet["user"]) <= set(user)


def test_as_many_gpus_as_there_can_be_fit(library: ctypes.CDLL) -> None:
    wanted = job()
    wanted.gpus, wanted.gpu_count = (ctypes.c_int * 64)(*range(960, 1024)), 64
    assert parse(start_packet(library, wanted)).gpus == tuple(range(960, 1024))


@pytest.mark.parametrize(
    ("node", "lane"),
    [("node1", 0), ("node1-l1", 1), ("a-b-l12", 12), ("rack-left", 0), ("n-l", 0), ("n-l2x", 0), ("", 0)],
)
def test_lane_of_a_node(library: ctypes.CDLL, node: str, lane: int) -> None:
    assert library.lane_of(node.encode()) == lane


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("0", [0]),
        ("0,2,7", [0, 2, 7]),
        ("1-3,5", [1, 2, 3, 5]),
        ("", []),
        ("x", []),
        ("3-1", []),
        ("0-4294967295", None),
    ],
)
def test_lists_of_gpus(library: ctypes.CDLL, text: str, gpus: list[int] | None) -> None:
    room = (ctypes.c_int * 64)()
    count = library.parse_gpus(text.encode(), room, ctypes.c_size_t(64))
    assert list(room[:count]) == (list(range(64)) if gpus is None else gpus)


def test_granted(library: ctypes.CDLL, path: Path) -> None:
    with peer(path, [lease("wait"), 0.1, lease("granted")]) as agent:
        assert wait(library, path, job(lane=1)) == GRANTED
        assert [wire.decode(packet)["type"] for packet in agent.received] == ["start"]


def test_the_agent_may_write_spaces(library: ctypes.CDLL, path: Path) -> None:
    with peer(path, [b'{"v": 1, "type": "lease", "state": "granted"}']):
        assert wait(library, path, job()) == GRANTED


def test_a_wait_is_announced_once_with_its_reason_and_its_end(library: ctypes.CDLL, path: Path) -> None:
    told: list[bytes | None] = []
    answers = [wire.encode("lease", state="wait", reason=f'job {number} "a\\b" has it: ä\n') for number in (1, 2, 3)]
    with peer(path, [answers[0], 0.6, *answers[1:], 0.3, lease("granted")]):
        assert wait(library, path, job(), told=told) == GRANTED
    assert told == [b'job 1 "a\\b" has it: ??', None]


def test_a_short_wait_is_not_announced(library: ctypes.CDLL, path: Path) -> None:
    told: list[bytes | None] = []
    with peer(path, [lease("wait"), lease("granted")]):
        assert wait(library, path, job(), told=told) == GRANTED
    assert not told


@given(text=st.text(), rest=st.text(max_size=5), size=st.integers(1, 80))
def test_any_reason_is_one_bounded_line(library: ctypes.CDLL, text: str, rest: str, size: int) -> None:
    room = ctypes.create_string_buffer(b"x" * (size + 3), size + 4)
    packet = wire.encode("lease", state="wait", reason=text) + rest.replace("\0", "").encode(errors="replace")
    for end in (len(packet), len(packet) // 2):
        library.reason_of(packet[:end], room, ctypes.c_size_t(size))
        assert len(room.value) < size
        assert room.value.decode("ascii").isprintable()
        assert room.raw[size:] == b"xxx\0"


def test_giveup(library: ctypes.CDLL, path: Path) -> None:
    with peer(path, [lease("giveup")]):
        assert wait(library, path, job()) == GIVES_UP


@pytest.mark.slow
def test_each_word_of_the_agent_renews_the_bound(library: ctypes.CDLL, path: Path) -> None:
    with peer(path, [lease("wait"), 0.6, lease("wait"), 0.6, lease("wait"), 0.6, lease("granted")]):
        assert wait(library, path, job(lane=1)) == GRANTED


def test_a_silent_agent_is_waited_for_no_longer_than_the_bound(library: ctypes.CDLL, path: Path) -> None:
    with peer(path, [lease("wait")]):
        assert wait(library, path, job(lane=1)) == SILENT


def test_an_unmanaged_job_counts_its_whole_wait(library: ctypes.CDLL, path: Path) -> None:
    with peer(path, [lease("wait"), *([0.2, lease("wait")] * 20), lease("granted")]):
        assert wait(library, path, job(managed=False)) == SILENT


def test_no_socket_means_no_agent_on_lane_0_only(library: ctypes.CDLL, path: Path) -> None:
    assert wait(library, path, job(), wait_s=30) == ABSENT
    assert wait(library, path, job(lane=1)) == SILENT


@pytest.mark.slow
def test_the_plugin_waits_for_a_socket_without_a_server(library: ctypes.CDLL, path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(path))
    assert wait(library, path, job()) == SILENT
    path.unlink()
    late = threading.Timer(0.4, lambda: Peer(path, [[lease("granted")]]))
    late.start()
    assert wait(library, path, job(lane=1), wait_s=5) == GRANTED


def test_an_agent_that_dies_meanwhile_is_asked_again(library: ctypes.CDLL, path: Path) -> None:
    with peer(path, [lease("wait"), b""], [REFUSAL], [lease("granted")]) as agent:
        assert wait(library, path, job(), wait_s=5) == GRANTED
        assert len(agent.received) == 3
        assert len(set(agent.received)) == 1


STOPPED = """
import ctypes, sys
sys.path.insert(0, sys.argv[1])
from spankstructs import TELLER, Config, job
print("ready", flush=True)
config = Config(sys.argv[3].encode(), 1)
print(ctypes.CDLL(sys.argv[2]).agent_wait(ctypes.byref(job(lane=1)), ctypes.byref(config), TELLER(lambda *_: None)))
"""


@pytest.mark.slow
def test_time_spent_stopped_is_no_silence(library_path: Path, path: Path) -> None:
    with peer(path, [lease("wait"), 1.5, lease("granted")]) as agent:
        arguments = [sys.executable, "-c", STOPPED, str(Path(__file__).parent), str(library_path), str(path)]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as waiting:
            assert waiting.stdout is not None
            waiting.stdout.readline()
            while not agent.received:
                agent.closing.wait(0.01)
            os.kill(waiting.pid, signal.SIGSTOP)
            agent.closing.wait(2.5)
            os.kill(waiting.pid, signal.SIGCONT)
            assert int(waiting.stdout.read()) == GRANTED


def test_the_end_is_reported_once_without_a_wait(
    library: ctypes.CDLL, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "node1-l1")
    config = ctypes.byref(Config(str(path).encode(), 1))
    library.agent_report_end(7, config)
    with peer(path, []) as agent:
        library.agent_report_end(7, config)
        while not agent.received:
            agent.closing.wait(0.01)
        assert parse(agent.received[0]) == End(job=7, node="node1-l1")


@pytest.mark.parametrize(
    ("comment", "word"),
    [
        (None, 0),
        ("", 0),
        ("about cadenza", 0),
        ('{"cadenza":{"v":1,"share":true}}', 2),
        ('{"cadenza":{"v":1,"share":true,"model":"a"},"share":false}', 2),
        ('{"cadenza":{"v":1,"share":false,"why":"no"},"x":1}', 1),
        ('{"cadenza":{}}', 0),
        ('{"x":{"cadenza":{"v":1,"share":true}}}', 0),
        ('{"a":"{\\"cadenza\\":{\\"v\\":1,\\"share\\":true}}"}', 0),
        (' {"cadenza":{"v":1,"share":true}}', 0),
        ('{"cadenza', 0),
        ('{"cadenza":{"v":1,"share":tr', 0),
    ],
)
def test_the_comments_word(library: ctypes.CDLL, comment: str | None, word: int) -> None:
    assert library.comment_sharing(None if comment is None else comment.encode()) == word


@pytest.mark.parametrize(
    ("comment", "per_gpu"),
    [
        (None, False),
        ('{"cadenza":{"v":1,"share":true}}', False),
        ('{"cadenza":{"v":1,"share":true,"batch":"global"}}', False),
        ('{"cadenza":{"v":1,"share":true,"min_gpus":1,"batch":"per-gpu"}}', True),
        ('{"cadenza":{"v":1,"share":true},"x":{"a":1,"batch":"per-gpu"}}', False),
        ('{"cadenza":{"batch":"per-gpu"}}', False),
    ],
)
def test_the_comments_batch(library: ctypes.CDLL, comment: str | None, *, per_gpu: bool) -> None:
    assert library.comment_batch_per_gpu(None if comment is None else comment.encode()) == per_gpu


def test_prolog_hands_over_to_the_task(library: ctypes.CDLL, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {
        "SLURMD_NODENAME": "node1-l1", "SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "1,3", "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_RESTART_COUNT": "4", "SLURM_JOB_UID": "42",
        "SLURM_JOB_COMMENT":
            '{"cadenza":{"v":1,"share":true,"late":true,"graphs":true,"summary":true,"batch":"per-gpu"}}',
    }  # fmt: skip
    for name, value in facts.items():
        monkeypatch.setenv(name, value)
    config, word = ctypes.byref(Config(str(path).encode(), 1)), ctypes.c_int()
    task = Job(id=7, node=b"node1-l1", hosts=1)
    assert not library.handover_read(config, ctypes.byref(task), ctypes.byref(word))
    library.handover_write(config)
    assert (path.parent / "jobs").stat().st_mode & 0o777 == 0o700
    assert library.handover_read(config, ctypes.byref(task), ctypes.byref(word))
    assert (task.restart, task.hosts, list(task.gpus[: task.gpu_count]), word.value) == (4, 2, [1, 3], 2)
    assert task.batch_per_gpu
    assert task.late
    assert task.graphs
    assert task.summary
    later = Job(id=7, node=b"node1-l1", restart=5)
    assert not library.handover_read(config, ctypes.byref(later), ctypes.byref(word)), "of the start before"
    assert (later.restart, later.hosts, later.gpu_count, word.value) == (5, 2, 0, 2)
    assert handover.read_all(path.parent / "jobs") == (handover.Handover(7, 4, "node1-l1", 2, True, (1, 3), 42),)
    library.handover_remove(config)
    assert not list((path.parent / "jobs").iterdir())


def test_one_step_waits_for_a_stopped_agent_and_not_each(
    library: ctypes.CDLL, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = {"SLURMD_NODENAME": "node1", "SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "0,3", "SLURM_JOB_RESTART_COUNT": "2"}
    for name, value in facts.items():
        monkeypatch.setenv(name, value)
    config, word, limits = ctypes.byref(Config(str(path).encode(), 30)), ctypes.c_int(), []
    library.handover_write(config)
    for script in ([lease("wait")], [], None):
        step = job()
        assert library.handover_read(config, ctypes.byref(step), ctypes.byref(word))
        limits.append(library.agent_limit_ms(ctypes.byref(step), config, ctypes.c_bool(True)))
        if script is not None:
            with peer(path, script):
                assert wait(library, path, step) == SILENT
            path.unlink()
    assert limits == [30_000, 30_000, 5000], "one that has spoken may have a reason to let it wait"
    (seen,) = handover.read_all(path.parent / "jobs")
    assert (seen.job, seen.gpus) == (7, (0, 3))
    library.handover_write(config)
    assert library.handover_read(config, ctypes.byref(step), ctypes.byref(word))
    assert not step.unheard, "another start of the job"


def test_a_host_without_agent_gets_no_files(
    library: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "node1")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_GPUS", "0")
    library.handover_write(ctypes.byref(Config(str(tmp_path / "none" / "agent.sock").encode(), 1)))
    assert not list(tmp_path.iterdir())

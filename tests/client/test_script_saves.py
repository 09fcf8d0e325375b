"""Scripts that save and resume by themselves are moved with their own checkpoints (`cadenza run --saves`)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from client_peer import PATIENCE_S, Peer, Rank, slurm_environment

from cadenza.sidecar import client, wire
from cadenza.sidecar.client.bootstrap import process, run_script, script_saves, script_saves_options
from cadenza.sidecar.client.bootstrap.script_saves import ScriptSaves
from cadenza.sidecar.client.session.job_session import Session

TRAIN = """
import argparse, os, signal, sys, threading, torch
options = argparse.ArgumentParser()
options.add_argument("--init_from", default="scratch"); options.add_argument("--handler", action="store_true")
args = options.parse_args()
torch.manual_seed(0)
model = torch.nn.Linear(4, 4); optimizer = torch.optim.AdamW(model.parameters(), lr=0.01); iter_num = 0
if args.init_from != "scratch":
    kept = torch.load(args.init_from if os.path.exists(args.init_from) else "out/ckpt.pt")
    model.load_state_dict(kept["model"]); optimizer.load_state_dict(kept["optimizer"]); iter_num = kept["iter_num"]
    print("resumed at", iter_num, flush=True)
def save():
    os.makedirs("out", exist_ok=True)
    kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": iter_num}
    torch.save(kept, "out/ckpt.pt.tmp"); os.replace("out/ckpt.pt.tmp", "out/ckpt.pt")
wanted = []
if args.handler: signal.signal(signal.SIGUSR1, lambda *_: wanted.append(1))
pause = threading.Event()
while not os.path.exists("end"):
    optimizer.zero_grad(); model(torch.ones(2, 4)).sum().backward(); optimizer.step(); iter_num += 1
    if (iter_num % 50 == 0 and not args.handler) or wanted: save(); wanted.clear()
    pause.wait(0.005)
"""


@pytest.fixture
def saves(tmp_path: Path) -> Iterator[Callable[..., ScriptSaves]]:
    made: list[ScriptSaves] = []

    def make(pattern: str = "ckpt-*.pt", number: int = 0) -> ScriptSaves:
        made.append(ScriptSaves(Session(), str(tmp_path / pattern), number))
        return made[-1]

    yield make
    for one in made:
        one.close()


def look(saves: ScriptSaves, times: int = 1) -> bool:
    for _ in range(times):
        saves.look()
    return saves._registration.ready


def test_at_no_moment_is_a_job_movable_that_has_saved_nothing(tmp_path: Path) -> None:
    """An agent that looks while the saver is added would order a checkpoint."""
    shown = []
    for make in (Session, process.prepare):
        session = make()
        session._savers.changed = lambda session=session: shown.append(session._savers.able)
        if make is Session:
            ScriptSaves(session, str(tmp_path / "ckpt-*.pt")).close()
        else:
            client.checkpoint(tmp_path / "moves", model=torch.nn.Linear(2, 2))
    client.detach()
    assert len(shown) > 1
    assert not any(shown)


def test_a_new_complete_checkpoint_makes_the_job_movable_for_a_while(
    saves: Callable[..., ScriptSaves], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ckpt-1.pt").write_text("of an earlier start")
    found = saves()
    assert not look(found, 3)
    (tmp_path / "ckpt-2.pt.tmp").write_text("unfinished")
    (tmp_path / "ckpt-2.tmp.pt").write_text("unfinished")
    assert not look(found, 3)
    file = (tmp_path / "ckpt-2.pt").open("w")
    file.write("a part")
    file.flush()
    assert not look(found, 3), "it is open"
    file.write(" and more")
    file.close()
    assert not look(found)
    assert look(found)
    saved = found._save()
    assert isinstance(saved, script_saves.Saved)
    assert saved.path == str(tmp_path / "ckpt-2.pt")
    now_s = time.time()
    monkeypatch.setattr(script_saves.clock, "wall_s", lambda: now_s + 30)
    assert 29 < found._save().lost_s < 60  # type: ignore[attr-defined]
    assert look(found)
    assert 29_000 < found._session.words[wire.PAGE_LOST_MS] < 60_000, "the agent sees it before it orders anything"
    (tmp_path / "ckpt-2.pt").unlink()
    assert look(found, 3)
    assert found._last.path.endswith("ckpt-2.pt"), "an older one is not new"  # type: ignore[union-attr]
    monkeypatch.setattr(script_saves, "WINDOW_S", 0.0)
    assert not look(found)
    assert "can be moved after the next" in found._registration.unready


@pytest.mark.parametrize("pattern", ["", "last", "step-*"])
def test_directories_and_marker_files_count(saves: Callable[..., ScriptSaves], tmp_path: Path, pattern: str) -> None:
    found = saves(pattern)
    place = tmp_path / ("last" if pattern == "last" else "step-5")
    place.mkdir() if pattern != "last" else place.write_text("5")
    if place.is_dir():
        assert not look(found, 3), "it is empty"
        (place / "weights").write_text("5")
    look(found)
    assert look(found)
    assert found._save().path == str(place)  # type: ignore[attr-defined]


def test_a_start_goes_on_from_a_checkpoint_that_is_whole(tmp_path: Path) -> None:
    """The node may have failed while the newest one was being written; the script would fail to read it for good."""
    whole = tmp_path / "ckpt-10.pt"
    torch.save({"step": 10}, whole)
    later = [tmp_path / name for name in ("ckpt-20.pt", "ckpt-30.pt")]
    later[0].write_bytes(whole.read_bytes()[:600])
    later[1].touch()
    found = script_saves.newest_whole(str(tmp_path / "*.pt"))
    assert found is not None
    assert found.path == str(whole)
    for name, files in {"a-1": ("model.pt", "state_0.pt"), "a-2": ("model.pt",)}.items():
        (tmp_path / name).mkdir()
        for file in files:
            torch.save({}, tmp_path / name / file)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "events").write_text("older, and something else")
    os.utime(tmp_path / "logs" / "events", (1, 1))
    found = script_saves.newest_whole(str(tmp_path / "a-*"))
    assert found is not None
    assert found.path == str(tmp_path / "a-1")
    torch.save({}, tmp_path / "a-2" / "state_0.pt")
    (tmp_path / "a-2" / "done").touch()
    found = script_saves.newest_whole(str(tmp_path))
    assert found is not None
    assert found.path == str(tmp_path / "a-2")
    tensors = json.dumps({"w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}).encode()
    for name, rest in (("m-1.safetensors", b"1234"), ("m-2.safetensors", b"12")):
        (tmp_path / name).write_bytes(len(tensors).to_bytes(8, "little") + tensors + rest)
    # The size of its table is garbled: 4 EiB, which no machine can read.
    (tmp_path / "m-3.safetensors").write_bytes((1 << 62).to_bytes(8, "little") + b"{}")
    found = script_saves.newest_whole(str(tmp_path / "*.safetensors"))
    assert found is not None
    assert found.path == str(tmp_path / "m-1.safetensors")


def test_only_a_handled_signal_makes_a_job_movable(saves: Callable[..., ScriptSaves]) -> None:
    before = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    try:
        found = saves("x", signal.SIGUSR1)
        assert not look(found)
        assert "no handler for SIGUSR1" in found._registration.unready
        signal.signal(signal.SIGUSR1, lambda *_: None)
        assert look(found)
        assert found._session.words[wire.PAGE_LOST_MS] == 0, "it saves when it is told"
    finally:
        signal.signal(signal.SIGUSR1, before)


@contextlib.contextmanager
def training(peer: Peer, place: Path, options: Sequence[str], words: Sequence[str] = (), restart: int = 0):
    """A start of the script under `cadenza run`, killed at the end."""
    (place / "train.py").write_text(TRAIN)
    command = [sys.executable, run_script.__file__, *options, "--", sys.executable, "train.py", *words]
    environ = slurm_environment(peer.path, SLURM_RESTART_COUNT=str(restart), OMP_NUM_THREADS="1")
    job = subprocess.Popen(command, cwd=place, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        yield job
    finally:
        job.kill()
        job.communicate()


def order(rank: Rank) -> dict[str, object]:
    """Order a checkpoint as soon as the job is movable; return what it answers."""
    limit = time.monotonic() + PATIENCE_S
    while not rank.page[wire.PAGE_SAVES] and time.monotonic() < limit:
        threading.Event().wait(0.02)
    rank.page[wire.PAGE_PURPOSE] = wire.PURPOSE_CHECKPOINT
    rank.stop_at(rank.step + 2, order=1)
    assert not rank.hear("arrived").get("refused")
    rank.say("commit", order=1)
    return rank.hear("checkpointed")


@pytest.mark.slow
def test_a_script_with_a_resume_flag_is_moved_with_its_own_checkpoint(peer: Peer, tmp_path: Path) -> None:
    options = ["--saves", "out/ckpt.pt", "--resume-arg", "--init_from={path}"]
    with training(peer, tmp_path, options):
        answer = order(peer.rank())
    kept = torch.load(tmp_path / "out/ckpt.pt")["iter_num"]
    assert answer["paths"] == [str(tmp_path / "out/ckpt.pt")]
    assert answer["error"] == ""
    assert float(str(answer.get("lost_s", 0.0))) < 20, "a checkpoint younger than 0.05 s loses nothing"
    peer.receipt = {"restart": 1, "step": answer["step"], "paths": answer["paths"], "away_s": 1.0}
    with training(peer, tmp_path, options, restart=1) as job:
        restored = peer.rank().hear("restored")
        (tmp_path / "end").touch()
        printed, errors = job.communicate(timeout=PATIENCE_S)
    assert restored["path"] == answer["paths"][0]  # type: ignore[index]
    assert printed == f"resumed at {kept}\n"
    assert "not moved again" not in errors


@pytest.mark.slow
def test_one_that_does_not_open_its_checkpoint_is_reported(peer: Peer, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/ckpt.pt").write_text("a checkpoint")
    peer.receipt = {"restart": 1, "step": 5, "paths": [str(tmp_path / "out/ckpt.pt")], "away_s": 1.0}
    with training(peer, tmp_path, ["--saves=out/ckpt.pt"], restart=1):
        assert "without having restored" in peer.rank().hear("unrestored")["reason"]


@pytest.mark.slow
def test_a_signal_has_the_script_save_for_the_order(peer: Peer, tmp_path: Path) -> None:
    with training(peer, tmp_path, ["--saves", "out", "--save-signal", "USR1"], ["--handler"]):
        answer = order(peer.rank())
    assert (answer["paths"], answer["error"]) == ([str(tmp_path / "out/ckpt.pt")], "")


def test_a_handler_that_saves_nothing_gives_the_order_back(
    saves: Callable[..., ScriptSaves], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        monkeypatch.setattr(script_saves, "HANDLER_S", 0.0)
        found = saves("x", signal.SIGUSR1)
        answers: list[str] = []
        monkeypatch.setattr(found._session, "checkpointed", lambda error="", **_: answers.append(error))
        assert found._save() is script_saves.DEFERRED
        found._at_boundary()
        assert "no new checkpoint in" in answers[0]
        found._at_boundary()
        assert len(answers) == 1
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    ("options", "command", "environ", "reason"),
    [
        ({"--resume-arg": "--r"}, ["python"], {}, "--resume-arg needs --saves"),
        ({"--saves": "x", "--save-signal": "USR9"}, ["python"], {}, "no such signal"),
        ({"--saves": "x", "--save-signal": "SIGKILL"}, ["python"], {}, "no script can handle it"),
        ({"--saves": "x"}, ["/usr/bin/torchrun", "train.py"], {}, "torchrun starts several ranks"),
        ({"--saves": "x"}, ["python", "-m", "torch.distributed.run"], {}, "starts several ranks"),
        ({"--saves": "x"}, ["python"], {"SLURM_NTASKS": "4"}, "SLURM_NTASKS is 4"),
        ({"--saves": "x"}, ["python"], {"CADENZA_BATCH": "global"}, "elastic job"),
        ({"--saves": "x"}, ["python"], {"SLURM_NTASKS": "1"}, ""),
    ],
)
def test_jobs_that_cannot_be_served_are_refused_by_name(
    options: dict[str, str], command: list[str], environ: dict[str, str], reason: str
) -> None:
    refused = script_saves_options.refusal(options, command, environ)
    assert reason in refused
    assert bool(refused) == bool(reason)


def test_refusals_exit_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_script.main(["--saves", "x", "--", "torchrun", "train.py"]) == 2
    assert "torchrun starts several ranks" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("restart", "argument", "files", "expected"),
    [("0", "--resume=auto", 1, []), ("1", "--resume=auto", 0, ["--resume=auto"]), ("1", "--from {path}", 0, []),
     ("2", "--from {path} -v", 2, ["--from", "{place}/c-1", "-v"])],
)  # fmt: skip
def test_the_resume_argument_is_added_from_the_second_start_on(
    restart: str, argument: str, files: int, expected: list[str], tmp_path: Path
) -> None:
    for number in range(files):
        (tmp_path / f"c-{number}").write_text("x")
        os.utime(tmp_path / f"c-{number}", (number + 1, number + 1))
    environ = {"SLURM_RESTART_COUNT": restart}
    command = script_saves_options.prepare(
        {"--saves": str(tmp_path / "c-*"), "--resume-arg": argument}, ["python"], environ
    )
    assert command == ["python", *(word.replace("{place}", str(tmp_path)) for word in expected)]
    assert environ[script_saves.SAVES_ENV] == str(tmp_path / "c-*")

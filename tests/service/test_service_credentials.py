"""Questions with a credential of munge or a token of Slurm: the real command, port and service.

munge and Slurm are stand-ins that do as the real ones of tests/cluster/test_login.py.
"""

from __future__ import annotations

import json
import os
import pwd
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import zmq
from click.testing import CliRunner
from service_rig import books, job

from cadenza.policies.core.decision import Decision, Memory
from cadenza.sidecar.clock import SystemClock
from cadenza.slurm_plugin.cli.main import main
from cadenza.slurm_plugin.errors import ServiceError
from cadenza.slurm_plugin.service import credentials, question_port
from cadenza.slurm_plugin.service.agents import curve_keys
from cadenza.slurm_plugin.service.credentials import Question, sealed, uid_of
from cadenza.slurm_plugin.service.owner_socket import Answer, OwnerSocket, ask
from cadenza.slurm_plugin.service.question_port import QuestionPort, RemoteService
from cadenza.slurm_plugin.service.store.writer import SqliteStore

NOBODY = pwd.getpwnam("nobody").pw_uid
MINE, KEY = b'{"job":1}', "k" * 40
PROGRAMS = {
    "munge": 'payload=$(cat); echo "MUNGE:$(printf "%s %s %s" "$(cat uid)" "$payload" $$ | base64 -w0):"',
    "unmunge": """
credential=$(cat)
set -- $(printf %s "$credential" | cut -d: -f2 | base64 -d)
grep -qxF "$credential" seen 2>/dev/null && code=17 || code=0
echo "$credential" >>seen
[ $code = 0 ] && status=Success || status="Replayed credential"
printf 'STATUS:          %s (%d)\\nUID:             %s (%d)\\n\\n%s' "$status" $code "???" "$1" "$2"
exit $code""",
    "scontrol": """
[ "$1" = token ] || exit 1
case $SLURM_JWT in
  good.*) user=nobody ;; lost.*) user=no-such-user ;; root.*) user=root ;; odd.*) echo SLURM_JWT=x.y.z; exit ;;
  *) echo "scontrol: error: slurm_fetch_token: error with request: Protocol authentication error" >&2; exit 1 ;;
esac
echo "SLURM_JWT=h.$(printf '{"exp":1,"sun":"%s"}' $user | base64 -w0 | tr -d = | tr /+ _-).s" """,
}


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of munge, unmunge and scontrol; ``uid`` is the user who makes credentials there."""
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\ncd {tmp_path}\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "uid").write_text(str(NOBODY))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv(credentials.TOKEN, raising=False)
    for constant, value in {"PAUSE_FACTOR": 0.0, "LINGER_MS": 20, "POLL_MS": 50}.items():
        monkeypatch.setattr(question_port, constant, value)
    return tmp_path


@pytest.fixture
def remote(programs: Path) -> Iterator[RemoteService]:
    """Return the service of a store with a job of nobody's and one of ada's."""
    store = SqliteStore(programs / "cadenza.db", SystemClock())
    mine, theirs = job(1, user="nobody"), job(2, user="ada")
    store.begin(books(mine, theirs), Decision((), Memory(), {mine.key: "waits", theirs.key: "runs"}), (), Memory())
    curve_keys.make_keys(programs / "keys", ("n1",))
    owners = OwnerSocket(programs / "service.sock", programs / "cadenza.db", SystemClock())
    with serving(programs, owners.of_credential) as found:
        yield found
    store.close()


class serving:  # noqa: N801
    """A question port, and how to reach it."""

    def __init__(self, folder: Path, answer: Callable[[int, bytes], bytes | None]) -> None:
        address, pair = f"ipc://{folder}/port", curve_keys.service_pair(folder / "keys")
        self.port, self.remote = QuestionPort(address, pair, answer, SystemClock()), RemoteService((address,), pair[0])

    def __enter__(self) -> RemoteService:
        self.port.start()
        return self.remote

    def __exit__(self, *_: object) -> None:
        self.port.close()


def caller(
    context: zmq.Context[zmq.Socket[bytes]], remote: RemoteService, reconnect_ivl: int = 100
) -> zmq.Socket[bytes]:
    """Return a connection with a key of its own."""
    link = context.socket(zmq.DEALER)
    link.curve_publickey, link.curve_secretkey = zmq.curve_keypair()
    link.curve_serverkey = remote.key
    link.linger, link.reconnect_ivl = 0, reconnect_ivl
    link.connect(remote.addresses[0])
    return link


def sent(remote: RemoteService, frame: bytes) -> Answer:
    """Return the answer to a frame over a new connection."""
    with zmq.Context() as context, caller(context, remote) as link:
        link.send(frame)
        assert link.poll(20_000)
        return msgspec.json.decode(zlib.decompress(link.recv()), type=Answer)


def test_a_user_with_munge_or_a_token_reads_their_own_jobs(
    remote: RemoteService, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for token in ("", "good.x.y"):
        if token:
            monkeypatch.setenv(credentials.TOKEN, token)
        assert ask(remote, 1, 20).reason == "waits"
        with pytest.raises(ServiceError, match="nothing on record of a job of yours"):
            ask(remote, 2, 20)
    monkeypatch.setenv(credentials.TOKEN, "root.x.y")
    with pytest.raises(ServiceError, match="uid 0 is asked for on the machine of slurmctld only"):
        ask(remote, 1, 20)
    monkeypatch.delenv(credentials.TOKEN)
    for uid in (0, os.geteuid(), 4_000_000_000):
        (programs / "uid").write_text(str(uid))
        with pytest.raises(ServiceError, match=f"uid {uid} is asked for"):
            ask(remote, 1, 20)


def test_a_credential_is_good_for_one_question_over_one_connection(programs: Path) -> None:
    asked = msgspec.json.decode(sealed(MINE, KEY), type=Question)
    for other, key in ((msgspec.structs.replace(asked, question=b'{"job":2}'), KEY), (asked, "o" * 40)):
        (programs / "seen").unlink(missing_ok=True)
        with pytest.raises(ServiceError, match="for another question"):
            uid_of(other, key)
    (programs / "seen").unlink()
    assert uid_of(asked, KEY) == NOBODY
    with pytest.raises(ServiceError, match="Replayed credential"):
        uid_of(asked, KEY)


def test_a_credential_for_another_program_is_none(programs: Path) -> None:
    for payload in (MINE, b"", b"0" * 64, b"STATUS: Success (0)\nUID: root (0)\n\n" + b"0" * 64):
        credential = credentials._output("munge", data=payload).decode().strip()
        with pytest.raises(ServiceError, match="for another question"):
            uid_of(Question(MINE, munge=credential), KEY)


@pytest.mark.parametrize(
    ("token", "reason"),
    [("forged.x.y", "Protocol authentication error"), ("lost.x.y", "names no user"), ("odd.x.y", "names no user")],
)
def test_a_token_that_slurm_does_not_take_names_no_one(programs: Path, token: str, reason: str) -> None:
    with pytest.raises(ServiceError, match=reason):
        uid_of(Question(MINE, token=token), KEY)


@pytest.mark.parametrize(
    "change",
    [
        {"munge": "MUNGE:a b:"}, {"munge": "MUNGE:aa:\nMUNGE:"}, {"munge": f"MUNGE:{'a' * 1024}:"}, {"munge": 7},
        {"token": "a.b"}, {"token": "daemon"}, {"token": "a.b.c\n"}, {"token": f"a.b.{'c' * 4096}"},
        {"question": "A" * 400}, {"uid": 0}, {"question": None},
    ],
)  # fmt: skip
def test_a_frame_beyond_its_bounds_reaches_no_program(
    remote: RemoteService, monkeypatch: pytest.MonkeyPatch, change: dict[str, object]
) -> None:
    monkeypatch.setattr(credentials, "_output", None)
    frame = json.dumps({"question": "e30=", "munge": "MUNGE:aa:"} | change).encode()
    assert sent(remote, frame).error == "no question of this version"


def test_callers_that_stay_keep_no_one_out(remote: RemoteService, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ENOUGH_CALLERS": 3, "MAX_CALLERS": 3, "TRIES": 20}.items():
        monkeypatch.setattr(question_port, name, value)
    assert sent(remote, b"{}").error
    with zmq.Context() as context:
        links = [caller(context, remote, reconnect_ivl=-1) for _ in range(2)]
        for link in links:
            with suppress(zmq.Again):  # the port may be opened anew before the last one's question
                link.send(b"{}", zmq.NOBLOCK)
            link.poll(1000)
        assert ask(remote, 1, 20).reason == "waits"
        for link in links:
            link.close()


def test_a_frame_too_large_ends_its_connection_only(remote: RemoteService) -> None:
    with zmq.Context() as context, caller(context, remote) as link:
        link.send(b"{" + b" " * 2 * question_port.MAX_FRAME)
        assert ask(remote, 1, 20).reason == "waits"
        assert not link.poll(0)


def test_a_service_on_standby_leaves_the_answer_to_the_other(programs: Path) -> None:
    curve_keys.make_keys(programs / "keys", ("n1",))
    (programs / "other").mkdir()
    (programs / "other" / "keys").symlink_to(programs / "keys")
    with (
        serving(programs, lambda *_: None) as idle,
        serving(programs / "other", lambda *_: zlib.compress(b"x")) as acts,
    ):
        (programs / "unmunge").write_text((programs / "unmunge").read_text().replace(">>seen", ">/dev/null"))
        assert RemoteService((*idle.addresses, *acts.addresses), acts.key).ask(MINE) == b"x", "each has its own munged"


def test_the_command_says_which_line_is_missing(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def said(expert: str, agent: str = "") -> str:
        config = programs / "cadenza.toml"
        config.write_text(
            f'[service]\nstore = "{programs}/none.db"\n[agent]\nkeys = "{programs}/keys"\n{agent}\n'
            f'[expert]\nsocket = "{programs}/agent.sock"\njobs_socket = "{programs}/none.sock"\n{expert}\n'
        )
        result = CliRunner().invoke(main, ["why", "1", "--config", str(config)])
        assert result.exit_code == 3
        return result.stderr

    port, agent = "question_port = 9", 'service = "tcp://127.0.0.1:6850"'
    assert "add [expert] question_port = 6852, here and on the controller" in said("")
    assert 'add [agent] service = "tcp://CONTROLLER:6850"' in said(port)
    assert f"copy the controller's {programs}/keys/service.key" in said(port, agent)
    curve_keys.make_keys(programs / "keys", ())
    monkeypatch.setattr(question_port, "CLIENT_TIMEOUT_S", 0.1)
    assert "cadenzad does not answer at tcp://127.0.0.1:9" in said(port, agent)
    (programs / "munge").write_text("#!/bin/sh\necho 'munge: Error: Failed to access munge.socket' >&2; exit 6\n")
    text = said(port, agent)
    assert "by munge or SLURM_JWT: munge: Error: Failed to access munge.socket; `export $(scontrol token)`" in text
    assert "add a relay: `cadenza keygen HOST`" in text

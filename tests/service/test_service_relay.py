"""Questions that agents pass on: the real agent, link and service; whose word counts for which user."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from service_rig import as_nobody, books, eventually, job, node, peer, refused, write_config

from cadenza.policies.core.decision import Decision, Memory
from cadenza.policies.core.model import Gpu, Lease
from cadenza.sidecar.clock import SystemClock
from cadenza.sidecar.orders import VERSION, Ask, Facts, JobFacts, Switched, Told
from cadenza.slurm_plugin.cli.main import main
from cadenza.slurm_plugin.errors import ServiceError, StoreError
from cadenza.slurm_plugin.service import owner_socket
from cadenza.slurm_plugin.service.agents import curve_keys
from cadenza.slurm_plugin.service.agents import hub as hub_module
from cadenza.slurm_plugin.service.agents.hub import FactSheet, Hub, HubSettings
from cadenza.slurm_plugin.service.job_access import JobAccess, Viewer
from cadenza.slurm_plugin.service.owner_socket import Answer, OwnerSocket, ask, ask_latest, ask_report
from cadenza.slurm_plugin.service.store.reader import StoreReader
from cadenza.slurm_plugin.service.store.writer import SqliteStore

QUESTION = "sacctmgr --noheader --parsable2 show user name={} withcoord format=user,adminlevel,coordinators"
NOBODY, DAEMON = pwd.getpwnam("nobody").pw_uid, pwd.getpwnam("daemon").pw_uid


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of Slurm's answers: nobody is ordinary, daemon coordinates an account; no private data."""
    for name in ("scontrol", "sacctmgr"):
        path = tmp_path / name
        path.write_text(f'#!/bin/sh\nexec cat "{tmp_path}/{name} $*"\n')
        path.chmod(0o755)
    (tmp_path / "scontrol show config").write_text("PrivateData             = none\n")
    for user, answer in (("nobody", "None|"), ("daemon", "None|lab,other"), ("ada", "Operator|")):
        (tmp_path / QUESTION.format(user)).write_text(f"{user}|{answer}\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[Path, Hub]]:
    """A store with a job of nobody's and one of ada's, the service's link and socket, and keys of three hosts."""
    store = SqliteStore(tmp_path / "cadenza.db", SystemClock())
    held = Lease("held", (Gpu("n1", 0),))
    mine, theirs = job(1, user="nobody", account="course"), job(2, lease=held)
    store.begin(books(mine, theirs), Decision((), Memory(), {mine.key: "waits", theirs.key: "runs"}), (), Memory())
    store.record([Switched(VERSION, "n1", number, 0, "yield", 100.0, 0.1, 0.1, 0.2, 5) for number in (1, 2)])
    curve_keys.make_keys(tmp_path / "keys", ("n1", "n2", "login1"))
    settings = HubSettings("tcp://127.0.0.1:*", tmp_path / "keys", 0.2, 0.6, 5.0, frozenset({"login1"}))
    hub = Hub(settings, SystemClock())
    hub.start()
    owners = OwnerSocket(tmp_path / "service.sock", tmp_path / "cadenza.db", SystemClock())
    owners.start()
    hub.on_ask = lambda asked, here: owners.relay(asked, here, lambda told: hub.send([(asked.host, told)]))
    yield tmp_path, hub
    owners.close()
    hub.close()
    store.close()


def told(site: tuple[Path, Hub], host: str, uid: int, question: str = '{"job":1}', key: str = "") -> Answer:
    """Return the answer to a question that an agent claims to pass on, with the key of ``key``."""
    with peer(site[1].address, host, site[0] / "keys", pair=key) as agent:
        agent.send(Ask(VERSION, host, 7, uid, question.encode()))
        answer = agent.receive(Told)
        assert isinstance(answer, Told)
        assert answer.id == 7
        return msgspec.json.decode(zlib.decompress(answer.answer), type=Answer)


def facts(hub: Hub, host: str, *users: str) -> None:
    """Tell the hub a round's facts, by which Slurm has jobs of these users on a host."""
    jobs = tuple(
        JobFacts(at, 0, managed=True, weight=1, priority=0, user=one, hosts=1) for at, one in enumerate(users, 1)
    )
    sheet = {host: Facts(VERSION, jobs, 60.0, share_between_users=False, enforce=True)}
    hub.send_facts(FactSheet(sheet, SystemClock().now(), valid_s=60.0))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_users_of_a_login_node_read_their_own_jobs(site: tuple[Path, Hub]) -> None:
    folder, hub = site
    for path in (folder, *folder.parents):
        if path != Path("/") and path.stat().st_uid == 0:
            path.chmod(path.stat().st_mode | 0o011)
    config, relay = folder / "login.toml", folder / "run" / "jobs.sock"
    config.write_text(
        f'[service]\nstore = "{folder}/none.db"\n[agent]\nservice = "{hub.address}"\nkeys = "{folder}/keys"\n'
        f'[expert]\nhost = "login1"\nsocket = "{folder}/run/agent.sock"\njobs_socket = "{folder}/none.sock"\n'
    )
    missing = CliRunner().invoke(main, ["why", "1", "--config", str(config)])
    assert missing.exit_code == 3
    for word in (str(relay), "none.sock", "cadenza keygen HOST", 'relays = ["HOST"]', "cadenza-relay"):
        assert word in missing.stderr
    daemon = subprocess.Popen([sys.executable, "-m", "cadenza.sidecar.agent", "--relay", "--config", str(config)])
    try:
        eventually(relay.exists)
        assert as_nobody(lambda: ask(relay, 1, 20).reason == "waits")
        assert as_nobody(lambda: refused(lambda: ask(relay, 2, 20), ServiceError))
        assert as_nobody(lambda: refused(lambda: StoreReader(folder / "cadenza.db"), StoreError))
        assert as_nobody(lambda: own_top(relay))
        words = ["why", "1", "--json", "--config", str(config)]
        assert as_nobody(lambda: json.loads(CliRunner().invoke(main, words).stdout)["reason"] == "waits")
        with pytest.raises(ServiceError, match="login1 does not speak for uid 0"):
            ask(relay, 1, 20)
    finally:
        daemon.terminate()
        daemon.wait()


def own_top(relay: Path) -> bool:
    last = ask_latest(relay, 0.0).round()
    return last is not None and [one.user for one in last.snapshot.jobs] == ["nobody"]


def test_the_agent_of_any_host_speaks_for_the_users_of_jobs_there(site: tuple[Path, Hub], slurm: Path) -> None:
    (slurm / QUESTION.format("nobody")).write_text("nobody|Operator|\n")
    assert "uid 65534 has no job on n1 on record" in told(site, "n1", NOBODY).error
    facts(site[1], "n1", "nobody", "root")
    answer = told(site, "n1", NOBODY)
    assert answer.record is not None
    assert answer.record.reason == "waits"
    theirs = told(site, "n1", NOBODY, '{"job":2}')
    assert "nothing on record of a job of yours" in theirs.error, "an Operator, too, sees others' jobs by a relay only"
    for host, uid in (("n2", NOBODY), ("n1", 0), ("n1", DAEMON), ("n1", os.geteuid())):
        assert f"uid {uid} has no job on {host}" in told(site, host, uid).error


def test_a_key_speaks_for_its_own_host_only(site: tuple[Path, Hub]) -> None:
    assert told(site, "login1", NOBODY).record is not None
    with peer(site[1].address, "login1", site[0] / "keys", pair="n2") as agent:
        agent.send(Ask(VERSION, "login1", 7, NOBODY, b'{"job":1}'))
        eventually(lambda: site[1].refused["key"] == 1)
        assert not agent.pending()


@pytest.mark.parametrize("uid", [0, os.geteuid(), 4_000_000_000])
def test_a_relay_speaks_for_no_daemon_and_no_stranger(site: tuple[Path, Hub], uid: int) -> None:
    assert told(site, "login1", uid).error == f"login1 does not speak for uid {uid}"


@pytest.mark.parametrize("change", [{"uid": -1}, {"uid": 2**32}, {"question": "A" * 400}, {"question": 7}, {"id": -1}])
def test_a_frame_beyond_its_bounds_is_refused(site: tuple[Path, Hub], change: dict[str, object]) -> None:
    frame = {"type": "Ask", "v": VERSION, "host": "login1", "id": 1, "uid": NOBODY, "question": "e30="} | change
    with peer(site[1].address, "login1", site[0] / "keys") as agent:
        agent.send(json.dumps(frame).encode())
        eventually(lambda: site[1].refused["format"] == 1)
    assert told(site, "login1", NOBODY).record is not None


def test_a_host_has_a_budget_of_questions(site: tuple[Path, Hub], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "ASKS_S", 0.0)
    monkeypatch.setattr(hub_module, "ASKS_AT_ONCE", 2.0)
    for _ in range(2):
        assert told(site, "login1", NOBODY).record is not None
    with peer(site[1].address, "login1", site[0] / "keys") as agent:
        agent.send(Ask(VERSION, "login1", 1, NOBODY, b'{"job":1}'))
        eventually(lambda: site[1].refused["asks"] == 1)


def test_a_host_has_few_questions_open(site: tuple[Path, Hub], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner_socket, "OPEN_PER_RELAY", 0)
    assert "too many questions" in told(site, "login1", NOBODY).error
    facts(site[1], "n1", "nobody")
    for _ in range(2 * owner_socket.OPEN_PER_HOST):
        assert told(site, "n1", NOBODY).record is not None, "one that is answered counts no more"


def test_an_answer_too_large_for_the_link_says_so(site: tuple[Path, Hub], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner_socket, "MAX_TOLD", 64)
    assert "too large to be sent" in told(site, "login1", NOBODY, '{"job":null}').error


@pytest.mark.parametrize("name", ["root", "ROOT"])
def test_the_root_of_slurms_accounting_is_not_one_whom_a_proxy_names(slurm: Path, tmp_path: Path, name: str) -> None:
    (slurm / QUESTION.format(name)).write_text("root|Administrator|lab\n")
    viewer = JobAccess(tmp_path / "none.db", SystemClock()).of_name(name)
    assert viewer == Viewer(name, ids=True, hosts=True)


def test_slurm_says_who_sees_the_jobs_of_others(slurm: Path, tmp_path: Path) -> None:
    access = JobAccess(tmp_path / "none.db", SystemClock())
    shown = {"ids": True, "hosts": True}
    assert access.of_name("ada") == Viewer("ada", everything=True, **shown)
    assert access.of_uid(DAEMON) == Viewer("daemon", accounts=frozenset({"lab", "other"}), **shown)
    assert access.of_uid(DAEMON).may_read("ada", "lab")
    assert not access.of_uid(DAEMON).may_read("ada", "course")
    assert access.of_uid(NOBODY) == Viewer("nobody", **shown)
    (slurm / QUESTION.format("+ada")).write_text("ada|Operator|\n")
    assert access.of_name("+ada") == Viewer("+ada", **shown)
    (slurm / "sacctmgr").unlink()
    assert JobAccess(tmp_path / "none.db", SystemClock()).of_name("ada") == Viewer("ada", **shown)
    (slurm / "scontrol show config").unlink()
    silent = JobAccess(tmp_path / "none.db", SystemClock())
    assert silent.of_name("ada") == Viewer("ada"), "without Slurm's word a user sees their own jobs"
    assert access.of_name("bob") == Viewer("bob", **shown), "its last word on the site holds"


def test_private_data_hides_the_numbers_of_others_jobs(site: tuple[Path, Hub], slurm: Path) -> None:
    for private, others in (("none", 2), ("accounts,jobs", 0)):
        (slurm / "scontrol show config").write_text(f"PrivateData             = {private}\n")
        access = JobAccess(site[0] / "cadenza.db", SystemClock())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner_socket, "JobAccess", lambda *_, access=access: access)
            patch.setattr("cadenza.sidecar.local_socket.peer_uid", lambda _: NOBODY)
            server = OwnerSocket(site[0] / "jobs.sock", site[0] / "cadenza.db", SystemClock())
            server.start()
            try:
                assert ask_latest(server.path, 0.0).others == ((Gpu("n1", 0), others),)
                config = write_config(site[0], store=str(site[0] / "closed.db"))
                view = json.loads(CliRunner().invoke(main, ["top", "--once", "--json", "--config", str(config)]).stdout)
                assert [(one["holder"], one["others"]) for one in view["gpus"] if one["others"]] == [
                    (others or None, True)
                ]
                assert "ada" not in json.dumps(view["jobs"])
            finally:
                server.close()


def test_private_data_hides_the_hosts_of_others_jobs(slurm: Path, tmp_path: Path) -> None:
    mine = job(1, user="nobody")
    waits = job(3, user="nobody", state="PENDING", nodes=(), barred=frozenset({"n1", "n2"}))
    theirs = job(2, "n2", user="ada", lease=Lease("held", (Gpu("n2", 0),)))
    nodes = (node("n1"), node("n1-l1", 1), node("n2"), node("n2-l1", 1))
    reasons = {waits.key: "waits for n2:gpu0-3: n2-l1 and n1 are full"}
    store = SqliteStore(tmp_path / "cadenza.db", SystemClock())
    store.begin(books(mine, theirs, waits, nodes=nodes), Decision((), Memory(), reasons), (), Memory())
    store.close()
    for private, seen in (("jobs", {"n1", "n2"}), ("jobs,nodes", {"n1"})):
        (slurm / "scontrol show config").write_text(f"PrivateData             = {private}\n")
        owners = OwnerSocket(tmp_path / "jobs.sock", tmp_path / "cadenza.db", SystemClock())
        latest, record = (
            msgspec.json.decode(owners.answer(f'{{"job":{number}}}'.encode(), NOBODY), type=Answer)
            for number in ("null", 3)
        )
        last = latest.latest and latest.latest.round()
        assert latest.latest
        assert last
        assert record.record
        assert {one.host for one in last.snapshot.nodes} == seen
        assert {one.name for one in latest.latest.hosts} == seen
        assert {gpu.host for gpu, _ in latest.latest.others} == seen - {"n1"}
        hidden = "waits for another host:gpu0-3: another host and n1 are full"
        for text in (last.decision.reasons[waits.key], record.record.reason):
            assert text == (hidden if seen == {"n1"} else reasons[waits.key])
        assert "n2" in seen or b"n2" not in msgspec.json.encode((latest, record))


def test_a_coordinator_sees_the_accounts_jobs(site: tuple[Path, Hub], slurm: Path) -> None:
    assert told(site, "login1", DAEMON, '{"job":2}').record is not None
    assert told(site, "login1", DAEMON, '{"job":1}').record is None
    latest = told(site, "login1", DAEMON, '{"job":null}').latest
    assert latest is not None
    assert [row.job for row in latest.switches] == [2]


def test_a_report_is_about_the_users_own_jobs(site: tuple[Path, Hub], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, now_s = site[0], SystemClock().now()
    monkeypatch.setattr("cadenza.sidecar.local_socket.peer_uid", lambda _: NOBODY)
    with pytest.raises(ServiceError, match="you may see your own jobs only"):
        ask_report(folder / "service.sock", 0.0, now_s, "ada")
    with pytest.raises(ServiceError, match="nothing on record of a job of yours in that time"):
        ask_report(folder / "service.sock", 0.0, now_s, None)

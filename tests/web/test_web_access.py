"""cadenza web: who sees what, at a port, at a socket and behind a proxy; what no request gets."""

from __future__ import annotations

import itertools
import os
import pwd
import re
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from web_rig import HOSTILE, PROXY_UID, Pages, cluster, record, serving

from cadenza.policies.core.decision import Decision, Memory
from cadenza.sidecar.clock import SystemClock
from cadenza.slurm_plugin.cli.main import main
from cadenza.slurm_plugin.service.store.writer import SqliteStore
from cadenza.slurm_plugin.web import viewers, web_pages, web_server

PUBLIC = ("/", "/turns", "/hosts/n1", "/hosts/n2")
PATHS = (*PUBLIC, "/jobs/1", "/jobs/2", "/jobs/4", "/report", "/whatif", "/whatif/w.html")
OF_BOB = ("secret-of-bob", "bob", 'jobs/2"', 'jobs/3"', "job 3 ")
SEEN = {
    "": PUBLIC,
    "ada": (*PUBLIC, "/jobs/1", "/report"),
    "bob": (*PUBLIC, "/jobs/2", "/report"),
    "carol": PUBLIC,
    "admin": PATHS,
}
"""The pages that each viewer gets; the others are refused. carol has never had a job."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = record(tmp_path_factory.mktemp("web"))
    (path.parent / "w.html").write_text("<style>p{color:red}</style><p>saved")
    (path.parent / "link.html").symlink_to("/etc/passwd")
    return path


@pytest.fixture(scope="module")
def pages(store: Path) -> Iterator[Pages]:
    """Return the pages at a socket whose other end is the proxy; a test may be another user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(viewers, "peer_uid", lambda _: PROXY_UID)
        with serving(store, str(store.parent / "web.sock"), store.parent) as found:
            yield found


@pytest.fixture
def admin(store: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a user in the group that may read the store."""
    asked = os.getgrouplist
    more = {"daemon": [store.stat().st_gid]}
    monkeypatch.setattr(os, "getgrouplist", lambda name, gid: more.get(name) or asked(name, gid))
    return "daemon"


def named(user: str) -> tuple[tuple[str, str], ...]:
    return (("Host", "hpc.example.org"), *([("X-Remote-User", user)] if user else []))


@pytest.mark.parametrize("who", SEEN)
def test_each_viewer_gets_their_pages_and_no_word_of_others(pages: Pages, admin: str, who: str) -> None:
    user = admin if who == "admin" else who
    for path in PATHS:
        answer = pages.get(path, *named(user))
        expected = (200,) if path in SEEN[who] else (403, 404)
        assert answer.status in expected, f"{path} for {who}"
        if who in ("", "ada", "carol"):
            assert [word for word in OF_BOB if word in answer.text] == [], f"{path} for {who}"
        if who == "":
            assert "jobs/1" not in answer.text
            assert "owned" not in answer.text
    assert ("secret-of-bob" in pages.get("/", *named(user)).text) == (who in ("bob", "admin"))


def test_counts_are_for_all(pages: Pages) -> None:
    text = pages.get("/", *named("")).text
    assert "not signed in: counts only" in text
    assert "8 GPUs: 8 held; jobs wait for a turn on 8" in text
    assert "<td>4</td><td>32</td><td>12</td><td>12</td><td>8</td><td>2</td><td>1</td><td>1</td>" in text
    assert "the agent of n3 is silent" in text
    assert "25 yields, at most 1 in two minutes" in pages.get("/turns", *named("")).text
    assert "another user&#39;s job" in pages.get("/hosts/n1", *named("ada")).text


def test_a_job_of_others_looks_like_one_that_never_was(pages: Pages) -> None:
    theirs, none = (pages.get(f"/jobs/{number}", *named("ada")) for number in (2, 999))
    assert (theirs.status, none.status) == (404, 404)
    assert theirs.text.replace("job 2:", "") == none.text.replace("job 999:", "")


def test_the_kernel_says_who_has_connected(pages: Pages, admin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = pwd.getpwnam("nobody").pw_uid
    monkeypatch.setattr(viewers, "peer_uid", lambda _: nobody)
    own, claimed = pages.get("/"), pages.get("/", ("X-Remote-User", admin))
    assert "nobody, own jobs" in own.text
    assert own.text == claimed.text, "only the proxy may name others"
    assert pages.get("/jobs/4").status == 200
    assert pages.get("/jobs/1", ("X-Remote-User", "ada")).status == 404
    monkeypatch.setattr(viewers, "peer_uid", lambda _: pwd.getpwnam(admin).pw_uid)
    assert f"{admin}, all jobs" in pages.get("/").text
    monkeypatch.setattr(viewers, "peer_uid", lambda _: 0)
    assert "root, all jobs" in pages.get("/").text
    monkeypatch.setattr(viewers, "peer_uid", lambda _: 3_999_999_999)
    assert "counts only" in pages.get("/").text


def test_a_login_called_root_is_not_this_machines_root(pages: Pages) -> None:
    assert "root, own jobs" in pages.get("/", *named("root")).text


@pytest.mark.parametrize(
    "names", [("ada", "bob"), ("ada bob",), ("",), ("a" * 65,), ("ada\u00e9",), ("ada,bob",), ("<b>",)]
)
def test_a_header_that_does_not_name_one_user_is_refused(pages: Pages, names: tuple[str, ...]) -> None:
    headers = [("X-Remote-User", name.encode("latin-1").decode("latin-1")) for name in names]
    answer = pages.get("/", ("Host", "hpc.example.org"), *headers)
    assert answer.status == 400
    assert "ada" not in answer.text


def test_at_a_port_nobody_has_a_name(store: Path) -> None:
    with serving(store, "127.0.0.1:0", store.parent) as found:
        for headers in ((), (("X-Remote-User", "ada"),), (("X-Remote-User", "root"),)):
            text = found.get("/", *headers).text
            assert "counts only" in text
            assert [word for word in (*OF_BOB, "ada") if word in text] == []
        assert found.get("/jobs/1").status == 404
        assert found.get("/whatif").status == 403
        assert found.get("/", ("Host", "evil.example.org")).status == 421, "its name may lead here"
        assert found.get("/", ("Host", "localhost:8852")).status == 200


@pytest.mark.parametrize(
    "said", [b"", b"GET / HTTP/1.1\r\nHost: localhost\r\n", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"]
)
def test_a_user_with_many_connections_keeps_no_other_out(
    store: Path, tmp_path: Path, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(viewers, "MAX_CONNECTIONS", 96)
    monkeypatch.setattr(web_server, "MAX_CONNECTIONS", 96)
    users = itertools.chain([pwd.getpwnam("daemon").pw_uid], itertools.repeat(pwd.getpwnam("nobody").pw_uid, 200))
    monkeypatch.setattr(viewers, "peer_uid", lambda _: next(users, 0))
    with serving(store, str(tmp_path / "web.sock")) as found, ExitStack() as stack:
        links = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(201)]
        for link in links:
            link.connect(found.listen)
            with suppress(OSError):
                link.sendall(said)
        assert "root, all jobs" in found.get("/").text
        links[0].sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" if not said else b"\r\n")
        assert links[0].recv(12) == b"HTTP/1.1 200", "the oldest connection of all, of a user with one"


def test_a_folder_of_whatifs_that_is_gone_is_said(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(viewers, "peer_uid", lambda _: 0)
    with serving(store, str(tmp_path / "web.sock"), tmp_path / "none") as found:
        assert found.get("/whatif").status == 503
        assert found.get("/whatif/w.html").status == 404


def test_hostile_names_stay_text(pages: Pages, admin: str) -> None:
    for path in ("/", "/jobs/1", "/hosts/n1"):
        text = pages.get(path, *named(admin)).text
        assert "&lt;script&gt;document.title=" in text, path
        assert "<script>document" not in text
        assert "{{7*7}}" in text
        assert not re.search("[\u202e\x1b]", text)
        assert HOSTILE not in text


def test_answers_forbid_all_that_the_pages_do_not_need(pages: Pages, admin: str) -> None:
    answers = [pages.get(path, *named(admin)) for path in (*PATHS[:-1], "/static/web.css", "/static/web.js", "/nope")]
    for answer in answers:
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self';")
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "private, no-cache"
        assert "server" not in answer.headers
        assert not re.search(r"(?i)\sstyle=|\son\w+=|https?://(?!www\.w3\.org)", answer.text)
    saved = pages.get("/whatif/w.html", *named(admin))
    assert saved.headers["content-security-policy"].startswith("sandbox; default-src 'none'")


def test_hosts_that_slurm_hides_are_those_without_jobs_that_one_may_see(
    store: Path, admin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(viewers, "peer_uid", lambda _: PROXY_UID)
    seen = {"": (), "carol": (), "ada": ("n1",), "bob": ("n1", "n2"), admin: ("n1", "n2", "n3", "n4")}
    with serving(store, str(tmp_path / "web.sock"), private="jobs,nodes") as found:
        for user, names in seen.items():
            text = found.get("/", *named(user)).text
            assert set(re.findall(r"\bn[1-4]\b", text)) == set(names), f"the first page for {user}"
            own = [name for name in ("n1", "n2", "n3", "n4") if found.get(f"/hosts/{name}", *named(user)).status == 200]
            assert own == list(names), user


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_nothing_can_be_changed(pages: Pages, method: str) -> None:
    assert pages.get("/", *named("ada"), method=method).status == 405


@pytest.mark.parametrize(
    "path",
    [
        "/whatif/..%2fcadenza.db", "/whatif/%2e%2e%2f%2e%2e%2fetc%2fpasswd", "/whatif/cadenza.db", "/whatif/link.html",
        "/whatif/none.html", "/static/base.html", "/static/..%2fweb.css", "/jobs/1%20or%201", "/jobs/" + "9" * 30,
        "/jobs?id=x", "/jobs", "/hosts/%00", "/hosts/n9", "/turns?partition=%3Cb%3E", "/report?since=1e9d", "/?page=-1",
        "/jobs/%D9%A3",
    ],
)  # fmt: skip
def test_a_path_that_is_no_page_is_not_found(pages: Pages, admin: str, path: str) -> None:
    assert pages.get(path, *named(admin)).status in (404, 400)


def test_a_browser_that_has_the_page_gets_304_and_another_viewer_never_does(pages: Pages) -> None:
    first = pages.get("/turns", *named("ada"))
    again = pages.get("/turns", *named("ada"), ("If-None-Match", first.headers["etag"]))
    assert (again.status, again.text) == (304, "")
    other = pages.get("/turns", *named("bob"), ("If-None-Match", first.headers["etag"]))
    assert other.status == 200
    assert "bob, own jobs" in other.text


def test_the_form_leads_to_the_job(pages: Pages) -> None:
    answer = pages.get("/jobs?id=1", *named("ada"))
    assert (answer.status, answer.headers["location"]) == (303, "jobs/1")


def test_a_round_is_decoded_once_for_all_and_the_next_one_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = record(tmp_path)
    made: list[int] = []
    build = web_pages.view_of
    monkeypatch.setattr(web_pages, "view_of", lambda *words: made.append(1) or build(*words))
    drawn: list[int] = []
    draw = web_pages.squares
    monkeypatch.setattr(web_pages, "squares", lambda *words: drawn.append(1) or draw(*words))
    monkeypatch.setattr(viewers, "peer_uid", lambda _: PROXY_UID)
    monkeypatch.setattr(web_pages, "STALE_AFTER_S", 1e9)
    moments = itertools.count(0.0, 100.0)  # no page is kept for long
    monkeypatch.setattr(SystemClock, "monotonic", lambda _: next(moments))
    with serving(path, str(tmp_path / "web.sock")) as found:
        for user in ("ada", "bob", "", "ada"):
            assert "Round 2 at" in found.get("/", *named(user)).text
        assert found.get("/static/web.js").text.count("addEventListener") == 2, "that of the report's tables, and ours"
        assert len(made) == 1
        writer = SqliteStore(path, SystemClock())
        writer.begin(cluster(), Decision((), Memory(), {}), (), Memory())
        writer.close()
        assert "Round 3 at" in found.get("/", *named("ada")).text
        assert (len(made), len(drawn)) == (2, 2)


def test_a_job_that_has_ended_keeps_its_story_for_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = record(tmp_path)
    writer = SqliteStore(path, SystemClock())
    writer.begin(replace(cluster(), jobs=()), Decision((), Memory(), {}), (), Memory())
    writer.close()
    monkeypatch.setattr(viewers, "peer_uid", lambda _: PROXY_UID)
    with serving(path, str(tmp_path / "web.sock")) as found:
        story = found.get("/jobs/1", *named("ada"))
        assert story.status == 200
        assert "no longer in Slurm; last: its turn: job 2 is next" in story.text
        assert "n1:gpu0-7" in story.text
        assert "GPU hours" in story.text
        assert "yield in" in story.text
        assert found.get("/jobs/1", *named("bob")).status == 404
        assert "another user&#39;s job" in found.get("/hosts/n1", *named("ada")).text, "job 2 of bob, which is over too"


def test_a_store_that_is_gone_is_said_and_its_path_is_not(tmp_path: Path) -> None:
    path = record(tmp_path)
    with serving(path, str(tmp_path / "web.sock")) as found:
        path.rename(tmp_path / "away.db")
        answer = found.get("/")
    assert answer.status == 503
    assert "the service&#39;s record cannot be read" in answer.text
    assert str(tmp_path) not in answer.text


@pytest.mark.parametrize(
    ("damage", "path"),
    [
        ("UPDATE settings SET text = '{'", "/"),
        ("UPDATE switches SET total_s = 'x'", "/"),
        ("UPDATE leases SET gpus = '['", "/hosts/n1"),
        ("UPDATE leases SET to_s = 'x'", "/hosts/n1"),
        ("UPDATE hours SET gpu_s = 'x'", "/jobs/1"),
        ("DROP TABLE effects", "/report"),
    ],
)
def test_a_row_that_cannot_be_read_is_said_as_well(
    tmp_path: Path, damage: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(sqlite3.connect(record(tmp_path))) as link:
        link.execute(damage)
        link.commit()
    monkeypatch.setattr(viewers, "peer_uid", lambda _: 0)
    with serving(tmp_path / "cadenza.db", str(tmp_path / "web.sock")) as found:
        answer = found.get(path)
    assert (answer.status, "record cannot be read" in answer.text) == (503, True)


def test_before_the_first_round_there_is_a_sentence(tmp_path: Path) -> None:
    SqliteStore(tmp_path / "cadenza.db", SystemClock()).close()
    with serving(tmp_path / "cadenza.db", str(tmp_path / "web.sock")) as found:
        answer = found.get("/")
    assert answer.status == 503
    assert "no round is on record yet" in answer.text


# --- The command -------------------------------------------------------------------------------------------------


def run(folder: Path, *words: str) -> Result:
    config = folder / "cadenza.toml"
    config.write_text(f'[service]\nstore = "{folder}/cadenza.db"\n')
    return CliRunner().invoke(main, ["web", *words, "--config", str(config)])


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("--listen", "0.0.0.0:8852"), 2, "other machines come through a web server"),
        (("--listen", "8852"), 2, "another port of 127.0.0.1"),
        (("--listen", "127.0.0.1:99999"), 2, "--listen 127.0.0.1:99999"),
        (("--listen", "/nowhere/web.sock"), 2, "--listen /nowhere/web.sock"),
        (("--proxy", "daemon"), 2, "at a port everyone could call themselves anyone"),
        (("--proxy", "no-such-user", "--listen", "/tmp/x"), 2, "no user of this name"),
        (("/no-such-folder",), 2, "no folder"),
    ],
)
def test_a_wrong_word_is_named_before_anything_is_opened(
    tmp_path: Path, words: tuple[str, ...], code: int, text: str
) -> None:
    SqliteStore(tmp_path / "cadenza.db", SystemClock()).close()
    done = run(tmp_path, *words)
    assert done.exit_code == code
    assert text in done.output


def test_a_port_in_use_and_a_missing_store_are_named(tmp_path: Path) -> None:
    assert run(tmp_path).exit_code == 3
    SqliteStore(tmp_path / "cadenza.db", SystemClock()).close()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = run(tmp_path, "--listen", address)
    assert done.exit_code == 2
    assert "Address already in use" in done.output


def test_without_its_libraries_the_command_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SqliteStore(tmp_path / "cadenza.db", SystemClock()).close()
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    done = run(tmp_path)
    assert done.exit_code == 3
    assert "uvicorn is not installed; pip install 'cadenza[web]'" in done.output


def test_the_command_serves_until_it_is_ended_and_takes_a_socket_that_was_left(tmp_path: Path) -> None:
    record(tmp_path)
    config = tmp_path / "cadenza.toml"
    config.write_text(f'[service]\nstore = "{tmp_path}/cadenza.db"\n')
    command = [sys.executable, "-m", "cadenza.slurm_plugin.cli", "web", "--listen", f"{tmp_path}/web.sock"]
    for _ in range(2):
        served = subprocess.Popen([*command, "--config", str(config)], stdout=subprocess.PIPE, text=True)
        try:
            assert served.stdout is not None
            assert served.stdout.readline() == f"listening: {tmp_path}/web.sock\n"
            answer = Pages(f"{tmp_path}/web.sock", "").get("/")
            assert (answer.status, "Round 2 at" in answer.text) == (200, True)
        finally:
            served.terminate()
            served.wait(20)
    assert (tmp_path / "web.sock").is_socket()
    assert (tmp_path / "web.sock").stat().st_mode & 0o777 == 0o666

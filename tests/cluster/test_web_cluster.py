"""cadenza web on a cluster: its pages show what runs there, to each user, and names of jobs stay text."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from cluster import CADENZA, PYTHON, wait_for
from harness import FOUR_GPUS, Cluster

SOCKET = "/tmp/web-of-test.sock"
NAME = '<script>document.title="owned"</script>{{7*7}}\x1b[2J'
ASK = f"""
import http.client, socket, sys
link = http.client.HTTPConnection("localhost")
link.sock = socket.socket(socket.AF_UNIX)
link.sock.connect({SOCKET!r})
link.request("GET", sys.argv[1])
answer = link.getresponse()
print(answer.status, answer.read().decode())
"""
TURNS = 3


class Web:
    """The pages of the cluster's service."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def page(self, path: str, user: str) -> str:
        """Return the status and the text of a page, as the kernel names its reader."""
        return self.cluster.ctl(PYTHON, "-c", ASK, path, user=user)


@pytest.fixture
def web(cluster: Cluster) -> Iterator[Web]:
    """Serve the pages as the service's user, as the shipped unit has it."""
    served = f"nohup {CADENZA} web --listen {SOCKET} >/tmp/web.log 2>&1 & echo $!"
    number = cluster.ctl("sh", "-c", served, user="cadenza").strip()
    there = ("test", "-S", SOCKET)
    try:
        wait_for("the socket", lambda: cluster.exec("ctl", *there, check=False).returncode == 0)
        yield Web(cluster)
    finally:
        cluster.ctl("kill", number)


def shown(web: Web, user: str) -> str:
    """Return the page Now, "" while a turn passes on."""
    text = web.page("/", user)
    return text if "4 GPUs: 4 held; jobs wait for a turn on 4" in text and "4 GPUs: 4 free" in text else ""


def test_the_pages_show_the_cluster_to_each_user_and_a_hostile_name_stays_text(cluster: Cluster, web: Web) -> None:
    # 1. Two users take turns on the GPUs of one host.
    mine, _ = (
        cluster.paced(name, iterations=10**6, user=user, options=(*FOUR_GPUS, f"--nodelist={node}"))
        for name, user, node in ((NAME, "alice", "node1"), ("of-bob", "bob", "node1-l1"))
    )
    of_mine = f"select count(*) from switches where kind = 'yield' and job = {mine}"
    wait_for("turns", lambda: cluster.sql(of_mine)[0][0] >= TURNS)
    # 2. Now: the hosts, and each reader's jobs.
    now = {
        user: wait_for(f"turns, for {user}", lambda user=user: shown(web, user)) for user in ("root", "alice", "bob")
    }
    assert [user for user, text in now.items() if f'jobs/{mine}"' in text] == ["root", "alice"]
    assert [user for user, text in now.items() if "of-bob" in text] == ["root", "bob"]
    # 3. A job's story, to its owner only.
    story = web.page(f"/jobs/{mine}", "alice")
    assert story.startswith("200 ")
    assert "node1:gpu0-3" in story
    assert int(re.search(r"<dt>Yields</dt><dd>(\d+)", story)[1]) >= 1  # type: ignore[index]
    assert web.page(f"/jobs/{mine}", "bob").startswith("404 ")
    # 4. A host's hour, the turns of all hosts, and the site's report.
    host = web.page("/hosts/node1", "alice")
    assert f"job {mine} &lt;script&gt;" in host
    assert "another user&#39;s job" in host
    assert "of-bob" not in host
    turns = web.page("/turns", "bob")
    assert int(re.search(r"(\d+) yields, at most", turns)[1]) >= TURNS  # type: ignore[index]
    report = wait_for("the report", lambda: next(filter(re.compile("200 ").match, [web.page("/report", "root")]), ""))
    assert "What sharing changed" in report
    # 5. The hostile name.
    for text in (*now.values(), story, host, turns, report):
        assert "<script>document" not in text
        assert "\x1b" not in text
    assert "&lt;script&gt;document.title=" in now["alice"]
    assert "{{7*7}}" in now["alice"]

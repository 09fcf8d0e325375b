"""A real Prometheus has data for each panel of the dashboard and each alert, and exporters' files follow the turns."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from urllib.parse import quote

import pytest

from cluster import ENGINE, ROOT, script, wait_for
from harness import Cluster

EXAMPLES = ROOT / "examples" / "prometheus"
TURNS = "[sharing]\nslice_s = 1.0\n"
GET = "import sys, urllib.request; sys.stdout.write(urllib.request.urlopen(sys.argv[1]).read().decode())"
SETTLED_S = 0.1
WATCH = """
import json, os, pathlib, time
seen, until = [], time.time() + 9
while time.time() < until:
    files = {}
    for path in sorted(pathlib.Path("/run/cadenza/gpu-jobs").glob("[0-9]*")):
        try:
            files[path.name] = path.read_text()
        except FileNotFoundError:
            pass
    if not seen or seen[-1][1] != files:
        seen.append((time.time(), files))
    time.sleep(0.01)
print(json.dumps(seen))
"""
"""Writes the changes of the files of one host within 9 s, each with its time."""


@pytest.fixture
def prometheus(cluster: Cluster) -> Iterator[str]:
    """Prometheus on the cluster; the name of its container."""
    script("prometheus", "--name", cluster.name)
    name = f"{cluster.name}-prometheus"
    yield name
    subprocess.run([ENGINE, "rm", "--force", name], check=True, stdout=subprocess.DEVNULL)


def get(cluster: Cluster, url: str) -> str:
    return cluster.ctl("python3", "-c", GET, url)


def queries() -> set[str]:
    """Return the queries of all panels and alerts; those of alerts without their comparisons, which seldom hold."""
    panels = json.loads((EXAMPLES / "dashboard.json").read_text())["panels"]
    found = {target["expr"] for panel in panels for target in panel.get("targets", ())}
    rules = (EXAMPLES / "cadenza.rules.yml").read_text()
    for block in re.findall(r"expr: (?:>-\n)?(.+?)\n {8}(?:for|labels):", rules, re.DOTALL):
        text = " ".join(block.split())
        found.update(re.split(r" (?:[<>]|==) (?:on \(instance\) )?|\b and on \(instance\) | or ", text))
    return {one.replace("$__rate_interval", "10s").replace("[15m]", "[10s]") for one in found if "cadenza" in one}


@pytest.mark.sites
def test_every_query_has_data_in_a_real_prometheus(cluster: Cluster, prometheus: str) -> None:
    for words in (("check", "rules", "cadenza.rules.yml"), ("test", "rules", "rules_test.yml")):
        command = [ENGINE, "exec", "--workdir", "/etc/prometheus", prometheus, "promtool", *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    text = get(cluster, "http://ctl:9852/metrics")
    checked = subprocess.run(
        [ENGINE, "exec", "-i", prometheus, "promtool", "check", "metrics"], input=text, text=True, capture_output=True,
        check=False,
    )  # fmt: skip
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
    assert not re.search(r'[{,](job|jobid|job_id|user|uid|host|node)="', text), "no label that grows with the site"
    cluster.configure(TURNS)
    jobs = [cluster.paced(f"metrics-{number}", iterations=500) for number in range(3)]
    cluster.paced("metrics-short", iterations=20)
    lacking = queries()
    assert len(lacking) > 40

    def all_have_data() -> bool:
        for one in sorted(lacking):
            answer = json.loads(get(cluster, f"http://prometheus:9090/api/v1/query?query={quote(one)}"))
            if answer["data"]["result"]:
                lacking.discard(one)
        return not lacking

    try:
        wait_for("data for all queries", all_have_data, 60, 1)
    finally:
        assert not lacking
    cluster.ctl("scancel", *map(str, jobs))


def test_the_files_for_exporters_follow_a_turn_within_a_second(cluster: Cluster) -> None:
    cluster.configure(TURNS)
    for number in range(4):  # two for each host
        cluster.paced(f"files-{number}", iterations=2000)
    wait_for("both jobs of node1 to take turns", lambda: len(yields(cluster)) >= 2, 60)
    changes = json.loads(cluster.exec("node1", "python3", "-c", WATCH).stdout)
    texts = [text for _, files in changes for text in files.values()]
    assert all(re.fullmatch(r"[1-9]\d*\n", text) for text in texts), "one job a GPU, and no empty file"
    # The files of the four GPUs change one after the other.
    settled = [one for one, following in pairwise(changes) if following[0] - one[0] > SETTLED_S]
    holders = [(at_s, set(files.values())) for at_s, files in settled]
    assert len(holders) >= 4, "there were turns"
    assert all(len(jobs) <= 1 for _, jobs in holders)
    leases = cluster.sql("select job, from_s, to_s from leases where host = 'node1' order by from_s")
    late = [
        min(abs(at_s - from_s) for at_s, jobs in holders if jobs == {f"{job}\n"})
        for job, from_s, to_s in leases
        if changes[0][0] < from_s < changes[-1][0] - 0.5 and to_s - from_s > 0.1
    ]
    assert late
    assert max(late) < 1.0


def yields(cluster: Cluster) -> list[object]:
    return cluster.sql("select job from switches where host = 'node1' and kind = 'yield' and at_s > unixepoch() - 10")


@pytest.mark.sites
def test_health_is_bad_within_trust_s_of_slurmctlds_end(cluster: Cluster) -> None:
    def health() -> str:
        ask = (
            "import sys, urllib.request as u\ntry: print(u.urlopen(sys.argv[1]).status)\nexcept OSError as e: print(e)"
        )
        return cluster.ctl("python3", "-c", ask, "http://ctl:9852/healthz").strip()

    assert health() == "200"
    cluster.service("ctl", "stop", "slurmctld")
    try:
        wait_for("503", lambda: "503" in health(), 30)
    finally:
        cluster.service("ctl", "start", "slurmctld")
    wait_for("200", lambda: health() == "200", 60)

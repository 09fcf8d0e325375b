"""An upgrade of Slurm from 24.11 to 26.05 by Debian's packages, in Slurm's order and under jobs of a plain site.

Slurm's guide (https://slurm.schedmd.com/upgrades.html) has slurmdbd first, then slurmctld, then each host; jobs run on.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator

import pytest
from guide_blocks import BUILDER, HOSTS, ROOT, executed
from plain_site import SHARED, PlainSite
from test_guide import INSTALL, execute

from cluster import wait_for

pytestmark = [
    pytest.mark.packages,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(os.environ.get("WAY") != "upgrade", reason="WAY=upgrade: make test-upgrade"),
]
NEW = f"{SHARED}/next"
"""The packages for Slurm 26.05, where all machines see them."""
FORKY = "echo 'deb http://deb.debian.org/debian forky main' >/etc/apt/sources.list.d/forky.list; apt-get update -qq"
PARTS = {
    "ctl": "slurm-client slurm-wlm-basic-plugins slurm-wlm-plugins slurmctld slurmdbd",
    "host": "slurm-client slurm-wlm-basic-plugins slurm-wlm-plugins slurmd",
}
JOB = """\
import sys, time
from pathlib import Path
from cadenza.sidecar import client

name, steps = sys.argv[1], int(sys.argv[2])
saved = Path(f"{name}.step")
step = int(saved.read_text()) if saved.exists() else 0

def save():
    saved.write_text(str(step))
    return str(saved)

session = client.attach()
session.call(on_checkpoint=save)
if step:
    session.restored(str(saved), step)
while step < steps and not Path(f"{name}.finish").exists():
    time.sleep(0.1)
    step += 1
    if step % 10 == 0:
        save()
    client.boundary()
print("done", step)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainSite]:
    """A site of Debian 13 after all steps of Install, whose service applies."""
    one = PlainSite("slurmupgrade", tmp_path_factory.mktemp("site"))
    try:
        one.up()
        printed: list[str] = []
        for block in executed([INSTALL]):
            if block.title != BUILDER:  # the target has built both releases
                execute(one, block, printed)
        one.said("ctl", "scancel --name=moves")
        shutil.copytree(ROOT / "dist" / "debs", one.folder / "home" / "next")
        (one.folder / "home" / "job.py").write_text(JOB)
        yield one
    finally:
        one.down()


def good(site: PlainSite, machine: str, command: str) -> str:
    """Return the output of a command of root that must succeed."""
    done = site.ran(machine, ("bash", "-euo", "pipefail", "-c", command))
    assert done.returncode == 0, f"{machine}: {command}\n{done.stdout[-6000:]}"
    return done.stdout


def submit(site: PlainSite, name: str, wrap: str, *options: str) -> str:
    words = f"sbatch --parsable --job-name={name} --chdir={SHARED} --mem=500 --time=60 {' '.join(options)}"
    return good(site, "ctl", f"runuser -u alice -- {words} --wrap='{wrap}' 2>/dev/null").strip()


def state(site: PlainSite, job: str) -> str:
    return good(site, "ctl", f"squeue --noheader --states=all --jobs={job} --format=%T").strip()


def steps(site: PlainSite, name: str) -> int:
    return int(site.said("ctl", f"cat {SHARED}/{name}.step 2>/dev/null") or 0)


def rounds(site: PlainSite) -> int:
    """Return the number of the last round."""
    query = "import sqlite3; print(sqlite3.connect('file:/var/lib/cadenzad/cadenza.db?mode=ro', uri=True)"
    return int(good(site, "ctl", f"""python3 -c "{query}.execute('select max(number) from rounds').fetchone()[0])" """))


def goes_on(site: PlainSite, *names: str) -> None:
    """Wait until jobs have got on, and the service has made a round."""
    before, round_ = {name: steps(site, name) for name in names}, rounds(site)
    wait_for("steps of all jobs", lambda: all(steps(site, name) > before[name] for name in names), 60)
    wait_for("a round of the service", lambda: rounds(site) > round_, 120)


def doctor(site: PlainSite) -> dict[str, str]:
    """Return what doctor says of each part, with its level."""
    found = re.findall(r"^(OK|WARN|FAIL)\s+(.+?): (.*)$", site.said("ctl", "cadenza doctor"), re.MULTILINE)
    return {about: f"{level} {text}" for level, about, text in found}


def install(site: PlainSite, machine: str, what: str) -> str:
    return good(site, machine, f"apt-get install -y --no-install-recommends -o Dpkg::Options::=--force-confold {what}")


def test_jobs_and_the_service_go_on_through_an_upgrade_of_slurm(site: PlainSite) -> None:
    assert doctor(site)["plugin"] == "OK for Slurm 24.11"
    assert "a requeued job starts two minutes later" in site.said("ctl", "cadenza doctor --to 26.05")
    # 1. A job that shares and one that does not run, a third waits, all by Slurm 24.11.
    plain = "until [ -e plain.finish ]; do date +%s >plain.step; sleep 1; done"
    jobs = {
        "shares": submit(site, "shares", "python3 job.py shares 100000", "--cadenza --gres=gpu:4 --nodelist=gpu1"),
        "plain": submit(site, "plain", plain, "--gres=gpu:4 --nodelist=gpu2"),
        "waits": submit(site, "waits", "python3 job.py waits 20", "--cadenza --gres=gpu:4 --nodelist=gpu2"),
    }
    goes_on(site, "shares", "plain")
    service = good(site, "ctl", "pgrep -f -o bin/cadenzad").strip()

    # 2. The controller: slurmdbd converts its tables, then slurmctld reads its state; jobs need neither.
    for machine in ("ctl", *HOSTS):
        good(site, machine, FORKY)
    good(site, "ctl", "systemctl stop slurmctld; systemctl stop slurmdbd")
    install(site, "ctl", f"{PARTS['ctl']} {NEW}/cadenza-slurm26.05_*.deb")
    good(site, "ctl", "systemctl start slurmdbd; until sacctmgr -n show cluster | grep -q site; do sleep 1; done")
    good(site, "ctl", "systemctl start slurmctld; until scontrol ping | grep -q UP; do sleep 1; done")
    assert "26.05" in good(site, "ctl", "scontrol --version")
    # 3. With hosts of 24.11 still: nobody was lost, requeued or held, and the same service makes its rounds.
    wait_for("the nodes", lambda: "gpu[1-2]" in site.said("ctl", "sinfo -h -t alloc,mix -o %N"), 90)
    assert [state(site, jobs[name]) for name in jobs] == ["RUNNING", "RUNNING", "PENDING"]
    goes_on(site, "shares", "plain")
    assert good(site, "ctl", "pgrep -f -o bin/cadenzad").strip() == service
    found = doctor(site)
    assert found["Slurm"].startswith("OK 26.05")
    assert found["plugin"] == "OK for Slurm 26.05"
    assert found["source"].startswith("OK Slurm's JSON v0.0.4")
    # What `doctor --to` has said: 24.11 has no such setting.
    good(site, "ctl", "sed -i 's/^SchedulerParameters=.*/&,requeue_delay=0/' /etc/slurm/*.conf; scontrol reconfigure")

    # 4. The hosts, one after the other. Jobs keep their slurmstepd of 24.11.
    for host in HOSTS:
        good(site, host, "systemctl stop slurmd")
        install(site, host, f"{PARTS['host']} {NEW}/cadenza-slurm26.05_*.deb")
        good(site, host, "systemctl start slurmd")
    versions = 'test "$(scontrol --oneliner show nodes | grep -c Version=26.05)" = 2'
    wait_for("both hosts", lambda: site.ran("ctl", ("bash", "-c", versions)).returncode == 0, 60)
    goes_on(site, "shares", "plain")
    assert [state(site, jobs[name]) for name in jobs] == ["RUNNING", "RUNNING", "PENDING"]

    # 5. Jobs start by the new Slurm: one that waited, and a new one by the flag, Lua and the plugin of 26.05.
    finish(site, "plain")
    new = submit(site, "new", "python3 job.py new 100000", "--cadenza=priority=1 --gres=gpu:4 --nodelist=gpu2")
    wait_for("the job that waited", lambda: state(site, jobs["waits"]) == "COMPLETED", 120)
    wait_for("the lease of the new one", lambda: "holds gpu2" in site.said("ctl", f"cadenza why {new}"), 120)
    assert '"priority":1' in good(site, "ctl", f"scontrol show job {new}")
    finish(site, "new")
    wait_for("its end", lambda: state(site, new) == "COMPLETED", 60)
    # 6. The job that began under 24.11 saves, moves to the other host, and goes on there.
    goes_on(site, "shares")
    good(site, "ctl", f"cadenza move {jobs['shares']} --to gpu2")
    there = f"squeue --noheader --jobs={jobs['shares']} --nodelist=gpu2 --states=running"
    wait_for("its move", lambda: site.said("ctl", there).strip(), 180)
    goes_on(site, "shares")
    finish(site, "shares")
    wait_for("its end", lambda: state(site, jobs["shares"]) == "COMPLETED", 60)
    told = good(site, "ctl", f"cat {SHARED}/slurm-{jobs['shares']}.out")
    assert re.search(r"checkpoint of step (\d+) saved(.*\n)*cadenza: continues at step \1 (.*\n)*done", told)
    # 7. The accounting has all of them, those of 24.11 too.
    ids = ",".join((*jobs.values(), new))
    ended = good(site, "ctl", f"sacct --noheader --allocations --parsable2 --format=JobID,State --jobs={ids}").split()
    assert sorted(ended) == sorted(f"{job}|COMPLETED" for job in ids.split(","))
    assert "FAIL" not in " ".join(doctor(site).values())


def finish(site: PlainSite, name: str) -> None:
    good(site, "ctl", f"touch {SHARED}/{name}.finish")

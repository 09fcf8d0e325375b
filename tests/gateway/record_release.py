"""Record what the commands of one release of Slurm print: one moment of a container cluster with jobs of all kinds.

    SLURM=24.11 container/build
    PYTHONPATH=container SLURM=24.11 python tests/gateway/record_release.py tests/gateway/data v0.0.42

writes release-24.11.json, and one for each further version of the data parser that is named. Of each record the fields
are kept that the gateway's decoder reads and that hold something. The recording of another release has the same jobs by
name; test_gateway_releases.py compares them.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from cadenza.slurm_plugin.gateway import slurm_json

from cluster import Cluster, wait_for

NAME = "cadenzarecord"
SIZE = ("--nodes", 2, "--gpus-per-node", 4, "--lanes", 2, "--unmanaged-nodes", 1, "--memory-mb", 64000, "--no-cadenza")
OPT_IN = '{"cadenza":{"v":1,"share":true}}'
PENDING: Mapping[str, str] = {
    "held": "--gpus=a100:2 --cadenza", "task": "-n4 --tres-per-task=gres/gpu:1 --mem=200",
    "pergpu": "--gpus=2 --cpus-per-gpu=2 --mem-per-gpu=77", "mem0": "--gpus=1 --mem=0",
    "excluser": f"--gpus=1 --exclusive=user --comment={OPT_IN}", "over": "--gpus=1 --oversubscribe",
    "plain": "--mem=50",
    "pin": "-N2 -n2 --gpus=4 --nodelist=node1-l1,node2-l1 --no-requeue", "limit": "--gpus=1 --time=2-03:00:00",
    "percpu": "--gpus=1 -c3 -n2 --mem-per-cpu=40", "excludes": "--gpus=1 --exclude=node1,node2 --cadenza",
    "constraint": "--gpus=1 --constraint=lane0",
}  # fmt: skip
"""Jobs that are held at their submission, with their options."""
RUNNING: Mapping[str, str] = {
    "susp": "--gres=gpu:a100:2 -c2 --mem=500 --cadenza", "requeue": "--gpus=1 -c2 --mem=500 --cadenza",
    "two": "-N2 -n2 --gres=gpu:1 --mem=300 --cadenza", "excl": "-p plain --exclusive --gpus=1",
}  # fmt: skip
ENDING: Mapping[str, str] = {
    "done": "true", "bad": "exit 3", "term": "kill -TERM $$", "ends": "trap '' TERM; sleep 300 & wait; sleep 300",
}  # fmt: skip
EMPTY = ("", [], {"set": False, "infinite": False, "number": 0})
"""Values that say nothing."""
KINDS = (
    ("jobs", slurm_json._Job, ("squeue", "--all", "--states=all")),
    ("nodes", slurm_json._Node, ("scontrol", "--all", "show", "nodes")),
    ("reservations", slurm_json._Reservation, ("scontrol", "--all", "show", "reservations")),
)


def submit(cluster: Cluster, name: str, options: str, command: str = "sleep 600") -> int:
    """Submit a job; a later option counts."""
    defaults = ["--time=40"] if "--mem" in options else ["--time=40", "--mem=100"]
    return int(cluster.sbatch(f"--job-name={name}", *defaults, *options.split(), command=command))


def fill(cluster: Cluster) -> None:
    """Bring about jobs of all kinds and states, drained nodes and a reservation."""
    running = {name: submit(cluster, name, options) for name, options in RUNNING.items()}
    ending = {name: submit(cluster, name, "--gpus=1", command) for name, command in ENDING.items()}
    for name, number in (running | {"ends": ending["ends"]}).items():
        cluster.wait_state(number, "RUNNING")
        print(f"{name}: job {number}", file=sys.stderr)
    cluster.ctl("scontrol", "suspend", str(running["susp"]))
    cluster.ctl("scontrol", "requeuehold", str(running["requeue"]))
    held = {name: submit(cluster, name, f"--hold {options}") for name, options in PENDING.items()}
    submit(cluster, "later", "--gres=gpu:1 --begin=now+1hour")
    submit(cluster, "dep", f"--gpus=1 --dependency=afterok:{held['held']}")
    submit(cluster, "arr", "--array=1-5%2 --gpus=1")
    odd = "sbatch --hold --gpus=1 -c3 -n2 --mem=100 --job-name=\"$(printf 'x\\377y')\" --comment=\"$(printf 'z\\377')\""
    cluster.ctl("sh", "-c", f"cd /tmp && {odd} --wrap=true", user="alice")
    wait_for("two tasks of the array", lambda: cluster.ctl("squeue", "-h", "-n", "arr", "-t", "R").count("\n") == 2)
    # The reservation comes last, because no job would start that may run into it.
    times = ("starttime=now+1hour", "duration=60", "users=root,alice", "flags=ignore_jobs")
    cluster.ctl("scontrol", "create", "reservation", "reservationname=maint", "nodes=node1,node2,node1-l1", *times)
    submit(cluster, "maint", "--hold --gpus=1 --reservation=maint --time=30 --cadenza")
    for node, reason in (("node1-l1", "cadenza: observing only"), ("node2-l1", "bad fan")):
        cluster.ctl("scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason={reason}")
    for name in ("done", "bad", "term"):
        cluster.wait_state(ending[name], "COMPLETED", "FAILED")
    cluster.wait_state(running["requeue"], "PENDING")
    cluster.ctl("scancel", str(ending["ends"]))
    cluster.wait_state(ending["ends"], "COMPLETING", "CANCELLED")


def record(cluster: Cluster, version: str) -> dict[str, object]:
    """Return the records of a version of the data parser; bytes that are not UTF-8 are surrogates."""
    found: dict[str, object] = {"time_s": float(cluster.ctl("date", "+%s")), "version": version}
    columns = "squeue --all --states=all --noheader --Format=JobID:24,Exclusive:24"
    found["exclusive"] = dict(line.split() for line in cluster.ctl("sh", "-c", f"{columns} || true").splitlines())
    for kind, struct, words in KINDS:
        encoded = cluster.ctl("sh", "-c", f"SLURM_BITSTR_LEN=0 {' '.join(words)} --json={version} | base64 -w0")
        answer = json.loads(base64.b64decode(encoded).decode("utf-8", "surrogateescape"))
        found["slurm"] = answer["meta"]["slurm"]["release"]
        fields = struct.__struct_fields__
        found[kind] = [
            {name: one[name] for name in fields if one.get(name, EMPTY[0]) not in EMPTY} for one in answer[kind]
        ]
    return found


def main() -> None:
    """Record on a fresh cluster, and remove it."""
    folder, *versions = sys.argv[1:]
    cluster = Cluster(NAME)
    try:
        cluster.up(*SIZE)
        wait_for("five nodes", lambda: cluster.ctl("sinfo", "-h", "-N", "-t", "idle").count("\n") >= 5)
        fill(cluster)
        recordings = [record(cluster, version) for version in versions]
    finally:
        cluster.down()
    for found in recordings:
        lines = []
        for name, value in found.items():
            if isinstance(value, list):
                rows = ",\n".join(json.dumps(one, separators=(",", ":")) for one in value)
                lines.append(f'"{name}":[\n{rows}\n]')
            else:
                lines.append(f'"{name}":{json.dumps(value)}')
        release = ".".join(str(found["slurm"]).split(".")[:2])
        further = "" if found["version"] == versions[0] else f"-{found['version']}"
        path = Path(folder) / f"release-{release}{further}.json"
        path.write_text("{" + ",\n".join(lines) + "}\n")


if __name__ == "__main__":
    main()

"""Jobs with a root file system of their own, as in containers, with and without the mount of the agent's socket."""

from __future__ import annotations

from cluster import PYTHON, ROOT, SHARED, wait_for
from harness import PACED_JOB, Cluster

MOUNTS = f"{SHARED}/50-cadenza.fstab"
ENTER = f"{SHARED}/enter-container"
CONTAINER = """#!/bin/sh
# Run a command in a root file system of its own, with the mounts of a file of enroot's form (x-create is enroot's own).
set -e
mounts=$1 && shift
root=$(mktemp -d)
mount -t tmpfs none "$root"
for name in dev etc home opt proc src tmp usr; do mkdir "$root/$name" && mount --rbind "/$name" "$root/$name"; done
cp --no-dereference /bin /lib /lib64 "$root"
if [ -s "$mounts" ]; then
  mkdir -p "$root/run/cadenza"
  mount --all --fstab "$mounts" --target-prefix "$root"
fi
exec chroot "$root" "$@"
"""


def contained(cluster: Cluster, node: str, mounts: str, iterations: int) -> int:
    """Submit a paced job whose process has a mount namespace and a root of its own."""
    program = f"{PYTHON} {PACED_JOB} --iterations {iterations}"
    command = f"exec unshare --user --map-root-user --mount sh {ENTER} {mounts} {program}"
    return int(cluster.sbatch("--gres=gpu:4", "--mem=500", "--cadenza", f"--nodelist={node}", command=command))


def test_a_job_in_a_container_takes_turns_with_the_shipped_mount(cluster: Cluster) -> None:
    cluster.put(MOUNTS, (ROOT / "packaging/enroot/50-cadenza.fstab").read_text())
    cluster.put(ENTER, CONTAINER)
    first = contained(cluster, "node1", MOUNTS, 200)
    wait_for("its lease", lambda: cluster.lease(first).get("state") == "held")
    second = contained(cluster, "node1-l1", MOUNTS, 100)
    wait_for("a yield of the first", lambda: cluster.lease(first).get("state") == "yielded")
    cluster.wait_done(first, second)
    for job in (first, second):
        assert "missing:" not in cluster.log(job)


def test_a_job_in_a_container_without_the_mount_is_told_the_line(cluster: Cluster) -> None:
    cluster.put(ENTER, CONTAINER)
    job = contained(cluster, "node1-l1", "/dev/null", 20)
    cluster.wait_done(job)
    _, shipped = (ROOT / "packaging/enroot/50-cadenza.fstab").read_text().splitlines()
    assert f"the job on lane 1 takes no turns; missing: `{shipped}` in " in cluster.log(job)

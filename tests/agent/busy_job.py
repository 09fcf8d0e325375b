"""A job with loader workers: each of its processes burns CPU and holds memory until its standard input ends.

Prints ``ready`` when all have theirs. ``--workers N`` forks as a loader does; ``--megabytes`` is what each holds.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading

parser = argparse.ArgumentParser()
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--megabytes", type=int, default=0)
parser.add_argument("--cpu", type=float, default=1.0)
options = parser.parse_args()

ready, told = os.pipe()
first = os.getpid()
for _ in range(options.workers):
    if os.fork() == 0:
        break
held = bytearray(os.urandom(1 << 20) * options.megabytes)
os.write(told, b"x")
ended = threading.Event()
if os.getpid() == first:
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    for _ in range(options.workers + 1):
        os.read(ready, 1)
    print("ready", flush=True)
while not ended.is_set() and (os.getpid() == first or os.getppid() == first):
    sum(range(int(options.cpu * 200_000)))
    ended.wait(0.01)

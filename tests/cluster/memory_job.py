"""A job with real memory: state that moves out at a yield, and memory that grows and stays in the process.

At its end it says the digest of its state, and the one that the state must have. Requeued from its checkpoint, it goes
on from there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time

import torch

from cadenza.sidecar import client

CHUNK = 2**17
"""Numbers of a MB."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state-mb", type=int, required=True)
    parser.add_argument("--grow-mb", type=int, default=0, help="MB that stay in the process")
    parser.add_argument("--grow-by", type=int, default=50, help="MB of them that a step takes")
    parser.add_argument("--grow-later", action="store_true", help="only once it has been out for a turn of another job")
    parser.add_argument("--iterations", type=int, required=True)
    parser.add_argument("--iteration-s", type=float, default=0.1)
    parser.add_argument("--spill", help="directory on a disk for the state")
    parser.add_argument("--checkpoint", help="directory for its checkpoints")
    options = parser.parse_args()
    state = torch.arange(options.state_mb * CHUNK)
    session = client.attach(tensors=[state], spill=options.spill)
    keeper = client.checkpoint(options.checkpoint, own={"state": state}) if options.checkpoint else None
    step = (keeper and keeper.restore()) or 0
    turns, kept = list[str](), list[torch.Tensor]()
    session.call(on_resume=lambda: turns.append("resumed"))
    for done in range(step, options.iterations):
        time.sleep(options.iteration_s)
        state += 1
        if (turns or not options.grow_later) and len(kept) * options.grow_by < options.grow_mb:
            kept.append(torch.ones(options.grow_by * CHUNK, dtype=torch.int64))
        if keeper:
            keeper.at(done + 1)
        client.boundary()
    found, right = hashlib.sha256(), hashlib.sha256()
    for start in range(0, len(state), CHUNK):
        found.update(state[start : start + CHUNK].numpy().tobytes())
        right.update((torch.arange(start, start + CHUNK) + options.iterations).numpy().tobytes())
    print(json.dumps({"found": found.hexdigest(), "right": right.hexdigest()}))


if __name__ == "__main__":
    main()

"""Two ranks of a real gloo group at a collective call: together, when one does not come, and at two different ones.

``python barrier_ranks.py FOLDER`` writes what each rank was told as ``FOLDER/told.RANK``.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

from checkpoint_jobs import fork, wait
from torch import distributed

from cadenza.sidecar.client.checkpoints import CheckpointError
from cadenza.sidecar.client.checkpoints.collective import Ranks

LONG, SHORT = timedelta(seconds=60), timedelta(seconds=1)


def rank(number: int, folder: Path) -> None:
    """Call save() together; then rank 1 stays away until rank 0 has given up, hears so, and both go on."""
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=number, world_size=2)
    ranks, told = Ranks(), []
    ranks.patience = LONG
    ranks.roll_call("save()")
    told.append("met")
    if number == 1:
        distributed.barrier()
    try:
        ranks.patience = SHORT
        ranks.roll_call("save()")
    except CheckpointError as error:
        told.append(str(error))
    if number == 0:
        distributed.barrier()
    ranks.patience = LONG
    try:
        ranks.roll_call(("save()", "restore()")[number])
    except CheckpointError as error:
        told.append(str(error))
    ranks.roll_call("save()")
    told.append("goes on")
    (folder / f"told.{number}").write_text(json.dumps(told))


if __name__ == "__main__":
    place = Path(sys.argv[1])
    sys.exit(any(wait(*(fork(rank, number, place) for number in range(2)))))

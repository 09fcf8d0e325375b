"""Two ranks of a real gloo group at a barrier: together, and when one of them does not come.

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
    """Meet the other rank; then rank 1 stays away until rank 0 has given up, and both meet in the training again."""
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=number, world_size=2)
    ranks, told = Ranks(), []
    ranks.barrier(LONG)
    told.append("met")
    if number == 0:
        try:
            ranks.barrier(SHORT)
        except CheckpointError as error:
            told.append(str(error))
    distributed.barrier()
    told.append("goes on")
    (folder / f"told.{number}").write_text(json.dumps(told))


if __name__ == "__main__":
    place = Path(sys.argv[1])
    sys.exit(any(wait(*(fork(rank, number, place) for number in range(2)))))

"""The agent on GPUs of some MiB in place of as many GiB: ``scaled_agent.py`` with its arguments.

A process that was not measured may keep 2 MiB there, and a context may grow by 64 KiB.
"""

from __future__ import annotations

from cadenza.sidecar.agent.main import main
from cadenza.sidecar.agent.telemetry import gpu_watch
from cadenza.sidecar.agent.turns import gpu_room

SCALE = 1 << 10

gpu_watch.UNMEASURED_BYTES //= SCALE
gpu_room.SLACK_BYTES //= SCALE

if __name__ == "__main__":
    main()

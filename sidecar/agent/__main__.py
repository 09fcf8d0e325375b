"""``python -m cadenza.sidecar.agent`` is ``cadenza-agent``."""

from __future__ import annotations

from cadenza.sidecar.agent.main import main

if __name__ == "__main__":
    main()

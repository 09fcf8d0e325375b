"""``python -m cadenza.slurm_plugin.cli``, the same as ``cadenza``."""

from __future__ import annotations

from cadenza.slurm_plugin.cli.main import main

main(prog_name="cadenza")

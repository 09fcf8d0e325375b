"""A machine whose squeue and scontrol give recorded answers of Slurm 26.05, and write down how they were called."""

from __future__ import annotations

import json
import os
from pathlib import Path

HERE = Path(__file__).resolve().parent
QUEUE = (HERE / "squeue_26_05.json").read_text()
NODES = (HERE / "scontrol_node_live_26_05.json").read_text()
AT_S = 1795600818.0
"""The moment of both answers."""
FORMATS = "data_parser/v0.0.44\ndata_parser/v0.0.45\n"
CONFIG = "Configuration data as of now\nClusterName             = w5plain\nPrivateData             = {private}\n"


def seen_by(user: str) -> str:
    """Return the queue as a user sees it with PrivateData=jobs: Slurm leaves the jobs of others out."""
    answer = json.loads(QUEUE)
    answer["jobs"] = [job for job in answer["jobs"] if job["user_name"] == user]
    return json.dumps(answer)


class FakeSlurm:
    """Commands in a folder of their own that print files; ``calls``: the command lines so far."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        script = f'#!/bin/sh\necho "${{0##*/}} $*" >> {folder}/calls\n'
        for name, body in (
            ("squeue", f"exec cat {folder}/queue"),
            (
                "scontrol",
                f'case "$2" in --json=list) f=formats;; config) f=config;; *) f=nodes;; esac; exec cat {folder}/$f',
            ),
        ):
            (folder / name).write_text(script + body + "\n")
            (folder / name).chmod(0o755)
        self.answer()

    def answer(self, queue: str = QUEUE, nodes: str = NODES, private: str = "none") -> None:
        """Set the answers from now on."""
        texts = {"queue": queue, "nodes": nodes, "config": CONFIG.format(private=private), "formats": FORMATS}
        for name, text in texts.items():
            (self.folder / name).write_text(text)

    @property
    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()

    @property
    def path(self) -> str:
        """Return a PATH with nothing but these commands and those that they need."""
        return os.pathsep.join((str(self.folder), "/usr/bin", "/bin"))

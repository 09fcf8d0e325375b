"""``cadenza doctor --gpu`` on a site's prolog and epilog, as common ones are written."""

from __future__ import annotations

from pathlib import Path

import pytest

from cadenza.slurm_plugin.errors import SlurmUnavailable
from cadenza.slurm_plugin.site.node_scripts import examine_scripts, gather_scripts

EXAMPLES = Path(__file__).parents[2] / "examples" / "site"


def findings(config: dict[str, str]) -> list[tuple[str, str, str]]:
    return [(one.level, one.about, one.observation) for one in examine_scripts(gather_scripts(lambda: config))]


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("pkill -KILL -u $SLURM_JOB_USER", "pkill"),
        ("squeue -h -o %i -u alice -w $HOSTNAME", "one node"),
        ("ps -o pid= | xargs -r kill -9", "kill -9"),
        ("nvidia-smi pmon -c 1", "context"),
        ("echo $SLURM_JOB_ID $SLURM_JOB_UID > /run/gpustat/$i", "metrics.md"),
        ("rm -f /var/run/dcgm-job-maps/$i", "other lanes"),
        ('[ "$SLURM_CPUS_ON_NODE" = "$(nproc)" ] && exclusive=1', "not alone"),
    ],
)
def test_a_host_wide_test_or_kill_is_named_with_its_line(tmp_path: Path, line: str, word: str) -> None:
    script = tmp_path / "epilog"
    script.write_text(f"#!/bin/sh\n# pkill is not used here\n{line}\n")
    found = findings({"Epilog": str(script), "Prolog": "(null)"})
    assert {(level, about) for level, about, _ in found} == {("WARN", "Epilog")}
    assert any(f"{script}:3: " in text and word in text for _, _, text in found)


def test_scripts_that_a_script_runs_are_read(tmp_path: Path) -> None:
    """As DeepOps does it: one program that runs all parts of a folder."""
    parts = tmp_path / "epilog.d"
    parts.mkdir()
    (parts / "40-lastuserjob").write_text("#!/bin/sh\nkillall -u alice\n")
    (parts / "60-loop").write_text(f"#!/bin/sh\n{tmp_path}/run-parts\n")
    (tmp_path / "run-parts").write_text(f"#!/bin/sh\nfor part in {parts}/*; do $part; done\n")
    ((level, about, text),) = findings({"Epilog[0]": f"{tmp_path}/run-parts"})
    assert (level, about) == ("WARN", "Epilog[0]")
    assert "40-lastuserjob:2: `killall`" in text


def test_safe_ones_and_programs_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\x7fELF\xff\xfe pkill")
    config = {"Prolog": str(tmp_path / "binary"), "Epilog": str(EXAMPLES / "epilog"), "TaskProlog": f"{tmp_path}/gone"}
    assert {(level, about) for level, about, _ in findings(config)} == {
        ("OK", "Prolog"), ("OK", "Epilog"), ("OK", "TaskProlog")
    }  # fmt: skip
    assert findings({"Epilog": str(EXAMPLES / "epilog-by-node")})[0][0] == "WARN"


def test_a_node_without_slurms_configuration_says_so() -> None:
    def absent() -> dict[str, str]:
        raise SlurmUnavailable("scontrol show config: no answer")

    (found,) = examine_scripts(gather_scripts(absent))
    assert (found.level, found.observation) == ("WARN", "scontrol show config: no answer")

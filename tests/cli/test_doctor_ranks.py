"""``cadenza doctor --gpu --ranks`` has a finding for each row of several ranks, and says why there are none."""

from __future__ import annotations

import sys
from pathlib import Path

from click.testing import CliRunner

from cadenza.slurm_plugin.cli.site.command import doctor
from cadenza.slurm_plugin.site.rank_rows import SCRIPT, try_ranks

ROWS = """
import json, sys
assert sys.argv[1:4] == ["--only", "R", "--json"]
rows = [dict(name=f"R {outcome}", outcome=outcome, why=why, figures={"NCCL_MiB": 958.25})
        for outcome, why in (("passed", ""), ("FAILED", "the losses differ"), ("not run", "needs 8 GPUs"))]
open(sys.argv[4], "w").write(json.dumps({"rows": rows}))
"""


def test_each_row_of_several_ranks_is_a_finding(tmp_path: Path) -> None:
    script = tmp_path / "rows.py"
    script.write_text(ROWS)
    passed, failed, missing = try_ranks(sys.executable, script)
    assert (passed.level, passed.about, passed.observation) == ("OK", "R passed", "passed; NCCL_MiB 958.2")
    assert (failed.level, "the losses differ" in failed.observation) == ("FAIL", True)
    assert (missing.level, "needs 8 GPUs" in missing.observation) == ("WARN", True)


def test_without_the_rows_or_their_result_it_says_so(tmp_path: Path) -> None:
    (tmp_path / "rows.py").write_text("raise SystemExit(3)")
    found = [*try_ranks(sys.executable, tmp_path / "none.py"), *try_ranks(sys.executable, tmp_path / "rows.py")]
    found += try_ranks(str(tmp_path / "no-python"), tmp_path / "rows.py")
    assert [one.level for one in found] == ["WARN"] * 3
    assert "no benchmarks" in found[0].observation
    assert "ended with 3" in found[1].observation
    assert SCRIPT.is_file()


def test_ranks_belong_to_a_gpu_host() -> None:
    done = CliRunner().invoke(doctor, ["--ranks"])
    assert (done.exit_code, "--ranks needs --gpu" in done.output) == (2, True)

"""The catalog of messages holds sentences that the policies really give."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "docs"))
import message_catalog


@pytest.fixture(scope="module")
def page() -> str:
    return message_catalog.page()


@pytest.mark.parametrize("title", message_catalog.PARTS)
def test_every_part_has_sentences(page: str, title: str):
    section = page.partition(f"## {title}\n")[2].partition("\n## ")[0]
    assert re.findall(r"^- \S.*", section, re.MULTILINE)


def test_sentences_are_those_of_the_source_without_docstrings_and_settings(page: str):
    assert "- its turn has come\n" in page
    assert 'observe-only: nothing is done until the mode is "apply"' in page
    assert "Managed partitions" not in page
    assert "Return" not in page

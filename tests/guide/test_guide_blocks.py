"""The guide has no block that is passed over, and no more steps than it promises."""

from __future__ import annotations

from pathlib import Path

import pytest
from guide_blocks import (
    BUILDER,
    CONTROLLER,
    EACH_HOST,
    EACH_MACHINE,
    HOSTS,
    OTHERS,
    OUTPUT,
    ROOT,
    USER,
    Block,
    blocks_of,
    by_wheels,
)
from plain_site import BlockFailedError, PlainSite

PAGES = [ROOT / "docs" / f"{name}.md" for name in ("install", "second-lane", "maintenance", "wheels")]
MACHINES = {CONTROLLER, EACH_HOST, USER, BUILDER, *HOSTS, *EACH_MACHINE, *OTHERS}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_block_names_its_machine_or_file(page: Path) -> None:
    blocks = blocks_of(page)
    assert len(blocks) == page.read_text().count("\n```") / 2
    assert [str(block) for block in blocks if block.language == "bash" and block.title not in MACHINES] == []
    assert [str(block) for block in blocks if not block.title] == []
    assert all(block.language == "text" for block in blocks if block.title == OUTPUT)


def test_the_guide_has_eight_steps_for_a_site_and_two_for_a_host() -> None:
    steps = [block for block in blocks_of(PAGES[0]) if block.language == "bash"]
    hosts = sum(block.title == EACH_HOST for block in steps)
    assert (len(steps) - hosts, hosts) == (8, 2)
    assert "Eight steps for a site and two a host" in PAGES[0].read_text()


def test_wheels_take_the_place_of_packages_and_of_nothing_else() -> None:
    text = "".join(block.text for block in by_wheels(PAGES[0], PAGES[-1]))
    assert "cadenza{,-agent" not in text
    assert "make debs" not in text
    assert {"cadenza plan --partition shared", "cadenza doctor", "make wheels"} <= set(text.splitlines())


@pytest.mark.parametrize(
    ("text", "fails"), [("true\n", False), ("true\nfalse\ntrue\n", True), ("false | true\n", True)]
)
def test_a_block_that_fails_is_an_error(tmp_path: Path, text: str, fails: bool) -> None:
    page = tmp_path / "page.md"
    page.write_text(f'# A page\n\n```bash title="{BUILDER}"\n{text}```\n')
    (block,) = blocks_of(page)
    site = PlainSite("none", tmp_path)
    if fails:
        with pytest.raises(BlockFailedError, match=r"page\.md:1 build machine ended with exit code 1"):
            site.execute(block)
    else:
        assert site.execute(block) == ""


def test_a_block_runs_on_each_host_or_on_one_machine() -> None:
    machines = [Block("p", 1, "bash", title, "").machines for title in (EACH_HOST, CONTROLLER, USER, "gpu1")]
    assert machines == [HOSTS, ("ctl",), ("ctl",), ("gpu1",)]

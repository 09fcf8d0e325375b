"""The configuration file: defaults that observe, errors that name the file and the key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from service_rig import make_keys, write_config

from cadenza.sidecar.agent_settings import ExpertTable
from cadenza.sidecar.agent_settings import load_settings as load_agent_settings
from cadenza.sidecar.config import DEFAULT_PATH, ConfigError
from cadenza.slurm_plugin.service import settings_reference
from cadenza.slurm_plugin.service.main import main
from cadenza.slurm_plugin.service.settings import (
    SPANK_WAIT_S,
    Settings,
    from_record,
    guard_settings,
    load_settings,
    sharing_settings,
    to_record,
)


def write(folder: Path, text: str, name: str = "cadenza.toml") -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults_observe_and_manage_nothing() -> None:
    settings = Settings()
    assert not settings.applies
    assert not sharing_settings(settings).place
    assert not guard_settings(settings).enforce
    assert not sharing_settings(settings).enforce
    assert guard_settings(settings).partitions == frozenset()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[service]\npol_s = 3\n", ("service.pol_s", "poll_s")),
        ("[servise]\npoll_s = 3\n", ("servise", "service")),
        ("[service]\nmode = 'aply'\n", ("service.mode", "aply")),
        ("[sharing]\nslice_s = 0\n", ("sharing.slice_s", "> 0")),
        ("[service]\nbind = '6820'\n", ("service.bind",)),
        ("[guard]\npartitions = 'gpu'\n", ("guard.partitions", "array")),
        ("[service]\npoll_s = = 1\n", ("not TOML", "line 2")),
        ("[expert]\nkill_switch = '/S'\n[service]\nstore = \"/a\\u0000\"\n", (":4: service.store", "printable line")),
        ("[guard]\npartitions = ['a', \"\\u001b[2J\"]\n", (":2: guard.partitions", "printable line")),
    ],
)
def test_errors_name_file_and_key(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_settings(path)
    assert str(path) in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_conf_d_is_merged_in_name_order(tmp_path: Path) -> None:
    path = write(tmp_path, "[service]\npoll_s = 5\nmode = 'apply'\n[guard]\npartitions = ['a']\n")
    write(tmp_path, "[service]\npoll_s = 7\n", "conf.d/20-b.toml")
    write(tmp_path, "[service]\npoll_s = 6\n[policy]\nplace = true\n", "conf.d/10-a.toml")
    settings = load_settings(path)
    assert settings.service.poll_s == 7
    assert sharing_settings(settings).places
    assert settings.guard.partitions == {"a"}


def test_error_in_conf_d_names_that_file(tmp_path: Path) -> None:
    path = write(tmp_path, "[service]\npoll_s = 5\n")
    extra = write(tmp_path, "[sharing]\nslice_s = -1\n", "conf.d/10-a.toml")
    with pytest.raises(ConfigError, match=str(extra)):
        load_settings(path)


def test_kill_switch_is_looked_up_each_time(tmp_path: Path) -> None:
    switch = tmp_path / "STOP"
    settings = load_settings(write(tmp_path, f"[expert]\nkill_switch = '{switch}'\n"))
    assert not guard_settings(settings).killed
    switch.touch()
    assert guard_settings(settings).killed


def test_every_key_has_a_meaning() -> None:
    assert all(row.doc and row.type for row in settings_reference.rows())


def test_a_site_has_at_most_forty_settings_and_those_for_experts_come_last() -> None:
    """A further one takes the place of another, is derived or measured, or is only for sites unlike others."""
    sections = [row.section for row in settings_reference.rows()]
    assert len(sections) - sections.count("expert") <= 40
    assert sections.index("expert") == len(sections) - sections.count("expert")


def test_the_service_and_the_agent_read_one_expert_table(tmp_path: Path) -> None:
    path = write(tmp_path, "[expert]\nheartbeat_s = 3\nmin_run_s = 1\n")
    assert load_settings(path).expert == load_agent_settings(path).expert == ExpertTable(heartbeat_s=3, min_run_s=1)
    write(tmp_path, "[agent]\nheartbeat_s = 3\n[expert]\nhartbeat_s = 3\n")
    for read in (load_settings, load_agent_settings):
        with pytest.raises(ConfigError) as caught:
            read(path)
        assert "cadenza.toml:2: unknown key agent.heartbeat_s; " in str(caught.value)
        assert "cadenza.toml:4: unknown key expert.hartbeat_s; did you mean heartbeat_s?" in str(caught.value)


def test_an_unmanaged_job_has_its_gpus_before_the_plugin_stops_waiting() -> None:
    plugin = (Path(__file__).resolve().parents[2] / "slurm_plugin/spank/cadenza.c").read_text(encoding="utf-8")
    assert f".wait_s = {SPANK_WAIT_S:g}}}" in plugin
    assert sharing_settings(Settings()).unmanaged_wait_s < SPANK_WAIT_S


def test_record_gives_the_same_settings() -> None:
    assert from_record(to_record(Settings())) == Settings()


@pytest.mark.skipif(DEFAULT_PATH.exists(), reason="Cadenza is installed on this machine")
def test_a_service_without_settings_ends_with_2_and_leaves_nothing_behind() -> None:
    store = Path(Settings().service.store).parent
    before = store.exists()
    done = CliRunner().invoke(main, [])
    assert done.exit_code == 2
    assert re.search(rf"^cadenzad: {DEFAULT_PATH} is missing: Cadenza is not set up here; ", done.stderr, re.MULTILINE)
    assert store.exists() == before


@pytest.mark.parametrize(("missing", "fault"), [("service.key_secret", "missing"), ("agents", "no agent's key there")])
def test_a_service_without_keys_ends_with_3_and_leaves_nothing_behind(tmp_path: Path, missing: str, fault: str) -> None:
    make_keys(tmp_path / "keys")
    (tmp_path / "keys" / missing).rename(tmp_path / "elsewhere")
    config = write_config(
        tmp_path, store=str(tmp_path / "state" / "cadenza.db"), jobs_socket=str(tmp_path / "run" / "s")
    )
    before = sorted(tmp_path.iterdir())
    done = CliRunner().invoke(main, ["--config", str(config)])
    assert done.exit_code == 3
    assert done.stderr.startswith(f"cadenzad: {tmp_path / 'keys' / missing}: {fault}; write ")
    assert sorted(tmp_path.iterdir()) == before

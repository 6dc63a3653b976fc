"""Configuration: file, settings over it, validation. What is wrong is an error that names the key and the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashrec.config.load import ConfigError, load_config
from flashrec.config.schema import Config


def test_no_file_means_defaults() -> None:
    assert load_config() == Config()


@pytest.mark.parametrize("text", ["", "# nothing\n", "{}", "detection: {}\n"])
def test_an_empty_file_means_defaults(text: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    assert load_config(path) == Config()


def test_settings_come_after_the_file_and_the_last_one_counts(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("spares: 3\ndetection: {dead_after_s: 4, suspect_after_s: 1.5}\n")
    config = load_config(path, ["detection.dead_after_s=4.5", "control.port=7", "detection.dead_after_s=5"])
    assert (config.spares, config.detection.dead_after_s, config.detection.suspect_after_s) == (3, 5, 1.5)
    assert config.control.port == 7


def test_off_is_a_word_and_true_is_not(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("fabric: {mpi: off}\n")
    assert load_config(path).fabric.mpi == load_config(settings=["fabric.mpi=off"]).fabric.mpi == "off"
    with pytest.raises(ConfigError, match="Expected `str`, got `bool`"):
        load_config(settings=["fabric.mpi=true"])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["detection.deadafter_s=3"], "unknown field `deadafter_s`"),
        (["nonsense=3"], "unknown field `nonsense`"),
        (["recovery.max_in_place=-1"], "max_in_place"),
        (["recovery.max_without_progress=0"], "max_without_progress"),
        (["control.port=65536"], "port"),
        (["detection.dead_after_s=0"], "dead_after_s"),
        (["detection.dead_after_s=many"], "dead_after_s"),
        (["recovery.spare_wait_s=.nan"], "spare_wait_s"),
        (["control.lease_s=.inf"], "lease_s"),
        (["output.follow=some"], "follow"),
        (["pool.name=a b"], "pool.name"),
        (["pool.name=a,b"], "pool.name"),
        ([f"pool.name={'x' * 64}"], "pool.name"),
        (["pool.tier=hot"], "pool.tier"),
        (["pool.max_swaps=-1"], "pool.max_swaps"),
        (["pool.wait_s=0"], "pool.wait_s"),
        (["detection.suspect_after_s=0.1"], "heartbeat_interval_s < suspect_after_s < dead_after_s"),
        (["detection.suspect_after_s=3"], "heartbeat_interval_s < suspect_after_s < dead_after_s"),
        (["control.lease_s=2"], "control.lease_s must be longer than detection.dead_after_s"),
        (["control.lease_s=5"], "detection.dead_after_s + detection.probed_patience_s"),
        (["detection.fabric_dead_after_s=1"], "suspect_after_s < fabric_dead_after_s"),
        (["detection.probe_timeout_s=1"], "probe_timeout_s < probe_interval_s"),
        (["detection.tick_interval_s=1"], "tick_interval_s < suspect_after_s"),
        (["spares"], "expected key=value"),
        (["=3"], "expected key=value"),
        (["spares.x.y=3", "spares.x=1", "spares.x.y=2"], "is a value, not a section"),
        (["spares=[1"], "not YAML"),
        (["spares=a: b: c"], "not YAML"),
    ],
)
def test_what_cannot_be_used_names_the_key(settings: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, settings)
    assert said in str(caught.value)


def test_an_unknown_key_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["detection.deadafter_s=3"])
    assert "detection.dead_after_s" in str(caught.value)
    assert "control.lease_s" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"detection: [", "is not YAML"),
        (b"\xff\xfe\x00", "is not YAML"),
        (b"- a list\n", "expected keys and values at the top, found a list"),
        (b"just words\n", "found a str"),
        (b"detection: {deadafter_s: 1}\n", "c.yaml"),
        (b"!!python/object/apply:os.system ['true']\n", "is not YAML"),
    ],
)
def test_a_bad_file_is_named(text: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert said in str(caught.value)
    assert "c.yaml" in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*missing.yaml: No such file"):
        load_config(tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("settings", "reservation", "max_swaps"),
    [
        ([], "", 0),
        (["pool.max_swaps=3"], "", 0),
        (["pool.name=p", "pool.max_swaps=3"], "p", 3),
        (["pool.name=p", "pool.max_swaps=0"], "p", 0),
        (["pool.name=p", "pool.tier=warm"], "", 0),
        (["pool.tier=pool", "pool.max_swaps=3"], "flashspare", 3),
        (["pool.tier=pool", "pool.name=p", "pool.max_swaps=3"], "p", 3),
    ],
)
def test_the_pool_that_is_used(settings: list[str], reservation: str, max_swaps: int) -> None:
    pool = load_config(None, settings).pool
    assert (pool.reservation, pool.limits().max_swaps) == (reservation, max_swaps)


def test_without_a_limit_of_its_own_a_job_takes_what_the_site_allows() -> None:
    assert load_config(None, ["pool.name=p"]).pool.limits().max_swaps >= 10**6

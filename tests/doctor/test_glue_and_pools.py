"""The Lua filters, the epilog and the pool: each way to have forgotten one of them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from flashrec.admin.doctor.facts import Facts
from flashrec.admin.doctor.finding import Finding, Status
from flashrec.admin.doctor.glue import check_glue, missing_hooks
from flashrec.admin.doctor.pools import check_pool, wanted_pool
from flashrec.admin.pool_sync import PoolError
from tests.doctor.builders import HEALTHY, NOTHING, UNASKED, by_name, facts, line, node, not_ok, reservation

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "slurm_plugin/lua"


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    """The folder of slurm.conf, with our example filters and an epilog."""
    for name in ("cli_filter.lua", "job_submit.lua"):
        (tmp_path / name).write_text((EXAMPLES / f"{name}.example").read_text())
    (tmp_path / "epilog").write_text("#!/bin/sh\nexec /usr/sbin/flashrec-epilog\n")
    return tmp_path


def look(conf: Path, has_pool: bool = True, arguments: tuple[str, ...] = (), **config: str) -> dict[str, Finding]:
    given = {"SLURM_CONF": str(conf / "slurm.conf"), "Epilog": str(conf / "epilog")} | config
    return by_name(check_glue(facts(given), line(*arguments), has_pool))


def test_examples_as_shipped_are_fine(conf: Path) -> None:
    assert not_ok(look(conf).values()) == []
    assert set(look(conf)) == {"lua.cli_filter", "lua.job_submit", "hooks.epilog"}


def test_without_a_pool_only_the_cli_filter_matters(conf: Path) -> None:
    assert set(look(conf, has_pool=False)) == {"lua.cli_filter"}


@pytest.mark.parametrize("value", ["(null)", "cli_filter/user_defaults"])
def test_no_cli_filter_costs_convenience(conf: Path, value: str) -> None:
    assert look(conf, CliFilterPlugins=value)["lua.cli_filter"].status is Status.WARN


def test_no_cli_filter_is_a_failure_if_the_plugin_is_told_to_rely_on_it(conf: Path) -> None:
    found = look(conf, arguments=("no_kill=cli_filter",), CliFilterPlugins="(null)")["lua.cli_filter"]
    assert found.status is Status.FAIL and "no_kill=cli_filter" in found.do


def test_no_job_submit_leaves_the_pool_open(conf: Path) -> None:
    assert look(conf, JobSubmitPlugins="(null)")["lua.job_submit"].status is Status.FAIL


@pytest.mark.parametrize("value", ["lua", "job_submit/lua", "throttle,lua"])
def test_ways_to_name_job_submit(conf: Path, value: str) -> None:
    assert look(conf, JobSubmitPlugins=value)["lua.job_submit"].status is Status.OK


@pytest.mark.parametrize("name", ["cli_filter", "job_submit"])
def test_script_that_does_not_call_ours(conf: Path, name: str) -> None:
    path = conf / f"{name}.lua"
    path.write_text("".join(f"-- {text}\n" for text in path.read_text().splitlines()))  # all of it is comment now
    found = look(conf)[f"lua.{name}"]
    assert found.status is Status.FAIL and f"{name}.lua.example" in found.do


def test_missing_cli_filter_stops_every_submission_here(conf: Path) -> None:
    (conf / "cli_filter.lua").unlink()
    assert look(conf)["lua.cli_filter"].status is Status.FAIL


def test_job_submit_that_only_the_controller_has_is_unknown_here(conf: Path) -> None:
    (conf / "job_submit.lua").unlink()
    found = look(conf)["lua.job_submit"]
    assert found.status is Status.UNKNOWN and "controller" in found.do


@pytest.mark.parametrize(
    ("epilog", "status"),
    [
        ("(null)", Status.WARN),
        ("{conf}/epilog", Status.OK),
        ("{conf}/flashrec-epilog", Status.OK),
        ("/no/flashrec-such/flashrec-epilog", Status.UNKNOWN),  # a node's, or a wrong path
        ("{conf}/other", Status.WARN),
        ("{conf}/only-on-nodes", Status.UNKNOWN),
    ],
)
def test_epilog(conf: Path, epilog: str, status: Status) -> None:
    for name in ("other", "flashrec-epilog"):
        (conf / name).write_text("#!/bin/sh\nexit 0\n")
    assert look(conf, Epilog=epilog.format(conf=conf))["hooks.epilog"].status is status


@pytest.mark.parametrize("argument", ["drain=user", "extend=10", "delay=5"])
def test_prolog_matters_where_an_argument_needs_it(conf: Path, argument: str) -> None:
    assert "hooks.prolog" not in look(conf, arguments=("drain=admin",))
    found = look(conf, arguments=(argument,), Prolog="(null)")["hooks.prolog"]
    assert found.status is Status.WARN and argument in found.what
    (conf / "flashrec-prolog").write_text("#!/bin/sh\n")
    assert look(conf, arguments=(argument,), Prolog=str(conf / "flashrec-prolog"))["hooks.prolog"].status is Status.OK


def test_hooks_by_a_pattern(conf: Path) -> None:
    assert look(conf, Epilog=f"{conf}/epi*")["hooks.epilog"].status is Status.OK


def test_node_without_a_hook_that_slurm_is_told_to_run(conf: Path) -> None:
    assert missing_hooks({"Prolog": "(null)", "Epilog[0]": str(conf / "epilog")}) == []
    (found,) = missing_hooks({"Prolog": "/no/such", "Epilog": f"{conf}/epilog,{conf}/lost*"})
    assert found.status is Status.FAIL and "drains it" in found.what
    assert "Prolog=/no/such" in found.what and f"Epilog={conf}/lost*" in found.what


def _shown(config: dict[str, str]) -> Facts:
    return msgspec.structs.replace(facts(), config=config)


def test_hooks_as_later_releases_show_them(conf: Path) -> None:
    """24.11 and 26.05 number them, and leave out what is not set."""
    given = {"SLURM_CONF": str(conf / "slurm.conf"), "Epilog[0]": "/bin/true", "Epilog[1]": str(conf / "epilog")}
    shown = {key: value for key, value in HEALTHY.items() if key != "Epilog"} | given
    found = by_name(check_glue(_shown(shown), None, True))
    assert found["hooks.epilog"].status is Status.OK
    del shown["Epilog[0]"], shown["Epilog[1]"]
    assert by_name(check_glue(_shown(shown), None, True))["hooks.epilog"].status is Status.WARN


def test_glue_that_could_not_be_asked_for_is_unknown() -> None:
    assert [found.status for found in check_glue(NOTHING, None, True)] == [Status.UNKNOWN]


# ---- pools


def pool(*arguments: str, **changes: object) -> dict[str, Finding]:
    given = facts(**changes)
    return by_name(check_pool(wanted_pool(line(*arguments), given), given))


def test_sound_pool_is_fine() -> None:
    assert not_ok(pool("pool=flashspare").values()) == []


def test_no_pool_at_all_is_fine() -> None:
    found = pool(nodes={"n1": node()}, reservations=())
    assert not_ok(found.values()) == []
    assert "no pool is set up" in found["pool.reservation"].what


@pytest.mark.parametrize("arguments", [("pool=flashspare",), ()])
def test_pool_that_was_set_up_but_has_no_reservation(arguments: tuple[str, ...]) -> None:
    """Named in plugstack.conf, or only by a node's feature."""
    found = pool(*arguments, reservations=())["pool.reservation"]
    assert found.status is Status.FAIL and "flashrec pool sync" in found.do


def test_other_names() -> None:
    held = reservation(name="extra")
    found = pool("pool=extra", "feature=hot", reservations=(held,), nodes={"n4": node("n4", features=("hot",))})
    assert not_ok(found.values()) == []
    assert pool("pool=extra")["pool.reservation"].status is Status.FAIL


def test_arguments_that_flashrec_pool_refuses_are_not_guessed() -> None:
    with pytest.raises(PoolError, match="size=many"):
        wanted_pool(line("pool=flashspare", "size=many"), facts())


def test_reservation_that_is_not_active() -> None:
    assert pool(reservations=(reservation(is_active=False),))["pool.reservation"].status is Status.FAIL


def test_pool_without_a_usable_node() -> None:
    down = node("n4", features=("flashspare",), states=frozenset({"DOWN"}))
    found = pool(nodes={"n4": down})
    assert found["pool.nodes"].status is Status.FAIL
    assert "n4 (DOWN)" in found["pool.nodes"].what
    assert found["pool.sync"].status is Status.WARN


def test_pool_with_one_bad_node_of_two() -> None:
    nodes = {
        "n3": node("n3", features=("flashspare",)),
        "n4": node("n4", features=("flashspare",), states=frozenset({"IDLE", "DRAIN"})),
    }
    found = pool(nodes=nodes, reservations=(reservation(nodes=("n3", "n4"), node_count=2),))
    assert found["pool.nodes"].status is Status.WARN
    assert "1 usable of 2" in found["pool.nodes"].what


def test_pool_that_is_smaller_than_wanted() -> None:
    assert "for a pool of 3" in pool("size=3")["pool.sync"].what


@pytest.mark.parametrize("fact", ["reservations", "nodes", "jobs"])
def test_pool_that_could_not_be_asked_for_is_unknown(fact: str) -> None:
    found = pool("pool=flashspare", **{fact: UNASKED})
    assert Status.UNKNOWN in {finding.status for finding in found.values()}
    assert Status.FAIL not in {finding.status for finding in found.values()}


def test_every_fact_missing_is_no_pool_found_but_unknown_if_one_is_named() -> None:
    named = wanted_pool(line("pool=flashspare"), NOTHING)
    assert [found.status for found in check_pool(named, NOTHING)] == [Status.UNKNOWN]
    assert msgspec.structs.fields(type(NOTHING))

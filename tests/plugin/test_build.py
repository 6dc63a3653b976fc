"""The plugin without a cluster: its unit tests, the same under sanitizers, what it exports, how it is installed."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.support.plugin import SOURCES, build_plugin, make

CONTRACT = SOURCES.parent / "docs/reference/plugin-contract.md"
UNITS = ("spec", "args", "cmdline", "option", "handover", "allocator", "task_env", "task_exit", "plugin", "fuzz target")


@pytest.mark.parametrize("target", ["check", "sanitize"])
def test_unit_tests(target: str, tmp_path: Path) -> None:
    said = make(target, f"BUILD={tmp_path}")
    assert re.findall(r"^ok   ([a-z_]+(?: target)?)", said, re.MULTILINE) == list(UNITS)


def test_a_failing_unit_test_fails_the_target(tmp_path: Path) -> None:
    cases = tmp_path / "specs.txt"
    cases.write_text("bad\tspares=1\n")
    with pytest.raises(AssertionError, match="is accepted"):
        make("check", f"BUILD={tmp_path}", f"TEST_CASES={cases}")


def _symbols(*options: str) -> set[str]:
    done = subprocess.run(["nm", "-D", *options, str(build_plugin())], capture_output=True, text=True, check=True)
    return {line.split()[-1].partition("@")[0] for line in done.stdout.splitlines()}


def test_only_what_slurm_looks_for_is_exported() -> None:
    assert _symbols("--defined-only") == {
        "plugin_name", "plugin_type", "plugin_version", "spank_plugin_version", "slurm_spank_init",
        "slurm_spank_init_post_opt", "slurm_spank_user_init", "slurm_spank_task_exit", "flashrec_contract",
    }  # fmt: skip


def test_it_needs_nothing_but_slurm_and_the_c_library() -> None:
    wanted = {name for name in _symbols("--undefined-only") if name.startswith(("slurm_", "spank_"))}
    assert wanted == {
        "spank_context", "spank_option_register", "spank_get_item", "spank_getenv", "spank_setenv",
        "spank_job_control_setenv", "slurm_error", "slurm_verbose",
    }  # fmt: skip
    done = subprocess.run(["readelf", "-d", str(build_plugin())], capture_output=True, text=True, check=True)
    assert re.findall(r"NEEDED.*\[(.*)\]", done.stdout) == ["libc.so.6"]


def test_hardening() -> None:
    done = subprocess.run(["readelf", "-lWd", str(build_plugin())], capture_output=True, text=True, check=True)
    assert "GNU_RELRO" in done.stdout
    assert "BIND_NOW" in done.stdout
    assert re.search(r"GNU_STACK.*RW ", done.stdout)
    assert "__stack_chk_fail" in _symbols("--undefined-only")


def test_install_and_uninstall(tmp_path: Path) -> None:
    build, root = tmp_path / "build", tmp_path / "root"
    folders = (f"BUILD={build}", f"DESTDIR={root}", "PLUGINDIR=/usr/lib64/slurm", "SYSCONFDIR=/etc/slurm")
    make("install", *folders)
    plugin = root / "usr/lib64/slurm/flashrecovery.so"
    conf = root / "etc/slurm/plugstack.conf.d/flashrecovery.conf"
    assert plugin.read_bytes() == (build / "flashrecovery.so").read_bytes()
    assert plugin.stat().st_mode & 0o777 == 0o644
    lines = [line for line in conf.read_text().splitlines() if not line.startswith("#")]
    assert lines == ["optional flashrecovery.so"]

    conf.write_text("optional flashrecovery.so pool=ours\n")
    assert f"kept {conf}" in make("install", *folders)
    assert "pool=ours" in conf.read_text()

    make("uninstall", *folders)
    assert not plugin.exists()


def test_grammar_of_the_message_is_that_of_the_contract() -> None:
    """Both name the same keys and tiers."""
    page = CONTRACT.read_text()
    grammar = re.search(r'FLASHREC_SPEC_GRAMMAR[\\\s]+((?:"[^"]*"[\\\s]*)+)', (SOURCES / "spank/spec.h").read_text())
    assert grammar
    message = "".join(re.findall(r'"([^"]*)"', grammar.group(1)))
    items = re.search(r"^    item  = (.*)$", page, re.MULTILINE)
    tiers = re.search(r"^    TIER  = (.*)$", page, re.MULTILINE)
    assert items and tiers
    keys = re.findall(r'"([a-z-]+)="', items.group(1))
    assert keys == re.findall(r"([a-z-]+)=[A-Za-z]", message.partition("ITEM one of")[2])
    assert f"tier={'|'.join(re.findall('[a-z]+', tiers.group(1)))}," in message


def test_environment_of_the_contract() -> None:
    names = set(re.findall(r'"(FLASHREC_[A-Z_]+)"', (SOURCES / "spank/flashrec.h").read_text()))
    pages = CONTRACT.read_text() + (CONTRACT.parent / "environment.md").read_text()
    assert names and all(f"`{name}" in pages for name in names), names


def test_plugin_knows_every_argument_of_the_contract() -> None:
    """Else it would call one unknown that another part of the suite reads."""
    table = CONTRACT.read_text().partition("## Arguments in plugstack.conf")[2].partition("\n## ")[0]
    documented = {
        key
        for line in table.splitlines()
        if line.startswith("| `")
        for key in re.findall(r"`([a-z_]+)=", line.split("|")[1])
    }
    known = set(re.findall(r'"([a-z_]+)=', (SOURCES / "spank/args.c").read_text()))
    assert documented == known

"""The helper process with a made-up pyslurm that is missing, dies, hangs, prints: then the command line answers."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flashrec.slurm.choice import make_scheduler
from flashrec.slurm.cli import CliScheduler
from flashrec.slurm.pyslurm_client import PyslurmScheduler
from flashrec.slurm.scheduler import SlurmError, SlurmUnavailable

FAKE = """
import os, sys, time
print("a library prints to standard output")
class RPCError(Exception): pass
class Thing:
    def __init__(self, *args, **fields):
        self.__dict__.update(fields)
    def __getattr__(self, name):
        return None
class Node(Thing):
    def modify(self, changes):
        raise RPCError("Invalid node state specified")
class Jobs: pass
class Job(Thing): pass
class JobSubmitDescription(Thing): pass
class Nodes:
    @staticmethod
    def load():
        {load}
        fields = dict(name="n1", state="IDLE+DRAIN", total_cpus=8, real_memory=100, reason="from pyslurm")
        return {{"n1": Node(**fields)}}
"""
FROM_COMMAND = """#!/bin/sh
cat <<'END'
{"nodes": [{"name": "n1", "address": "", "state": ["IDLE"], "features": [], "active_features": [], "partitions": [],
 "reason": "from scontrol", "reason_set_by_user": "", "reason_changed_at": 0, "comment": "", "gres": "", "version": "",
 "cpus": 1, "alloc_cpus": 0, "real_memory": 1, "boot_time": 0}]}
END
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make pyslurm.Nodes.load run this statement first; scontrol answers as well."""
    command = tmp_path / "scontrol"
    command.write_text(FROM_COMMAND)
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.getcwd()}")

    def make(load: str = "pass") -> None:
        (tmp_path / "pyslurm.py").write_text(FAKE.format(load=load))

    return make


def play(program: Callable[[PyslurmScheduler], Any], timeout_s: float = 20.0) -> Any:
    async def run() -> Any:
        scheduler = PyslurmScheduler(timeout_s)
        try:
            return await program(scheduler)
        finally:
            await scheduler.close()

    return asyncio.run(asyncio.wait_for(run(), 60))


def test_pyslurm_answers_and_what_libraries_print_is_no_answer(fake: Callable[[str], None]) -> None:
    fake()

    async def program(scheduler: PyslurmScheduler) -> None:
        for _ in range(2):
            (node,) = (await scheduler.nodes(["n1"])).values()
            assert (node.reason, node.states, node.num_cpus) == ("from pyslurm", {"IDLE", "DRAIN"}, 8)
        with pytest.raises(SlurmError, match="no node n2"):
            await scheduler.nodes(["n2"])
        with pytest.raises(SlurmError, match="Invalid node state") as caught:
            await scheduler.undrain("n1")
        assert not isinstance(caught.value, SlurmUnavailable)
        assert scheduler.uses_pyslurm

    play(program)


@pytest.mark.parametrize(
    "load",
    ["os._exit(3)", "os.kill(os.getpid(), 11)", "os.write(3, b'no\\n') or time.sleep(60)", "sys.exit(1)"],
    ids=["exits", "crashes", "nonsense", "leaves"],
)
def test_when_the_helper_dies_the_command_line_takes_over_and_says_so_once(
    load: str, fake: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    fake(load)

    async def program(scheduler: PyslurmScheduler) -> None:
        for _ in range(2):
            assert (await scheduler.nodes(["n1"]))["n1"].reason == "from scontrol"
        assert not scheduler.uses_pyslurm

    with caplog.at_level(logging.WARNING):
        play(program)
    assert len([record for record in caplog.records if "pyslurm is not used any more" in record.message]) == 1


def test_without_pyslurm_the_command_line_answers(fake: Callable[[str], None], tmp_path: Path) -> None:
    (tmp_path / "pyslurm.py").write_text("import os, sys\nsys.stderr.write('fatal: no slurm.conf')\nos._exit(1)\n")

    async def program(scheduler: PyslurmScheduler) -> None:
        assert (await scheduler.nodes(["n1"]))["n1"].reason == "from scontrol"

    play(program)


def test_a_helper_that_hangs_is_given_up_and_ended(fake: Callable[[str], None], tmp_path: Path) -> None:
    fake(f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())) and time.sleep(300)")

    async def program(scheduler: PyslurmScheduler) -> None:
        with pytest.raises(SlurmUnavailable, match="pyslurm did not answer within 5 s"):
            await scheduler.nodes(["n1"])
        stat = Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")
        assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] in "ZX"
        assert (await scheduler.nodes(["n1"]))["n1"].reason == "from scontrol"

    play(program, timeout_s=5)


def test_what_pyslurm_cannot_read_the_command_line_answers(
    fake: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    """A user's job with a name that is not UTF-8 makes pyslurm fail on all jobs."""
    fake("b'\\xff'.decode()")

    async def program(scheduler: PyslurmScheduler) -> None:
        for _ in range(2):
            assert (await scheduler.nodes(["n1"]))["n1"].reason == "from scontrol"
        assert scheduler.uses_pyslurm

    with caplog.at_level(logging.WARNING):
        play(program)
    assert len([record for record in caplog.records if "cannot answer all questions" in record.message]) == 1


def test_an_outage_is_no_reason_to_give_pyslurm_up(fake: Callable[[str], None]) -> None:
    fake("raise RPCError('Unable to contact slurm controller (connect failure)')")

    async def program(scheduler: PyslurmScheduler) -> None:
        for _ in range(2):
            with pytest.raises(SlurmUnavailable, match="Unable to contact"):
                await scheduler.nodes()
        assert scheduler.uses_pyslurm

    play(program)


def test_the_sites_choice() -> None:
    assert type(make_scheduler({})) is type(make_scheduler({"FLASHREC_SLURM": "cli"})) is CliScheduler
    assert isinstance(make_scheduler({"FLASHREC_SLURM": "pyslurm"}), PyslurmScheduler)
    with pytest.raises(ValueError, match="use cli or pyslurm"):
        make_scheduler({"FLASHREC_SLURM": "rest"})


def test_importing_our_side_imports_no_pyslurm() -> None:
    assert "pyslurm" not in sys.modules

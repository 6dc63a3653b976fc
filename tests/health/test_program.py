"""The health program over a Slurm of the test's own that remembers nodes and can be away, slow or contrary."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flashrec.admin.health import program, reason
from flashrec.admin.health.program import Run
from flashrec.admin.health.state import OnlyOne, State, read, write
from flashrec.health.checkfile import parse
from flashrec.slurm.scheduler import NodeInfo, SlurmError, SlurmUnavailable
from tests.health.support import CheckDir, needs_root
from tests.health.test_policy import node


class FakeSlurm:
    """Nodes n1.. of one cluster. before: called with the name of each question."""

    def __init__(self, num_nodes: int = 3) -> None:
        self.known = {f"n{i}": node(f"n{i}", since=None) for i in range(1, num_nodes + 1)}
        self.asked: list[str] = []
        self.away = self.hangs = self.refuses = False
        self.clock = itertools.count(1)
        self.max_seen = 0

    async def _answer(self, question: str) -> None:
        self.asked.append(question)
        await asyncio.sleep(0)
        if self.hangs:
            await asyncio.Event().wait()
        if self.away:
            raise SlurmUnavailable("no controller")
        if self.refuses:
            raise SlurmError("Invalid user id")

    async def nodes(self, names: Sequence[str] | None = None) -> dict[str, NodeInfo]:
        await self._answer("nodes")
        return dict(self.known) if names is None else {name: self.known[name] for name in names}

    async def drain(self, name: str, text: str) -> None:
        await self._answer(f"drain {name}")
        self.set(name, states=self.known[name].states | {"DRAIN"}, reason=text, reason_time=float(next(self.clock)))

    async def undrain(self, name: str) -> None:
        await self._answer(f"undrain {name}")
        self.set(name, states=self.known[name].states - {"DRAIN"}, reason="")

    def set(self, name: str, **changes: Any) -> None:
        self.known[name] = msgspec.structs.replace(self.known[name], **changes)

    @property
    def drained(self) -> list[str]:
        return [name for name, node in self.known.items() if "DRAIN" in node.states]


class Site:
    """A check file with one check, `disk`, whose verdict the test sets; each node has a state file of its own."""

    def __init__(self, folder: Path, slurm: FakeSlurm) -> None:
        self.folder, self.slurm = folder, slurm
        self.checks = CheckDir(folder / "checks")
        self.settings = {"fail_runs": 1, "ok_runs": 1, "max_drained": 1, "spread_s": 0, "slurm_timeout_s": 5}
        self.lines = ["* || disk"]
        self.said: list[str] = []
        self.good()

    def bad(self) -> None:
        self.checks.says("disk", "fail", "it is broken")

    def good(self) -> None:
        self.checks.says("disk")

    def text(self, name: str = "n1") -> str:
        settings = {"check_dir": self.checks.folder, "state_file": self.state_file(name), **self.settings}
        return "\n".join([*(f"{key} = {value}" for key, value in settings.items()), *self.lines])

    def state_file(self, name: str = "n1") -> Path:
        return self.folder / f"{name}.json"

    def run_of(self, name: str = "n1") -> Run:
        plan = parse(self.text(name), "test.conf")
        return Run(name, plan, self.slurm, lambda _, text: self.said.append(text), settle_s=0.05)  # type: ignore[arg-type]

    def run(self, name: str = "n1", times: int = 1) -> None:
        for _ in range(times):
            asyncio.run(self.run_of(name).run())

    def run_all(self) -> None:
        async def run() -> None:
            await asyncio.gather(*(self.run_of(name).run() for name in self.slurm.known))

        asyncio.run(run())


@pytest.fixture
def slurm() -> FakeSlurm:
    return FakeSlurm()


@pytest.fixture
def site(tmp_path: Path, slurm: FakeSlurm) -> Site:
    return Site(tmp_path, slurm)


def test_from_good_to_bad_to_good(site: Site, slurm: FakeSlurm) -> None:
    site.settings |= {"fail_runs": 2, "ok_runs": 2}
    site.run(times=3)
    assert slurm.asked == ["nodes"]  # only the first run had to ask
    site.bad()
    site.run()
    assert slurm.asked == ["nodes"]
    site.run()
    assert slurm.drained == ["n1"]
    assert reason.is_ours("flashrec-health", slurm.known["n1"].reason)
    assert "disk: it is broken" in slurm.known["n1"].reason
    site.good()
    site.run()
    assert slurm.drained == ["n1"]
    site.run()
    assert slurm.drained == []
    slurm.asked.clear()
    site.run(times=3)
    assert slurm.asked == []


def test_an_admins_drain_is_left_alone(site: Site, slurm: FakeSlurm) -> None:
    slurm.set("n1", states=frozenset({"IDLE", "DRAIN"}), reason="new power supply")
    site.bad()
    site.run(times=3)
    site.good()
    site.run(times=3)
    assert slurm.known["n1"].reason == "new power supply" and slurm.drained == ["n1"]


def test_a_reason_that_an_admin_changed_is_left_alone(site: Site, slurm: FakeSlurm) -> None:
    site.bad()
    site.run()
    slurm.set("n1", reason=slurm.known["n1"].reason + " - disk ordered")
    site.good()
    site.run(times=3)
    assert slurm.drained == ["n1"]
    assert not any(question.startswith("undrain") for question in slurm.asked)


def test_a_lost_state_file_does_not_lose_the_node(site: Site, slurm: FakeSlurm) -> None:
    site.bad()
    site.run()
    site.state_file().unlink()
    site.good()
    site.run()
    assert slurm.drained == []


def test_of_many_that_fail_at_once_max_drained_stay_drained(tmp_path: Path) -> None:
    slurm = FakeSlurm(12)
    site = Site(tmp_path, slurm)
    site.settings["max_drained"] = 2
    site.bad()
    site.run_all()
    assert len(slurm.drained) == 2
    for name in slurm.known:
        if name not in slurm.drained:
            site.run(name)
    assert len(slurm.drained) == 2


def test_away_or_contrary_slurm_changes_nothing(site: Site, slurm: FakeSlurm) -> None:
    site.bad()
    slurm.away = True
    site.run()
    assert slurm.drained == [] and "Slurm could not be asked, nothing is changed" in site.said[-1]
    slurm.away, slurm.refuses = False, True
    site.run()
    assert slurm.drained == [] and "Slurm refuses" in site.said[-1]
    slurm.refuses = False
    site.run()
    assert slurm.drained == ["n1"]


def test_a_hanging_slurm_is_not_waited_for(site: Site, slurm: FakeSlurm) -> None:
    site.settings["slurm_timeout_s"] = 0.3
    site.bad()
    slurm.hangs = True
    started = time.monotonic()
    site.run()
    assert time.monotonic() - started < 10
    assert "no answer within 0.3 s" in site.said[-1]


def test_a_controller_lost_after_the_drain_is_asked_again(tmp_path: Path) -> None:
    """n2 is drained already when it can be seen again that n1 was one too many."""

    class LostAfterDrain(FakeSlurm):
        async def drain(self, name: str, text: str) -> None:
            self.set("n2", states=frozenset({"IDLE", "DRAIN"}), reason="flashrec-health: x", reason_time=0.5)
            await super().drain(name, text)
            self.away = True

    slurm = LostAfterDrain()
    site = Site(tmp_path, slurm)
    site.bad()
    site.run()
    assert slurm.drained == ["n1", "n2"] and read(site.state_file()).must_recount
    slurm.away = False
    site.run()
    assert slurm.drained == ["n2"]


def test_a_drain_that_was_not_confirmed_is_not_forgotten(tmp_path: Path) -> None:
    """The command hung, but the controller did it."""

    class Silent(FakeSlurm):
        async def drain(self, name: str, text: str) -> None:
            await super().drain(name, text)
            raise SlurmUnavailable("no answer")

    slurm = Silent()
    site = Site(tmp_path, slurm)
    site.run()
    site.bad()
    site.run()
    assert slurm.drained == ["n1"]
    site.good()
    site.run()
    assert slurm.drained == []


def test_features_are_asked_for_only_if_needed(site: Site, slurm: FakeSlurm) -> None:
    site.lines = ["@a100 || disk"]
    site.bad()
    site.run()
    assert slurm.drained == []
    slurm.set("n1", features=("a100",))
    site.run()
    assert slurm.drained == ["n1"]


def test_without_features_nothing_is_known(site: Site, slurm: FakeSlurm) -> None:
    site.lines = ["@a100 || disk"]
    site.bad()
    slurm.away = True
    site.run()
    assert "unknown: disk: the features of this node are not known" in " ".join(site.said)


def test_no_state_no_drain(site: Site, slurm: FakeSlurm) -> None:
    """Where counts cannot be kept, every failure would be the first one or the last one."""
    site.bad()
    site.state_file().mkdir()
    with pytest.raises(OSError, match=r"n1\.json"):
        site.run()
    assert slurm.drained == []


# ---- the program around it


def conf(site: Site) -> Path:
    path = site.folder / "node-health.conf"
    path.write_text(site.text())
    return path


def ran(site: Site, capsys: pytest.CaptureFixture[str], config: Path | None = None, **env: str) -> str:
    path = config or conf(site)
    assert program.main(path, site.slurm, {"SLURMD_NODENAME": "n1", **env}) == 0  # type: ignore[arg-type]
    return capsys.readouterr().err


def test_the_program_says_what_it_does(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    assert "<7>ok (1 checks)" in ran(site, capsys)
    site.bad()
    said = ran(site, capsys)
    assert "<4>fail: disk: it is broken" in said
    assert "<3>drained: flashrec-health: disk: it is broken [" in said


def test_the_program_ends_well_whatever_is_wrong(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    site.bad()
    assert "there is no /nonexistent" in ran(site, capsys, Path("/nonexistent"))
    assert "SLURMD_NODENAME is not set" in ran(site, capsys, SLURMD_NODENAME="")
    site.lines = ["* || disk", "nonsense"]
    assert "nonsense" in ran(site, capsys)
    site.lines = ["* || disk", "* || no-such-check"]
    assert "there is no check no-such-check" in ran(site, capsys)
    site.lines = ["* || disk"]
    assert site.slurm.drained == [] and site.slurm.asked == []

    async def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(program, "run_checks", broken)
    assert "failed, RuntimeError: a fault of ours" in ran(site, capsys)


def test_a_second_run_beside_the_first_does_nothing(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.bad()
    first = OnlyOne(site.state_file())
    assert "an earlier run has not ended" in ran(site, capsys)
    assert site.slurm.asked == [] and not site.state_file().exists()
    first.close()
    ran(site, capsys)
    assert site.slurm.drained == ["n1"]


def test_the_program_has_a_limit_of_its_own(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "PROGRAM_LIMIT_S", 0.3)
    site.checks.add("disk", "sleep 600")
    started = time.monotonic()
    assert "gave up after 0.3 s" in ran(site, capsys)
    assert time.monotonic() - started < 15


@needs_root
def test_a_check_file_that_others_can_write_is_not_used(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    path = conf(site)
    path.chmod(0o666)
    site.bad()
    assert "is not used" in ran(site, capsys, path)
    path.chmod(0o644)
    os.chown(path, 65534, 65534)
    assert "belongs to user 65534" in ran(site, capsys, path)
    assert site.slurm.asked == []


def test_a_state_from_before_is_used(site: Site, slurm: FakeSlurm) -> None:
    site.settings["fail_runs"] = 5
    write(site.state_file(), State(fails=4, may_be_drained=False))
    site.bad()
    site.run()
    assert slurm.drained == ["n1"]

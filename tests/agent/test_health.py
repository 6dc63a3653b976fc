"""An agent that looks at its node: real check programs, a fake NVML module, and what is told of it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import flashrec
from flashrec.agent import checks
from flashrec.agent.health import HealthWatch
from flashrec.core.health import HealthRules
from flashrec.health import nvml

FAKE = Path(flashrec.__file__).parent / "testing/fake_nvml"
LIMIT_S = 40
CHECK = """#!/bin/sh
echo run >>{folder}/{name}.runs
[ -e {folder}/hang ] && exec sleep 600
if [ -e {folder}/{name}.bad ]; then s=fail r=broken; elif [ -e {folder}/{name}.blind ]; then s=unknown r='needs root'
else s=ok r=; fi
echo "{{\\"check\\": \\"{name}\\", \\"status\\": \\"$s\\", \\"reason\\": \\"$r\\"}}"
"""


class Node:
    """A node with two checks of its own: what is wrong with them are files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.told: list[tuple[str, tuple[str, ...]]] = []
        (folder / "checks").mkdir()
        for name in ("disk", "nic"):
            path = folder / "checks" / name
            path.write_text(CHECK.format(folder=folder, name=name))
            path.chmod(0o755)
        self.file = folder / "health.conf"
        self.file.write_text(f"check_dir = {folder / 'checks'}\n* || disk\n* || nic\n")

    def watch(self, **rules: Any) -> HealthWatch:
        fields: dict[str, Any] = {
            "enabled": True, "file": str(self.file), "only": ("disk", "nic"), "admit": ("disk",), "period_s": 0.2,
            "again_s": 0.05, "timeout_s": 20.0, "fail_after": 2, "well_after": 2, "gpu_period_s": 0.1,
        }  # fmt: skip
        return HealthWatch("n1", HealthRules(**(fields | rules)))

    def tell(self, state: str, reasons: tuple[str, ...]) -> None:
        self.told.append((state, reasons))

    async def told_that(self, state: str, count: int = 1) -> tuple[str, ...]:
        """The reasons of the newest word, once there are `count` of them and it is this."""
        while len(self.told) < count or self.told[-1][0] != state:
            await asyncio.sleep(0.005)
        assert len(self.told) == count, self.told
        return self.told[-1][1]

    def runs(self, name: str) -> int:
        path = self.folder / f"{name}.runs"
        return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    monkeypatch.setattr(nvml, "MODULE", "pynvml_that_is_not_installed")
    return Node(tmp_path)


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: Node) -> Iterator[Path]:
    """The folder of the fake driver."""
    monkeypatch.setattr(nvml, "MODULE", "pynvml")
    monkeypatch.syspath_prepend(str(FAKE))
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.setenv("FLASHREC_NODE", "n1")
    monkeypatch.setenv("FLASHREC_FAKE_NVML", str(tmp_path))
    yield tmp_path
    sys.modules.pop("pynvml", None)


def play(scene: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), LIMIT_S))


def test_the_first_result_is_told_and_then_only_changes(node: Node) -> None:
    async def scene() -> None:
        watch = node.watch(fail_after=4)
        watch.begin(node.tell)
        assert await node.told_that("well") == ()
        assert node.runs("nic") == 0, "what is not in `admit` is not waited for"
        while node.runs("nic") < 2:
            await asyncio.sleep(0.01)
        assert len(node.told) == 1
        (node.folder / "nic.bad").touch()
        before = node.runs("nic")
        assert await node.told_that("sick", 2) == ("nic: broken",)
        assert node.runs("nic") >= before + 3, "one failing look is not enough"
        (node.folder / "nic.bad").unlink()
        assert await node.told_that("well", 3) == ()
        watch.close()

    play(scene)


def test_what_is_bad_from_the_start_counts_at_once(node: Node) -> None:
    async def scene() -> None:
        (node.folder / "disk.bad").touch()
        watch = node.watch(fail_after=100, period_s=1000.0)
        watch.begin(node.tell)
        assert await node.told_that("sick") == ("disk: broken",)
        assert node.runs("disk") == 1
        watch.close()

    play(scene)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda node: (node.folder / "disk.blind").touch(), "disk: needs root"),
        (lambda node: node.file.unlink(), "cannot read"),
        (lambda node: node.file.write_text(f"check_dir = {node.folder / 'checks'}\n* || nic\n"), "has none of disk"),
        (lambda node: node.file.write_text(f"check_dir = {node.folder}/none\n* || disk\n"), "no such directory"),
        (lambda node: (node.folder / "hang").touch(), "disk: did not end within"),
    ],
)
def test_could_not_look_is_neither_well_nor_sick(node: Node, make: Callable[[Node], Any], reason: str) -> None:
    async def scene() -> None:
        make(node)
        watch = node.watch(only=("disk",), timeout_s=1.0)
        watch.begin(node.tell)
        assert any(reason in said for said in await node.told_that("unknown"))
        watch.close()

    play(scene)


def test_a_check_file_that_comes_later_is_used(node: Node) -> None:
    async def scene() -> None:
        text = node.file.read_text()
        node.file.unlink()
        watch = node.watch()
        watch.begin(node.tell)
        await node.told_that("unknown")
        node.file.write_text(text)
        await node.told_that("well", 2)
        watch.close()

    play(scene)


def test_the_loop_goes_on_while_a_check_hangs(node: Node) -> None:
    async def scene() -> None:
        (node.folder / "hang").touch()
        watch = node.watch()
        watch.begin(node.tell)
        while not node.runs("disk"):
            await asyncio.sleep(0.01)
        turns = 0
        for _ in range(20):
            await asyncio.sleep(0.01)
            turns += 1
        assert turns == 20 and not node.told
        watch.close()

    play(scene)


def test_a_check_file_on_a_dead_file_server_holds_up_nobody(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe that nobody writes to: to open it hangs, as a file on such a server does."""

    async def scene() -> None:
        monkeypatch.setattr(checks, "GRACE_S", 0.0)
        node.file.unlink()
        os.mkfifo(node.file)
        watch = node.watch(timeout_s=0.5)
        began = asyncio.get_running_loop().time()
        watch.begin(node.tell)
        turns = 0
        while not node.told:
            await asyncio.sleep(0.01)
            turns += 1
        assert turns > 5 and asyncio.get_running_loop().time() - began > 0.4
        assert any("does a file system hang?" in reason for reason in await node.told_that("unknown"))
        threads = sum(thread.name == "flashrec-checks" for thread in threading.enumerate())
        await asyncio.sleep(0.5)
        assert sum(thread.name == "flashrec-checks" for thread in threading.enumerate()) == threads == 1
        with node.file.open("w") as writer:
            writer.write("nonsense")
        watch.close()

    play(scene)


def test_a_new_life_is_told_anew_and_a_former_one_not_any_more(node: Node) -> None:
    async def scene() -> None:
        watch = node.watch(period_s=1000.0, well_after=3)
        (node.folder / "disk.bad").touch()
        watch.begin(node.tell)
        await node.told_that("sick")
        watch.end()
        (node.folder / "disk.bad").unlink()
        again: list[str] = []
        watch.begin(lambda state, _: again.append(state))
        while not again:
            await asyncio.sleep(0.01)
        assert again == ["sick"], "one good look does not make it well"
        assert len(node.told) == 1
        watch.close()

    play(scene)


def test_an_xid_makes_the_node_sick_within_a_second(node: Node, gpus: Path) -> None:
    """No check is due for a long time: NVML tells."""

    async def scene() -> None:
        watch = node.watch(period_s=1000.0, gpu_period_s=1000.0)
        watch.begin(node.tell)
        await node.told_that("well")
        began = time.monotonic()
        (gpus / "n1.new").write_text("1 79")
        (gpus / "n1.new").rename(gpus / "n1.xid")
        assert await node.told_that("sick", 2) == (
            "gpu 1 Xid 79: it has fallen off the bus; it needs a reset, a reboot or a repair",
        )
        assert time.monotonic() - began < 10
        assert not (gpus / "n1.xid").exists(), "the driver has told it"
        watch.close()

    play(scene)


def test_a_gpu_that_is_lost_from_the_start(node: Node, gpus: Path) -> None:
    async def scene() -> None:
        (gpus / "n1.json").write_text(json.dumps([{}, {"lost": True}]))
        watch = node.watch()
        watch.begin(node.tell)
        (reason,) = await node.told_that("sick")
        assert reason == "gpu 1: GPU is lost: the node needs a GPU reset or a reboot"
        watch.close()

    play(scene)


def test_a_driver_that_hangs_holds_up_nobody(node: Node, gpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first result comes without it, and it is never taken for an answer."""

    async def scene() -> None:
        hang = threading.Event()
        monkeypatch.setattr(nvml.load(), "nvmlInit", lambda: hang.wait(60))
        watch = node.watch(timeout_s=0.3, only=("disk",))
        watch.begin(node.tell)
        await node.told_that("well")
        while not watch._gpus.overdue(0.3):
            await asyncio.sleep(0.01)
        (found,) = watch._gpus.overdue(0.3)
        assert found.status == "unknown" and "NVML has not answered" in found.reason
        while node.runs("disk") < 4:
            await asyncio.sleep(0.01)
        assert len(node.told) == 1
        watch.close()
        hang.set()

    play(scene)


def test_a_thread_that_ends_badly_is_said(
    node: Node, gpus: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene() -> None:
        monkeypatch.setattr(nvml.load(), "nvmlDeviceGetUUID", lambda _: 1 / 0)
        watch = node.watch()
        watch.begin(node.tell)
        await node.told_that("well")
        watch.close()

    play(scene)
    assert "GPUs are not watched" in caplog.text and "ZeroDivisionError" in caplog.text


def test_checks_end_with_the_life(node: Node) -> None:
    async def scene() -> None:
        (node.folder / "hang").touch()
        node.file.write_text(node.file.read_text().replace("||", "|| timeout_s=50"))
        watch = node.watch(timeout_s=1000.0)
        watch.begin(node.tell)
        while not any("sleep 600" in line for line in _children()):
            await asyncio.sleep(0.01)
        watch.close()
        while any("sleep 600" in line for line in _children()):
            await asyncio.sleep(0.01)

    play(scene)


def _children() -> list[str]:
    found = []
    lists = [path.read_text() for path in Path("/proc/self/task").glob("*/children")]  # of each thread
    for pid in " ".join(lists).split():
        try:
            found.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            pass
    return found

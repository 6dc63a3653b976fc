"""Stacks of real processes that do not answer any more, in each of the three ways."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flashrec.agent import stacks
from flashrec.agent.process import state_of

SCRIPT = """
import ctypes, os, signal, sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from flashrec.runtime import stacks
print(stacks.register(Path(sys.argv[2])), flush=True)
def forward():
    print("there", flush=True)
    if sys.argv[1] == "lock":
        ctypes.PyDLL(None).usleep(60_000_000)
    elif sys.argv[1] == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif sys.argv[1] == "reset":
        signal.signal(stacks.STACKS_SIGNAL, signal.SIG_DFL)
        print("reset", flush=True)
    time.sleep(60)
forward()
"""
ROOT = Path(__file__).parents[2]
Hang = Callable[[str], tuple[int, int, Path]]


@pytest.fixture
def hang(tmp_path: Path) -> Iterator[Hang]:
    """Start a process that hangs: its pid, its signal, its file."""
    processes = []

    def start(kind: str) -> tuple[int, int, Path]:
        path = tmp_path / "stacks"
        script = SCRIPT.format(root=str(ROOT))
        argv = [sys.executable, "-S", "-c", _without_torch(script), kind, str(path)]
        processes.append(subprocess.Popen(argv, stdout=subprocess.PIPE, text=True))
        words = [processes[-1].stdout.readline().strip() for _ in range(3 if kind == "reset" else 2)]
        assert words[1] == "there"
        while kind == "stopped" and state_of(processes[-1].pid) != "T":
            time.sleep(0.005)
        return processes[-1].pid, int(words[0]), path

    yield start
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


def _without_torch(script: str) -> str:
    """The module under test alone: its package would load torch, which takes seconds."""
    load = (
        "import importlib.util as u, logging, types\n"
        "timeline = types.ModuleType('t'); timeline.logger = logging.getLogger('x')\n"
        "for name in ('flashrec', 'flashrec.runtime'): sys.modules[name] = types.ModuleType(name)\n"
        "sys.modules['flashrec.runtime.timeline'] = timeline\n"
        f"spec = u.spec_from_file_location('stacks', {str(ROOT / 'flashrec/runtime/stacks.py')!r})\n"
        "stacks = u.module_from_spec(spec); spec.loader.exec_module(stacks)\n"
    )
    return script.replace("from flashrec.runtime import stacks\n", load)


def take(pid: int, number: int, path: Path, timeout_s: float = 10.0) -> tuple[str, str]:
    return asyncio.run(stacks.take(pid, number, path, timeout_s))


@pytest.mark.parametrize("kind", ["asleep", "lock", "stopped"])
def test_py_spy_sees_whatever_the_process_does(kind: str, hang: Hang) -> None:
    how, text = take(*hang(kind))
    assert how == "py-spy", text
    assert "forward (<string>:" in text


@pytest.mark.parametrize("kind", ["asleep", "lock"])
def test_without_py_spy_the_process_writes_itself(kind: str, hang: Hang, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "find_py_spy", lambda: None)
    pid, number, path = hang(kind)
    for _ in range(2):
        how, text = take(pid, number, path)
        assert how == "faulthandler", text
        assert text.count("in forward") == 1, "only what was written now"
        assert "py-spy is not installed" in text, "and why it was not the better way"
    assert state_of(pid) == "S", "it goes on"


@pytest.mark.parametrize("kind", ["stopped", "reset"])
def test_a_process_that_cannot_write_itself_is_not_signalled(
    kind: str, hang: Hang, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "find_py_spy", lambda: None)
    pid, number, path = hang(kind)
    how, text = take(pid, number, path, 3.0)
    assert how == "/proc" and "state: " in text
    assert ("process state T" if kind == "stopped" else "no handler for signal") in text
    assert state_of(pid) not in ("Z", "X", ""), "the signal would have ended it"


def test_a_py_spy_that_fails_or_hangs_does_not_hold_us_up(hang: Hang, tmp_path: Path, monkeypatch) -> None:
    pid, number, path = hang("asleep")
    for name, script, said in (
        ("fails", "echo Permission denied >&2; exit 1", "py-spy: Permission denied"),
        ("hangs", "exec sleep 60", "py-spy: no answer within"),
    ):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setattr(stacks, "find_py_spy", lambda program=program: str(program))
        began = time.monotonic()
        how, text = take(pid, number, path, 2.0)
        assert how == "faulthandler" and said in text
        assert time.monotonic() - began < 8.0


def test_a_process_that_writes_nothing_does_not_hold_us_up(hang: Hang, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "find_py_spy", lambda: None)
    pid, number, path = hang("asleep")
    how, text = take(pid, number, path.with_name("another"), 0.3)
    assert how == "/proc" and "nothing was written in time" in text


def test_a_process_that_is_gone_has_none(tmp_path: Path) -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    how, text = take(process.pid, int(signal.SIGRTMAX) - 3, tmp_path / "stacks")
    assert how == "none" and f"there is no process {process.pid}" in text


def test_stacks_are_bounded(tmp_path: Path) -> None:
    assert stacks._shorten("x" * stacks.MAX_BYTES) == "x" * stacks.MAX_BYTES
    text = stacks._shorten("ä" * stacks.MAX_BYTES)
    assert len(text.encode()) < stacks.MAX_BYTES + 50 and text.endswith("bytes more")

"""Where a worker is, before it is killed: the first of three ways that works, within a bounded time and size.

py-spy        reads the memory of the process, whatever it does: also when the interpreter's lock is held or the process
              is stopped. Needs `py-spy` beside our Python or in PATH, and leave to trace (root, or Yama's word of the
              worker, see `runtime.stacks`).
faulthandler  the worker writes its stacks itself, upon a signal that its runtime has announced. Works with the lock
              held, not in a stopped process or one in an uninterruptible system call.
/proc         what the kernel says: state, system call, kernel stack. Always there.

Why a better way did not work is said before what the next one found.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import time
from pathlib import Path

from flashrec.agent.process import state_of

MAX_BYTES = 32 * 1024
POLL_S = 0.02
SETTLED_S = 0.06  # a file that does not grow for so long is complete
_PY_SPY_SHARE = 0.6  # of the time there is
_PROC_FILES = ("wchan", "syscall", "stack")


async def take(pid: int, number: int, path: Path, timeout_s: float) -> tuple[str, str]:
    """(how, text) of process `pid` within `timeout_s`. number: its stacks signal (0: none), which writes to `path`.

    how is 'py-spy', 'faulthandler', '/proc' or 'none'. Never raises.
    """
    deadline = time.monotonic() + timeout_s
    failures: list[str] = []
    text = await _by_py_spy(pid, _PY_SPY_SHARE * timeout_s, failures)
    how = "py-spy"
    if not text:
        how, text = "faulthandler", await _by_signal(pid, number, path, deadline, failures)
    if not text:
        how, text = "/proc", _by_proc(pid)
    if not text:
        how, failures = "none", [*failures, f"/proc: there is no process {pid}"]
    return how, _shorten("".join(f"({failure})\n" for failure in failures) + text)


def find_py_spy() -> str | None:
    beside = os.path.dirname(sys.executable)
    return shutil.which("py-spy", path=f"{beside}:{os.environ.get('PATH', os.defpath)}")


async def _by_py_spy(pid: int, timeout_s: float, failures: list[str]) -> str:
    program = find_py_spy()
    if program is None:
        failures.append("py-spy is not installed: pip install 'flashrec[stacks]'")
        return ""
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(
            program, "dump", "--nonblocking", "--pid", str(pid),
            stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe,
        )  # fmt: skip
    except OSError as err:
        failures.append(f"py-spy: {err.strerror}")
        return ""
    try:
        async with asyncio.timeout(timeout_s):
            out, errors = await process.communicate()
    except TimeoutError:
        failures.append(f"py-spy: no answer within {timeout_s:g} s")
        return ""
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    if process.returncode == 0 and out.strip():
        return out.decode(errors="replace")
    said = errors.decode(errors="replace").strip().splitlines()
    failures.append(f"py-spy: {said[0] if said else f'exit code {process.returncode}'}")
    return ""


async def _by_signal(pid: int, number: int, path: Path, deadline: float, failures: list[str]) -> str:
    state = state_of(pid)
    if number == 0 or state in ("T", "t", "D", ""):
        why = "its signal is not at hand" if number == 0 else f"process state {state or 'gone'}"
        failures.append(f"faulthandler: {why}")
        return ""
    if not _catches(pid, number):
        failures.append(f"faulthandler: the process has no handler for signal {number} any more")
        return ""
    before = _size(path)
    try:
        os.kill(pid, number)
    except OSError as err:
        failures.append(f"faulthandler: {err.strerror}")
        return ""
    size, grown_at = before, time.monotonic()
    while time.monotonic() < deadline and (size == before or time.monotonic() - grown_at < SETTLED_S):
        await asyncio.sleep(POLL_S)
        if _size(path) != size:
            size, grown_at = _size(path), time.monotonic()
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(before)
        if text := file.read(MAX_BYTES + 1).decode(errors="replace"):
            return text
    failures.append("faulthandler: nothing was written in time")
    return ""


def _by_proc(pid: int) -> str:
    found = [f"state: {state_of(pid)}"] if state_of(pid) else []
    for name in _PROC_FILES if found else ():
        with contextlib.suppress(OSError):
            if text := Path(f"/proc/{pid}/{name}").read_text(errors="replace").strip():
                found.append(f"{name}: {text}")
    return "\n".join(found)


def _catches(pid: int, number: int) -> bool:
    """False where the signal would end the process: a script may have put the handler back."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _shorten(text: str) -> str:
    data = text.encode()
    if len(data) <= MAX_BYTES:
        return text
    return data[:MAX_BYTES].decode(errors="ignore") + f"\n… {len(data) - MAX_BYTES} bytes more"

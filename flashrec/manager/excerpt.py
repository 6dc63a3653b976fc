"""The one line of a stack dump that tells most: where the main thread is, and from which line of the script it came."""

from __future__ import annotations

import re
from collections.abc import Iterator

_PY_SPY = re.compile(r"^\s+(?P<function>\S.*?) \((?P<file>.+):(?P<line>\d+)\)$")
_FAULTHANDLER = re.compile(r'^\s+File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$')
_LIBRARIES = re.compile(r"(^|/)(torch|flashrec|lib/python[\d.]+|site-packages|<frozen .*>)(/|$)|^<frozen ")


def excerpt(how: str, text: str) -> str:
    """'all_reduce (torch/distributed/c10d.py:12), from train.py:88 in forward'; '' if there is nothing to show."""
    if how == "/proc":
        kept = (line for line in text.splitlines() if line.startswith(("state:", "wchan:")))
        return "in the kernel, " + ", ".join(kept)
    frames = list(_main_thread(text))
    if not frames:
        return ""
    inner = frames[0]
    script = next((frame for frame in frames if not _LIBRARIES.search(frame["file"])), inner)
    innermost = f"{_short(inner['file'])}:{inner['line']} in {inner['function']}"
    if script is inner:
        return innermost
    return f"{innermost}, from {_short(script['file'])}:{script['line']} in {script['function']}"


def _main_thread(text: str) -> Iterator[re.Match[str]]:
    """Its frames, innermost first: what py-spy calls MainThread; of faulthandler's the current thread."""
    lines = text.splitlines()
    heads = [i for i, line in enumerate(lines) if line.startswith(("Thread ", "Current thread "))]
    named = [i for i in heads if '"MainThread"' in lines[i] or lines[i].startswith("Current thread ")]
    if not heads:
        return
    start = named[0] if named else heads[0]
    for line in lines[start + 1 :]:
        frame = _PY_SPY.match(line) or _FAULTHANDLER.match(line)
        if frame is not None:
            yield frame
        elif line.startswith(("Thread ", "Current thread ")):
            return


def _short(path: str) -> str:
    """The end of a path that still says which file it is."""
    return "/".join(path.split("/")[-2:]) if path.count("/") > 1 else path

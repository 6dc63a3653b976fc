"""A parked task: the user's interpreter, with what takes long imported, waits for its rank and then runs the script.

    python [flags] -c BOOTSTRAP HOW IMPORTS DEVICE -- script.py …      (or -- -m module …)

The launcher has become this by exec, so the interpreter, its flags and its environment are those that the script would
have had. Once the rank is there the script runs as `__main__` in this very process: arguments, `sys.path[0]`, file
names, exit codes and the children of multiprocessing are those of a fresh start; see docs/guides/hot-spares.md.

Modules of the default list are those that DistributedDataParallel and our runtime need in any script. One that cannot
be imported is left out, as the script may do without it.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Sequence
from importlib.abc import InspectLoader
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import NoReturn

from flashrec.transport import task

IMPORTS = (
    "torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo", "torch.optim", "torch.utils.data",
    "flashrec.runtime.api",
)  # fmt: skip
CONTEXT = "flashrec.runtime.cuda_context"
_NO_PACKAGE = {"__package__": None, "__spec__": None}
_BOOTSTRAP = (
    "import sys; sys.flags.safe_path or sys.path.__setitem__(0, {path!r}); import flashrec.agent.park as p; p.main()"
)


def argv(command: Sequence[str], num_flags: int, how: str, imports: Sequence[str], device: str = "") -> list[str]:
    """What the launcher becomes. num_flags: words of `command` that are python's, its name too. device: the number of
    the GPU to make a context on; '': none."""
    python, script = command[:num_flags], command[num_flags:]
    first = os.getcwd() if script[0] == "-m" else str(Path(script[0]).resolve().parent)
    return [*python, "-c", _BOOTSTRAP.format(path=first), how, ",".join(filter(None, imports)), device, "--", *script]


def main() -> None:
    """Import, wait, run. Returns when the script has ended; ends the process if it is not needed."""
    how, imports, device, script = sys.argv[1], sys.argv[2].split(","), sys.argv[3], sys.argv[5:]
    sys.orig_argv = [*sys.orig_argv[: sys.orig_argv.index("-c")], *script]
    for name in [*IMPORTS, *filter(None, imports)]:
        try:
            importlib.import_module(name)
        except Exception as err:
            os.write(2, f"flashrec: {name} cannot be imported while parked: {err!r}\n".encode())
    if device and (trouble := importlib.import_module(CONTEXT).make(int(device))):
        os.write(2, f"flashrec: no CUDA context while parked: {trouble}\n".encode())
    if how == "script":
        task.hide()
    else:
        task.await_assignment()
    code, names, sys.argv = _load(
        script
    )  # not before: the packages of a module are imported here, and may want the rank
    _run(code, names)


def _load(script: list[str]) -> tuple[types.CodeType, dict[str, object], list[str]]:
    """Code, globals and sys.argv of `script.py …` or `-m module …`, as the interpreter has them. Raises OSError,
    SyntaxError, ImportError."""
    if script[0] != "-m":
        path = os.path.abspath(script[0])
        code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
        loader = SourceFileLoader("__main__", path)
        return code, {"__file__": path, "__loader__": loader, "__cached__": None, **_NO_PACKAGE}, script
    name = script[1]
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        name = f"{name}.__main__"
        spec = importlib.util.find_spec(name)
    found = spec.loader.get_code(name) if spec is not None and isinstance(spec.loader, InspectLoader) else None
    if spec is None or found is None:
        raise ImportError(f"no module named {name} that can be run")
    names: dict[str, object] = {
        "__file__": spec.origin, "__loader__": spec.loader, "__package__": spec.parent, "__spec__": spec,
        "__cached__": spec.cached,
    }  # fmt: skip
    return found, names, [str(spec.origin), *script[2:]]


def _run(code: types.CodeType, names: dict[str, object]) -> None:
    """In the module `__main__` that the interpreter has made, so that its globals live as long as the process."""
    module = sys.modules["__main__"]
    module.__dict__.clear()
    module.__dict__.update(__name__="__main__", __doc__=None, __builtins__=builtins, **names)
    try:
        exec(code, module.__dict__)
    except SystemExit:
        raise
    except BaseException as err:
        _end(err)


def _end(err: BaseException) -> NoReturn:
    """As the interpreter ends a script, and without our frames: the same exception looks the same in every life."""
    trace = err.__traceback__
    if trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    err = err.with_traceback(trace)
    sys.last_type, sys.last_value, sys.last_traceback = type(err), err, trace
    sys.excepthook(type(err), err, trace)
    if isinstance(err, KeyboardInterrupt):
        sys.excepthook = lambda *_: None
        raise err  # the interpreter ends itself by the signal, after its exit handlers
    sys.exit(1)

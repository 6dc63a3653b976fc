"""srun's own options before the command: read as srun reads them, then sorted by whom they concern.

A user writes one srun line. What flashrec makes of it is several things: the workers' job steps, the number of nodes
and ranks, where the followed output goes and, if there is no allocation yet, `salloc`. Options that fight flashrec's
own are left out (with a word about it) where nothing is lost, and refused with the reason where something would be.

An option that is not in the table (a newer Slurm's, another SPANK plugin's) is for the workers' job steps, as typed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import msgspec

from flashrec.manager.request import RequestError

# For whom: `allocation` (srun does not look at it inside one), `both`, `first` (the allocation if one is made, else the
# steps), `place` (the allocation if one is made, else refused), `step`, `count`, `output`, `dropped`, `refused`.
# A letter: the short form. `=`: takes a value. `?`: may have one behind `=` (or behind the letter, without a space).
_TABLE = """
allocation  A account= . bb= . bbf= b begin= . cluster-constraint= . comment= . contiguous S core-spec= . deadline=
            . delay-boot= d dependency= . exclusive? H hold I immediate? L licenses= . mail-type= . mail-user=
            . mcs-label= . mincpus= . nice? s oversubscribe p partition= . power= . prefer= . priority= q qos= . reboot
            . reservation= . segment= . spread-job . switches= . thread-spec= . time-min= . tmp= . use-min-nodes
            . wckey= . gid=
both        . acctg-freq= . cores-per-socket= . cpu-freq= . cpus-per-gpu= c cpus-per-task= B extra-node-info=
            . gpu-freq= . gpus-per-node= . gpus-per-socket= . gpus-per-task= . gres= . gres-flags= . hint=
            J job-name= . mem= . mem-per-cpu= . mem-per-gpu= . network= . ntasks-per-core= . ntasks-per-socket=
            O overcommit . profile= . sockets-per-node= . threads-per-core= . tres-per-task=
first       C constraint= . signal= t time=
place       x exclude= F nodefile= w nodelist=
step        . accel-bind= . bcast-exclude= D chdir= . compress? . container= . container-id= . cpu-bind= m distribution=
            . epilog= . exact . export= . gpu-bind= . mem-bind= . mpi= . msg-timeout= . oom-kill-step? . prolog=
            . propagate? Q quiet . resv-ports? . slurmd-debug= . task-epilog= . task-prolog= T threads= . tres-bind=
            v verbose
count       n ntasks= N nodes= . ntasks-per-node=
output      e error= l label . open-mode= o output=
dropped     X disable-status K kill-on-bad-exit? k no-kill? . overlap E preserve-env . quit-on-interrupt u unbuffered
            W wait=
refused     . async . bcast? M clusters= G gpus= . het-group= . interactive i input= . jobid= . multi-prog
            Z no-allocate . ntasks-per-gpu= . pty? r relative= . send-libs? . stepmgr . test-only . uid= . x11?
"""
_WHY = {
    "async": "flashrec waits for the ranks",
    "bcast": "put the script where all nodes see it, or send it with sbcast before",
    "clusters": "log in to that cluster",
    "exclude": "exclude nodes when the allocation is made (in sbatch or salloc)",
    "gpus": "a total changes with the nodes: say --gpus-per-node or --gpus-per-task",
    "het-group": "heterogeneous jobs cannot replace a node by one of another kind",
    "interactive": "ranks have no terminal",
    "input": "ranks have no standard input",
    "jobid": "run inside the allocation",
    "multi-prog": "one command for all ranks",
    "no-allocate": "flashrec works in allocations only",
    "nodefile": "flashrec places the ranks itself",
    "nodelist": "flashrec places the ranks itself",
    "ntasks-per-gpu": "say --ntasks-per-node",
    "pty": "ranks have no terminal",
    "relative": "flashrec places the ranks itself",
    "send-libs": "put the script where all nodes see it, or send it with sbcast before",
    "stepmgr": "no new step can start once the step manager's node is lost",
    "test-only": "it starts nothing; try it with srun itself",
    "uid": "run as that user",
    "x11": "ranks have no display",
}


class _Known(msgspec.Struct, frozen=True):
    name: str
    short: str
    value: Literal["", "=", "?"]
    use: str


def _known() -> list[_Known]:
    known, use = [], ""
    for line in _TABLE.strip().splitlines():
        words = line.split()
        if not line.startswith(" "):
            use, *words = words
        for short, name in zip(words[::2], words[1::2], strict=True):
            value: Literal["", "=", "?"] = "=" if name.endswith("=") else "?" if name.endswith("?") else ""
            known.append(_Known(name.rstrip("=?"), short.strip("."), value, use))
    return known


_LONG = {option.name: option for option in _known()}
_SHORT = {option.short: option for option in _known() if option.short}


class Typed(msgspec.Struct, frozen=True):
    """One option: the name without dashes ('' if it is not in the table), its value, the words as they were typed."""

    name: str
    value: str | None
    words: tuple[str, ...]
    use: str


class NodeCount(msgspec.Struct, frozen=True):
    """-N MIN[-MAX]: how many nodes have ranks."""

    least: int
    most: int


class SrunOptions(msgspec.Struct, frozen=True):
    """steps: for every job step of the workers; allocation: for salloc, if one is made. output: -o's pattern.

    `notices`: what the user should know, a sentence each."""

    steps: tuple[str, ...] = ()
    allocation: tuple[str, ...] = ()
    num_ranks: int | None = None
    nodes: NodeCount | None = None
    ranks_per_node: int | None = None
    output: str | None = None
    open_mode: str | None = None
    is_labelled: bool = False
    notices: tuple[str, ...] = ()


def read_srun_options(options: Sequence[str], *, makes_allocation: bool = False) -> SrunOptions:
    """Sort srun's options by whom they concern. Raises RequestError."""
    steps: list[str] = []
    allocation: list[str] = []
    said: dict[str, str] = {}
    notices: dict[str, str] = {}
    for option in split(options):
        use = option.use
        if use == "place":
            use = "allocation" if makes_allocation else "refused"
        if use == "first":
            use = "allocation" if makes_allocation else "step"
        if use == "refused" and not _is_harmless(option):
            raise RequestError(f"srun option --{option.name} cannot be used with flashrec: {_WHY[option.name]}")
        if option.name == "distribution" and (option.value or "").startswith("arbitrary"):
            raise RequestError("srun option --distribution=arbitrary cannot be used with flashrec: it places the ranks")
        if use in ("allocation", "both"):
            allocation += option.words
        if use in ("step", "both"):
            steps += option.words
        if use in ("count", "output"):
            said[option.name] = option.value or ""
        notices |= _notice(option)
    nodes = said.get("nodes")
    return SrunOptions(
        steps=tuple(steps),
        allocation=tuple(allocation),
        num_ranks=_number("ntasks", said["ntasks"]) if "ntasks" in said else None,
        nodes=_node_count(nodes) if nodes is not None else None,
        ranks_per_node=_number("ntasks-per-node", said["ntasks-per-node"]) if "ntasks-per-node" in said else None,
        output=said.get("output"),
        open_mode=_open_mode(said.get("open-mode")),
        is_labelled="label" in said,
        notices=tuple(notices.values()),
    )


def split(options: Sequence[str]) -> list[Typed]:
    """Take the words apart as srun does: `-N4`, `-N 4`, `-lu`, `--nodes 4`, `--nodes=4`, abbreviated long names."""
    found: list[Typed] = []
    words = list(options)
    while words:
        word = words.pop(0)
        if word.startswith("--") and len(word) > 2:
            found.append(_long(word, words))
        elif word.startswith("-") and len(word) > 1:
            found += _short(word, words)
        elif found and found[-1].name == "":
            last = found.pop()  # the value of an option that we do not know
            found.append(msgspec.structs.replace(last, words=(*last.words, word)))
        else:
            raise RequestError(f"{word!r} is not an option: put -- in front of the command")
    return found


def _long(word: str, rest: list[str]) -> Typed:
    typed, equals, value = word[2:].partition("=")
    option = _LONG.get(typed) or _abbreviated(typed)
    if option is None:
        return Typed("", None, (word,), "step")
    if option.value == "" and equals:
        raise RequestError(f"srun option --{option.name} takes no value")
    if option.value == "=" and not equals:
        value = _take(f"--{option.name}", rest)
    has_value = bool(equals) or option.value == "="
    canonical = f"--{option.name}={value}" if has_value else f"--{option.name}"
    return Typed(option.name, value if has_value else None, (canonical,), option.use)


def _abbreviated(typed: str) -> _Known | None:
    meant = [name for name in _LONG if name.startswith(typed)]
    if len(meant) > 1:
        raise RequestError(f"srun option --{typed} is ambiguous: write {' or '.join(f'--{name}' for name in meant)}")
    return _LONG[meant[0]] if meant else None


def _short(word: str, rest: list[str]) -> list[Typed]:
    """One word may hold several letters; the first that takes a value takes the rest of the word."""
    found: list[Typed] = []
    letters = word[1:]
    while letters:
        letter, letters = letters[0], letters[1:]
        option = _SHORT.get(letter)
        if option is None:
            return [*found, Typed("", None, (f"-{letter}{letters}",), "step")]
        value: str | None = None
        if option.value == "=":
            value = letters.removeprefix("=") if letters else _take(f"-{letter}", rest)
        elif option.value == "?" and letters:
            value = letters.removeprefix("=")
        if option.value and value is not None:
            letters = ""
        canonical = f"--{option.name}" if value is None else f"--{option.name}={value}"
        found.append(Typed(option.name, value, (canonical,), option.use))
    return found


def _take(option: str, rest: list[str]) -> str:
    if not rest:
        raise RequestError(f"srun option {option} needs a value")
    return rest.pop(0)


def _is_harmless(option: Typed) -> bool:
    """Asks for what is so anyway."""
    return (option.name, option.value) in (("input", "none"), ("input", "/dev/null"), ("send-libs", "no"))


def _notice(option: Typed) -> dict[str, str]:
    if option.name == "kill-on-bad-exit" and option.value != "0":
        return {option.name: "srun option --kill-on-bad-exit is left out: a lost rank is replaced, the others stay"}
    if option.name == "wait" and option.value != "0":
        return {option.name: "srun option --wait is left out: a rank that is lost is replaced, the others stay"}
    if option.name == "no-kill" and option.value is not None:
        return {option.name: f"srun option --no-kill={option.value} is left out: --no-kill is always given"}
    if option.name == "error":
        return {option.name: "srun option --error is left out: a rank's standard error goes with its standard output"}
    return {}


def _number(name: str, value: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,6}", value):
        raise RequestError(f"srun option --{name}: {value!r} is not a count of 1 or more")
    return int(value)


def _node_count(value: str) -> NodeCount:
    least, dash, most = value.partition("-")
    count = NodeCount(_number("nodes", least), _number("nodes", most if dash else least))
    if count.most < count.least:
        raise RequestError(f"srun option --nodes: {value!r} is not a range")
    return count


def _open_mode(value: str | None) -> str | None:
    if value is not None and value not in ("append", "truncate"):
        raise RequestError(f"srun option --open-mode: {value!r} is neither append nor truncate")
    return value

"""The check file: what is checked on which node, as data. One line each; `#` opens a comment line.

    KEY = VALUE                                   a setting, see Settings
    NODESET || [OPTION=VALUE ...] CHECK [ARG ...]  run this check on these nodes

NODESET is described in `nodesets`. The right side is split as a shell would (quotes, backslashes), and nothing else of
a shell happens. OPTION is timeout_s, when_hung or when_unknown, for that line alone. Every error names the line.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from flashrec.health.nodesets import check_term

DEFAULT_PATH = Path("/etc/flashrec/node-health.conf")
PROGRAM_LIMIT_S = 50.0  # Slurm ends its HealthCheckProgram after 60 s; the launcher's own watchdog acts at 55 s
SETTLE_S = 2.0  # see flashrec.admin.health.policy
BUILT_IN = """\
# No site file: what can be asked of any node without knowing it.
* || memory
* || disk --min-free-percent 2 / /tmp
* || clock
* || gpu
* || nic --default-route
* || processes
"""

Seconds = Annotated[float, Meta(gt=0, le=PROGRAM_LIMIT_S)]
Runs = Annotated[int, Meta(ge=1, le=1000)]
Doubt = Literal["unknown", "fail"]
_CHECK = re.compile(r"[a-z][a-z0-9-]*")
_KEY = re.compile(r"[a-z_]+")


class CheckFileError(Exception):
    """The file cannot be used; the message says which line and why."""


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file's settings. Those from `prefix` on concern only the program that Slurm runs."""

    check_timeout_s: Seconds = 15.0  # one check; then it and all it started is killed
    run_timeout_s: Seconds = 25.0  # all checks together
    parallel: Annotated[int, Meta(ge=1, le=64)] = 8
    when_hung: Doubt = "unknown"  # what a check that did not end in time counts as
    when_unknown: Doubt = "unknown"  # what a check that could not look counts as
    check_dir: str = ""  # '': where the checks were installed
    prefix: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{2,40}$")] = "flashrec-health"
    fail_runs: Runs = 2
    ok_runs: Runs = 3
    max_drained: Annotated[int, Meta(ge=0, le=100000)] = 1
    drain_busy: Literal["yes", "no"] = "no"
    slurm_timeout_s: Seconds = 5.0
    spread_s: Annotated[float, Meta(ge=0, le=20)] = 3.0
    state_file: str = "/var/lib/flashrec/node-health.json"


class CheckLine(msgspec.Struct, frozen=True):
    """One check on some nodes; line: its number in the file."""

    line: int
    terms: tuple[str, ...]
    check: str
    args: tuple[str, ...]
    timeout_s: float
    when_hung: Doubt
    when_unknown: Doubt

    @property
    def label(self) -> str:
        """The check with its arguments: tells two lines of the same check apart."""
        return shlex.join((self.check, *self.args))


class LineOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one line may set for itself; None: as the settings say."""

    timeout_s: Seconds | None = None
    when_hung: Doubt | None = None
    when_unknown: Doubt | None = None


class Plan(msgspec.Struct, frozen=True):
    """A check file that has been read. source: for messages."""

    source: str
    settings: Settings
    lines: tuple[CheckLine, ...]

    @property
    def needs_features(self) -> bool:
        """True if Slurm has to be asked for the node's features first."""
        return any(term.startswith("@") for line in self.lines for term in line.terms)


def load_plan(path: Path | None = None) -> Plan:
    """Read a check file; None: the site's, or the built-in one if there is none. Raises CheckFileError."""
    if path is None and not DEFAULT_PATH.exists():
        return parse(BUILT_IN, f"built-in checks (no {DEFAULT_PATH})")
    path = path or DEFAULT_PATH
    try:
        return parse(path.read_text(), str(path))
    except OSError as err:
        raise CheckFileError(f"cannot read {path}: {err.strerror}") from err
    except UnicodeDecodeError as err:
        raise CheckFileError(f"{path} is not text: {err}") from err


def parse(text: str, source: str) -> Plan:
    """Raises CheckFileError with the number of the first line that is wrong."""
    values: dict[str, object] = {}
    checks: list[tuple[int, str]] = []
    for number, line in _meaningful(text):
        if "||" in line:
            checks.append((number, line))
            continue
        key, value = _setting(line, f"{source}:{number}")
        if key in values:
            raise CheckFileError(f"{source}:{number}: {key} is set twice")
        values[key] = value
    settings = Settings(**values)  # type: ignore[arg-type]
    _check_budget(settings, source)
    lines = tuple(_check(line, number, settings, f"{source}:{number}") for number, line in checks)
    if not lines:
        raise CheckFileError(f"{source}: no checks; a check is a line as `* || disk /`")
    return Plan(source, settings, lines)


def _meaningful(text: str) -> Iterator[tuple[int, str]]:
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.strip()
        if line and not line.startswith("#"):
            yield number, line


def _setting(line: str, where: str) -> tuple[str, object]:
    key, equals, value = (part.strip() for part in line.partition("="))
    if not equals or not _KEY.fullmatch(key):
        raise CheckFileError(f"{where}: {line!r} is neither `KEY = VALUE` nor `NODESET || CHECK [ARG ...]`")
    return key, _convert(key, value, Settings, where)


def _convert(key: str, value: str, into: type[msgspec.Struct], where: str) -> object:
    try:
        return getattr(msgspec.convert({key: value}, into, strict=False), key)
    except msgspec.ValidationError as err:
        if "unknown field" in str(err):
            known = ", ".join(field.name for field in msgspec.structs.fields(into))
            raise CheckFileError(f"{where}: there is no {key}; known: {known}") from err
        reason = str(err).partition(" - at ")[0]
        raise CheckFileError(f"{where}: {key} = {value}: {reason}") from err


def _check_budget(settings: Settings, source: str) -> None:
    """Slurm's 60 s have to hold the checks, three questions to Slurm and the waiting in between."""
    worst_s = settings.run_timeout_s + 3 * settings.slurm_timeout_s + settings.spread_s + SETTLE_S
    if worst_s > PROGRAM_LIMIT_S:
        raise CheckFileError(
            f"{source}: run_timeout_s + 3 x slurm_timeout_s + spread_s + {SETTLE_S:g} is {worst_s:g} s; "
            f"at most {PROGRAM_LIMIT_S:g} s, because Slurm ends the program after 60 s"
        )


def _check(line: str, number: int, settings: Settings, where: str) -> CheckLine:
    left, _, right = line.partition("||")
    terms = tuple(left.split())
    if not terms:
        raise CheckFileError(f"{where}: no nodes before ||; * means every node")
    try:
        for term in terms:
            check_term(term)
        words = shlex.split(right)
    except ValueError as err:
        raise CheckFileError(f"{where}: {err}") from err
    options: dict[str, object] = {}
    while words and "=" in words[0]:
        key, _, value = words.pop(0).partition("=")
        options[key] = _convert(key, value, LineOptions, where)
    if not words:
        raise CheckFileError(f"{where}: no check after ||")
    if not _CHECK.fullmatch(words[0]):
        raise CheckFileError(f"{where}: {words[0]!r} is not the name of a check: a-z, 0-9 and -")
    chosen = LineOptions(**options)  # type: ignore[arg-type]
    return CheckLine(
        line=number,
        terms=terms,
        check=words[0],
        args=tuple(words[1:]),
        timeout_s=chosen.timeout_s or settings.check_timeout_s,
        when_hung=chosen.when_hung or settings.when_hung,
        when_unknown=chosen.when_unknown or settings.when_unknown,
    )

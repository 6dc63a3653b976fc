"""GPUs through NVML: is each there, does its memory hold, are its links up, do its clocks run, and what Xids come.

NVML is the library of NVIDIA's driver, asked through the package nvidia-ml-py (`pip install flashrec[nvidia]`). No
package, library or driver means that nobody can look, never that something is wrong. What a GPU or a driver does not
support is left out. Every call may hang with the driver, so all of this belongs into a thread that nobody waits for.

Not yet run on real hardware: the tests put another module in the place of `pynvml`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol, cast

from flashrec.core.health import Found
from flashrec.health.xids import describe

MODULE = "pynvml"
SLOW_LOOKS = 6  # so many looks in a row with clocks held down by hardware: it is not a hot minute
DOWN_LOOKS = 2
_MAX_LINKS = 18


class Unusable(Exception):
    """GPUs cannot be looked at on this machine; the message says why."""


class Nvml(Protocol):
    """What is used of the module pynvml. Every call raises NVMLError, or one of its subclasses NVMLError_*."""

    NVMLError: type[Exception]
    NVMLError_GpuIsLost: type[Exception]
    NVMLError_ResetRequired: type[Exception]
    NVMLError_Timeout: type[Exception]
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED: int
    NVML_VOLATILE_ECC: int
    nvmlEventTypeXidCriticalError: int
    nvmlClocksThrottleReasonHwSlowdown: int
    nvmlClocksThrottleReasonHwThermalSlowdown: int
    nvmlClocksThrottleReasonHwPowerBrakeSlowdown: int

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlDeviceGetCount(self) -> int: ...
    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any: ...
    def nvmlDeviceGetIndex(self, handle: Any) -> int: ...
    def nvmlDeviceGetUUID(self, handle: Any) -> str: ...
    def nvmlDeviceGetTotalEccErrors(self, handle: Any, kind: int, counter: int) -> int: ...
    def nvmlDeviceGetRemappedRows(self, handle: Any) -> tuple[int, int, int, int]: ...
    def nvmlDeviceGetRetiredPagesPendingStatus(self, handle: Any) -> int: ...
    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any) -> int: ...
    def nvmlDeviceGetNvLinkState(self, handle: Any, link: int) -> int: ...
    def nvmlDeviceGetSupportedEventTypes(self, handle: Any) -> int: ...
    def nvmlEventSetCreate(self) -> Any: ...
    def nvmlDeviceRegisterEvents(self, handle: Any, types: int, events: Any) -> None: ...
    def nvmlEventSetWait_v2(self, events: Any, timeout_ms: int) -> Any: ...
    def nvmlEventSetFree(self, events: Any) -> None: ...


def load() -> Nvml:
    """The module pynvml. Raises Unusable."""
    if importlib.util.find_spec(MODULE) is None:
        raise Unusable("nvidia-ml-py is not installed (pip install 'flashrec[nvidia]')")
    try:
        return cast(Nvml, importlib.import_module(MODULE))
    except Exception as err:  # somebody else's module of that name
        raise Unusable(f"the module {MODULE} cannot be used: {err!r}") from err


class Gpus:
    """The GPUs that this process may see. One thread uses it. Raises Unusable if there are none to look at."""

    def __init__(self, nvml: Nvml) -> None:
        self._nvml = nvml
        try:
            nvml.nvmlInit()
            count = nvml.nvmlDeviceGetCount()
        except nvml.NVMLError as err:
            raise Unusable(f"NVML cannot be used: {err}") from err
        if count == 0:
            raise Unusable("NVML shows this process no GPU")
        self._count = count
        self._errors: dict[int, int] = {}  # uncorrectable memory errors at the first look
        self._links: dict[int, set[int]] = {}  # links that were up at the first look
        self._events = self._listen()

    def close(self) -> None:
        with contextlib.suppress(self._nvml.NVMLError):
            if self._events is not None:
                self._nvml.nvmlEventSetFree(self._events)
            self._nvml.nvmlShutdown()

    # ---- looks ------------------------------------------------------------------------------------------------

    def look(self) -> list[Found]:
        """Everything that can be asked of each GPU now."""
        found: list[Found] = []
        for index in range(self._count):
            try:
                handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
                self._nvml.nvmlDeviceGetUUID(handle)
                about = [*self._memory(index, handle), *self._clocks(index, handle), *self._nvlink(index, handle)]
            except (self._nvml.NVMLError_GpuIsLost, self._nvml.NVMLError_ResetRequired) as err:
                found.append(_fail(f"gpu {index}", f"{err}: the node needs a GPU reset or a reboot"))
            except self._nvml.NVMLError as err:
                found.append(Found(f"gpu {index}", "unknown", f"NVML does not tell: {err}"))
            else:
                found += [Found(f"gpu {index}", "ok"), *about]
        return found

    def _ask(self, call: Callable[..., Any], *args: Any) -> Any:
        """The answer; None for what this GPU or driver does not have. A lost GPU is no answer but an exception."""
        try:
            return call(*args)
        except (self._nvml.NVMLError_GpuIsLost, self._nvml.NVMLError_ResetRequired):
            raise
        except self._nvml.NVMLError:
            return None

    def _memory(self, index: int, handle: Any) -> Iterator[Found]:
        nvml, check = self._nvml, f"gpu {index} memory"
        wrong = []
        errors = self._ask(
            nvml.nvmlDeviceGetTotalEccErrors, handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        )
        rows = self._ask(nvml.nvmlDeviceGetRemappedRows, handle)
        retiring = self._ask(nvml.nvmlDeviceGetRetiredPagesPendingStatus, handle)
        if rows is not None and rows[3]:
            wrong.append("a memory row could not be remapped")
        if rows is not None and rows[2]:
            wrong.append("remapped memory rows wait for a reset")
        if retiring:
            wrong.append("retired memory pages wait for a reset")
        if errors is not None:
            new = errors - self._errors.setdefault(index, errors)
            if new > 0:
                wrong.append(f"{new} new uncorrectable memory errors")
        if errors is None and rows is None and retiring is None:
            return
        yield _fail(check, "; ".join(wrong)) if wrong else Found(check, "ok")

    def _clocks(self, index: int, handle: Any) -> Iterator[Found]:
        nvml = self._nvml
        reasons = self._ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
        if reasons is None:
            return
        held = [
            name
            for name, bit in (
                ("heat", nvml.nvmlClocksThrottleReasonHwThermalSlowdown),
                ("the power brake", nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown),
                ("hardware", nvml.nvmlClocksThrottleReasonHwSlowdown),
            )
            if reasons & bit
        ]
        check = f"gpu {index} clocks"
        yield Found(check, "fail", f"held down by {held[0]}", SLOW_LOOKS) if held else Found(check, "ok")

    def _nvlink(self, index: int, handle: Any) -> Iterator[Found]:
        """A link that was up and is down. (Errors on a link that stays up come as Xid 74, if they matter.)"""
        known = self._links.get(index)
        up: set[int] = set()
        for link in range(_MAX_LINKS):
            state = self._ask(self._nvml.nvmlDeviceGetNvLinkState, handle, link)
            if state is None and not up:
                break  # none here
            if state:
                up.add(link)
        if known is None:
            self._links[index] = up
        elif known:
            down = ", ".join(map(str, sorted(known - up)))
            check = f"gpu {index} nvlink"
            yield Found(check, "fail", f"link {down} went down", DOWN_LOOKS) if down else Found(check, "ok")

    # ---- Xids -------------------------------------------------------------------------------------------------

    def _listen(self) -> Any:
        """An event set for the Xids of every GPU that can tell them; None if none can."""
        nvml = self._nvml
        with contextlib.suppress(nvml.NVMLError):
            events, count = nvml.nvmlEventSetCreate(), 0
            for index in range(self._count):
                with contextlib.suppress(nvml.NVMLError):
                    handle = nvml.nvmlDeviceGetHandleByIndex(index)
                    wanted = nvml.nvmlDeviceGetSupportedEventTypes(handle) & nvml.nvmlEventTypeXidCriticalError
                    if wanted:
                        nvml.nvmlDeviceRegisterEvents(handle, wanted, events)
                        count += 1
            if count:
                return events
            nvml.nvmlEventSetFree(events)
        return None

    def wait(self, timeout_s: float) -> list[Found]:
        """Wait for an Xid. What is fatal never becomes good again: there is no finding that says so."""
        nvml = self._nvml
        if self._events is None:
            time.sleep(timeout_s)
            return []
        try:
            event = nvml.nvmlEventSetWait_v2(self._events, int(timeout_s * 1000))
        except nvml.NVMLError_Timeout:
            return []
        except nvml.NVMLError:
            time.sleep(timeout_s)  # it would say so again at once
            return self.look()
        if event.eventType != nvml.nvmlEventTypeXidCriticalError:
            return []
        xid = int(event.eventData)
        try:
            name = f"gpu {nvml.nvmlDeviceGetIndex(event.device)}"
        except nvml.NVMLError:  # it is the one that is lost
            name = "a gpu"
        what = describe(xid)
        if not what:
            return [Found(f"{name} Xid {xid}", "warn", "a program's own error, or dealt with by the driver")]
        return [_fail(f"{name} Xid {xid}", f"{what}; it needs a reset, a reboot or a repair")]


def _fail(check: str, reason: str) -> Found:
    """What one look is enough for."""
    return Found(check, "fail", reason, fail_after=1)

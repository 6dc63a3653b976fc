"""Stands in for NVIDIA's `pynvml` in tests: with this folder first on PYTHONPATH, agents take it for the real one.

GPUs are files. FLASHREC_FAKE_NVML names a folder: in it NODE.json says what the GPUs of NODE are (a list of objects,
see `_GPU`; no file: two good ones), and each NODE.xid that appears is one Xid: it contains "GPU XID", and goes away
when the Xid was told. Names, error classes and the way of waiting are those of nvidia-ml-py; none of its code is here.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
NVML_VOLATILE_ECC = 0
nvmlEventTypeXidCriticalError = 8
nvmlClocksThrottleReasonHwSlowdown = 0x08
nvmlClocksThrottleReasonHwThermalSlowdown = 0x40
nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 0x80

_GPU: dict[str, Any] = {
    "lost": False,  # every call about it says so
    "ecc": 0,  # uncorrectable memory errors since the driver was loaded; null: not supported
    "rows": [0, 0, 0, 0],  # remapped for correctable, for uncorrectable, waiting, failed; null: not supported
    "retiring": None,  # pages wait for a reset; null: not supported
    "throttle": 0,  # bits of nvmlClocksThrottleReason*; null: not supported
    "links": [],  # 1: up, 0: down
}


class NVMLError(Exception):
    """As the library's: str() says what NVML says."""

    said = "Unknown Error"

    def __str__(self) -> str:
        return self.said


class NVMLError_GpuIsLost(NVMLError):
    said = "GPU is lost"


class NVMLError_ResetRequired(NVMLError):
    said = "GPU requires reset"


class NVMLError_Timeout(NVMLError):
    said = "Timeout"


class NVMLError_NotSupported(NVMLError):
    said = "Not Supported"


class NVMLError_LibraryNotFound(NVMLError):
    said = "NVML Shared Library Not Found"


def _folder() -> Path:
    return Path(os.environ["FLASHREC_FAKE_NVML"])


def _node() -> str:
    return os.environ.get("FLASHREC_NODE") or os.environ.get("SLURMD_NODENAME") or "node"


def _gpus() -> list[dict[str, Any]]:
    try:
        listed = json.loads((_folder() / f"{_node()}.json").read_text())
    except FileNotFoundError:
        listed = [{}, {}]
    return [_GPU | gpu for gpu in listed]


def _of(handle: int, key: str) -> Any:
    gpu = _gpus()[handle]
    if gpu["lost"]:
        raise NVMLError_GpuIsLost
    if gpu[key] is None:
        raise NVMLError_NotSupported
    return gpu[key]


def nvmlInit() -> None:
    if "FLASHREC_FAKE_NVML" not in os.environ or (_folder() / f"{_node()}.none").exists():
        raise NVMLError_LibraryNotFound


def nvmlShutdown() -> None:
    pass


def nvmlDeviceGetCount() -> int:
    return len(_gpus())


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    _of(index, "lost")
    return index


def nvmlDeviceGetIndex(handle: int) -> int:
    _of(handle, "lost")
    return handle


def nvmlDeviceGetUUID(handle: int) -> str:
    _of(handle, "lost")
    return f"GPU-{_node()}-{handle}"


def nvmlDeviceGetTotalEccErrors(handle: int, kind: int, counter: int) -> int:
    return int(_of(handle, "ecc"))


def nvmlDeviceGetRemappedRows(handle: int) -> tuple[int, ...]:
    return tuple(_of(handle, "rows"))


def nvmlDeviceGetRetiredPagesPendingStatus(handle: int) -> int:
    return int(_of(handle, "retiring"))


def nvmlDeviceGetCurrentClocksThrottleReasons(handle: int) -> int:
    return int(_of(handle, "throttle"))


def nvmlDeviceGetNvLinkState(handle: int, link: int) -> int:
    links = _of(handle, "links")
    if link >= len(links):
        raise NVMLError_NotSupported
    return int(links[link])


def nvmlDeviceGetSupportedEventTypes(handle: int) -> int:
    _of(handle, "lost")
    return nvmlEventTypeXidCriticalError


def nvmlEventSetCreate() -> list[int]:
    return []


def nvmlDeviceRegisterEvents(handle: int, types: int, events: list[int]) -> None:
    events.append(handle)


def nvmlEventSetFree(events: list[int]) -> None:
    events.clear()


def nvmlEventSetWait_v2(events: list[int], timeout_ms: int) -> SimpleNamespace:
    """Returns within 20 ms of an Xid of a registered GPU; raises NVMLError_Timeout."""
    path, deadline = _folder() / f"{_node()}.xid", time.monotonic() + timeout_ms / 1000
    while time.monotonic() < deadline:
        try:
            said = path.read_text().split()
        except FileNotFoundError:
            said = []
        if len(said) == 2 and int(said[0]) in events:
            path.unlink()
            return SimpleNamespace(device=int(said[0]), eventType=nvmlEventTypeXidCriticalError, eventData=int(said[1]))
        time.sleep(0.02)
    raise NVMLError_Timeout

"""GPUs through NVML. The module pynvml is ours (flashrec/testing/fake_nvml): this shows what is concluded from what
NVML says, not that a real driver says it. The names that are used are looked up in the real package, if that is here.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import flashrec
from flashrec.core.health import Found, HealthRules, NodeState
from flashrec.health import nvml
from flashrec.health.xids import FATAL

FAKE = Path(flashrec.__file__).parent / "testing/fake_nvml/pynvml.py"


class Driver:
    """Two GPUs of node n1."""

    def __init__(self, folder: Path, module: ModuleType) -> None:
        self.folder, self.module = folder, module
        self.gpus({}, {})

    def gpus(self, *gpus: dict[str, Any]) -> None:
        (self.folder / "n1.json").write_text(json.dumps(gpus))

    def xid(self, gpu: int, number: int) -> None:
        (self.folder / "n1.xid").write_text(f"{gpu} {number}")

    def open(self) -> nvml.Gpus:
        return nvml.Gpus(self.module)  # type: ignore[arg-type]


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    monkeypatch.setenv("FLASHREC_FAKE_NVML", str(tmp_path))
    monkeypatch.setenv("FLASHREC_NODE", "n1")
    monkeypatch.syspath_prepend(str(FAKE.parent))
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    yield Driver(tmp_path, nvml.load())  # type: ignore[arg-type]
    sys.modules.pop("pynvml", None)


def bad(found: list[Found]) -> dict[str, str]:
    return {one.check: one.reason for one in found if one.status == "fail"}


def test_good_gpus_are_good(driver: Driver) -> None:
    driver.gpus({"links": [1, 1]}, {"ecc": None, "rows": None, "throttle": None})
    gpus = driver.open()
    for found in (gpus.look(), gpus.look()):
        assert {one.status for one in found} == {"ok"}
    assert [one.check for one in gpus.look()] == [
        "gpu 0", "gpu 0 memory", "gpu 0 clocks", "gpu 0 nvlink", "gpu 1",
    ]  # fmt: skip
    gpus.close()


@pytest.mark.parametrize(
    ("change", "check", "reason"),
    [
        ({"lost": True}, "gpu 1", "GPU is lost: the node needs a GPU reset or a reboot"),
        ({"rows": [0, 1, 0, 1]}, "gpu 1 memory", "could not be remapped"),
        ({"rows": [0, 1, 1, 0]}, "gpu 1 memory", "remapped memory rows wait for a reset"),
        ({"retiring": 1}, "gpu 1 memory", "retired memory pages wait for a reset"),
        ({"ecc": 5}, "gpu 1 memory", "2 new uncorrectable memory errors"),
        ({"throttle": 0x40}, "gpu 1 clocks", "held down by heat"),
        ({"throttle": 0x80}, "gpu 1 clocks", "held down by the power brake"),
        ({"throttle": 0x08}, "gpu 1 clocks", "held down by hardware"),
        ({"links": [1, 0, 1]}, "gpu 1 nvlink", "link 1 went down"),
    ],
)
def test_what_goes_wrong_with_one(driver: Driver, change: dict[str, Any], check: str, reason: str) -> None:
    good = {"ecc": 3, "retiring": 0, "links": [1, 1, 1]}
    driver.gpus(good, good)
    gpus = driver.open()
    assert not bad(gpus.look()), "errors of the past are not held against it"
    driver.gpus(good, good | change)
    (found,) = bad(gpus.look()).items()
    assert found[0] == check and reason in found[1]


def test_a_gpu_that_is_lost_between_two_questions(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = driver.open()
    gpus.look()

    def lost(*_: object) -> None:
        raise driver.module.NVMLError_GpuIsLost

    monkeypatch.setattr(driver.module, "nvmlDeviceGetCurrentClocksThrottleReasons", lost)
    assert set(bad(gpus.look())) == {"gpu 0", "gpu 1"}


def test_software_that_slows_a_gpu_down_is_no_fault(driver: Driver) -> None:
    driver.gpus({"throttle": 0x01 | 0x04 | 0x20}, {})  # idle, power cap, software's thermal limit
    assert not bad(driver.open().look())


def test_memory_errors_are_not_forgotten_by_the_next_look(driver: Driver) -> None:
    gpus = driver.open()
    gpus.look()
    driver.gpus({"ecc": 1}, {})
    assert bad(gpus.look()) and bad(gpus.look())


def test_how_many_looks_it_takes(driver: Driver) -> None:
    """A lost GPU makes the node sick at once, a hot one only when it stays hot."""
    state, gpus = NodeState(HealthRules(fail_after=3)), driver.open()
    state.look(gpus.look())
    state.is_admitted = True
    driver.gpus({"throttle": 0x40}, {})
    for _ in range(nvml.SLOW_LOOKS - 1):
        state.look(gpus.look())
        assert state.state == "well"
    state.look(gpus.look())
    assert state.reasons == ("gpu 0 clocks: held down by heat",)
    driver.gpus({}, {"lost": True})
    for _ in range(2):
        state.look(gpus.look())
    assert state.reasons == ("gpu 1: GPU is lost: the node needs a GPU reset or a reboot",)


@pytest.mark.parametrize("xid", sorted(FATAL))
def test_a_fatal_xid_is_for_good(driver: Driver, xid: int) -> None:
    state, gpus = NodeState(HealthRules(fail_after=3, well_after=1)), driver.open()
    state.look(gpus.look())
    state.is_admitted = True
    driver.xid(1, xid)
    state.look(gpus.wait(1.0))
    assert state.state == "sick" and f"gpu 1 Xid {xid}: {FATAL[xid]}" in state.reasons[0]
    for _ in range(5):
        state.look(gpus.look())
    assert state.state == "sick"


@pytest.mark.parametrize("xid", [13, 31, 43, 45, 63, 94])
def test_what_a_program_did_itself_is_no_fault_of_the_node(driver: Driver, xid: int) -> None:
    gpus = driver.open()
    driver.xid(0, xid)
    (found,) = gpus.wait(1.0)
    assert (found.check, found.status) == (f"gpu 0 Xid {xid}", "warn")


def test_an_xid_of_a_gpu_that_is_gone(driver: Driver) -> None:
    gpus = driver.open()
    driver.xid(0, 79)
    driver.gpus({"lost": True}, {})
    (found,) = gpus.wait(1.0)
    assert found.check == "a gpu Xid 79" and found.status == "fail"


def test_no_xid_comes(driver: Driver) -> None:
    assert driver.open().wait(0.05) == []


def test_an_event_set_that_cannot_be_waited_for_is_a_reason_to_look(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = driver.open()

    def lost(*_: object) -> None:
        raise driver.module.NVMLError_GpuIsLost

    monkeypatch.setattr(driver.module, "nvmlEventSetWait_v2", lost)
    driver.gpus({"lost": True}, {})
    assert "gpu 0" in bad(gpus.wait(0.01))


def test_where_nobody_can_look_nothing_is_wrong(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    (driver.folder / "n1.none").touch()
    with pytest.raises(nvml.Unusable, match="NVML cannot be used: NVML Shared Library Not Found"):
        driver.open()
    (driver.folder / "n1.none").unlink()
    driver.gpus()
    with pytest.raises(nvml.Unusable, match="no GPU"):  # a job step without GPUs
        driver.open()
    monkeypatch.setattr(nvml, "MODULE", "pynvml_that_is_not_installed")
    with pytest.raises(nvml.Unusable, match="nvidia-ml-py is not installed"):
        nvml.load()
    (driver.folder / "broken_pynvml.py").write_text("raise RuntimeError('of another kind')\n")
    monkeypatch.syspath_prepend(str(driver.folder))
    monkeypatch.setattr(nvml, "MODULE", "broken_pynvml")
    with pytest.raises(nvml.Unusable, match="of another kind"):
        nvml.load()


def test_the_names_are_those_of_the_real_package() -> None:
    found = importlib.util.find_spec("pynvml")
    if found is None or found.origin is None or Path(found.origin) == FAKE:
        pytest.skip("nvidia-ml-py is not installed")
    real = Path(found.origin).read_text()
    used = [name for name in (*nvml.Nvml.__annotations__, *vars(nvml.Nvml)) if name.startswith(("nvml", "NVML"))]
    assert len(used) > 20
    for name in used:
        if not name.startswith("NVMLError_"):  # made when the package is imported
            assert name in real, name

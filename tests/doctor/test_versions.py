"""Versions of Python packages: supported, broken, missing."""

import pytest

from flashrec.admin.doctor.finding import Finding, Status
from flashrec.admin.doctor.versions import check_versions, installed, is_within, numbers, supported_torch
from tests.doctor.builders import by_name

SLURM = (25, 11, 2)


def look(**packages: str) -> dict[str, Finding]:
    known = {"torch": "2.13.0+cpu"} | {name.replace("_", "-"): version for name, version in packages.items()}
    return by_name(check_versions(SLURM, lambda package: known.get(package) or None))


def test_range_of_torch_is_the_one_that_ranks_insist_on() -> None:
    versions = pytest.importorskip("flashrec.runtime.torch_private.versions")
    wanted = supported_torch()
    assert set(wanted.split(",")) == set(versions.SUPPORTED_TEXT.split(","))


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ("2.13.0+cpu", Status.OK),
        ("2.13.1", Status.OK),
        ("2.12.1", Status.FAIL),
        ("2.14.1+cu130", Status.OK),
        ("2.15.0", Status.FAIL),
        ("2.15.0a0+git1", Status.FAIL),
        ("", Status.WARN),
    ],
)
def test_torch(version: str, status: Status) -> None:
    assert look(torch=version)["torch.version"].status is status


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ("2.28.2", Status.OK),
        ("2.28.3", Status.FAIL),
        ("2.28.8", Status.FAIL),
        ("2.28.9", Status.OK),
        ("2.30.1", Status.OK),
    ],
)
@pytest.mark.parametrize("package", ["nvidia_nccl_cu12", "nvidia_nccl_cu13"])
def test_nccl_that_is_known_to_break(package: str, version: str, status: Status) -> None:
    assert look(**{package: version})["nccl.version"].status is status


def test_absence_of_what_is_optional_is_fine() -> None:
    found = look()
    assert {
        name: found[name].status for name in ("nccl.version", "mpi4py.version", "pyslurm.version")
    } == dict.fromkeys(("nccl.version", "mpi4py.version", "pyslurm.version"), Status.OK)


@pytest.mark.parametrize(("version", "status"), [("25.11.2", Status.OK), ("24.5.1", Status.WARN)])
def test_pyslurm_of_another_slurm(version: str, status: Status) -> None:
    assert look(pyslurm=version)["pyslurm.version"].status is status


def test_versions_are_read() -> None:
    assert numbers("2.13.0+cpu") == (2, 13, 0)
    assert numbers("2.14.0rc1") == (2, 14, 0)
    assert is_within("2.13", ">=2.13,<2.14") and not is_within("2.14", ">=2.13,<2.14")
    with pytest.raises(ValueError, match="~=2"):
        is_within("2.13", "~=2.13")


def test_what_is_installed_is_found_without_importing_it() -> None:
    assert installed("click") is not None
    assert installed("no-such-package-of-ours") is None

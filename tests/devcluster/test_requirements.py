"""What is missing is named, all of it, with the command that mends it."""

from __future__ import annotations

from typing import Any

import pytest

from flashrec.devcluster.requirements import MissingRequirementError, check_requirements, find_program

FULL: dict[str, Any] = {
    "which": lambda name: f"/usr/bin/{name}",
    "is_root": lambda: True,
    "try_namespaces": lambda: None,
    "platform": "linux",
}


def lacks(**changes: Any) -> str:
    with pytest.raises(MissingRequirementError) as caught:
        check_requirements(**{**FULL, **changes})
    return str(caught.value)


def test_a_complete_machine_passes() -> None:
    check_requirements(**FULL)


@pytest.mark.parametrize(
    ("program", "package"),
    [
        ("slurmctld", "slurmctld"),
        ("slurmd", "slurmd"),
        ("srun", "slurm-client"),
        ("munged", "munge"),
        ("ip", "iproute2"),
        ("tc", "iproute2"),
        ("nft", "nftables"),
        ("nsenter", "util-linux"),
        ("unshare", "util-linux"),
        ("setpriv", "util-linux"),
    ],
)
def test_a_missing_program_is_named_with_its_package(program: str, package: str) -> None:
    message = lacks(which=lambda name: None if name == program else f"/usr/bin/{name}")
    assert message.startswith(f"{program} not found: apt-get install ") and package in message


def test_everything_missing_is_named_at_once() -> None:
    message = lacks(which=lambda name: None, is_root=lambda: False)
    assert "slurmd not found" in message and "munged not found" in message
    assert "needs root: run with sudo" in message


def test_a_container_without_privileges_is_told_apart() -> None:
    message = lacks(try_namespaces=lambda: "unshare failed: Operation not permitted")
    assert message.startswith("cannot create network namespaces: unshare failed: Operation not permitted")
    assert "--privileged" in message


def test_namespaces_are_not_tried_without_root() -> None:
    def fail() -> str:
        raise AssertionError("tried")

    assert lacks(is_root=lambda: False, try_namespaces=fail) == "needs root: run with sudo"


def test_other_systems_are_told_what_is_missing() -> None:
    assert lacks(platform="darwin") == "needs Linux namespaces; this is darwin"


def test_daemons_are_found_where_an_ordinary_path_does_not_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashrec.devcluster.requirements.SEARCH_PATH", "/nowhere")
    with pytest.raises(MissingRequirementError, match="slurmd not found: apt-get install"):
        find_program("slurmd")

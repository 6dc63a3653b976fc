"""Which variables of a script come too late for a parked process."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashrec.runtime.late import cuda_objection, objection

START = b"OMP_NUM_THREADS=1\0PATH=/bin\0EMPTY=\0MULTI=a=b\0"


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, ""),
        ({"OMP_NUM_THREADS": "2"}, "OMP_NUM_THREADS"),
        ({"MKL_NUM_THREADS": "2", "KMP_AFFINITY": "none"}, "KMP_AFFINITY, MKL_NUM_THREADS"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "PYTORCH_CUDA_ALLOC_CONF"),
        ({"PYTORCH_ALLOC_CONF": "x"}, "PYTORCH_ALLOC_CONF"),
        ({"KMP_INIT_AT_FORK": "FALSE", "TORCHINDUCTOR_CACHE_DIR": "/x", "RANK": "3", "PATH": "/other"}, ""),
    ],
)
def test_only_what_is_read_when_torch_is_loaded_counts(changes: dict[str, str], names: str, tmp_path: Path) -> None:
    (tmp_path / "environ").write_bytes(START)
    environ = {"OMP_NUM_THREADS": "1", "PATH": "/bin", "EMPTY": "", "MULTI": "a=b"} | changes
    said = objection(environ, tmp_path / "environ")
    assert said == (f"the script sets {names}, which a parked process reads before: set it in front of the command"
                    if names else "")  # fmt: skip


def test_what_the_driver_reads_counts_only_where_there_is_a_context(tmp_path: Path) -> None:
    (tmp_path / "environ").write_bytes(START + b"CUDA_DEVICE_ORDER=PCI_BUS_ID\0")
    late = {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "NVIDIA_TF32_OVERRIDE": "0"}
    environ = late | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_MODULE_LOADING": "LAZY", "OMP_NUM_THREADS": "1"}
    assert objection(environ, tmp_path / "environ") == ""
    assert cuda_objection(environ, tmp_path / "environ") == (
        "the script sets CUDA_DEVICE_MAX_CONNECTIONS, CUDA_VISIBLE_DEVICES, NVIDIA_TF32_OVERRIDE, which a parked "
        "process with a CUDA context reads before: set it in front of the command"
    )


def test_what_cannot_be_read_is_no_objection(tmp_path: Path) -> None:
    assert objection({"OMP_NUM_THREADS": "2"}, tmp_path / "nothing") == ""

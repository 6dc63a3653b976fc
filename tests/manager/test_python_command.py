"""Which commands can be parked: an interpreter with its flags, and a script or a module."""

from __future__ import annotations

import shlex

import pytest

from flashrec.manager.python_command import num_python_words


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("python train.py", 1),
        ("python3 train.py -c x", 1),
        ("/opt/venv/bin/python3.11 -u -OO -X dev -Wignore -W error train.py --steps 3", 8),
        ("python -Xfrozen_modules=off -IB ./train", 3),
        ("python -m train --steps 3", 1),
        ("python -u -m pkg.train", 2),
        ("python -c 'import train'", None),
        ("python -uc 'import train'", None),
        ("python -i train.py", None),
        ("python -m", None),
        ("python -X", None),
        ("python -", None),
        ("python - x", None),
        ("python --version", None),
        ("python", None),
        ("bash train.sh", None),
        ("apptainer exec image.sif python train.py", None),
        ("pythonw train.py", None),
        ("torchrun train.py", None),
        ("", None),
    ],
)
def test_words_of_the_interpreter(command: str, words: int | None) -> None:
    assert num_python_words(shlex.split(command)) == words

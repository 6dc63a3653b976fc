"""`flashrec run` as typed and as `srun --flashrecovery` hands it over: options, SPEC and environment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from flashrec.cli import run as module
from flashrec.cli.main import main
from flashrec.config.schema import Config, Pool
from flashrec.manager.request import OutputFile, Request

Run = Callable[..., Request]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """The request that a command line inside an allocation comes to."""
    requests: list[Request] = []
    monkeypatch.setattr(module, "run", lambda request: requests.append(request) or 0)
    monkeypatch.chdir(tmp_path)

    def ask(*argv: str, **environ: str) -> Request:
        done = CliRunner().invoke(
            main, ["run", *argv, "--", "python", "t.py", "--spares", "9"], env={"SLURM_JOB_ID": "1", **environ}
        )
        assert done.exit_code == 0, done.output
        return requests.pop()

    return ask


def refused(*argv: str, **environ: str) -> str:
    env: dict[str, Any] = {"SLURM_JOB_ID": "1", "FLASHREC_PLUGIN": None, "FLASHREC_SPEC": None, **environ}
    done = CliRunner().invoke(main, ["run", *argv, "--", "true"], env=env)
    assert done.exit_code == 64, done.output
    return done.output


def test_what_is_behind_the_dashes_is_the_command(asked: Run) -> None:
    request = asked()
    assert request.command == ("python", "t.py", "--spares", "9")
    assert request.config == Config()


def test_options_of_srun_and_ours_in_any_order(asked: Run, tmp_path: Path) -> None:
    request = asked(
        "-N", "4", "--spares", "2", "-Jhello", "--set", "control.port=7", "-c", "2", "-J", "--local", "--job-dir=d",
        "-phigh", "--container-image", "a b", "-o", "out.%j",
    )  # fmt: skip
    assert (request.num_nodes, request.least_nodes, request.config.spares, request.local_nodes) == (4, 4, 2, 0)
    assert request.config.control.port == 7
    assert request.job_dir == Path("d")
    assert request.output == OutputFile("out.%j")
    assert request.srun_options == (
        "--job-name=hello", "--cpus-per-task=2", "--job-name=--local", "--container-image", "a b",
    )  # fmt: skip


def test_help_is_help() -> None:
    for word in ("-h", "--help"):
        done = CliRunner().invoke(main, ["run", "-N4", word])
        assert done.exit_code == 0 and "max-swaps=COUNT" in done.output


@pytest.mark.parametrize(
    ("argv", "config"),
    [
        (["--flashrecovery"], Config()),
        (["--flashrecovery="], Config()),
        (["--flashrecovery=spares=2"], Config(spares=2)),
        (["--flashrecovery=spares=2", "--spares=3"], Config(spares=3)),
        (["--flashrecovery=spares=2", "--set", "spares=4"], Config(spares=4)),
        (["--flashrecovery=pool=day", "--pool", "night"], Config(pool=Pool(name="night", tier="pool"))),
        (["--flashrecovery=config=c.yaml"], Config(spares=7)),
        (["--flashrecovery=config=c.yaml,spares=0"], Config(spares=0)),
        (["--config", "c.yaml", "--flashrecovery"], Config(spares=7)),
        (["--flashrecovery", "-N4"], Config()),
    ],
)
def test_spec(argv: list[str], config: Config, asked: Run) -> None:
    Path("c.yaml").write_text("spares: 7\n")
    request = asked(*argv)
    assert request.config == config
    assert (request.num_nodes == 4) is ("-N4" in argv)


@pytest.mark.parametrize(
    ("argv", "environ", "spares"),
    [
        ([], {"FLASHREC_PLUGIN": "1", "FLASHREC_SPEC": "spares=3"}, 3),
        (["--flashrecovery=spares=2"], {"FLASHREC_PLUGIN": "1", "FLASHREC_SPEC": "spares=3"}, 2),
        (["--flashrecovery"], {"FLASHREC_PLUGIN": "1", "FLASHREC_SPEC": "spares=3"}, None),
        ([], {"FLASHREC_PLUGIN": "1"}, None),
        ([], {"FLASHREC_PLUGIN": "1", "FLASHREC_SPEC": "off"}, None),
        ([], {"FLASHREC_SPEC": "spares=3"}, None),
    ],
)
def test_the_plugins_spec_is_the_default(
    argv: list[str], environ: dict[str, str], spares: int | None, asked: Run
) -> None:
    assert asked(*argv, **environ).config.spares == spares


@pytest.mark.parametrize(
    ("argv", "environ", "said"),
    [
        (["--flashrecovery=spares=two"], {}, "tier=hot|warm|pool, pool=NAME"),
        (["--flashrecovery=off"], {}, "start the command with srun"),
        ([], {"FLASHREC_PLUGIN": "1", "FLASHREC_SPEC": "nonsense"}, "tier=hot|warm|pool"),
        (["--flashrecovery"], {"FLASHREC_PLUGIN": "2"}, "version 2 of the contract"),
        (["--flashrecovery=config=a", "--config", "b"], {}, "given twice"),
        (["--flashrecovery=config=/nonexistent"], {}, "cannot read /nonexistent"),
        (["--pty"], {}, "ranks have no terminal"),
        (["-w", "n1"], {}, "places the ranks itself"),
        (["--local", "-c", "2"], {}, "not --cpus-per-task=2"),
        (["--local", "-p", "gpu"], {}, "not --partition=gpu"),
        (["-o", "%N"], {}, "use %t"),
    ],
)
def test_what_is_refused_is_refused_before_anything_starts(
    argv: list[str], environ: dict[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if "%N" in argv:
        argv = ["--local", *argv]
    assert said in refused(*argv, **environ)
    assert list(tmp_path.iterdir()) == []


def test_no_command() -> None:
    done = CliRunner().invoke(main, ["run", "-N4"])
    assert done.exit_code == 64 and "no command" in done.output


@pytest.mark.parametrize("argv", [[], ["--ntasks-per-node=2"]])
def test_outside_an_allocation_without_a_number_of_nodes(argv: list[str]) -> None:
    said = refused(*argv, SLURM_JOB_ID="")
    assert "must be started inside a Slurm allocation" in said and "-N" in said


def test_outside_an_allocation_salloc_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[tuple[str, list[str], dict[str, str]]] = []

    def execvpe(file: str, argv: list[str], environ: dict[str, str]) -> None:
        became.append((file, argv, environ))
        raise SystemExit(0)

    monkeypatch.setattr("os.execvpe", execvpe)
    monkeypatch.setattr("shutil.which", lambda name, path: f"/usr/bin/{name}")
    argv = ["--flashrecovery=spares=2", "-N2", "-p", "gpu", "--set", "control.port=7", "-K", "--", "true"]
    done = CliRunner().invoke(main, ["run", *argv], env={"SLURM_JOB_ID": None})
    assert done.exit_code == 0, done.output
    ((file, words, environ),) = became
    assert file == "salloc" and "--nodes=4" in words and "--partition=gpu" in words
    inner = words[words.index("run") + 1 :]
    assert inner[:3] == ["--flashrecovery=spares=2", "--set", "control.port=7"]
    assert environ["FLASHREC_NO_KILL"] == environ["FLASHREC_HANDED_OVER"] == "1"


def test_outside_an_allocation_without_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name, path: None)
    assert "there is no salloc" in refused("-N2", SLURM_JOB_ID="")

"""--flashrecovery on a real cluster: what srun, sbatch and salloc make of it."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

import pytest

from tests.plugin.conftest import Became, Site, complaints

pytestmark = pytest.mark.devcluster

Done = subprocess.CompletedProcess[str]


def _run(site: Site, *argv: str, **options: object) -> Done:
    return site.cluster.run(argv, check=False, cwd=site.folder, **options)  # type: ignore[arg-type]


def _becomes(site: Site, *argv: str, **options: object) -> Became:
    before = site.started()
    done = _run(site, *argv, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert site.started() == before + 1
    return Became.parse(done.stdout)


def _stays(site: Site, *argv: str, **options: object) -> Done:
    before = site.started()
    done = _run(site, *argv, **options)
    assert site.started() == before, done.stdout
    done.stderr = complaints(done.stderr)
    return done


@pytest.mark.parametrize("command", ["srun", "sbatch", "salloc"])
def test_help_shows_the_option(site: Site, command: str) -> None:
    assert "--flashrecovery=[SPEC]" in _run(site, command, "--help").stdout


COMMAND_LINES: tuple[tuple[Sequence[str], Sequence[str]], ...] = (
    (["--flashrecovery", "hostname"], ["--flashrecovery=", "--", "hostname"]),
    (["-N2", "--flashrecovery=spares=01", "-n", "2", "a", "-n", "9"],
     ["--flashrecovery=spares=1", "-N2", "-n", "2", "--", "a", "-n", "9"]),
    (["--flashrecovery=tier=pool,spares=2", "-N1", "--", "a", "--", "b"],
     ["--flashrecovery=spares=2,tier=pool", "-N1", "--", "a", "--", "b"]),
    (["--flash", "-N1", "a"], ["--flashrecovery=", "-N1", "--", "a"]),
    (["--flashrec=max-swaps=3", "-N1", "a"], ["--flashrecovery=max-swaps=3", "-N1", "--", "a"]),
    (["--flashrecovery=off", "-N1", "--flashrecovery=pool=p", "a"], ["--flashrecovery=pool=p", "-N1", "--", "a"]),
    (["--comment", "--flashrecovery", "--flashrecovery", "a"],
     ["--flashrecovery=", "--comment", "--flashrecovery", "--", "a"]),
    (["--flashrecovery", "sh", "--flashrecovery=off"], ["--flashrecovery=", "--", "sh", "--flashrecovery=off"]),
    (["--flashrecovery", "--job-name=", "-J", "two words", "a", "", "b\nc", "*"],
     ["--flashrecovery=", "--job-name=", "-J", "two words", "--", "a", "", "b\nc", "*"]),
    (["-vN1", "--export=NONE", "--flashrecovery=config=a b.yaml", "-K0", "a"],
     ["--flashrecovery=config=a b.yaml", "-vN1", "--export=NONE", "-K0", "--", "a"]),
    (["-N9", "--jobid=4711", "--flashrecovery", "a"], ["--flashrecovery=", "-N9", "--jobid=4711", "--", "a"]),
)  # fmt: skip


@pytest.mark.parametrize(("typed", "words"), COMMAND_LINES, ids=lambda words: " ".join(words).replace("\n", "-"))
def test_bare_srun_becomes_flashrec_run(site: Site, typed: Sequence[str], words: Sequence[str]) -> None:
    became = _becomes(site, "srun", *typed)
    assert became.words == ("run", *words)
    assert became.environ["FLASHREC_HANDED_OVER"] == became.environ["FLASHREC_PLUGIN"] == "1"
    assert became.environ["PWD"] == str(site.folder)
    assert became.blocked == 0, "signals that srun has blocked stay blocked"


def test_a_long_command_line_arrives_whole(site: Site) -> None:
    words = [f"word-{i}-{'x' * 100}" for i in range(3000)]
    became = _becomes(site, "srun", "--flashrecovery", "a", *words)
    assert became.words[4:] == tuple(words)


def test_standard_files_stay(site: Site) -> None:
    with site.plugstack(f"optional {site.plugin} flashrec={site.folder}/echo"):
        echo = site.folder / "echo"
        echo.write_text("#!/bin/sh\ncat\necho error >&2\nexit 7\n")
        echo.chmod(0o755)
        done = _run(site, "srun", "--flashrecovery", "a", stdin="from stdin")
    assert (done.stdout, done.stderr, done.returncode) == ("from stdin", "error\n", 7)


def test_limits_and_open_files_stay(site: Site) -> None:
    """flashrec finds what it would find if it had been started instead of srun."""
    plain = Became.parse(_run(site, str(site.executable)).stdout).environ
    environ = _becomes(site, "srun", "--flashrecovery", "a").environ
    assert environ["NOFILE"] == plain["NOFILE"]
    assert _numbers(environ["FILES"]) == _numbers(plain["FILES"])


def _numbers(files: str) -> list[str]:
    return [path.rpartition("/")[2] for path in files.split()]


def test_ctrl_c_reaches_flashrec(site: Site) -> None:
    """srun blocks SIGINT before it loads the plugin. (Here it may be ignored, as in any background job of a shell.)"""
    with site.plugstack(f"optional {site.plugin} flashrec={site.folder}/raiser"):
        raiser = site.folder / "raiser"
        raiser.write_text("#!/bin/bash\nkill -INT $$\necho still here\n")
        raiser.chmod(0o755)
        done = _run(site, "env", "--default-signal=INT", "bash", "-c", "srun --flashrecovery a; echo code $?")
    assert done.stdout == "code 130\n", done.stderr


def test_path_is_searched(site: Site) -> None:
    with site.plugstack(f"optional {site.plugin}"):
        became = _becomes(site, "env", f"PATH=/nowhere:{site.folder}:/usr/bin:/bin", "srun", "--flashrecovery", "a")
        assert became.words == ("run", "--flashrecovery=", "--", "a")


def test_unprivileged_user(site: Site) -> None:
    assert _becomes(site, "srun", "--flashrecovery", "a", user="nobody").words[0] == "run"


# ---- refused


@pytest.mark.parametrize(
    "command", [["srun", "-N1", "true"], ["salloc", "-N1", "true"], ["sbatch", "-N1", "--wrap=true"]]
)
@pytest.mark.parametrize("spec", ["sprs=1", "spares=1,spares=2", "off,spares=1", "tier=cold"])
def test_bad_spec_is_refused_with_the_grammar(site: Site, command: list[str], spec: str) -> None:
    program, *rest = command
    done = _stays(site, program, f"--flashrecovery={spec}", *rest)
    assert done.returncode != 0
    assert "spares=COUNT, tier=hot|warm|pool, pool=NAME, max-swaps=COUNT, config=FILE" in done.stderr
    assert done.stdout == ""


def test_bad_spec_in_a_script_is_refused(site: Site) -> None:
    script = "#!/bin/sh\n#SBATCH --flashrecovery=spares=many\nhostname\n"
    done = _stays(site, "sbatch", "-N1", stdin=script)
    assert done.returncode != 0
    assert 'not a number of 1 to 6 digits: "many"' in done.stderr


@pytest.mark.parametrize(
    "words", [["--flashrecovery", "a", ":", "b"], ["a", ":", "--flashrecovery", "b"], ["-N1", "a", ":", "--flash", "b"]]
)
def test_heterogeneous_step_is_refused(site: Site, words: list[str]) -> None:
    done = _stays(site, "srun", *words)
    assert done.returncode == 1
    assert "heterogeneous" in done.stderr


def test_no_command_is_sruns_own_complaint(site: Site) -> None:
    with_option, without = _stays(site, "srun", "--flashrecovery", "-N1"), _stays(site, "srun", "-N1")
    assert with_option.returncode == without.returncode != 0
    assert with_option.stderr == without.stderr


@pytest.mark.parametrize("argument", ["", "flashrec=/nowhere/flashrec"])
def test_missing_flashrec_is_one_line_and_code_1(site: Site, argument: str) -> None:
    with site.plugstack(f"optional {site.plugin} {argument}"):
        done = _stays(site, "env", "PATH=/usr/bin:/bin", "srun", "--flashrecovery", "-N1", "hostname")
        assert (done.returncode, done.stdout) == (1, "")
        (line,) = done.stderr.splitlines()
        assert "install" in line
        plain = _stays(site, "srun", "-N1", "-w", "n1", "hostname")
        assert (plain.returncode, plain.stdout, plain.stderr) == (0, "n1\n", "")


# ---- ordinary


@pytest.mark.parametrize(
    "options",
    [["--flashrecovery=off"], ["--flashrecovery=spares=1", "--flashrecovery=off"], []],
    ids=lambda words: " ".join(words) or "none",
)
def test_ordinary_srun(site: Site, options: list[str]) -> None:
    done = _stays(site, "srun", *options, "-N2", "-l", "hostname")
    assert sorted(done.stdout.splitlines()) == ["0: n0", "1: n1"]
    assert (done.returncode, done.stderr) == (0, "")


def test_srun_that_is_ours_is_not_handed_over(site: Site) -> None:
    done = _stays(site, "env", "FLASHREC_HANDED_OVER=1", "srun", "--flashrecovery", "-w", "n1", "hostname")
    assert (done.returncode, done.stdout) == (0, "n1\n")


_VOLATILE = (
    "SLURM_JOB",
    "SLURM_STEP",
    "SLURM_TASK_PID",
    "SLURM_SRUN_COMM",
    "SLURM_LAUNCH_NODE",
    "SLURM_WORKING_CLUSTER",
    "SLURM_UMASK",
)
ORDINARY = (
    ["srun", "-N2", "-l", "hostname"],
    ["srun", "-N1", "-w", "n0", "env"],
    ["srun", "-N1", "sh", "-c", "echo out; echo err >&2; exit 3"],
    ["srun", "-N1", "--no-such-option", "true"],
    ["srun", "-N9", "-I1", "true"],
    ["srun"],
    ["salloc", "-N1", "-w", "n1", "srun", "env"],
    ["sbatch", "-W", "-N1", "-o", "/dev/null", "--wrap=exit 5"],
)  # fmt: skip


def _observable(done: Done) -> tuple[int, list[str], list[str]]:
    def lines(text: str) -> list[str]:
        kept = (line for line in text.splitlines() if not line.startswith(_VOLATILE))
        return sorted("".join(c for c in line if not c.isdigit()) for line in kept)

    return done.returncode, lines(done.stdout), lines(done.stderr)


@pytest.mark.parametrize("argv", ORDINARY, ids=" ".join)
def test_without_the_option_nothing_changes(site: Site, argv: list[str]) -> None:
    """Exit code, output and the environment of tasks are those of a cluster without the plugin."""
    with site.plugstack("# no plugin"):
        without = _observable(_stays(site, *argv))
    assert _observable(_stays(site, *argv)) == without


# ---- inside a job


def _job(site: Site, script: str, *options: str, header: str = "") -> tuple[str, int]:
    output = site.folder / "output"
    output.unlink(missing_ok=True)
    done = _run(site, "sbatch", "-W", "-N2", f"-o{output}", *options, stdin=f"#!/bin/bash\n{header}\n{script}\n")
    assert done.stdout.startswith("Submitted"), done.stderr
    return output.read_text(), done.returncode


@pytest.mark.parametrize(
    ("options", "header", "spec"),
    [
        (["--flashrecovery"], "", ""),
        (["--flashrecovery=spares=01"], "", "spares=1"),
        ([], "#SBATCH --flashrecovery=spares=1", "spares=1"),
        (["--flashrecovery=pool=p"], "#SBATCH --flashrecovery=spares=1", "pool=p"),
        (["--flashrecovery=spares=1", "--export=NONE"], "", "spares=1"),
        (["--flashrecovery", "--export=A=b"], "", ""),
    ],
)
def test_option_of_sbatch_is_the_default_inside(site: Site, options: list[str], header: str, spec: str) -> None:
    output, code = _job(site, "srun -N2 a b", "--no-kill", *options, header=header)
    assert code == 0, output
    became = Became.parse(output)
    assert became.words == ("run", f"--flashrecovery={spec}", "-N2", "--", "a", "b")
    assert became.environ["FLASHREC_SPEC"] == spec
    assert became.environ["FLASHREC_PLUGIN"] == "1"
    submit_line = became.environ["FLASHREC_SUBMIT_LINE"].split()
    assert submit_line[0].endswith("sbatch") and "--no-kill" in submit_line


def test_words_of_the_script_are_not_those_of_sbatch(site: Site) -> None:
    script = site.folder / "job.sh"
    script.write_text("#!/bin/bash\nsrun a\n")
    output = site.folder / "script-output"
    _run(site, "sbatch", "-W", "-N1", f"-o{output}", "--flashrecovery", str(script), "--no-kill")
    assert "--no-kill" not in Became.parse(output.read_text()).environ["FLASHREC_SUBMIT_LINE"]


def test_srun_overrides_what_sbatch_was_given(site: Site) -> None:
    output, _ = _job(site, "srun --flashrecovery=spares=2 a", "--flashrecovery=spares=1")
    assert Became.parse(output).words[1] == "--flashrecovery=spares=2"
    output, _ = _job(site, "srun --flashrecovery=off -N2 -l hostname", "--flashrecovery=spares=1")
    assert sorted(output.splitlines()) == ["0: n0", "1: n1"]


def test_off_for_the_whole_job(site: Site) -> None:
    output, _ = _job(site, "srun -N1 -w n1 hostname; srun --flashrecovery a", "--flashrecovery=off")
    assert output.startswith("n1\n")
    assert Became.parse(output).words[1] == "--flashrecovery="


def test_option_only_of_an_srun_inside(site: Site) -> None:
    output, _ = _job(site, "srun --flashrecovery=spares=1 a")
    became = Became.parse(output)
    assert became.words == ("run", "--flashrecovery=spares=1", "--", "a")
    assert "FLASHREC_SPEC" not in became.environ


def test_job_submitted_from_within_a_job_inherits_no_variable(site: Site) -> None:
    inner = site.folder / "inner-output"
    script = f"""
export FLASHREC_HANDED_OVER=1   # as in a rank
unset SLURM_SPANK__SLURM_SPANK_OPTION_flashrecovery_flashrecovery
sbatch -N1 -o {inner} --wrap 'env | grep FLASHREC; echo end'
"""
    _job(site, script, "--flashrecovery=spares=1")
    _run(site, "srun", "-N2", "--exclusive", "true")  # behind both
    assert inner.read_text() == "end\n"


def test_filter_that_adds_no_kill(site: Site) -> None:
    with site.plugstack(f"{site.usual} no_kill=cli_filter"):
        output, _ = _job(site, "srun a", "--flashrecovery")
    environ = Became.parse(output).environ
    assert environ["FLASHREC_NO_KILL"] == "1"
    assert "FLASHREC_SUBMIT_LINE" not in environ


def test_salloc(site: Site) -> None:
    became = _becomes(site, "salloc", "-N2", "--no-kill", "--flashrecovery=spares=1", "srun", "-n2", "a")
    assert became.words == ("run", "--flashrecovery=spares=1", "-n2", "--", "a")
    assert became.environ["FLASHREC_SPEC"] == "spares=1"
    assert became.environ["SLURM_JOB_ID"].isdigit()
    assert became.environ["FLASHREC_SUBMIT_LINE"].endswith("salloc -N2 --no-kill --flashrecovery=spares=1")


def test_salloc_of_flashrec_is_left_alone(site: Site) -> None:
    """As `flashrec run` starts it for a bare srun; the option is inherited from its environment."""
    inherited = "SLURM_SPANK__SLURM_SPANK_OPTION_flashrecovery_flashrecovery"
    env = {"FLASHREC_HANDED_OVER": "1", "FLASHREC_NO_KILL": "1", "FLASHREC_PLUGIN": "1", inherited: "spares=1"}
    done = _run(site, "salloc", "-Q", "-N1", "sh", "-c", "env | grep ^FLASHREC | sort", env=env)
    assert done.stdout == "FLASHREC_HANDED_OVER=1\nFLASHREC_NO_KILL=1\nFLASHREC_PLUGIN=1\n"


def test_shell_of_salloc_is_ordinary(site: Site) -> None:
    """With use_interactive_step salloc starts it through an srun of its own, which inherits the option."""
    script = "hostname; srun --overlap a; exit 7\n"
    argv = ("salloc", "-N1", "-w", "n1", "--flashrecovery")
    done = _run(site, *argv, stdin=script, env={"SHELL": "/bin/bash"})
    assert done.returncode == 7, done.stderr
    assert done.stdout.startswith("n1\n")
    assert Became.parse(done.stdout).words == ("run", "--flashrecovery=", "--overlap", "--", "a")

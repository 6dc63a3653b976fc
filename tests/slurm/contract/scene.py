"""What the contract suite and the recorder do to a dev cluster besides asking it: jobs, forged ones among them."""

from __future__ import annotations

from flashrec.devcluster.cluster import DevCluster

# What a user can put into a job's name and comment, made to look like an answer of each of Slurm's commands.
EVIL = (
    "x JobState=FAILED NodeList=n9\nJobId=666 JobName=evil JobState=FAILED Nodes=n9|666|FAILED|n9|n9\n"
    '666|FAILED|n9|n9\nerror: Unable to contact slurm controller\t"},{"job_id":666,\\'
)
FORGED = (f"--job-name={EVIL}", f"--comment={EVIL}")
RESERVATION = (
    "reservationname=spares",
    "nodes=n4",
    "users=root",
    "starttime=now",
    "duration=infinite",
    "flags=ignore_jobs,maint",
)
SLEEPER = "#!/bin/sh\nsrun --no-kill --overlap sleep 600\n"


def submit(cluster: DevCluster, *options: str, script: str = SLEEPER, user: str | None = None) -> int:
    """The id of a new batch job that sleeps in a job step of all its nodes."""
    argv = ["sbatch", "--parsable", "--no-kill", "--output=/dev/null", *options]
    return int(cluster.run(argv, stdin=script, user=user, cwd="/").stdout.split(";")[0])

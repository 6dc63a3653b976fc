"""Our tests on other Slurm releases than this machine's: `make test-slurm SLURM=24.11`."""

"""The same training, the same fault, and who brings it back: flashrec, torchft, nvidia-resiliency-ext, torchrun, Slurm.

`training.py` is what all jobs train; `scripts/` has it in the form that each peer asks for, `adapters/` starts it as
the peer's documentation says, `trial.py` injects the fault, `reading.py` gets the figures from the logs of steps.
"""

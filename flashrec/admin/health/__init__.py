"""What Slurm's HealthCheckProgram does with the report of a node's checks: drain it, undrain it, or leave it alone.

    flashrec-node-health            (slurm_plugin/health: the watchdog that slurmd runs)
      └ flashrec node-health --slurm = program.main: checks, then one decision
           health.run_checks        what is the matter with this node
           state                    how often in a row, kept in a file
           policy                   pure: what follows, and why
           reason                   the mark by which we know what we drained ourselves

Rules: never undrain what does not bear our own unchanged reason; never drain more than `max_drained` nodes, nor a busy
one unless told to; what cannot be looked at is no ground for anything; whatever happens, the exit code is 0 and the
program ends in time.
"""

"""`flashrec doctor`: is everything there that recovery needs, and if not, what is to be done?

    finding         ok, warn, fail or unknown, what was seen, what to do
    facts           what is asked of Slurm, once, each answer or the reason why there is none
    settings, slurm_checks, plugin_checks, glue, pools     the cluster: pure functions of the facts (and of files)
    machine, root_files, versions    the machine we are on
    nodes           the same on nodes, through a short job
    examine         all of them in order

A check looks and changes nothing. Everything is bounded in time. "Could not look" is its own verdict.
"""

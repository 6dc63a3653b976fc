"""How long it takes until a failure is seen, and until training goes on: measured on a dev cluster, fault by fault.

    python -m benchmarks.detection --help            (make bench-detection)
    python -m benchmarks.detection.quiet --help      (make bench-false-positives)

Every fault is real and stamped by whoever does it; the verdict is stamped by the journal of the job. Both clocks are
the same CLOCK_MONOTONIC: all nodes of a dev cluster are on one machine.
"""

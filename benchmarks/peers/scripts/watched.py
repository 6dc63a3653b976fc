"""Plain torch with heartbeats to nvidia-resiliency-ext's rank monitor, for its in-job restart."""

from __future__ import annotations

import torch.distributed as dist
from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

from benchmarks.peers import training
from benchmarks.peers.scripts import plain


def main() -> None:
    options = training.parse()
    dist.init_process_group("gloo")
    client = RankMonitorClient()
    client.init_workload_monitoring()
    plain.train(options, client.send_heartbeat)
    client.shutdown_workload_monitoring()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""What the fork server of many layouts imports once, so that each worker need not. Not pipelining: whether that is
imported decides what the runtime looks for in a script that does not use it."""

import torch
from torch.distributed import fsdp, tensor  # noqa: F401

from tests.runtime.layouts import model, program  # noqa: F401

torch.compiler.list_backends()  # imports them, which takes seconds

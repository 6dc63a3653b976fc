"""What the fork server of many layouts imports once, so that each worker need not: two seconds for one that compiles.
Not pipelining: whether that is imported decides what the runtime looks for in a script that does not use it."""

import torch._dynamo.repro.after_aot
import torch._functorch.aot_autograd
import torch._inductor.compile_fx
from torch.distributed import fsdp, tensor  # noqa: F401

from tests.runtime.layouts import model, program  # noqa: F401

"""What the fork server of many layouts imports once, so that each worker need not: two seconds for one that compiles.
Not pipelining: whether that is imported decides what the runtime looks for in a script that does not use it."""

from torch._dynamo.repro import after_aot  # noqa: F401
from torch._functorch import aot_autograd  # noqa: F401
from torch._inductor import compile_fx  # noqa: F401
from torch.distributed import fsdp, tensor  # noqa: F401

from tests.runtime.layouts import model, program  # noqa: F401

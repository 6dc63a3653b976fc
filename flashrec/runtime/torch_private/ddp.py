"""The reducer of DistributedDataParallel: its buckets, and what it has learnt in its first iteration."""

from __future__ import annotations

import ctypes
import functools
import itertools
import operator
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

_dist: Any = dist  # names that torch exports without saying so
_autograd: Any = torch.autograd

_NEEDED_OF_DDP = (
    "_assign_modules_buffers",
    "_comm_hooks",
    "_get_ddp_logging_data",
    "_has_rebuilt_buckets",
    "_join_config",
    "_module_parameters",
    "_set_static_graph",
    "_sync_buffers",
    "_use_python_reducer",
    "forward_sync_buffers",
    "logger",
    "modules_buffers",
    "will_sync_module_buffers",
    "require_forward_param_sync",
)
_NEEDED_OF_REDUCER = ("_autograd_hook", "_delay_all_reduce", "prepare_for_backward", "prepare_for_forward")

_ALIGNMENT = 16
_MAX_SHARED_BYTES = 16 << 20
_MAX_SPREAD_BYTES = 1 << 20  # more goes faster through a broadcast, which sends from several ranks at once
_MAX_DIRECT = 256  # more buffers than that are copied faster than the kernel gathers them
BucketLayout = list[list[int]]
Spread = Callable[[list[memoryview]], None]
Usage = list[tuple[int, bool]]  # for each parameter: how often its hook fired in the first backward; has it a gradient


def needed(ddp: Any) -> Iterator[tuple[str, Any]]:
    """Each private name beyond those that `versions` looks for, and the object that must have it."""
    for name in _NEEDED_OF_DDP:
        yield name, ddp
    for name in _NEEDED_OF_REDUCER:
        yield name, ddp.reducer


def layout(ddp: Any) -> BucketLayout:
    """Parameter indices of each gradient bucket, in reduction order. Allocates zeros of the size of all gradients."""
    index = {param.data_ptr(): i for i, param in enumerate(params(ddp))}
    buckets = ddp.reducer._get_zeros_like_grad_buckets()
    return [[index[param.data_ptr()] for param in bucket.parameters()] for bucket in buckets]


def params(ddp: Any) -> list[torch.nn.Parameter]:
    """In the order of the reducer's indices."""
    found: list[torch.nn.Parameter] = ddp._build_params_for_reducer()[0]
    return found


def recreate(ddp: Any, layout: BucketLayout) -> None:
    """A reducer that has not seen an iteration, with these buckets; hooks of the user are registered again."""
    builtin = builtin_hook(ddp)
    parameters, expects_sparse = ddp._build_params_for_reducer()
    original = _dist._compute_bucket_assignment_by_size
    _dist._compute_bucket_assignment_by_size = lambda *_a, **_k: (list(reversed(layout)), [2**60] * len(layout))
    try:
        ddp.reducer._remove_autograd_hooks()
        names = ddp._build_debug_param_to_name_mapping(parameters)
        ddp._ddp_init_helper(parameters, expects_sparse, names, ddp.static_graph)
    finally:
        _dist._compute_bucket_assignment_by_size = original
    for hook, state in ddp._comm_hooks:
        ddp.logger._set_comm_hook_name(hook.__qualname__)
        _dist._register_comm_hook(ddp.reducer, state, hook)
    if builtin:
        ddp._register_builtin_comm_hook(getattr(_dist.BuiltinCommHookType, builtin))
    if ddp.static_graph:
        ddp.static_graph = False
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # find_unused_parameters is not needed: the script has been told
            ddp._set_static_graph()
    ddp._has_rebuilt_buckets = False


def reset(ddp: Any) -> None:
    """Forget a half-done backward; the next one records the order of gradients again, so buckets are rebuilt again."""
    ddp.reducer._reset_state()
    ddp._has_rebuilt_buckets = False


def rebuild(ddp: Any) -> tuple[bool, bool]:
    """Rebuild the buckets now if the reducer is due to (a broadcast from rank 0). Returns (are they rebuilt, does each
    forward take the buffers of rank 0)."""
    if not ddp._has_rebuilt_buckets and ddp.reducer._rebuild_buckets():
        ddp._has_rebuilt_buckets = True
    return (
        bool(ddp._has_rebuilt_buckets),
        bool(ddp.forward_sync_buffers and ddp.modules_buffers and not has_buffer_hook(ddp)),
    )


def is_rebuilt(ddp: Any) -> bool:
    return bool(ddp._has_rebuilt_buckets)


# ---- the first iteration of a static graph ---------------------------------------------------------------------------


def has_begun(ddp: Any) -> bool:
    """True once the first backward of a static graph has begun."""
    return bool(ddp._static_graph_delay_allreduce_enqueued)


class FirstBackward:
    """Counts what a reducer learns of a static graph in its first iteration, and keeps to itself."""

    def __init__(self, ddp: Any) -> None:
        self._ddp, self._params, self._num_forwards = ddp, params(ddp), 0
        self._counts = [0] * len(self._params)
        self._has_gradient = [False] * len(self._params)
        self._handles = [ddp.register_forward_pre_hook(self._forward)]
        for index, param in enumerate(self._params):
            node: Any = param.view_as(param).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
            self._handles.append(node.register_hook(functools.partial(self._fired, index)))

    def usage(self) -> Usage:
        """Ends the counting."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        return list(zip(self._counts, self._has_gradient, strict=True))

    def _forward(self, *_: Any) -> None:
        if torch.is_grad_enabled() and self._ddp.require_backward_grad_sync:
            self._num_forwards += 1

    def _fired(self, index: int, *_: Any) -> None:
        if self._num_forwards == 1:
            self._counts[index] += 1
            self._has_gradient[index] |= self._params[index].grad is not None


def pretend_first_backward(ddp: Any, usage: Usage) -> None:
    """On a fresh reducer: let it learn what its predecessor has learnt in the first backward. No communication.
    To be followed by `reduce_nothing` on all ranks."""
    ddp.reducer.prepare_for_forward()
    for index, (param, (count, has_gradient)) in enumerate(zip(params(ddp), usage, strict=True)):
        param.grad = torch.zeros_like(param) if has_gradient else None
        for _ in range(count):
            ddp.reducer._autograd_hook(index)
        param.grad = None
    ddp._static_graph_delay_allreduce_enqueued = True


def reduce_nothing(ddp: Any, is_used: list[bool]) -> None:
    """The end of a first backward, on all ranks, with gradients of zero where a parameter is used by any rank: whoever
    has not yet learns which parameters nobody uses. The others learn it again. Gradients are None afterwards. A
    collective."""
    parameters = params(ddp)
    for param, is_one_used in zip(parameters, is_used, strict=True):
        param.grad = torch.zeros_like(param) if is_one_used else None
    try:
        ddp.reducer.prepare_for_backward([])
        ddp.reducer._delay_all_reduce()
    finally:
        for param in parameters:
            param.grad = None


# ---- buffers ---------------------------------------------------------------------------------------------------------


class SharedBuffers:
    """The buffers of one DDP, to be taken from rank 0. DDP itself broadcasts once for each dtype; this does it in one
    go where they are plain, on one device, and small enough for a copy; and without the copy where they are few and
    contiguous in host memory. What goes over the wire is the same, so that ranks may differ in that."""

    def __init__(self, ddp: Any, spread: Spread | None = None) -> None:
        """spread: a faster broadcast from rank 0 to all ranks, of bytes in host memory."""
        self._ddp = ddp
        ranks = dist.get_process_group_ranks(ddp.process_group)
        self._spread = spread if ranks == list(range(dist.get_world_size())) else None
        self._is_source = dist.get_rank(ddp.process_group) == 0
        self._shapes: list[tuple[torch.Size, torch.dtype]] = []
        self._flat = torch.empty(0, dtype=torch.uint8)
        self._views: list[torch.Tensor] = []
        self._where: list[tuple[torch.Tensor, int, int]] = []  # the buffers last looked at, their addresses and sizes …
        self._memory: list[memoryview] = []  # … and the memory at these, laid out like `_flat`; []: a copy is needed
        self._names: list[str] = []
        self._slots: list[tuple[dict[str, torch.Tensor | None], str]] = []  # where each buffer hangs in its module …
        self._edges: list[tuple[dict[str, Any], str, Any]] = []  # … and on the way there, each module in its parent

    def share(self) -> None:
        """Give all ranks of the group the buffers of its rank 0. A collective."""
        if self._spread is not None and self._memory and self._is_as_before():
            self._spread(self._memory)
            return
        ddp = self._ddp
        buffers = self._newest()
        if not buffers:
            return
        if self._spread is not None:
            self._memory = self._memory_of(buffers)
            if self._memory:
                self._spread(self._memory)
                return
        if not self._fit(buffers):
            ddp._sync_buffers()
            return
        with torch.no_grad(), _autograd._unsafe_preserve_version_counter(tuple(buffers)):
            if self._is_source:
                torch._foreach_copy_(self._views, buffers)
            if self._spread is not None and self._is_spreadable():
                self._spread([_bytes_at(self._flat)])
            else:
                dist.broadcast(self._flat, group=ddp.process_group, group_src=0)
            if not self._is_source:
                torch._foreach_copy_(buffers, self._views)

    def share_in_forward(self, is_training: Callable[[], bool]) -> None:
        """From now on each forward of a rank that trains does this in place of DDP's own broadcasts, where there is a
        `spread` and DDP would broadcast."""
        ddp = self._ddp
        if self._spread is None or has_delayed_params(ddp) or is_compiled_reducer(ddp):
            return
        forward = _InForward(self, is_training)
        ddp.register_forward_pre_hook(forward)
        ddp.module.register_forward_pre_hook(forward.goes_on)

    def _is_spreadable(self) -> bool:
        return self._flat.nbytes <= _MAX_SPREAD_BYTES and self._flat.device.type == "cpu"

    def _memory_of(self, buffers: list[torch.Tensor]) -> list[memoryview]:
        """The buffers themselves, with what lies between them in `_flat`. []: they have to be copied."""
        if not self._fit(buffers) or not self._is_spreadable() or len(buffers) > _MAX_DIRECT:
            return []
        if not all(each.is_contiguous() and not each.is_conj() and not each.is_neg() for each in buffers):
            return []
        self._where = [(each, each.data_ptr(), each.nbytes) for each in buffers]
        padding = memoryview(bytearray(_ALIGNMENT))
        views = [view for each in buffers for view in (_bytes_at(each), padding[: -each.nbytes % _ALIGNMENT])]
        return [view for view in views if view.nbytes]

    def _is_as_before(self) -> bool:
        """Is `_memory` that of the buffers which the module has now? In plain loops: this is done in each step."""
        if list(self._ddp.named_module_buffers) != self._names:
            return False
        for children, name, child in self._edges:
            if children.get(name) is not child:
                return False
        for (slot, name), (buffer, address, size) in zip(self._slots, self._where, strict=True):
            if slot.get(name) is not buffer or buffer.data_ptr() != address or buffer.nbytes != size:
                return False
        return True

    def _newest(self) -> list[torch.Tensor]:
        """Since its forward began, when DDP has looked itself, the script may have put others in their place."""
        ddp = self._ddp
        is_as_known = (
            list(ddp.named_module_buffers) == self._names
            and all(children.get(name) is child for children, name, child in self._edges)
            and all(map(operator.is_, ddp.modules_buffers, (slot.get(name) for slot, name in self._slots)))
        )
        if not is_as_known:
            ddp._assign_modules_buffers()
            self._names = list(ddp.named_module_buffers)
            paths = [name.split(".") for name in self._names]
            self._slots = [(ddp.module.get_submodule(".".join(path[:-1]))._buffers, path[-1]) for path in paths]
            inner = {".".join(path[:i]) for path in paths for i in range(1, len(path))}
            edges = [name.rpartition(".") for name in sorted(inner)]
            self._edges = [
                (above := ddp.module.get_submodule(path)._modules, name, above[name]) for path, _, name in edges
            ]
        return list(ddp.modules_buffers)

    def _fit(self, buffers: list[torch.Tensor]) -> bool:
        """Make the copy fit. False: it cannot be used; all ranks say the same, as they have the same buffers."""
        if any(type(each) is not torch.Tensor or each.layout is not torch.strided for each in buffers):
            return False
        shapes = [(buffer.shape, buffer.dtype) for buffer in buffers]
        if shapes == self._shapes and self._flat.device == buffers[0].device:
            return True
        starts = list(
            itertools.accumulate((-buffer.nbytes // _ALIGNMENT * -_ALIGNMENT for buffer in buffers), initial=0)
        )
        if starts[-1] > _MAX_SHARED_BYTES or any(buffer.device != buffers[0].device for buffer in buffers):
            return False
        self._shapes = shapes
        self._flat = torch.zeros(starts[-1], dtype=torch.uint8, device=buffers[0].device)
        self._views = [
            self._flat[start : start + buffer.nbytes].view(buffer.dtype).view(buffer.shape)
            for start, buffer in zip(starts, buffers, strict=False)
        ]
        return True


class _InForward:
    """A hook before the forward of a DDP. Nothing of it travels with a copy of the DDP, and it keeps nothing alive."""

    def __init__(self, buffers: SharedBuffers | None = None, is_training: Callable[[], bool] = lambda: False) -> None:
        self._buffers = (lambda: None) if buffers is None else weakref.ref(buffers)
        self._is_training = is_training
        self._told: Any = None  # the DDP, while it has been told to leave buffers alone

    def __call__(self, ddp: Any, args: Any) -> None:
        self.goes_on()  # the last forward may have failed before its module began
        buffers = self._buffers()
        if buffers is None or not self._is_training() or not ddp.will_sync_module_buffers() or has_buffer_hook(ddp):
            return
        buffers.share()
        self._told, ddp.require_forward_param_sync = ddp, False

    def goes_on(self, *_: Any) -> None:
        """DDP has looked whether it shall broadcast: all is as it was."""
        if self._told is not None:
            self._told.require_forward_param_sync, self._told = True, None

    def __reduce__(self) -> tuple[type[_InForward], tuple[()]]:
        return _InForward, ()


def has_buffer_hook(ddp: Any) -> bool:
    """Does the script say itself how buffers are made equal?"""
    return "buffer_hook" in vars(ddp)


def _bytes_at(tensor: torch.Tensor) -> memoryview:
    """Its memory, contiguous and on the CPU. Not as `numpy()` has it: nothing could resize such a tensor any more."""
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


# ---- what the script has asked for -----------------------------------------------------------------------------------


def comm_hooks(ddp: Any) -> list[tuple[Any, Any]]:
    """(hook, its state) in Python."""
    return list(ddp._comm_hooks)


def builtin_hook(ddp: Any) -> str:
    """Name of the C++ communication hook; "" without one."""
    name = str(ddp._get_ddp_logging_data().get("comm_hook", ""))
    return name.removeprefix("BuiltinCommHookType.") if name.startswith("BuiltinCommHookType.") else ""


def expects_sparse(ddp: Any) -> bool:
    return any(ddp._build_params_for_reducer()[1])


def has_delayed_params(ddp: Any) -> bool:
    return bool(ddp._delay_all_reduce_params)


def is_compiled_reducer(ddp: Any) -> bool:
    return bool(ddp._use_python_reducer)


def use(ddp: Any) -> tuple[list[tuple[Any, Any]], bool, bool]:
    """How the script uses it: (its `comm_hooks`, static_graph, is it inside of `with ddp.join()`)."""
    return list(ddp._comm_hooks), bool(ddp.static_graph), bool(ddp._join_config.enable)


def has_optimizer_in_backward(ddp: Any) -> bool:
    return any(hasattr(param, "_in_backward_optimizers") for param in ddp._module_parameters)

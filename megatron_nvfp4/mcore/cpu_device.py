"""Megatron-LM on a machine without CUDA: torch.cuda answers as one device whose memory is the host's.

Megatron asks torch.cuda in some fifty places (device count, streams, random state, memory) and has no
switch for a CPU. `install` makes those questions answerable, in this process only and for good:

- torch.cuda reports one device; streams, events and synchronisation do nothing; random state is the CPU's.
- Every request for a "cuda" device gets the CPU; Tensor.cuda(), Module.cuda() and pin_memory() return self.
- Tensor.is_cuda is True and Tensor.type() says torch.cuda.*, which Megatron's optimizers compare. `device`
  stays truthful: own code decides by `tensor.device.type`.
- 16-bit matrix products are computed in FP32 and rounded once: ten times faster on most CPUs.
- CUDA graphs, pinned memory, NCCL and kernels are not emulated. Collectives run on gloo.

It is for training small models, tests and conversion on a laptop, not for speed.
"""

import argparse
import contextlib
import os
import time
from types import SimpleNamespace

HOST_MEMORY = 1 << 34
# What a CPU run needs of Megatron's options; a flag without a value is set as if given.
REQUIRED_OPTIONS = {
    "--distributed-backend": "gloo",
    "--num-workers": 0,
    "--no-gradient-accumulation-fusion": None,
    "--no-rope-fusion": None,
    "--no-masked-softmax-fusion": None,
    "--no-persist-layer-norm": None,
}
_installed = False


def is_installed() -> bool:
    """Whether `install` has run in this process."""
    return _installed


def set_parser_defaults(parser: argparse.ArgumentParser) -> None:
    """Make what the CPU needs the default of Megatron's options; the user's flags still win."""
    for flag, value in REQUIRED_OPTIONS.items():
        action = parser._option_string_actions.get(flag)
        if action is not None:
            parser.set_defaults(**{action.dest: action.const if value is None else value})


def install() -> None:
    """Make torch.cuda answer for the CPU. Call before importing megatron; a second call does nothing."""
    global _installed
    if _installed:
        return
    # Megatron's jit_fuser is torch.compile, which would look for a CUDA driver.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    # Megatron insists on it for tensor parallelism, for the sake of CUDA's launch order.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    import torch

    _answer_questions(torch)
    _redirect_tensors(torch)
    _rewrite_devices(torch).__enter__()
    _installed = True


class _Event:
    """A CUDA event on the host's clock."""

    def __init__(self, *args, **kwargs) -> None:
        self.time = time.perf_counter()

    def record(self, *args) -> None:
        self.time = time.perf_counter()

    def wait(self, *args) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "_Event") -> float:
        return (end.time - self.time) * 1e3


class _Stream:
    """A CUDA stream on which everything has already happened."""

    cuda_stream = 0

    def __init__(self, *args, **kwargs) -> None: ...

    def wait_stream(self, *args) -> None: ...

    def wait_event(self, *args) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, *args) -> _Event:
        return _Event()


def _answer_questions(torch) -> None:
    cuda, stream = torch.cuda, _Stream()
    properties = SimpleNamespace(
        name="cpu", major=8, minor=0, total_memory=HOST_MEMORY, multi_processor_count=1
    )
    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_name": "cpu",
        "get_device_capability": (8, 0),  # the least that --moe-grouped-gemm and BF16 accept
        "get_device_properties": properties,
        "current_stream": stream,
        "default_stream": stream,
        "is_current_stream_capturing": False,
        "mem_get_info": (HOST_MEMORY, HOST_MEMORY),
        "memory_stats": {},
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_reserved": 0,
        "set_device": None,
        "set_stream": None,
        "synchronize": None,
        "empty_cache": None,
        "reset_peak_memory_stats": None,
        "_lazy_init": None,
    }
    for name, answer in answers.items():
        setattr(cuda, name, lambda *args, _answer=answer, **kwargs: _answer)

    generator = torch.default_generator

    def get_state(*args, **kwargs):
        return generator.get_state()

    def set_state(state, *args, **kwargs) -> None:
        generator.set_state(state)

    def seed(value: int) -> None:
        generator.manual_seed(int(value))

    for module in (cuda, cuda.random):
        module.get_rng_state, module.set_rng_state = get_state, set_state
    cuda.manual_seed = cuda.manual_seed_all = seed
    cuda.default_generators = (generator,)
    cuda._lazy_call = lambda callback, **kwargs: callback()
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.stream = cuda.device = lambda *args, **kwargs: contextlib.nullcontext()
    for kind in ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Byte"):
        setattr(cuda, f"{kind}Tensor", getattr(torch, f"{kind}Tensor"))


def _redirect_tensors(torch) -> None:
    tensor = torch.Tensor
    cpu_type = tensor.type

    def type_(self, dtype=None, *args, **kwargs):
        if dtype is None:
            return "torch.cuda." + cpu_type(self).rpartition(".")[2]
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.")
        return cpu_type(self, dtype, *args, **kwargs)

    def same(self, *args, **kwargs):
        return self

    tensor.type = type_
    tensor.cuda = tensor.pin_memory = same
    tensor.record_stream = lambda self, *args: None
    tensor.is_cuda = property(lambda self: True)
    torch.nn.Module.cuda = same


def _rewrite_devices(torch):
    from torch.overrides import TorchFunctionMode

    cpu = torch.device("cpu")

    def means_cuda(device) -> bool:
        if isinstance(device, torch.device):
            return device.type == "cuda"
        if isinstance(device, str):
            return device.partition(":")[0] == "cuda"
        return type(device) is int

    products = {
        torch.bmm,
        torch.baddbmm,
        torch.mm,
        torch.matmul,
        torch.Tensor.matmul,
        torch.Tensor.__matmul__,
        torch.nn.functional.linear,
    }

    def in_fp32(function, args, kwargs):
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
        halves = [tensor.dtype for tensor in tensors if tensor.itemsize == 2]
        if not halves:
            return function(*args, **kwargs)
        args = [a.float() if isinstance(a, torch.Tensor) else a for a in args]
        kwargs = {k: a.float() if isinstance(a, torch.Tensor) else a for k, a in kwargs.items()}
        return function(*args, **kwargs).to(halves[0])

    # A mode is off inside its own handler, and recomputation runs forwards inside backward: so backward is
    # kept away from the handler (torch.autograd) or run with the mode on again (Tensor.backward).
    torch.autograd.has_torch_function = lambda tensors: False

    def backward(loss, gradient=None, retain_graph=None, create_graph=False, inputs=None):
        return torch.autograd.backward(loss, gradient, retain_graph, create_graph, inputs=inputs)

    class CudaMeansCpu(TorchFunctionMode):
        """Every torch function asked for a CUDA device gets the CPU."""

        def __torch_function__(self, function, types, args=(), kwargs=None):
            kwargs = dict(kwargs or {})
            if means_cuda(kwargs.get("device")):
                kwargs["device"] = cpu
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
            if function is torch.Tensor.to and len(args) > 1 and means_cuda(args[1]):
                args = (args[0], cpu, *args[2:])
            if function in products and "out" not in kwargs:
                return in_fp32(function, args, kwargs)
            if function is torch.Tensor.backward:
                with self:
                    return backward(*args, **kwargs)
            return function(*args, **kwargs)

    return CudaMeansCpu()

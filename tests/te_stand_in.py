"""Transformer Engine 2.20 in plain torch, as far as Megatron's wrappers subclass and call it. Tests only.

`install()` puts modules named transformer_engine.* where Megatron will import them, so that its own TE
layers can be built, saved and trained on a CPU. Parameter names, partition attributes and extra state follow
TE 2.20.2 (https://github.com/NVIDIA/TransformerEngine, transformer_engine/pytorch/module); numerics are
torch's, without quantisation, user buffers or sharded communication. What Megatron only mentions in
annotations is a class that cannot be built; what it imports optionally is absent.

`kernel_modules()` is another world: TE's NVFP4 quantiser and GEMM as backends/te.py calls them, in torch.
"""

import enum
import importlib.machinery
import sys
import types
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn import functional

from megatron_nvfp4 import quant
from megatron_nvfp4.quant import layout

VERSION = "2.20.2"


class Module(torch.nn.Module):
    """Base of TE's layers: the extra state of a stateless recipe is an empty byte tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.fp8_meta = {"fp8_checkpoint": False, "recipe": None}
        self.fp8 = self.fp8_calibration = False

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state) -> None:
        if state is not None and state.numel():
            raise RuntimeError("stand-in: extra state of a stateful recipe")

    def init_fp8_metadata(self, num_gemms: int = 1) -> None: ...

    def backward_dw(self) -> None: ...


def _parameter(shape, dtype: torch.dtype, device, init, tracker=None, rng_name=None):
    parameter = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
    fork = nullcontext()
    if tracker is not None:
        fork = tracker().fork(rng_name) if rng_name else tracker().fork()
    with fork, torch.no_grad():
        init(parameter)
    return parameter


def _partition(parameter: Tensor, axis: int) -> None:
    parameter.tensor_model_parallel = True
    parameter.partition_dim, parameter.partition_stride = axis, 1


class _Sized(Module):
    """Sizes per rank, and weights marked as TE marks them: axis 0 unless row-parallel, always parallel."""

    def _take_sizes(
        self, in_features, out_features, parallel_mode, tp_size, sequence_parallel
    ) -> None:
        self.in_features = in_features // (tp_size if parallel_mode == "row" else 1)
        self.out_features = out_features // (tp_size if parallel_mode == "column" else 1)
        self.parallel_mode, self.tp_size = parallel_mode, tp_size
        self.sequence_parallel = sequence_parallel and tp_size > 1

    def _add(self, suffix: str, bias: bool, dtype, device, init, tracker, rng_name) -> None:
        shape = (self.out_features, self.in_features)
        weight = _parameter(shape, dtype, device, init, tracker, rng_name)
        _partition(weight, 1 if self.parallel_mode == "row" else 0)
        self.register_parameter(f"weight{suffix}", weight)
        if not bias:
            return
        zeros = _parameter((self.out_features,), dtype, device, torch.nn.init.zeros_)
        if self.parallel_mode == "row":
            zeros.sequence_parallel = self.sequence_parallel
        elif self.parallel_mode == "column":
            _partition(zeros, 0)
        self.register_parameter(f"bias{suffix}", zeros)


class Linear(_Sized):
    def __init__(
        self,
        in_features,
        out_features,
        sequence_parallel=False,
        tp_size=1,
        get_rng_state_tracker=None,
        rng_tracker_name=None,
        init_method=None,
        bias=True,
        return_bias=False,
        params_dtype=torch.float32,
        parallel_mode=None,
        device=None,
        **ignored,
    ) -> None:
        super().__init__()
        self._take_sizes(in_features, out_features, parallel_mode, tp_size, sequence_parallel)
        self.use_bias, self.return_bias = bias, return_bias
        self._add(
            "", bias, params_dtype, device, init_method, get_rng_state_tracker, rng_tracker_name
        )

    def forward(self, x, is_first_microbatch=None):
        fused = self.bias if self.use_bias and not self.return_bias else None
        y = functional.linear(x, self.weight, fused)
        return (y, self.bias) if self.return_bias else y


class LayerNormLinear(Linear):
    def __init__(
        self,
        in_features,
        out_features,
        eps=1e-5,
        normalization="LayerNorm",
        zero_centered_gamma=False,
        params_dtype=torch.float32,
        device=None,
        **kwargs,
    ) -> None:
        super().__init__(
            in_features, out_features, params_dtype=params_dtype, device=device, **kwargs
        )
        self.normalization, self.eps, self.zero_centered_gamma = (
            normalization,
            eps,
            zero_centered_gamma,
        )
        fill = torch.nn.init.zeros_ if zero_centered_gamma else torch.nn.init.ones_
        self.layer_norm_weight = _parameter((in_features,), params_dtype, device, fill)
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel
        self.layer_norm_bias = None
        if normalization == "LayerNorm":
            zeros = _parameter((in_features,), params_dtype, device, torch.nn.init.zeros_)
            self.layer_norm_bias = zeros
            zeros.sequence_parallel = self.sequence_parallel

    def forward(self, x, is_first_microbatch=None):
        return super().forward(_normalize(self, x, self.layer_norm_weight, self.layer_norm_bias))


class GroupedLinear(_Sized):
    def __init__(
        self,
        num_gemms,
        in_features,
        out_features,
        sequence_parallel=False,
        tp_size=1,
        get_rng_state_tracker=None,
        rng_tracker_name=None,
        init_method=None,
        bias=True,
        return_bias=False,
        params_dtype=torch.float32,
        parallel_mode=None,
        device=None,
        **ignored,
    ) -> None:
        super().__init__()
        self._take_sizes(in_features, out_features, parallel_mode, tp_size, sequence_parallel)
        self.num_gemms, self.use_bias, self.return_bias = num_gemms, bias, return_bias
        tracker = get_rng_state_tracker
        for index in range(num_gemms):
            self._add(index, bias, params_dtype, device, init_method, tracker, rng_tracker_name)

    def forward(self, x, m_splits, is_first_microbatch=None):
        parts = [
            functional.linear(rows, getattr(self, f"weight{index}"))
            for index, rows in enumerate(torch.split(x, list(m_splits)))
        ]
        return torch.cat(parts)


class _Norm(Module):
    normalization: str

    def __init__(
        self,
        normalized_shape,
        eps=1e-5,
        sequence_parallel=None,
        params_dtype=torch.float32,
        zero_centered_gamma=False,
        device=None,
    ) -> None:
        super().__init__()
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        fill = torch.nn.init.zeros_ if zero_centered_gamma else torch.nn.init.ones_
        self.weight = _parameter((normalized_shape,), params_dtype, device, fill)
        self.bias = None
        if self.normalization == "LayerNorm":
            self.bias = _parameter((normalized_shape,), params_dtype, device, torch.nn.init.zeros_)
        if sequence_parallel is not None:
            for parameter in self.parameters():
                parameter.sequence_parallel = sequence_parallel

    def forward(self, x):
        return _normalize(self, x, self.weight, self.bias)


class RMSNorm(_Norm):
    normalization = "RMSNorm"


class LayerNorm(_Norm):
    normalization = "LayerNorm"


def _normalize(module, x, weight, bias):
    gamma = weight.float() + 1 if module.zero_centered_gamma else weight.float()
    shape = (x.shape[-1],)
    if module.normalization == "RMSNorm":
        return functional.rms_norm(x.float(), shape, gamma, module.eps).to(x.dtype)
    return functional.layer_norm(x.float(), shape, gamma, bias.float(), module.eps).to(x.dtype)


class DotProductAttention(Module):
    def __init__(self, num_attention_heads, kv_channels, num_gqa_groups=None, **ignored) -> None:
        super().__init__()
        self.qkv_format = "sbhd"
        self.register_load_state_dict_post_hook(_forgive_missing_extra_state)

    def forward(self, query, key, value, attention_mask=None, **ignored):
        heads_first = [tensor.permute(1, 2, 0, 3) for tensor in (query, key, value)]
        y = functional.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
        batch, _, sequence, _ = y.shape
        return y.permute(2, 0, 1, 3).reshape(sequence, batch, -1)


def _forgive_missing_extra_state(module, incompatible_keys) -> None:
    """TE's attention loads checkpoints of the time before it had an extra state."""
    missing = incompatible_keys.missing_keys
    missing[:] = [key for key in missing if not key.endswith("core_attention._extra_state")]


class FP8GlobalStateManager:
    @staticmethod
    def is_fp8_enabled() -> bool:
        return False


class CudaRNGStatesTracker:
    """Base of a Megatron class that is never made here."""


class _Mentioned(types.ModuleType):
    """A module of which Megatron only mentions names, in annotations and isinstance checks."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__dict__.setdefault(name, type(name, (), {"__init__": _cannot_build}))


def _cannot_build(self, *args, **kwargs) -> None:
    raise RuntimeError(f"stand-in: {type(self).__name__} of Transformer Engine is not here")


def _no_context(*args, **kwargs):
    return nullcontext()


_LAYERS = {
    cls.__name__: cls
    for cls in (Linear, LayerNormLinear, GroupedLinear, RMSNorm, LayerNorm, DotProductAttention)
}
_CONTEXTS = dict.fromkeys(("fp8_autocast", "fp8_model_init"), _no_context)
# Modules of which Megatron takes more names than it uses here.
_MENTIONED = frozenset(
    f"transformer_engine.{name}"
    for name in (
        "common.recipe",
        "pytorch.distributed",
        "pytorch.float8_tensor",
        "pytorch.graph",
        "pytorch.module.base",
        "pytorch.ops",
        "pytorch.router",
        "pytorch.tensor",
        "pytorch.utils",
    )
)
_MODULES = {
    "transformer_engine": {"__version__": VERSION},
    "transformer_engine.common": {},
    "transformer_engine.pytorch": {**_LAYERS, **_CONTEXTS},
    "transformer_engine.pytorch.fp8": {"FP8GlobalStateManager": FP8GlobalStateManager, **_CONTEXTS},
    "transformer_engine.pytorch.module": {},
    **{name: {} for name in sorted(_MENTIONED)},
    "transformer_engine.pytorch.distributed": {"CudaRNGStatesTracker": CudaRNGStatesTracker},
    "transformer_engine.pytorch.module.base": {"TransformerEngineBaseModule": Module},
}


def install() -> None:
    """RuntimeError when it is too late: Megatron, or a real Transformer Engine, is already imported."""
    late = [name for name in ("transformer_engine", "megatron.core") if name in sys.modules]
    if late:
        raise RuntimeError(f"te_stand_in.install: {', '.join(late)} is already imported")
    for name, content in _MODULES.items():
        module = (_Mentioned if name in _MENTIONED else types.ModuleType)(name)
        module.__path__ = []
        module.__dict__.update(content)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


# --- NVFP4 kernels ---------------------------------------------------------------------------


class DType(enum.IntEnum):
    """TE's numbers of the types, as far as they are used here."""

    kFloat4E2M1 = 10  # noqa: N815


class NVFP4TensorStorage:
    """What general_gemm takes (pytorch/tensor/storage/nvfp4_tensor_storage.py): keywords as TE's."""

    def __init__(
        self,
        *,
        rowwise_data,
        rowwise_scale_inv,
        columnwise_data,
        columnwise_scale_inv,
        amax_rowwise,
        amax_columnwise,
        fp4_dtype,
        quantizer,
        with_gemm_swizzled_scales,
        row_scaled_nvfp4=False,
        nvfp4_use_4over6=False,
        nvfp4_e4m3_max=448,
    ) -> None:
        rows, half = rowwise_data.shape
        assert fp4_dtype == DType.kFloat4E2M1
        assert rowwise_data.dtype == rowwise_scale_inv.dtype == torch.uint8
        assert rowwise_data.is_contiguous()
        # common/transformer_engine.cpp, CheckScaleTensorShape
        assert rowwise_scale_inv.shape == layout.swizzled_shape(rows, half // 8)
        self.data, self.scales, self.amax = rowwise_data, rowwise_scale_inv, amax_rowwise
        self.is_plain = not (with_gemm_swizzled_scales or row_scaled_nvfp4 or columnwise_data)

    def values(self) -> Tensor:
        rows, half = self.data.shape
        scales = self.scales[:rows, : half // 8].view(torch.float8_e4m3fn)
        parts = quant.QuantizedTensor(self.data, scales, self.amax, quant.NVFP4Spec())
        return quant.decode_exact(parts)[0].double()


class NVFP4Quantizer:
    """tex.quantize of a rowwise tensor: scales completed to 128x4 tiles by bytes nobody wrote."""

    def __init__(
        self,
        *,
        fp4_dtype,
        rowwise,
        columnwise,
        with_2d_quantization,
        row_scaled_nvfp4,
        nvfp4_use_4over6,
        nvfp4_e4m3_max,
        nvfp4_4over6_err_mode,
    ) -> None:
        assert (fp4_dtype, rowwise, columnwise) == (DType.kFloat4E2M1, True, False)
        assert nvfp4_4over6_err_mode in ("MAE", "MSE")
        self.spec = quant.NVFP4Spec(
            block=(16, 16) if with_2d_quantization else (1, 16),
            outer="token" if row_scaled_nvfp4 else "tensor",
            # pytorch/tensor/nvfp4_tensor.py: the maximum counts with four-over-six only
            e4m3_max=nvfp4_e4m3_max if nvfp4_use_4over6 else 448,
            four_over_six=nvfp4_4over6_err_mode.lower() if nvfp4_use_4over6 else None,
        )

    def __call__(self, x: Tensor):
        assert x.shape[0] % 16 == x.shape[1] % 16 == 0 < x.shape[0]
        quantized = quant.quantize(x, self.spec)
        rows, cols = quantized.block_scales.shape
        scales = torch.full(layout.swizzled_shape(rows, cols), 0xAB, dtype=torch.uint8)
        scales[:rows, :cols] = quantized.block_scales.view(torch.uint8)
        return types.SimpleNamespace(
            _rowwise_data=quantized.codes,
            _rowwise_scale_inv=scales,
            _amax_rowwise=quantized.amax,
        )


def general_gemm(A, B, out_dtype=None, *, layout):
    """B times A transposed, alpha as common/recipe/nvfp4.cu computes it; returns four things as TE does."""
    assert layout == "TN"
    assert A.is_plain
    assert B.is_plain
    rows, cols, num_k = B.data.shape[0], A.data.shape[0], A.data.shape[1] * 2
    # pytorch/tensor/nvfp4_tensor.py and common/gemm/cublaslt_gemm.cu
    assert rows % 16 == 0 < rows
    assert cols % 8 == num_k % 32 == 0
    alpha = A.amax * B.amax * (torch.ones(1) / torch.tensor([36.0 * 448 * 448]))
    acc = (B.values() @ A.values().t()).float()
    return (alpha * acc).to(out_dtype), None, None, None


def kernel_modules() -> dict[str, types.ModuleType]:
    """Modules for sys.modules; none of them is a real Transformer Engine."""
    contents = {
        "transformer_engine": {"__version__": VERSION},
        "transformer_engine_torch": {"DType": DType},
        "transformer_engine.pytorch": {"NVFP4Quantizer": NVFP4Quantizer},
        "transformer_engine.pytorch.cpp_extensions": {"general_gemm": general_gemm},
        "transformer_engine.pytorch.tensor": {},
        "transformer_engine.pytorch.tensor.storage": {},
        "transformer_engine.pytorch.tensor.storage.nvfp4_tensor_storage": {
            "NVFP4TensorStorage": NVFP4TensorStorage
        },
    }
    modules = {}
    for name, content in contents.items():
        modules[name] = types.ModuleType(name)
        modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        modules[name].__path__ = []
        modules[name].__dict__.update(content)
    return modules

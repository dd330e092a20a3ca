"""What the three linear modules share: parameters by TE's names, extra state, the numerics of a layer."""

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from megatron_nvfp4.backends import Matrices, Operand
from megatron_nvfp4.quant.tensor_versions import versions_of

from .autograd import grouped_matmul
from .matmul import MatmulSetup, quantize_weights
from .params import QLinearParams, get_qlinear_params, require_backend, shape_faults

logger = logging.getLogger(__name__)
EXTRA_STATE = "_extra_state"


class ExtraStateModule(torch.nn.Module):
    """A module whose `_extra_state` is TE's for a stateless recipe: an empty uint8 tensor.

    Loading accepts None, empty, missing and foreign state and ignores it; nothing is ever unpickled.
    """

    may_lack_state = False  # missing state is not worth a line in the log

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.register_load_state_dict_pre_hook(_complete_extra_state)

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state) -> None:
        size = state.numel() if isinstance(state, Tensor) else int(state is not None)
        if size:
            _warn_once(
                f"foreign {EXTRA_STATE} ignored: quantisation here keeps no state between steps"
            )


_warned: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        logger.warning(message)


def _complete_extra_state(module, state_dict, prefix, *_) -> None:
    """A checkpoint may lack `_extra_state`, or hold one per expert (torch_dist); neither is an error."""
    key = prefix + EXTRA_STATE
    if key not in state_dict:
        if not module.may_lack_state:
            _warn_once(f"checkpoint without {EXTRA_STATE}: loaded all the same")
        state_dict[key] = torch.empty(0, dtype=torch.uint8)
    for index in range(1, getattr(module, "num_gemms", 1)):
        state_dict.pop(f"{key}{index}", None)


class QLinearBase(ExtraStateModule):
    """Numerics of a layer of one or more weights (out_features, in_features).

    layer_name: how errors and records call the layer.
    """

    in_features: int
    out_features: int

    def __init__(self, layer_name: str) -> None:
        super().__init__()
        self.layer_name = layer_name
        self.qlinear_params: QLinearParams | None = None
        self._is_stochastic = False
        self._weight_cache: tuple[tuple, Operand | Matrices] | None = None

    def __getstate__(self) -> dict:
        """Without the quantised weights kept between microbatches: copies and pickles make their own."""
        return self.__dict__ | {"_weight_cache": None}

    def set_qlinear_params(self, params: QLinearParams | None) -> None:
        """Fix the numerics; None asks the environment. ValueError for a shape the recipe cannot take."""
        params = params or get_qlinear_params()
        device = next((parameter.device for parameter in self.parameters()), None)
        require_backend(params, device)
        faults = shape_faults(params.recipe, self.in_features, self.out_features)
        if faults:
            raise ValueError(
                f"{self.layer_name}: recipe {params.recipe.name} cannot take this layer: "
                + "; ".join(faults)
                + ". Exclude it from quantisation (recipe: bf16 for this layer in the policy file), "
                "or pad the model dimension"
            )
        self.qlinear_params = params
        self._is_stochastic = "stochastic_rounding" in params.recipe.requires
        self._weight_cache = None

    def rounding_seed(self, device: torch.device) -> int | None:
        """Key of the stochastic rounding of one call, None if the recipe has none.

        Taken from the device's generator: torch.manual_seed fixes it, a checkpoint carries it, and
        recomputation, which restores the generator, repeats it; hence also taken in a gradient-free pass
        while training. On CUDA from the generator's seed and offset, which the host knows without
        synchronising, but not while it captures a CUDA graph: torch then refuses to say the offset. On a CPU
        one draw; a data loader draws there too, so a resumed run rounds by other bits than an unbroken one.
        """
        if not self._is_stochastic or not (self.training or torch.is_grad_enabled()):
            return None
        if device.type != "cuda":
            return int(torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu"))
        generator = torch.cuda.default_generators[torch.device(device).index or 0]
        offset = generator.get_offset()
        generator.set_offset(offset + 4)  # Philox offsets count in fours
        return (generator.initial_seed() * 0x9E3779B97F4A7C15 + offset) % (2**63 - 1)

    def quantized_weights(
        self, weights: Sequence[Tensor], setup: MatmulSetup, is_first_microbatch: bool | None
    ) -> Operand | Matrices:
        """The forward operand of the weights, kept between microbatches only when the caller says so.

        is_first_microbatch: None quantises on every call; True quantises and keeps the result; False uses
        what was kept, if the weights are still the same objects, memory and version. An optimizer that
        writes through `.data` does not change the version: hence only an explicit False may reuse, and
        only while training (a scoring pass may follow a weight update outside the schedule).
        """
        if is_first_microbatch:
            # Also in the gradient-free pass of recomputation, whose second pass comes with False.
            self._weight_cache = None
        if is_first_microbatch is None or not torch.is_grad_enabled():
            return quantize_weights(weights, setup)
        ids, addresses = tuple(map(id, weights)), tuple(map(Tensor.data_ptr, weights))
        key = (setup.params, setup.dtype, ids, addresses, tuple(versions_of(weights)))
        if is_first_microbatch or self._weight_cache is None or self._weight_cache[0] != key:
            self._weight_cache = (key, quantize_weights(weights, setup))
        return self._weight_cache[1]

    def matmul(
        self,
        x: Tensor,
        offsets: Tensor,
        weights: Sequence[Tensor],
        bias: Tensor | None,
        setup: MatmulSetup,
        is_first_microbatch: bool | None,
    ) -> Tensor:
        """x (M, K) by groups times the weights; see grouped_matmul."""
        operand = self.quantized_weights(weights, setup, is_first_microbatch)
        return grouped_matmul(x, offsets, bias, operand, setup, weights)

    def activation_dtype(self, x: Tensor) -> torch.dtype:
        """Autocast's dtype inside autocast, else the input's; ValueError for integers."""
        if not x.is_floating_point():
            raise ValueError(f"{self.layer_name}: input is {x.dtype}; give a floating-point tensor")
        kind = x.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def new_parameter(
    memory: Tensor,
    init: Callable[[Tensor], object],
    *,
    rng: Callable | None = None,
    rng_name: str | None = None,
) -> torch.nn.Parameter:
    """A parameter in `memory`, filled by `init` inside the random state tracker's fork if there is one."""
    parameter = torch.nn.Parameter(memory)
    fork = nullcontext()
    if rng is not None:
        fork = rng().fork(rng_name) if rng_name else rng().fork()
    with fork, torch.no_grad():
        init(parameter)
    return parameter


def mark_partition(parameter: Tensor, parallel_mode: str | None, *, is_bias: bool = False) -> None:
    """Set TE's and Megatron's partition attributes: column splits axis 0, row splits axis 1."""
    parallel = parallel_mode == "column" or (parallel_mode == "row" and not is_bias)
    parameter.tensor_model_parallel = parallel
    parameter.partition_dim = (1 if parallel_mode == "row" else 0) if parallel else -1
    parameter.partition_stride = 1


def default_device() -> torch.device:
    """TE's default is the GPU; without one, the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def default_init(weight: Tensor) -> None:
    """TE's default initialisation."""
    torch.nn.init.normal_(weight, mean=0.0, std=0.023)


def refuse(layer: str, **unsupported) -> None:
    """Raise one ValueError that names every argument of TE's that is set and has no meaning here."""
    set_ = [f"{name}={value!r}" for name, value in unsupported.items() if value]
    if set_:
        raise ValueError(f"{layer}: not supported: {', '.join(set_)}; leave them at their defaults")

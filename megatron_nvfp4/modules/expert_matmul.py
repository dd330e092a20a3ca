"""One of the experts' two products in one call: what the dataflow needs of a GroupedLinear."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_nvfp4.backends import Matrices, Operand
from megatron_nvfp4.recipes import FORWARD, Recipe

from .grouped_linear import GroupedLinear
from .matmul import MatmulSetup, input_gradient, is_quantized_once, leaves, quantize_weights


def keeps_packed(recipe: Recipe) -> bool:
    """Whether that operand is all that the weight gradient reads of the tokens."""
    return is_quantized_once(recipe) and recipe.wgrad.right == FORWARD


@dataclass(frozen=True)
class ExpertMatmul:
    """One product of the experts in one call: its numerics, its forward operand, its G weights (N, K)."""

    setup: MatmulSetup
    operand: Operand | Matrices
    weights: tuple[Tensor, ...]

    @classmethod
    def of(
        cls, linear: GroupedLinear, x: Tensor, is_first_microbatch: bool | None = None
    ) -> "ExpertMatmul":
        """The product that `linear` would compute of rows in x's dtype and on its device, without bias.

        is_first_microbatch: as GroupedLinear.forward. ValueError for a layer with biases or with weights that
        are shards.
        """
        if linear.use_bias or linear.amax_group is not None:
            raise ValueError(
                f"{linear.layer_name}: bias={linear.use_bias}, sharded={linear.amax_group is not None}; the "
                "expert dataflow takes whole weights without bias, call the layer by itself"
            )
        weights = linear.weights
        setup = MatmulSetup(
            params=linear.qlinear_params,
            name=linear.layer_name,
            dtype=linear.activation_dtype(x),
            fuse_wgrad=linear.fuse_wgrad_accumulation,
            hides_wgrad=linear.hides_wgrad(weights),
            seed=linear.rounding_seed(x.device),
            keep_for_backward=torch.is_grad_enabled(),
        )
        return cls(setup, linear.quantized_weights(weights, setup, is_first_microbatch), weights)

    @property
    def recipe(self) -> Recipe:
        return self.setup.params.recipe

    @property
    def trains(self) -> bool:
        return self.setup.keep_for_backward and any(w.requires_grad for w in self.weights)

    @property
    def leaves(self) -> Sequence[Tensor]:
        """The weights that autograd is told of."""
        return leaves(self.weights, self.setup)

    def with_operand(self) -> "ExpertMatmul":
        """The same with the forward operand made anew where it was not kept."""
        if self.operand is not None:
            return self
        return replace(self, operand=quantize_weights(self.weights, self.setup))

    def dgrad(self, grad: Tensor, offsets: Tensor) -> Tensor:
        """grad (M, N) times the weights: (M, K), as GroupedMatmul's backward."""
        return input_gradient(grad, offsets, self.weights, self.operand, self.setup)

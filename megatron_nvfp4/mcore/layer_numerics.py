"""How a Megatron layer gets its numerics: its model-wide name, the policy, and the first microbatch."""

from megatron.core.quantization.quant_config import QuantizationConfig

from megatron_nvfp4.modules import QLinearParams
from megatron_nvfp4.modules.base import QLinearBase

from .arguments import policy_of

PAYLOAD_KEY = "minite_recipe"


class MegatronLinear(QLinearBase):
    """Mixin in front of a linear module: numerics by `finish_init`, Megatron's (output, bias) return.

    GPTModel calls finish_init on every module that has it once the model stands (gpt_model.py); by then
    MiniTETransformerLayer has told each linear its model-wide name. A model that never calls it gets the
    policy at the first forward.
    """

    config = None
    # None until a schedule sets it: without set_is_first_microbatch no quantised weight is ever reused.
    is_first_microbatch: bool | None = None

    def set_qlinear_params(self, params: QLinearParams | None) -> None:
        """As the base, but None (the constructor's) leaves the choice to finish_init."""
        if params is not None:
            super().set_qlinear_params(params)

    def finish_init(self, quantization_config: QuantizationConfig | None) -> None:
        """Take the recipe of this layer.

        quantization_config: Megatron's match for this module from --te-precision-config-file, whose payload
            {minite_recipe: NAME} goes before the policy. ValueError for any other payload.
        """
        policy = policy_of(self.config)
        recipe = policy.recipe_for(self.layer_name, self.config.num_layers)
        if quantization_config is not None:
            payload = quantization_config.config or {}
            if set(payload) != {PAYLOAD_KEY} or not isinstance(payload[PAYLOAD_KEY], str):
                raise ValueError(
                    f"{self.layer_name}: --te-precision-config-file entry "
                    f"{quantization_config.config_key!r} holds {sorted(payload)}, meant for Transformer "
                    f"Engine; match only {{{PAYLOAD_KEY}: NAME}} to this layer, or use --minite-config"
                )
            recipe = policy.named(payload[PAYLOAD_KEY])
        self.set_qlinear_params(
            QLinearParams(recipe=recipe, backend=policy.backend, strict=policy.strict)
        )

    def forward(self, x, *args):
        """(output, bias or None); the bias is not added when the caller asked to skip it."""
        if self.qlinear_params is None:
            self.finish_init(None)
        first = None if self.config.disable_parameter_transpose_cache else self.is_first_microbatch
        out = super().forward(x, *args, is_first_microbatch=first)
        if first:
            self.is_first_microbatch = False
        return out if self.return_bias else (out, None)


def reset_first_microbatch(model) -> None:
    """Tell every linear of a MegatronModule that a new step begins, so that weights are quantised anew."""
    for module in model.modules():
        if isinstance(module, MegatronLinear):
            module.is_first_microbatch = True

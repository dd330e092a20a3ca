"""`--quantization minite_nvfp4` for vLLM 0.26: NVFP4 by this project's quantisers and GEMMs.

vLLM calls `register` in each of its processes (entry point `vllm.general_plugins`); nothing of vLLM is
replaced. BF16 checkpoints are quantised when they are loaded, and activations per token; quantised
checkpoints are refused. Layers and recipes are those of the SGLang plugin: what the policy selects
(MINITE_RECIPE, MINITE_CONFIG) by Megatron's layer names, or without any selection the experts alone.
Router, embedding and head stay BF16.

The BF16 weights stay beside the quantised ones, for updates load into them. vLLM's own updates
(reload_weights, start_weight_update to finish_weight_update) quantise again; whoever calls the model's
load_weights alone has to call vLLM's process_weights_after_loading after it.

Ranks of tensor parallelism quantise the shares that they hold, each with an amax of its own; with
expert parallelism a rank has whole experts. Experts under data or context parallelism are refused.

The products of these layers are this project's, the operators between them vLLM's, whose orders of
addition are others: no bits of log-probabilities are claimed to be the learner's. It has run with vLLM's
layer classes and weight loaders on a CPU, never in a vLLM engine.
"""

from .method import NAME


def register() -> None:
    """Add the method to vLLM's table, of which the choices of its command line are made."""
    from vllm.model_executor.layers.quantization import register_quantization_config

    from .vllm_methods import config_class

    register_quantization_config(NAME)(config_class())

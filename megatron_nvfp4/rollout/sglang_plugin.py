"""`--quantization minite_nvfp4` for SGLang 0.5.23 and later: NVFP4 by this project's quantisers and GEMMs.

SGLang calls `register` in each of its processes (entry point `sglang.srt.plugins`); nothing of SGLang
is replaced. BF16 checkpoints are quantised when they are loaded, and again after every weight update;
NVFP4 checkpoints in ModelOpt's format, as `export-nvfp4` writes them, are taken as they are, in the
linear layout, with the activations they were exported for: per token or in BF16. The learner computes the
same with the profile `sglang_minite_nvfp4`.

Which layers: of a BF16 checkpoint those that the policy selects (MINITE_RECIPE, MINITE_CONFIG), by
Megatron's layer names, or without any selection the experts alone; of an NVFP4 checkpoint those it does
not exclude, and a policy beside it must say the same. A module that the policy quantises under a name it
cannot have is refused. Router, embedding and head stay BF16.

Ranks: one or two. Of a BF16 checkpoint a rank quantises the share that it holds, which has an amax of its
own, and rows of activations likewise; the learner does the same share by share (deterministic_sampler). With
--ep-size 2 a rank has whole experts. An NVFP4 checkpoint has scales of whole weights: its experts can be
spread whole, its weights cannot be cut.
"""

from .method import NAME


def register() -> None:
    """Add the method to SGLang's table and to the choices of its command line."""
    from sglang.srt.layers.quantization import QUANTIZATION_METHODS
    from sglang.srt.server_args import add_quantization_method_choices

    from .sglang_methods import config_class

    others = {name: method for name, method in QUANTIZATION_METHODS.items() if name != NAME}
    QUANTIZATION_METHODS.clear()
    # First: the first method that claims a checkpoint has it, and modelopt_fp4 claims its own.
    QUANTIZATION_METHODS.update({NAME: config_class(), **others})
    add_quantization_method_choices([NAME])

"""--transformer-impl minite in an unpatched Megatron: the patch's hunks as wrappers, before parsing.

The same seams as patches/megatron-lm, one function each; on a patched tree they change nothing.
"""

import functools
import re
import sys
from collections.abc import Callable
from types import ModuleType

from . import cpu_device, wgrad_fusion
from .arguments import IMPL, add_arguments, require_layers_for_profile

_installed = False


def install() -> None:
    """Teach this process's Megatron the value `minite`. Before its arguments are parsed; once is enough."""
    global _installed
    if _installed:
        return
    _installed = True
    _widen_literal()
    _wrap_layer_specs()
    _wrap_module()
    _wrap_training()
    wgrad_fusion.install()


def _widen_literal() -> None:
    """argparse takes its choices from the field's Literal (megatron/training/argument_utils.py)."""
    from typing import Literal, get_args

    from megatron.core.transformer.transformer_config import TransformerConfig

    field = TransformerConfig.__dataclass_fields__["transformer_impl"]
    choices = get_args(field.type)
    if IMPL not in choices:
        field.type = Literal[(*choices, IMPL)]
        TransformerConfig.__annotations__["transformer_impl"] = field.type


def _wrap_layer_specs() -> None:
    from megatron.core.models import backends
    from megatron.core.models.gpt import gpt_layer_specs

    from .layer_specs import get_minite_block_spec, get_minite_layer_specs
    from .spec_provider import MiniTESpecProvider

    def get_backend(original, transformer_impl):
        return MiniTESpecProvider() if transformer_impl == IMPL else original(transformer_impl)

    def layer_specs(
        original,
        config,
        use_transformer_engine=False,
        normalization=None,
        qk_l2_norm=False,
        **kwargs,
    ):
        if config.transformer_impl == IMPL:
            return get_minite_layer_specs(config, bool(qk_l2_norm))
        return original(config, use_transformer_engine, normalization, qk_l2_norm, **kwargs)

    def block_spec(
        original,
        config,
        use_transformer_engine=False,
        normalization=None,
        qk_l2_norm=False,
        vp_stage=None,
        pp_rank=None,
    ):
        if config.transformer_impl == IMPL:
            return get_minite_block_spec(config, bool(qk_l2_norm), vp_stage, pp_rank)
        return original(
            config, use_transformer_engine, normalization, qk_l2_norm, vp_stage, pp_rank
        )

    def mtp_block_spec(original, config, spec, use_transformer_engine=False, **kwargs):
        if config.transformer_impl == IMPL:
            if not hasattr(spec, "layer_specs"):
                spec = gpt_layer_specs.TransformerBlockSubmodules(layer_specs=[spec])
            return gpt_layer_specs.get_gpt_mtp_block_spec_for_backend(
                config=config, spec=spec, backend=MiniTESpecProvider(), **kwargs
            )
        return original(config, spec, use_transformer_engine, **kwargs)

    _wrap(backends, "get_backend", get_backend)
    _wrap(gpt_layer_specs, "get_gpt_decoder_layer_specs", layer_specs)
    _wrap(gpt_layer_specs, "get_gpt_decoder_block_spec", block_spec)
    _wrap(gpt_layer_specs, "get_gpt_mtp_block_spec", mtp_block_spec)


def _wrap_module() -> None:
    from megatron.core.transformer.module import MegatronModule

    from .layer_numerics import reset_first_microbatch

    def set_is_first_microbatch(original, model):
        original(model)
        if getattr(model.config, "transformer_impl", None) == IMPL:
            reset_first_microbatch(model)

    _wrap(MegatronModule, "set_is_first_microbatch", set_is_first_microbatch)


def _wrap_training() -> None:
    from megatron.training import arguments
    from megatron.training.models import gpt

    from .layer_specs import get_minite_block_spec, get_minite_layer_specs

    def default_layer_spec(original, config, vp_stage):
        transformer = config.transformer
        if transformer.transformer_impl == IMPL:
            return get_minite_block_spec(transformer, transformer.qk_l2_norm, vp_stage)
        return original(config, vp_stage)

    def single_layer_spec(original, config, vp_stage):
        transformer = config.transformer
        if transformer.transformer_impl == IMPL:
            return get_minite_layer_specs(transformer, transformer.qk_l2_norm)[-1]
        return original(config, vp_stage)

    def add_megatron_arguments(original, parser):
        parser = add_arguments(original(parser))
        for action in parser._actions:  # a lone % in a help text makes --help fail
            action.help = action.help and re.sub(r"%%|%(?!\()", "%%", action.help)
        if cpu_device.is_installed():
            cpu_device.set_parser_defaults(parser)
        return parser

    def validate_args(original, args, *others, **kwargs):
        require_layers_for_profile(args)
        return original(args, *others, **kwargs)

    _wrap(gpt, "default_layer_spec", default_layer_spec)
    _wrap(gpt, "_te_or_local_layer_spec", single_layer_spec)
    _wrap(arguments, "add_megatron_arguments", add_megatron_arguments)
    _wrap(arguments, "validate_args", validate_args)
    _keep_prebuilt_dataset_helpers()


def wrap_gpt_builders(gpt_builders: ModuleType) -> None:
    """The dense path of a checkout's gpt_builders.py, which scripts such as train_rl.py use."""
    from .layer_specs import get_minite_block_spec

    def layer_spec(original, use_te, config):
        if config.transformer_impl == IMPL:
            return get_minite_block_spec(config, getattr(config, "qk_l2_norm", False))
        return original(use_te, config)

    _wrap(gpt_builders, "_get_transformer_layer_spec", layer_spec)


def _keep_prebuilt_dataset_helpers() -> None:
    """The wheel ships the compiled helpers but not the Makefile that Megatron would run at start-up."""
    from pathlib import Path

    from megatron.core.datasets import utils

    if not (Path(utils.__file__).parent / "Makefile").exists():
        utils.compile_helpers = lambda: None


def _wrap(owner, name: str, wrapper: Callable) -> None:
    """Replace owner.name by wrapper(original, ...), also where modules have imported it by name."""
    original = getattr(owner, name)
    wrapped = functools.wraps(original)(functools.partial(wrapper, original))
    if isinstance(owner, type):  # a method needs a function, which binds self
        wrapped = functools.wraps(original)(
            lambda self, *args, **kw: wrapper(original, self, *args, **kw)
        )
    setattr(owner, name, wrapped)
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is original:
            setattr(module, name, wrapped)

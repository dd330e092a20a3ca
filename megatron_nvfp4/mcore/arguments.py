"""Command-line arguments, the policy they choose, and every reason why a configuration cannot run."""

import argparse
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from megatron.core.quantization.utils import get_quant_config_or_none
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_nvfp4.deterministic.profiles import BESIDE_PROFILE
from megatron_nvfp4.modules.norm import NORMALIZATIONS
from megatron_nvfp4.modules.params import QLinearParams, require_backend, shape_faults
from megatron_nvfp4.recipes import Policy, get_recipe, resolve
from megatron_nvfp4.recipes.policy import MOE_DATAFLOWS, layer_number_of

from .moe_support import unfused_reasons

IMPL = "minite"


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the options of minite layers, --minite-recipe and those below it, to Megatron's parser."""
    if "--minite-recipe" in parser._option_string_actions:
        return parser  # a patched Megatron has added them already
    group = parser.add_argument_group(title="minite")
    group.add_argument(
        "--minite-recipe",
        default=None,
        metavar="NAME",
        help="recipe of every quantised layer (python -m megatron_nvfp4 recipes); default $MINITE_RECIPE",
    )
    group.add_argument(
        "--minite-config",
        default=None,
        metavar="FILE",
        help="YAML policy: recipes by layer name and number; default $MINITE_CONFIG",
    )
    group.add_argument(
        "--minite-moe-dataflow",
        choices=MOE_DATAFLOWS,
        default=None,
        help="experts by the fused dataflow where the configuration allows it, or always, or never; "
        "default: the policy's moe_dataflow, auto",
    )
    group.add_argument(
        "--minite-deterministic",
        default=None,
        metavar="PROFILE",
        help="compute what the sampler computes, bit for bit, by a profile such as sglang_det_bf16; "
        "default: the policy's deterministic, none",
    )
    group.add_argument(
        "--minite-deterministic-attention",
        default=None,
        metavar="BACKEND",
        help="the sampler's attention backend, triton or fa3; default: the policy's, triton",
    )
    group.add_argument(
        "--minite-deterministic-sampler",
        default=None,
        metavar="RANKS",
        help="the sampler's --tp-size and --ep-size: tp1, tp2 or tp2ep2; default: the policy's, tp1",
    )
    return parser


def policy_of(config: TransformerConfig) -> Policy:
    """The policy of a model, resolved once and kept on its config: arguments, then the environment.

    Under a deterministic profile, which multiplies by itself, layers without a chosen recipe are BF16.
    """
    policy = getattr(config, "minite_policy", None)
    if policy is None:
        policy = _resolved(_argument)
    if policy.deterministic and policy.sources.get("recipe") == "default":
        sources = {**policy.sources, "recipe": BESIDE_PROFILE}
        policy = replace(policy, recipe=get_recipe("bf16"), sources=sources)
    config.minite_policy = policy
    return policy


def _resolved(argument: Callable[[str], str | None]) -> Policy:
    """The policy that Megatron's arguments choose, each given by name."""
    return resolve(
        argument("minite_recipe"),
        argument("minite_config"),
        deterministic=argument("minite_deterministic"),
        deterministic_attention=argument("minite_deterministic_attention"),
        deterministic_sampler=argument("minite_deterministic_sampler"),
    )


def require_layers_for_profile(args: argparse.Namespace) -> None:
    """ValueError for a deterministic profile that no layer would see, as --transformer-impl is another.

    args: Megatron's, parsed. Of the layers that --spec names nothing is known here.
    """
    impl = args.transformer_impl
    if impl == IMPL or getattr(args, "spec", None) is not None:
        return
    policy = _resolved(lambda name: getattr(args, name, None))
    if policy.deterministic is None:
        return
    source = policy.sources["deterministic"]
    asked = f"deterministic: {policy.deterministic} ({source})"
    if source == "explicit":
        asked = f"--minite-deterministic {policy.deterministic}"
    raise ValueError(
        f"--transformer-impl {impl}: {asked} is computed by models on minite layers alone; use "
        f"--transformer-impl {IMPL}, or leave the profile out"
    )


def moe_dataflow_of(config: TransformerConfig) -> str:
    """One of MOE_DATAFLOWS, as --minite-moe-dataflow or else the policy says; kept on the model's config."""
    choice = getattr(config, "minite_moe_dataflow", None) or _argument("minite_moe_dataflow")
    choice = choice or policy_of(config).moe_dataflow
    if choice not in MOE_DATAFLOWS:
        raise ValueError(f"minite_moe_dataflow={choice!r}; use one of {', '.join(MOE_DATAFLOWS)}")
    config.minite_moe_dataflow = choice
    return choice


def gradients_are_awaited(config: TransformerConfig) -> bool:
    """Whether Megatron may wait for each parameter's gradient: what overlaps its reduction with the backward
    does, and so do its CUDA graphs; without Megatron's global arguments nobody knows.
    """
    if _argument("overlap_grad_reduce") is not False or config.no_sync_func is not None:
        return True
    own_wrappers = ("use_megatron_fsdp", "use_torch_fsdp2")
    graphs = getattr(config, "cuda_graph_impl", "none") != "none"
    return graphs or any(_argument(name) for name in own_wrappers)


def _argument(name: str) -> str | None:
    """A value of Megatron's global arguments, where they exist and have it."""
    try:
        from megatron.training.global_vars import get_args

        return getattr(get_args(), name, None)
    except (ImportError, AssertionError):  # no megatron.training, or not initialised
        return None


# (attribute of TransformerConfig, values that are fine, flag, remedy)
_UNSUPPORTED = (
    ("fp8", (None, False), "--fp8-format", "drop it: the recipe decides the numerics"),
    ("fp4", (None, False), "--fp4-format", "drop it: the recipe decides the numerics"),
    ("use_kitchen", (None, False), "use_kitchen", "drop it: choose one of kitchen and minite"),
    (
        "multi_latent_attention",
        (None, False),
        "--multi-latent-attention",
        "use --transformer-impl transformer_engine for MLA models",
    ),
    (
        "experimental_attention_variant",
        (None,),
        "--experimental-attention-variant",
        "use --transformer-impl transformer_engine for it",
    ),
    (
        "heterogeneous_block_specs",
        (None, False),
        "--heterogeneous-layers-config-path",
        "use --transformer-impl transformer_engine for it",
    ),
    ("tp_comm_overlap", (None, False), "--tp-comm-overlap", "drop it: it drives TE's user buffers"),
    ("delay_wgrad_compute", (None, False), "--delay-wgrad-compute", "drop it"),
    (
        "overlap_dispatch_backward_with_experts_wgrad",
        (None, False),
        "--overlap-dispatch-backward-with-experts-wgrad",
        "drop it",
    ),
    ("symmetric_ar_type", (None,), "--symmetric-ar-type", "drop it"),
    ("use_te_activation_func", (None, False), "--use-te-activation-func", "drop it"),
    ("moe_single_grouped_weight", (None, False), "--moe-single-grouped-weight", "drop it"),
    ("moe_single_grouped_bias", (None, False), "--moe-single-grouped-bias", "drop it"),
    (
        "use_transformer_engine_op_fuser",
        (None, False),
        "--use-transformer-engine-op-fuser",
        "drop it",
    ),
    ("fused_residual_rmsnorm", (None, False), "--fused-residual-rmsnorm", "drop it"),
    (
        "moe_router_padding_for_quantization",
        (None, False),
        "--moe-router-padding-for-quantization",
        "drop it: experts take any number of tokens",
    ),
    (
        "fine_grained_activation_offloading",
        (None, False),
        "--fine-grained-activation-offloading",
        "drop it",
    ),
    (
        "cuda_graph_impl",
        (None, "none"),
        "--cuda-graph-impl",
        "use none: offsets are read on the host",
    ),
    ("normalization", NORMALIZATIONS, "--normalization", "use LayerNorm or RMSNorm"),
)


def config_faults(config: TransformerConfig, have_te: bool) -> list[str]:
    """Everything in a Megatron configuration that minite layers cannot do, each with its remedy."""
    faults = []
    for name, fine, flag, remedy in _UNSUPPORTED:
        value = getattr(config, name, fine[0])
        if value not in fine:
            faults.append(f"{flag} ({name}={value!r}): {remedy}")
    return (
        faults
        + moe_faults(config, have_te)
        + recipe_faults(config)
        + rule_faults(config)
        + layer_faults(config)
        + deterministic_faults(config)
    )


def moe_faults(config: TransformerConfig, have_te: bool) -> list[str]:
    """What speaks against the dataflow that was asked for, and what the unfused one cannot do."""
    choice, reasons = moe_dataflow_of(config), unfused_reasons(config)
    if choice == "fused" and config.num_moe_experts:
        return [
            f"--minite-moe-dataflow fused: {reason}; change it, or use auto" for reason in reasons
        ]
    recompute = getattr(config, "recompute_modules", None) or []
    if not have_te and "moe_act" in recompute and (reasons or choice == "unfused"):
        return [
            "--recompute-modules moe_act: Megatron's code for it needs Transformer Engine, which the fused "
            "dataflow does not; use --recompute-granularity full, or install transformer-engine"
        ]
    return []


def recipe_faults(config: TransformerConfig) -> list[str]:
    """Recipes of the policy that no backend can compute."""
    policy, faults = policy_of(config), []
    for recipe in policy.all_recipes:
        try:
            require_backend(QLinearParams(recipe=recipe, backend=policy.backend))
        except RuntimeError as error:
            faults.append(str(error).replace("\n", "\n    "))
    return faults


def rule_faults(config: TransformerConfig) -> list[str]:
    """Rules of the policy file that apply to no layer of this model."""
    names = [name for name, _, _ in _layers(config)]
    return [
        f"--minite-config layers[{index}] (match={rule.match!r}, layer_numbers="
        f"{list(rule.layer_numbers)}) applies to no layer, such as {names[0]}; correct or remove it"
        for index, rule in enumerate(policy_of(config).rules)
        if not any(rule.applies(name, layer_number_of(name)) for name in names)
    ]


def deterministic_faults(config: TransformerConfig) -> list[str]:
    """Why the run cannot honour the deterministic profile of its policy."""
    policy, num_rows = policy_of(config), _argument("padded_vocab_size")
    if policy.deterministic is None:
        return []
    from .deterministic_run import NEEDED_ARGUMENTS, require_config

    given = {name: _argument(name) for name, _, _ in NEEDED_ARGUMENTS}
    checks = [partial(require_config, policy, config, given)]
    if num_rows is not None:
        checks.append(partial(vocab_size_of, num_rows))
    faults = []
    for check in checks:
        try:
            check()
        except ValueError as error:
            faults.append(str(error).replace("\n", "\n    "))
    return faults


def vocab_size_of(num_rows: int) -> int:
    """Tokens that the head of `num_rows` rows scores, padding left out; without Megatron's arguments all.

    Raises ValueError where the arguments do not name a number that fits.
    """
    if _argument("padded_vocab_size") is None:
        return num_rows
    vocab_size = _argument("vocab_size")
    if vocab_size is None or not 0 < vocab_size <= num_rows:
        raise ValueError(
            f"--vocab-size {vocab_size}: the deterministic mode scores the tokens of the sampler's head, of "
            f"which the model here has up to {num_rows}; give vocab_size of its config.json"
        )
    return vocab_size


def layer_faults(config: TransformerConfig) -> list[str]:
    """Layers whose per-rank sizes do not divide into the blocks of the recipe the policy gives them."""
    policy = policy_of(config)
    seen: dict[str, None] = {}
    for name, in_features, out_features in _layers(config):
        if get_quant_config_or_none(name, config.quant_recipe) is not None:
            continue  # its own payload names the recipe, and finish_init checks it
        recipe = policy.recipe_for(name, config.num_layers)
        for fault in shape_faults(recipe, in_features, out_features):
            suffix = re.sub(r"^\w+\.layers\.\d+\.|local_experts\.\d+\.", "", name)
            seen[
                f"{suffix} ({recipe.name}): {fault}; change the model dimension, or give the layer "
                "recipe bf16 in --minite-config"
            ] = None
    return list(seen)


def _layers(config: TransformerConfig) -> Iterator[tuple[str, int, int]]:
    """(model-wide name, in_features, out_features) of every linear of ours, sizes per rank."""
    pattern = moe_layer_pattern(config)
    for index, moe in enumerate(pattern):
        for suffix, in_features, out_features in _layer_sizes(config, moe):
            yield f"decoder.layers.{index}.{suffix}", in_features, out_features
    for index in range(config.mtp_num_layers or 0):
        for suffix, in_features, out_features in _layer_sizes(config, pattern[-1]):
            name = f"mtp.layers.{index}.transformer_layer.{suffix}"
            yield name, in_features, out_features


def moe_layer_pattern(config: TransformerConfig) -> list[bool]:
    """For every decoder layer, whether it is MoE (--moe-layer-freq)."""
    frequency = config.moe_layer_freq
    if not config.num_moe_experts:
        return [False] * config.num_layers
    if isinstance(frequency, int):
        return [index % frequency == 0 for index in range(config.num_layers)]
    if len(frequency) != config.num_layers:
        raise ValueError(
            f"--moe-layer-freq {frequency} has {len(frequency)} entries for {config.num_layers} layers"
        )
    return [bool(entry) for entry in frequency]


def _layer_sizes(config: TransformerConfig, moe: bool) -> list[tuple[str, int, int]]:
    """(name in the layer, in_features, out_features) per tensor-parallel rank."""
    tp = config.tensor_model_parallel_size
    etp = config.expert_tensor_parallel_size or tp
    hidden, head = config.hidden_size, config.kv_channels
    groups = config.num_query_groups or config.num_attention_heads
    gate = 2 if config.gated_linear_unit else 1
    sizes = [
        (
            "self_attention.linear_qkv",
            hidden,
            (config.num_attention_heads + 2 * groups) * head // tp,
        ),
        ("self_attention.linear_proj", config.num_attention_heads * head // tp, hidden),
    ]
    if moe:
        ffn = config.moe_ffn_hidden_size or config.ffn_hidden_size
        experts = ["mlp.experts"]
        if not config.moe_grouped_gemm:
            num_local = config.num_moe_experts // config.expert_model_parallel_size
            experts = [f"mlp.experts.local_experts.{index}" for index in range(num_local)]
        for stem in experts:
            sizes.append((f"{stem}.linear_fc1", hidden, gate * ffn // etp))
            sizes.append((f"{stem}.linear_fc2", ffn // etp, hidden))
    else:
        sizes.append(("mlp.linear_fc1", hidden, gate * config.ffn_hidden_size // tp))
        sizes.append(("mlp.linear_fc2", config.ffn_hidden_size // tp, hidden))
    shared = getattr(config, "moe_shared_expert_intermediate_size", None)
    if moe and shared:
        sizes.append(("mlp.shared_experts.linear_fc1", hidden, gate * shared // tp))
        sizes.append(("mlp.shared_experts.linear_fc2", shared // tp, hidden))
    return sizes


def require_supported(config: TransformerConfig, have_te: bool) -> None:
    """Raise one ValueError with every fault of the configuration."""
    faults = config_faults(config, have_te)
    if faults:
        listed = "\n".join(f"  - {fault}" for fault in faults)
        raise ValueError(f"--transformer-impl {IMPL} cannot run this configuration:\n{listed}")

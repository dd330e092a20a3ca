"""A two-layer GPT built from megatron.core on the CPU, and what a checkpoint would say about it.

Imported in child processes only (megatron_runs.py): the CPU shim and the TE stand-in change a process
for good.
"""

import re
import zlib

import te_stand_in
import torch

from megatron_nvfp4.mcore import cpu_device

KINDS = {
    "dense": {},
    "moe_grouped": {"num_moe_experts": 4, "moe_grouped_gemm": True},
    "moe_sequential": {"num_moe_experts": 4, "moe_grouped_gemm": False},
}
VOCABULARY, SEQUENCE = 256, 64
# What Megatron assumes of a parameter without the attribute.
ATTRIBUTES = {
    "allreduce": True,
    "tensor_model_parallel": False,
    "partition_dim": -1,
    "partition_stride": 1,
    "sequence_parallel": False,
}


def start(*, te: bool = False) -> None:
    """The shim, the stand-in if asked for, and a gloo world from torchrun's variables."""
    cpu_device.install()
    if te:
        te_stand_in.install()
    torch.distributed.init_process_group("gloo")


def parallelise(*, tp: int = 1, pp: int = 1, ep: int = 1) -> None:
    """Megatron's process groups, anew, and its random state."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
    )
    model_parallel_cuda_manual_seed(1234, force_reset_rng=True)


def new_config(kind: str = "dense", impl: str = "minite", **changes):
    """TransformerConfig of hidden size 64: GQA, qk norm, SwiGLU, RMSNorm, no biases, BF16."""
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_config import TransformerConfig

    moe = {}
    if KINDS[kind]:
        moe = {
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": 96,
            "moe_token_dispatcher_type": "alltoall",
            "moe_aux_loss_coeff": 1e-3,
        }
    values = {
        "num_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 16,
        "ffn_hidden_size": 128,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "qk_layernorm": True,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "apply_rope_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
        "sequence_parallel": parallel_state.get_tensor_model_parallel_world_size() > 1,
        "transformer_impl": impl,
        **moe,
        **KINDS[kind],
    }
    return TransformerConfig(**{**values, **changes})


def new_model(config, spec=None):
    """GPTModel on `spec`, default: TE's block spec or ours, as config.transformer_impl says."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel

    return GPTModel(
        config=config,
        transformer_layer_spec=spec or block_spec(config),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )


def block_spec(config):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    from megatron_nvfp4.mcore.layer_specs import get_minite_block_spec

    if config.transformer_impl == "minite":
        return get_minite_block_spec(config)
    return get_gpt_decoder_block_spec(config, use_transformer_engine=True)


def without_te_fallback() -> None:
    """Make miniTE take its own norm and attention although the stand-in is there."""
    from megatron_nvfp4.mcore import layer_specs, spec_provider

    layer_specs.HAVE_TE = spec_provider.HAVE_TE = False


def loss_of(model) -> torch.Tensor:
    """Mean loss on one fixed batch of two sequences."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, VOCABULARY - 1, (2, SEQUENCE + 1), generator=generator)
    positions = torch.arange(SEQUENCE).expand(2, -1)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    return model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).float().mean()


def fill(model) -> None:
    """Values that depend on a parameter's canonical name alone: equal in every form of one model."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            seed = zlib.crc32(canonical(name).encode())
            generator = torch.Generator().manual_seed(seed)
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = parameter.dim() == 1
            parameter.copy_(1 + 0.1 * noise if is_norm else 0.05 * noise)


def canonical(name: str) -> str:
    """Grouped experts named as sequential ones."""
    return re.sub(
        r"experts\.(linear_fc\d)\.weight(\d+)$", r"experts.local_experts.\2.\1.weight", name
    )


def weights_of(state_dict) -> dict[str, torch.Tensor]:
    """Canonical name -> weight, without extra state."""
    return {
        canonical(name): tensor.detach().clone()
        for name, tensor in state_dict.items()
        if "_extra_state" not in name
    }


def differing(found: dict, expected: dict) -> list[str]:
    """Names that one side lacks or whose values are not the same bits."""
    names = found.keys() | expected.keys()
    return sorted(
        name
        for name in names
        if name not in found or name not in expected or not torch.equal(found[name], expected[name])
    )


def sharded(model):
    """The model's sharded state dict, as checkpointing asks for it in training."""
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return model.sharded_state_dict(
        metadata={"dp_cp_group": group, "singleton_local_shards": False}
    )


def save_distributed(model, folder) -> None:
    from megatron.core import dist_checkpointing

    folder.mkdir()
    dist_checkpointing.save(sharded(model), str(folder))


def load_distributed(model, folder) -> None:
    from megatron.core import dist_checkpointing

    model.load_state_dict(dist_checkpointing.load(sharded(model), str(folder)))


def describe(model) -> dict:
    """What a checkpoint and Megatron's optimizers see of the model, as plain data."""
    from megatron.core.dist_checkpointing.mapping import apply_factories

    state = model.state_dict_for_save_checkpoint()
    entries = sharded(model)
    local = {name: _entry(entry) for name, entry in entries.items() if hasattr(entry, "key")}
    apply_factories(entries)
    return {
        "state_dict": {
            name: None if tensor is None else list(tensor.shape) for name, tensor in state.items()
        },
        "sharded": local,
        "shards": sorted(_shards(entries), key=str),
        "attributes": {
            name: {key: getattr(parameter, key, default) for key, default in ATTRIBUTES.items()}
            for name, parameter in model.named_parameters()
        },
    }


def _entry(entry) -> dict:
    found = {"key": entry.key, "kind": type(entry).__name__}
    if found["kind"] != "ShardedTensorFactory":
        found |= {
            "global_shape": list(entry.global_shape),
            "global_offset": list(entry.global_offset),
        }
    return found


def _shards(entries):
    """Every shard that would be written: position, pieces per axis, added axes, type and replica."""
    for entry in _leaves(entries):
        yield [
            entry.key,
            list(entry.global_shape),
            list(entry.global_offset),
            list(getattr(entry, "axis_fragmentations", None) or []),
            getattr(entry, "prepend_axis_num", None),
            str(getattr(entry, "dtype", None)),
            list(entry.replica_id),
        ]


def _leaves(tree):
    if isinstance(tree, dict | list | tuple):
        for branch in tree.values() if isinstance(tree, dict) else tree:
            yield from _leaves(branch)
    elif hasattr(tree, "replica_id"):
        yield tree

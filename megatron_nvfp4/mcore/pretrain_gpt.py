"""GPT pretraining on the megatron-core wheel alone: data, loss and forward step for megatron.training.

The wheel has megatron.training but not the pretrain scripts of the repository. This covers plain language
modelling on Megatron's indexed datasets (or --mock-data); for SFT, fill-in-the-middle, packed sequences or
distillation run the repository's pretrain_gpt.py (`python -m megatron_nvfp4 run`).
"""

from functools import partial

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import (
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, pretrain, print_rank_0
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage
from torch import Tensor

BATCH_FIELDS = ("attention_mask", "labels", "loss_mask", "position_ids", "tokens")
NOT_HERE = ("sft", "fim_data", "hybrid_context_parallel", "dataloader_inter_document_masking")


def main() -> None:
    """Parse Megatron's arguments from sys.argv and train."""
    args = parse_and_validate_args(
        args_defaults={"tokenizer_type": "GPT2BPETokenizer", "eval_interval": 1000}
    )
    unsupported = [f"--{name.replace('_', '-')}" for name in NOT_HERE if getattr(args, name, False)]
    if unsupported:
        raise ValueError(
            f"pretrain: {', '.join(unsupported)} needs the repository's script: "
            "python -m megatron_nvfp4 run path/to/pretrain_gpt.py ..."
        )
    build_datasets.is_distributed = True
    pretrain(
        pretrain_cfg_container_from_args(args, gpt_config_from_args(args)),
        build_datasets,
        ModelType.encoder_or_decoder,
        forward_step,
        get_embedding_ranks=get_embedding_ranks,
    )


def forward_step(data_iterator, model):
    """One microbatch: (per-token losses, function that reduces them)."""
    batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    losses = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return losses, partial(loss_func, batch["loss_mask"])


def get_batch(data_iterator, vp_stage: int | None) -> dict[str, Tensor | None]:
    """This rank's fields of the next microbatch; None for all of them inside the pipeline."""
    if not is_first_or_last_pipeline_stage(vp_stage):
        return dict.fromkeys(BATCH_FIELDS)
    args = get_args()
    batch = {}
    if mpu.get_tensor_model_parallel_rank() == 0:
        sample = next(data_iterator)
        for field in BATCH_FIELDS:
            value = sample.get(field)
            batch[field] = None if value is None else value.cuda(non_blocking=True)
    batch = get_batch_on_this_tp_rank(
        batch,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        cp_size=args.context_parallel_size,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    batch = get_batch_on_this_cp_rank(
        batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group()
    )
    return {field: batch.get(field) for field in BATCH_FIELDS}


def loss_func(loss_mask: Tensor, losses: Tensor):
    """(sum of masked losses, number of tokens, {"lm loss": both}), as Megatron's schedules want them."""
    mask = loss_mask.reshape(-1).float()
    loss = torch.sum(losses.reshape(-1).float() * mask)
    if get_args().check_for_nan_in_loss_and_grad:
        for test, what in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            get_rerun_state_machine().validate_result(
                result=loss,
                rejection_func=test,
                message=f"{what} in the loss of this rank",
                tolerance=0.0,
                fatal=True,
            )
    num_tokens = mask.sum().detach().to(torch.int)
    report = torch.cat([loss.detach().reshape(1), num_tokens.reshape(1)])
    return loss, num_tokens, {"lm loss": report}


def build_datasets(num_samples, vp_stage: int | None = None):
    """Train, validation and test datasets from --data-path and friends, or --mock-data."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )
    dataset = MockGPTDataset if args.mock_data else GPTDataset

    def built_here() -> bool:
        return mpu.get_tensor_model_parallel_rank() == 0 and is_first_or_last_pipeline_stage(
            vp_stage
        )

    print_rank_0("> building datasets ...")
    return BlendedMegatronDatasetBuilder(dataset, num_samples, built_here, config).build()


def get_embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """Pipeline ranks that hold the word embedding."""
    ranks = pp_ranks[:1]
    if len(pp_ranks) > 1 and not get_args().untie_embeddings_and_output_weights:
        ranks.append(pp_ranks[-1])
    return ranks

"""Write a Megatron checkpoint, torch_dist or mp_rank files, as a Hugging Face checkpoint."""

import argparse

from megatron_nvfp4.checkpoint.convert import hf_from_megatron


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `main`."""
    parser.add_argument(
        "--megatron", required=True, metavar="DIR", help="what --save named, or one iteration of it"
    )
    parser.add_argument(
        "--hf-config",
        required=True,
        metavar="DIR",
        help="the model's Hugging Face folder: config.json, tokenizer; weights are not needed",
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to create")
    parser.add_argument(
        "--max-shard-gb",
        type=float,
        metavar="GB",
        help="default: the files of --hf-config where its weights or index are there, else 5",
    )
    parser.add_argument("--force", action="store_true", help="replace the output folder")


def main(options: argparse.Namespace) -> int:
    """Convert and return 0; ValueError or RuntimeError say what is wrong."""
    hf_from_megatron(
        options.megatron,
        options.hf_config,
        options.out,
        max_shard_bytes=None if options.max_shard_gb is None else options.max_shard_gb * 1e9,
        force=options.force,
    )
    return 0

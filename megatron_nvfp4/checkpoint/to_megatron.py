"""Write a Hugging Face checkpoint as a Megatron checkpoint, torch_dist or mp_rank files."""

import argparse

from megatron_nvfp4.checkpoint.convert import FORMATS, ParallelSizes, megatron_from_hf


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `main`."""
    parser.add_argument("--hf", required=True, metavar="DIR", help="Hugging Face checkpoint")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to create, for --load")
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default=FORMATS[0],
        help="torch_dist loads in every parallel layout; torch in the one given here",
    )
    parser.add_argument(
        "--make-vocab-size-divisible-by",
        type=int,
        default=128,
        metavar="N",
        help="as in training; the embedding is padded to a multiple of N times --tp",
    )
    for name, group in (("tp", "tensor"), ("pp", "pipeline"), ("ep", "expert")):
        text = f"{group} parallel size, for --format torch"
        parser.add_argument(f"--{name}", type=int, default=1, metavar="N", help=text)
    parser.add_argument(
        "--etp", type=int, metavar="N", help="expert tensor parallel size; default: --tp"
    )
    parser.add_argument(
        "--vpp", type=int, default=1, metavar="N", help="virtual stages of a pipeline rank"
    )
    parser.add_argument("--force", action="store_true", help="replace the output folder")


def main(options: argparse.Namespace) -> int:
    """Convert and return 0; ValueError or RuntimeError say what is wrong."""
    megatron_from_hf(
        options.hf,
        options.out,
        format=options.format,
        sizes=ParallelSizes(options.tp, options.pp, options.ep, options.etp, options.vpp),
        vocab_divisible_by=options.make_vocab_size_divisible_by,
        force=options.force,
    )
    return 0

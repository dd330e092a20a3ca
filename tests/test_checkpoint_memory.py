"""How much memory a conversion takes: two gigabytes in a child process that says its peak."""

import subprocess
import sys
import time

import torch
from checkpoint_small import CONFIGS, fused_names
from megatron_runs import environment

from megatron_nvfp4.checkpoint.hf import HFReader, HFWriter
from megatron_nvfp4.checkpoint.plan import Architecture, hf_tensors

BIG = CONFIGS["qwen3_moe"] | {
    "vocab_size": 32768,
    "hidden_size": 1024,
    "num_hidden_layers": 10,
    "num_experts": 64,
    "moe_intermediate_size": 512,
    "num_attention_heads": 16,
    "head_dim": 64,
}


def test_two_gigabytes_are_converted_in_a_fraction_of_the_memory(tmp_path):
    """Prevents: a model, or a layer of it, that has to fit into memory; both ways, experts fused on disk."""
    arch = Architecture.from_hf_config(BIG)
    shapes = hf_tensors(arch, hf_names=fused_names(arch))
    block = torch.randn(1 << 20).bfloat16()
    with HFWriter(tmp_path / "hf", config=BIG) as writer:
        for name, shape in shapes.items():
            numel = torch.Size(shape).numel()
            writer.write(name, block.repeat(-(-numel // block.numel()))[:numel].view(shape))
    total = HFReader(tmp_path / "hf").num_bytes()
    assert total > 2e9
    largest = max(2 * torch.Size(shape).numel() for shape in shapes.values())
    code = (
        "import re\n"
        "from megatron_nvfp4.checkpoint import convert\n"
        # Not resource's ru_maxrss: a child starts with that of the process that started it.
        "status = lambda: open('/proc/self/status').read()\n"
        "peak = lambda: 1024 * int(re.search(r'VmHWM:\\s+(\\d+) kB', status())[1])\n"
        "before = peak(); convert.megatron_from_hf('hf', 'megatron'); there = peak()\n"
        "convert.hf_from_megatron('megatron', 'hf', 'back')\n"
        "print(before, there, peak())\n"
    )
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    before, there, back = map(int, done.stdout.split())
    print(f"{total / 1e9:.2f} GB both ways in {time.monotonic() - begin:.1f} s;", end=" ")
    print(f"peak {(there - before) / 1e6:.0f} and {(back - before) / 1e6:.0f} MB above the imports")
    slack = 64 << 20
    assert max(there, back) - before < 2 * largest + slack
    names = ("model.layers.2.self_attn.q_proj.weight", "model.layers.9.mlp.experts.down_proj")
    for name in names:
        first, second = (HFReader(tmp_path / folder).read(name) for folder in ("hf", "back"))
        assert torch.equal(first.view(torch.uint8), second.view(torch.uint8))

"""How much memory conversions and exports take: two gigabytes in a child that says its peak."""

import shutil
import subprocess
import sys
import time

import pytest
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


SLACK = 64 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two gigabytes in `hf`."""
    path = tmp_path_factory.mktemp("big")
    arch = Architecture.from_hf_config(BIG)
    block = torch.randn(1 << 20).bfloat16()
    with HFWriter(path / "hf", config=BIG) as writer:
        for name, shape in hf_tensors(arch, hf_names=fused_names(arch)).items():
            numel = torch.Size(shape).numel()
            writer.write(name, block.repeat(-(-numel // block.numel()))[:numel].view(shape))
    assert HFReader(path / "hf").num_bytes() > 2e9
    yield path
    shutil.rmtree(path)


def _largest(folder) -> int:
    reader = HFReader(folder / "hf")
    return max(reader.num_bytes(name) for name in reader.names())


def _run(folder, code: str) -> list[int]:
    """The numbers that a child prints, which may call `peak`, its largest resident set so far."""
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", PEAK + code],
        cwd=folder,
        capture_output=True,
        text=True,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    print(f"{time.monotonic() - begin:.1f} s", end=" ")
    return list(map(int, done.stdout.splitlines()[-1].split()))


# Not resource's ru_maxrss: a child starts with that of the process that started it.
PEAK = (
    "import re\n"
    "status = lambda: open('/proc/self/status').read()\n"
    "peak = lambda: 1024 * int(re.search(r'VmHWM:\\s+(\\d+) kB', status())[1])\n"
)


def test_two_gigabytes_are_converted_in_a_fraction_of_the_memory(folder):
    """Prevents: a model, or a layer of it, that has to fit into memory; both ways, experts fused on disk."""
    code = (
        "from megatron_nvfp4.checkpoint import convert\n"
        "before = peak(); convert.megatron_from_hf('hf', 'megatron'); there = peak()\n"
        "convert.hf_from_megatron('megatron', 'hf', 'back')\n"
        "print(before, there, peak())\n"
    )
    before, there, back = _run(folder, code)
    print(f"peak {(there - before) / 1e6:.0f} and {(back - before) / 1e6:.0f} MB above the imports")
    assert max(there, back) - before < 2 * _largest(folder) + SLACK
    names = ("model.layers.2.self_attn.q_proj.weight", "model.layers.9.mlp.experts.down_proj")
    for name in names:
        first, second = (HFReader(folder / which).read(name) for which in ("hf", "back"))
        assert torch.equal(first.view(torch.uint8), second.view(torch.uint8))


def test_two_gigabytes_are_exported_in_a_fraction_of_the_memory(folder):
    """Prevents: the same of an export, whose quantiser has FP32 copies of what it works on."""
    code = (
        "from megatron_nvfp4.checkpoint import export, export_plan, formats, hf\n"
        "source = hf.HFReader('hf')\n"
        "plan = export_plan.plan_export(source, formats.MODELOPT, 'te')\n"
        "before = peak()\n"
        "export.export(source, 'serve', plan)\n"
        "print(before, peak())\n"
    )
    before, after = _run(folder, code)
    print(f"peak {(after - before) / 1e6:.0f} MB above the imports")
    assert after - before < 2 * _largest(folder) + SLACK
    reader = HFReader(folder / "serve")
    assert reader.meta("model.layers.9.mlp.experts.63.down_proj.weight")[1] == (1024, 256)
    assert reader.num_bytes() < 0.4 * HFReader(folder / "hf").num_bytes()

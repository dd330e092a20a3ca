"""Which rank files Megatron's own groups read and write where experts are cut otherwise than the rest."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from checkpoint_small import CONFIGS, architecture, random_weights, write_hf
from megatron_runs import environment, require_megatron

from megatron_nvfp4.checkpoint.convert import ParallelSizes, hf_from_megatron, megatron_from_hf
from megatron_nvfp4.checkpoint.hf import HFReader
from megatron_nvfp4.checkpoint.legacy import LegacyReader
from megatron_nvfp4.checkpoint.plan import hf_tensors

require_megatron()

# world, tp, pp, ep, etp, cp
LAYOUTS = (
    (4, 4, 1, 2, 2, 1),
    (4, 2, 1, 4, 1, 1),
    (8, 4, 1, 2, 2, 1),
    (8, 4, 1, 4, 1, 1),
    (8, 2, 2, 2, 1, 1),
    (8, 4, 2, 4, 1, 1),
    (8, 2, 1, 2, 1, 2),
    (16, 4, 2, 2, 2, 1),
)
MORE_PARTS = (2, 1, 1, 1, 2, 1)
# Every rank in turn: its place in Megatron's groups, which need no second process to be computed.
CODE = """
import json, sys, torch
from torch.testing._internal.distributed.fake_pg import FakeStore
from megatron.core import parallel_state as mpu
for world, tp, pp, ep, etp, cp in json.loads(sys.argv[1]):
    found = []
    for rank in range(world):
        torch.distributed.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        mpu.initialize_model_parallel(
            tp, pp, context_parallel_size=cp, expert_model_parallel_size=ep,
            expert_tensor_parallel_size=etp, create_gloo_process_groups=False)
        found.append([
            mpu.get_tensor_model_parallel_rank(), mpu.get_pipeline_model_parallel_rank(),
            mpu.get_expert_model_parallel_rank(), mpu.get_expert_tensor_parallel_rank(),
            mpu.get_expert_data_parallel_rank()])
        mpu.destroy_model_parallel()
        torch.distributed.destroy_process_group()
    print("places", json.dumps(found))
"""


@pytest.fixture(scope="module")
def places() -> dict[tuple[int, ...], list[tuple[int, ...]]]:
    """(tp, pp, ep, expert tp, expert data parallel) rank of every rank, by layout."""
    layouts = (*LAYOUTS, MORE_PARTS)
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(layouts)],
        capture_output=True,
        text=True,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    lines = (line.split(maxsplit=1) for line in done.stdout.splitlines())
    found = [json.loads(line[1]) for line in lines if line[0] == "places"]
    return {layout: list(map(tuple, ranks)) for layout, ranks in zip(layouts, found, strict=True)}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_an_experts_part_follows_from_the_tensor_parallel_rank(layout, places):
    """Prevents: experts' columns put together in another order than Megatron's ranks cut them."""
    _, tp, _, _, etp, _ = layout
    assert {place[0] for place in places[layout]} == set(range(tp))
    assert all(place[3] == place[0] % etp for place in places[layout])


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[1], LAYOUTS[4]], ids=str)
def test_the_files_that_megatron_writes_are_enough(layout, places, tmp_path):
    """Prevents: a real run's folders refused: of (tp, ep) it writes only the pairs that some rank has."""
    _, tp, pp, ep, etp, _ = layout
    weights = random_weights(hf_tensors(architecture("qwen3_moe")))
    write_hf(tmp_path / "hf", CONFIGS["qwen3_moe"], weights)
    sizes = ParallelSizes(tp, pp, ep, etp)
    megatron_from_hf(tmp_path / "hf", tmp_path / "megatron", format="torch", sizes=sizes)
    written = {place[:3] for place in places[layout] if place[4] == 0}
    assert written == {place[:3] for place in places[layout]}  # every rank finds its file
    folders = {
        f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else "") + f"_{e:03d}" for t, p, e in written
    }
    removed = 0
    for path in list((tmp_path / "megatron" / "release").iterdir()):
        if path.name not in folders:
            shutil.rmtree(path)
            removed += 1
    assert removed
    hf_from_megatron(tmp_path / "megatron", tmp_path / "hf", tmp_path / "back")
    found = HFReader(tmp_path / "back")
    assert found.names() == sorted(weights)
    assert [name for name in weights if not torch.equal(found.read(name), weights[name])] == []
    shutil.rmtree(next(path for path in (tmp_path / "megatron" / "release").iterdir()))
    with pytest.raises(ValueError, match="missing"):
        LegacyReader(tmp_path / "megatron")


def test_more_expert_parts_than_tensor_ranks_have_no_files(places, tmp_path):
    """Prevents: an expert's second half lost: Megatron gives both halves' ranks the same file name."""
    assert [place[:3] for place in places[MORE_PARTS]] == [(0, 0, 0), (0, 0, 0)]
    assert [place[3:] for place in places[MORE_PARTS]] == [(0, 0), (1, 0)]
    write_hf(
        tmp_path / "hf",
        CONFIGS["qwen3_moe"],
        random_weights(hf_tensors(architecture("qwen3_moe"))),
    )
    with pytest.raises(ValueError, match=r"etp=2 does not divide tp=1; .* write torch_dist"):
        megatron_from_hf(
            tmp_path / "hf", tmp_path / "out", format="torch", sizes=ParallelSizes(etp=2)
        )

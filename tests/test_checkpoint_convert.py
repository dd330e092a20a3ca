"""Hugging Face to Megatron and back: the same bytes for every model, format and parallel layout."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_small import CONFIGS, MOE, architecture, fused_names, random_weights, write_hf
from megatron_runs import environment

from megatron_nvfp4.__main__ import main
from megatron_nvfp4.checkpoint.convert import (
    ParallelSizes,
    hf_from_megatron,
    megatron_from_hf,
    open_megatron,
)
from megatron_nvfp4.checkpoint.dcp import TorchDistReader, TorchDistWriter
from megatron_nvfp4.checkpoint.hf import HFReader
from megatron_nvfp4.checkpoint.plan import copies, hf_tensors, parameters

ROOT = Path(__file__).parents[1]
CASES = [*((name, False) for name in CONFIGS), *((name, True) for name in MOE)]
# What the `torch` format can hold of four layers, eight heads in four groups and four experts.
LAYOUTS = {
    "one rank": ParallelSizes(),
    "tp": ParallelSizes(tp=4),
    "pp": ParallelSizes(pp=4),
    "tp pp vpp": ParallelSizes(tp=2, pp=2, vpp=2),
    "tp ep": ParallelSizes(tp=2, ep=4),
    "tp pp ep etp vpp": ParallelSizes(tp=4, pp=2, ep=2, etp=2, vpp=2),
    "tp ep etp": ParallelSizes(tp=2, ep=2, etp=1),
}


def _names(kind: str, fused: bool) -> list[str] | None:
    return fused_names(architecture(kind)) if fused else None


def _write(folder: Path, kind: str, *, fused: bool = False, tags: bool = False, **changes) -> Path:
    """A tiny checkpoint; tags: every element of it is a number of its own instead of a random one."""
    arch, names = architecture(kind), _names(kind, fused)
    shapes = hf_tensors(arch, hf_names=names)
    weights = random_weights(shapes)
    if tags:
        start = 1
        for name, shape in shapes.items():
            values = torch.arange(start, start + weights[name].numel())
            weights[name] = values.view(shape).double()
            start += weights[name].numel()
    for name, source in copies(arch, hf_names=names).items():
        weights[name] = weights[source].clone()
    weights |= {name: value for name, value in changes.items() if value is not None}
    weights = {
        name: value
        for name, value in weights.items()
        if name not in changes or changes[name] is not None
    }
    write_hf(folder, CONFIGS[kind], weights)
    return folder


def _assert_same(found: Path, expected: Path) -> None:
    """The same tensors: names, dtypes, shapes, bytes."""
    first, second = HFReader(found), HFReader(expected)
    assert first.names() == second.names()
    different = [
        name
        for name in first.names()
        if first.meta(name) != second.meta(name)
        or not torch.equal(_bytes(first.read(name)), _bytes(second.read(name)))
    ]
    assert different == []


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


# --- round trips --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "fused"), CASES)
def test_round_trip_through_torch_dist(tmp_path, kind, fused):
    # Prevents: a byte, a dtype or a name that a conversion does not bring back.
    hf = _write(tmp_path / "hf", kind, fused=fused)
    megatron_from_hf(hf, tmp_path / "megatron")
    hf_from_megatron(tmp_path / "megatron", hf, tmp_path / "back")
    _assert_same(tmp_path / "back", hf)
    assert json.loads((tmp_path / "back/config.json").read_text()) == CONFIGS[kind]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", CONFIGS)
def test_round_trip_through_rank_files(tmp_path, kind, layout):
    # Prevents: layers, experts or rows that go to the wrong rank or come back from it in another order.
    sizes = LAYOUTS[layout]
    if kind not in MOE and sizes.ep > 1:
        sizes = ParallelSizes(tp=sizes.tp, pp=sizes.pp, vpp=sizes.vpp)
    hf = _write(tmp_path / "hf", kind, tags=True)
    megatron_from_hf(hf, tmp_path / "megatron", format="torch", sizes=sizes)
    hf_from_megatron(tmp_path / "megatron", hf, tmp_path / "back")
    _assert_same(tmp_path / "back", hf)
    _assert_files_hold_every_number_once(tmp_path / "megatron", sizes)


def _assert_files_hold_every_number_once(folder: Path, sizes: ParallelSizes) -> None:
    """By torch.load: nothing is missing, and what parallelism cuts lies on no more ranks than it should."""
    etp = sizes.tp if sizes.etp is None else sizes.etp
    found: dict[str, list[torch.Tensor]] = {"routed": [], "cut": [], "other": []}
    for path in (folder / "release").glob("*/model_optim_rng.pt"):
        state = torch.load(path, weights_only=False)
        for model in (value for name, value in state.items() if name.startswith("model")):
            for key, value in model.items():
                if isinstance(value, torch.Tensor):
                    cut = key.endswith(("linear_qkv.weight", "linear_proj.weight"))
                    group = "routed" if ".mlp.experts." in key else "cut" if cut else "other"
                    found[group].append(value.flatten().long())
    counts = {n: torch.cat(values).bincount() for n, values in found.items() if values}
    every = torch.cat([torch.nonzero(count)[:, 0] for count in counts.values()]).sort().values
    every = every[every > 0]  # 0 pads the vocabulary
    assert torch.equal(every, torch.arange(1, len(every) + 1))
    assert set(counts["cut"].tolist()) <= {0, sizes.ep}
    if "routed" in counts:
        assert set(counts["routed"].tolist()) <= {0, sizes.tp // etp}


def test_every_rank_holds_its_rows_of_gate_and_of_up(tmp_path):
    # Prevents: a rank with the gate alone; fc1 rows in an order that shapes do not give away.
    hf = _write(tmp_path / "hf", "qwen3", tags=True)
    megatron_from_hf(hf, tmp_path / "megatron", format="torch", sizes=ParallelSizes(tp=2))
    reader = HFReader(hf)
    gate, up, q, k, v = (
        reader.read(f"model.layers.1.{name}_proj.weight")
        for name in ("mlp.gate", "mlp.up", "self_attn.q", "self_attn.k", "self_attn.v")
    )
    for rank in range(2):
        path = tmp_path / f"megatron/release/mp_rank_{rank:02d}/model_optim_rng.pt"
        model = torch.load(path, weights_only=False)["model"]
        layer = "decoder.layers.1."
        half = gate.shape[0] // 2
        rows = slice(rank * half, (rank + 1) * half)
        assert torch.equal(
            model[f"{layer}mlp.linear_fc1.weight"], torch.cat([gate[rows], up[rows]])
        )
        groups = [x.view(4, -1, 64)[2 * rank : 2 * rank + 2] for x in (q, k, v)]
        expected = torch.cat(groups, dim=1).reshape(-1, 64)
        assert torch.equal(model[f"{layer}self_attention.linear_qkv.weight"], expected)


def test_tied_embeddings_over_four_stages(tmp_path):
    # Prevents: an lm_head made up from the last stage's copy, or the copy missing there.
    hf = _write(tmp_path / "hf", "qwen3_tied")
    megatron_from_hf(hf, tmp_path / "megatron", format="torch", sizes=ParallelSizes(pp=4))
    last = tmp_path / "megatron/release/mp_rank_00_003/model_optim_rng.pt"
    assert "output_layer.weight" in torch.load(last, weights_only=False)["model"]
    hf_from_megatron(tmp_path / "megatron", hf, tmp_path / "back")
    assert "lm_head.weight" not in HFReader(tmp_path / "back").names()
    _assert_same(tmp_path / "back", hf)


def test_redundant_head_is_dropped_on_the_way_and_kept_where_it_was(tmp_path):
    # Prevents: tied models refused because their repository also ships the head.
    weights = random_weights(hf_tensors(architecture("qwen3_tied")))
    head = weights["model.embed_tokens.weight"].clone()
    hf = _write(tmp_path / "hf", "qwen3_tied", **{"lm_head.weight": head})
    megatron_from_hf(hf, tmp_path / "megatron")
    assert "output_layer.weight" not in TorchDistReader(tmp_path / "megatron").keys()  # noqa: SIM118
    hf_from_megatron(tmp_path / "megatron", hf, tmp_path / "back")
    _assert_same(tmp_path / "back", hf)


def test_config_alone_gives_published_names(tmp_path):
    # Prevents: a conversion that needs the original weights; experts fused although nobody asked for it.
    hf = _write(tmp_path / "hf", "qwen3_moe")
    (tmp_path / "config").mkdir()
    config = json.dumps(CONFIGS["qwen3_moe"] | {"torch_dtype": "float32"})
    for name, text in (("config.json", config), ("tokenizer.json", "{}")):
        (tmp_path / "config" / name).write_text(text)
    megatron_from_hf(hf, tmp_path / "megatron")
    hf_from_megatron(
        tmp_path / "megatron", tmp_path / "config", tmp_path / "back", max_shard_bytes=1e5
    )
    _assert_same(tmp_path / "back", hf)
    assert (tmp_path / "back/tokenizer.json").read_text() == "{}"
    assert HFReader(tmp_path / "back").config["torch_dtype"] == "bfloat16"  # what the tensors are
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1


def test_prefixes_and_local_names_are_read(tmp_path):
    # Prevents: checkpoints of wrappers and of Megatron's local spec refused, or their norms mixed up.
    hf = _write(tmp_path / "hf", "qwen3_moe")
    megatron_from_hf(hf, tmp_path / "megatron")
    reader = TorchDistReader(tmp_path / "megatron")
    arch = architecture("qwen3_moe")
    common = {"args": reader.common["args"]}
    with TorchDistWriter(tmp_path / "local", common=common, num_layers=4, num_experts=4) as writer:
        for key in reader.keys():  # noqa: SIM118
            name = key.replace("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
            name = name.replace(
                "self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"
            )
            is_stacked = key.startswith("decoder.layers.")
            for layer in range(arch.num_layers) if is_stacked else [None]:
                writer.write(f"module.{name}", reader.read(key, layer=layer), layer=layer)
    hf_from_megatron(tmp_path / "local", hf, tmp_path / "back")
    _assert_same(tmp_path / "back", hf)


def test_arguments_are_in_the_checkpoint(tmp_path):
    # Prevents: --use-checkpoint-args that finds nothing, or the shape of another model.
    hf = _write(tmp_path / "hf", "deepseek_v3")
    sizes = ParallelSizes(tp=2, pp=2, ep=2, etp=1)
    megatron_from_hf(hf, tmp_path / "megatron", format="torch", sizes=sizes, vocab_divisible_by=64)
    path = tmp_path / "megatron/release/mp_rank_00_000_000/model_optim_rng.pt"
    arguments = torch.load(path, weights_only=False)["args"]
    expected = {
        "num_layers": 4,
        "hidden_size": 64,
        "padded_vocab_size": 256,
        "moe_layer_freq": [0, 1, 1, 1],
        "num_experts": 4,
        "multi_latent_attention": True,
        "kv_lora_rank": 24,
        "mtp_num_layers": 1,
        "moe_router_score_function": "sigmoid",
        "moe_shared_expert_intermediate_size": 32,
        "tensor_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
        "untie_embeddings_and_output_weights": True,
    }
    assert {name: getattr(arguments, name) for name in expected} == expected
    assert (tmp_path / "megatron/latest_checkpointed_iteration.txt").read_text() == "release"


# --- refusals -----------------------------------------------------------------------------------------

Q_PROJ = "model.layers.2.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("qwen3", {Q_PROJ: None}, rf"1 missing \({Q_PROJ}\), 0 unexpected \(none\)"),
        (
            "qwen3",
            {"model.layers.4.mlp.up_proj.weight": torch.ones(2)},
            r"unexpected \(model.layers.4",
        ),
        (
            "qwen3",
            {"model.embed_tokens.weight": torch.ones(251, 64)},
            r"\[251, 64\] is not \[250, 64\]",
        ),
        (
            "qwen3",
            {Q_PROJ: torch.ones(128, 64)},
            r"linear_qkv.weight: its parts .*q_proj.weight is torch",
        ),
        (
            "qwen3",
            {"lm_head.weight": None},
            "lm_head.weight is missing; if the head is the embedding",
        ),
        (
            "qwen3_tied",
            {"lm_head.weight": torch.ones(250, 64)},
            "tie_word_embeddings=true; set it to f",
        ),
        (
            "qwen3_moe",
            {"model.layers.1.mlp.experts.3.up_proj.weight": None},
            r"missing \(model.layers.1.mlp.experts.3.up_proj.weight\)",
        ),
        (
            "deepseek_v3",
            {"model.layers.4.shared_head.head.weight": torch.ones(250, 64)},
            "shared_head.head.weight: differs from lm_head.weight, and Megatron's prediction layers",
        ),
        (
            "deepseek_v3",
            {"model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(1, 1)},
            "holds quantised weights .*up_proj.weight_scale_inv.*; dequantise it first",
        ),
    ],
)
def test_wrong_hf_checkpoints_are_refused_by_name(tmp_path, kind, changes, message):
    # Prevents: a Megatron checkpoint that lacks or misplaces something, found hours later if at all.
    hf = _write(tmp_path / "hf", kind, **changes)
    with pytest.raises(ValueError, match=message):
        megatron_from_hf(hf, tmp_path / "megatron")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


@pytest.mark.parametrize(
    ("kind", "drop", "add", "config", "message"),
    [
        (
            "qwen3",
            "decoder.layers.1.mlp.linear_fc2.weight",
            {},
            {},
            "1 missing .*1.mlp.linear_fc2.weight",
        ),
        (
            "qwen3",
            "",
            {"decoder.layers.0.adapter.weight": (4, 4)},
            {},
            "1 unknown .*0.adapter.weight",
        ),
        (
            "qwen3",
            "output_layer.weight",
            {},
            {},
            "output_layer.weight is missing although config.json",
        ),
        (
            "qwen3",
            "",
            {},
            {"tie_word_embeddings": True},
            "output_layer.weight: differs from embedding",
        ),
        ("qwen3", "", {}, {"vocab_size": 300}, "256 rows cannot hold vocab_size=300"),
        ("qwen3", "", {}, {"vocab_size": 100}, "256 rows are no padding of vocab_size=100"),
        (
            "qwen3",
            "",
            {},
            {"intermediate_size": 80},
            r"linear_fc1.weight: shape \[192, 64\] is not \[160",
        ),
        ("qwen3", "", {}, {"num_hidden_layers": 5}, r"missing \(decoder.layers.4"),
        ("qwen3", "", {}, {"num_hidden_layers": 3}, r"unknown \(decoder.layers.3"),
    ],
)
def test_wrong_megatron_checkpoints_are_refused_by_name(tmp_path, kind, drop, add, config, message):
    # Prevents: a Hugging Face model that loads and is another one than was trained.
    weights = random_weights(
        {p.key: p.shape for p in parameters(architecture(kind), vocab_size_padded=256)}
    )
    weights.pop(drop, None)
    weights |= random_weights(add)
    common = {"args": {"make_vocab_size_divisible_by": 128, "tensor_model_parallel_size": 1}}
    with TorchDistWriter(tmp_path / "megatron", common=common, num_layers=4) as writer:
        for name, tensor in weights.items():
            writer.write(name, tensor)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text(json.dumps(CONFIGS[kind] | config))
    with pytest.raises(ValueError, match=message):
        hf_from_megatron(tmp_path / "megatron", tmp_path / "hf", tmp_path / "back")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"moe_mlp_glu_interleave_size": 32},
            "interleave_size=32, so rows of gate and up alternate",
        ),
        ({"apply_layernorm_1p": True}, "apply_layernorm_1p=True, so norms are stored less one"),
        ({"rotary_interleaved": True}, "so query and key rows are in another order"),
        (
            {"num_attention_heads": 4, "kv_channels": 32},
            "num_attention_heads=4, config.json implies 8",
        ),
        (
            {"group_query_attention": True, "num_query_groups": 2},
            "num_query_groups=2, config.json implies 4",
        ),
    ],
)
def test_arguments_that_contradict_the_config_are_refused(tmp_path, arguments, message):
    # Prevents: values in another order or meaning than shapes show, converted as if they were not.
    shapes = {p.key: p.shape for p in parameters(architecture("qwen3"))}
    with TorchDistWriter(tmp_path / "megatron", common={"args": arguments}, num_layers=4) as writer:
        for name, tensor in random_weights(shapes).items():
            writer.write(name, tensor)
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["qwen3"]))
    with pytest.raises(ValueError, match=message):
        open_megatron(tmp_path / "megatron", tmp_path)


def test_parameters_stored_twice_are_refused(tmp_path):
    # Prevents: one of two values taken at random.
    key = "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"
    with TorchDistWriter(tmp_path / "megatron", common={}, num_layers=1) as writer:
        writer.write(key, torch.ones(64))
        writer.write("decoder.layers.0.input_layernorm.weight", torch.ones(64))
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["qwen3"]))
    with pytest.raises(ValueError, match=rf"{key}: stored twice in .*input_layernorm.weight"):
        open_megatron(tmp_path / "megatron", tmp_path)


def test_sizes_belong_to_the_torch_format(tmp_path):
    # Prevents: --tp 8 taken for a promise that torch_dist files were cut by it.
    with pytest.raises(ValueError, match="torch_dist is not cut by ranks; leave the sizes out"):
        megatron_from_hf(tmp_path, tmp_path / "out", sizes=ParallelSizes(tp=2))
    with pytest.raises(ValueError, match="format='pt': choose one of torch_dist, torch"):
        megatron_from_hf(tmp_path, tmp_path / "out", format="pt")


# --- verbs and scripts --------------------------------------------------------------------------------


def test_verbs_convert_there_and_back(tmp_path, capsys):
    # Prevents: options of the command line that do not reach the conversion.
    hf = _write(tmp_path / "hf", "qwen3_moe")
    out, back = str(tmp_path / "megatron"), str(tmp_path / "back")
    sizes = "--tp 2 --pp 2 --ep 2 --etp 1 --vpp 2 --make-vocab-size-divisible-by 64".split()
    assert (
        main(["convert-hf-to-megatron", "--hf", str(hf), "--out", out, "--format", "torch", *sizes])
        == 0
    )
    ranks = sorted(path.name for path in (tmp_path / "megatron/release").iterdir())
    assert ranks == [
        f"mp_rank_{t:02d}_{p:03d}_{e:03d}" for t in (0, 1) for p in (0, 1) for e in (0, 1)
    ]
    words = ["convert-megatron-to-hf", "--megatron", out, "--hf-config", str(hf), "--out", back]
    assert main(words) == 0
    _assert_same(tmp_path / "back", hf)
    assert main(words) == 2
    assert "error: " in capsys.readouterr().err
    assert main([*words, "--force"]) == 0


@pytest.mark.parametrize("script", ["convert_hf_to_megatron", "convert_megatron_to_hf"])
def test_scripts_refuse_in_one_line(tmp_path, script):
    # Prevents: a traceback for a folder that is not there.
    words = {
        "convert_hf_to_megatron": ["--hf", tmp_path / "no", "--out", tmp_path / "out"],
        "convert_megatron_to_hf": [
            *(
                "--megatron",
                tmp_path / "no",
                "--hf-config",
                tmp_path / "no",
                "--out",
                tmp_path / "out",
            )
        ],
    }[script]
    command = [sys.executable, ROOT / "tools" / f"{script}.py", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1

"""The `torch` format, one file a rank: cut and joined exactly, read from and loaded by megatron-core.

Megatron runs in child processes (megatron_runs.py); the reader and the writer import none of it.
"""

import argparse
import os
import zipfile

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from checkpoint_small import load_rank_file  # noqa: E402

from megatron_nvfp4.checkpoint.legacy import LegacyReader, LegacyWriter  # noqa: E402

NUM_LAYERS, NUM_EXPERTS, HIDDEN = 4, 8, 8
# tp, pp, ep, etp, vpp
LAYOUTS = [
    (1, 1, 1, None, 1),
    (2, 1, 1, None, 1),
    (4, 1, 1, None, 1),
    (1, 2, 1, None, 1),
    (1, 2, 1, None, 2),
    (1, 1, 4, None, 1),
    (2, 2, 2, None, 2),
    (4, 4, 8, None, 1),
    (2, 1, 2, 1, 1),
    (4, 2, 2, 2, 1),
]


def _model() -> dict[str, tuple["torch.Tensor", str | None]]:
    """Every value in the model is different, so that any wrong row or column is seen."""
    count = 0

    def numbered(*shape, dtype=torch.float32):
        nonlocal count
        size = torch.Size(shape).numel()
        count += size
        values = torch.arange(count - size, count, dtype=torch.int32)
        return (values.view(torch.float32) if dtype == torch.float32 else values).view(shape)

    model = {
        "embedding.word_embeddings.weight": (numbered(16, HIDDEN), "rows"),
        "decoder.final_layernorm.weight": (numbered(HIDDEN), None),
        "output_layer.weight": (numbered(16, HIDDEN), "rows"),
    }
    for layer in range(NUM_LAYERS):
        at = f"decoder.layers.{layer}."
        model |= {
            f"{at}self_attention.linear_qkv.layer_norm_weight": (numbered(HIDDEN), None),
            f"{at}self_attention.linear_qkv.weight": (numbered(24, HIDDEN), "rows"),
            f"{at}self_attention.linear_qkv.bias": (numbered(24), "rows"),
            f"{at}self_attention.linear_proj.weight": (numbered(HIDDEN, 16), "columns"),
            f"{at}mlp.router.weight": (numbered(NUM_EXPERTS, HIDDEN), None),
            f"{at}mlp.shared_experts.linear_fc1.weight": (numbered(16, HIDDEN), "halves"),
        }
        for expert in range(NUM_EXPERTS):
            fc1, fc2 = (f"{at}mlp.experts.linear_fc{i}.weight{expert}" for i in (1, 2))
            model[fc1] = numbered(16, HIDDEN), "halves"
            model[fc2] = numbered(HIDDEN, 8, dtype=torch.int32), "columns"
    return model


def _args(tp, pp, ep, etp, vpp) -> dict:
    return {
        "num_layers": NUM_LAYERS,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": etp or tp,
        "virtual_pipeline_model_parallel_size": vpp if vpp > 1 else None,
    }


def _write(folder, layout, model=None, **options):
    tp, pp, ep, etp, vpp = layout
    sizes = {"tp": tp, "pp": pp, "ep": ep, "etp": etp, "vpp": vpp}
    sizes |= {"num_layers": NUM_LAYERS, "num_experts": NUM_EXPERTS}
    common = options.pop("common", {"args": _args(*layout)})
    with LegacyWriter(folder, common=common, **sizes, **options) as writer:
        for key, (tensor, split) in (model or _model()).items():
            writer.write(key, tensor, split)
    return folder


def _same_bits(a, b) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


# --- cutting and joining ----------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_comes_back(tmp_path, layout):
    # Prevents: halves, columns, layers or experts of one rank in another's place.
    model = _model()
    reader = LegacyReader(_write(tmp_path / "out", layout, model))
    assert reader.keys() == sorted(model)
    assert reader.common == {"args": _args(*layout), "iteration": 0, "checkpoint_version": 3.0}
    for key, (tensor, split) in model.items():
        assert reader.meta(key, split) == (tensor.dtype, tuple(tensor.shape)), key
        assert _same_bits(reader.read(key, split), tensor), key
        size = tensor.shape[0]
        for rows in ((0, size), (1, size - 1), (size // 2 - 1, size // 2 + 1), (2, 2)):
            part = reader.read(key, split, rows=rows)
            assert _same_bits(part, tensor[slice(*rows)]), (key, rows)


def test_ranks_hold_what_megatron_expects(tmp_path):
    # Prevents: a writer and a reader that agree on a wrong cut. The slices here are written out by hand.
    model = _model()
    folder = _write(tmp_path / "out", (2, 2, 2, None, 2), model)
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "release"
    names = sorted(path.name for path in (folder / "release").iterdir())
    assert names == [
        f"mp_rank_{t:02d}_{p:03d}_{e:03d}" for t in (0, 1) for p in (0, 1) for e in (0, 1)
    ]
    state = load_rank_file(folder / "release" / "mp_rank_01_001_001" / "model_optim_rng.pt")
    assert state["args"].num_layers == NUM_LAYERS
    assert state["checkpoint_version"] == 3.0
    # Layers go to (virtual stage, stage) (0, 0), (0, 1), (1, 0), (1, 1).
    for number, layer in ((0, 1), (1, 3)):
        found, at, new = state[f"model{number}"], f"decoder.layers.{layer}.", "decoder.layers.0."
        qkv = model[f"{at}self_attention.linear_qkv.weight"][0]
        assert _same_bits(found[f"{new}self_attention.linear_qkv.weight"], qkv[12:])
        proj = model[f"{at}self_attention.linear_proj.weight"][0]
        assert _same_bits(found[f"{new}self_attention.linear_proj.weight"], proj[:, 8:])
        fc1 = model[f"{at}mlp.experts.linear_fc1.weight6"][0]
        expected = torch.cat([fc1[4:8], fc1[12:16]])
        assert _same_bits(found[f"{new}mlp.experts.linear_fc1.weight2"], expected)
        router = model[f"{at}mlp.router.weight"][0]
        assert _same_bits(found[f"{new}mlp.router.weight"], router)
    assert "output_layer.weight" in state["model1"]
    assert not any("embedding" in key for key in [*state["model0"], *state["model1"]])
    first = load_rank_file(folder / "release" / "mp_rank_00_000_000" / "model_optim_rng.pt")
    embedding = model["embedding.word_embeddings.weight"][0]
    assert _same_bits(first["model0"]["embedding.word_embeddings.weight"], embedding[:8])


def test_tied_embeddings_and_prediction_layers_get_their_copies(tmp_path):
    # Prevents: a last stage without the head that it shares with the first.
    model = {k: v for k, v in _model().items() if k != "output_layer.weight"}
    for pp, args, name in (
        (2, {}, "output_layer.weight"),
        (2, {"mtp_num_layers": 1}, "embedding.word_embeddings.weight"),
        (1, {}, None),
    ):
        layout = (2, pp, 1, None, 1)
        common = {"args": {**_args(*layout), **args}}
        folder = _write(tmp_path / f"{pp}{len(args)}", layout, model, tied=not args, common=common)
        paths = sorted(folder.glob("release/mp_rank_01*/model_optim_rng.pt"))
        last = load_rank_file(paths[-1])["model"]
        expected = model["embedding.word_embeddings.weight"][0][8:]
        if name is None:
            assert "output_layer.weight" not in last
        else:
            assert _same_bits(last[name], expected)
        reader = LegacyReader(folder)
        extra = {"output_layer.weight"} if pp == 2 and not args else set()
        assert set(reader.keys()) == set(model) | extra


def test_local_names_uneven_stages_and_training_state_are_read(tmp_path):
    # Prevents: layer numbers taken from num_layers / pp; optimizer state mistaken for weights.
    expected = {}
    for pp, num_layers in ((0, 1), (1, 3)):
        model = {}
        for local in range(num_layers):
            layer = local + pp
            for expert in range(2):
                tensor = torch.full((4, 2), 10.0 * layer + expert)
                rest = f"mlp.experts.local_experts.{expert}.linear_fc2.weight"
                model[f"decoder.layers.{local}.{rest}"] = tensor
                expected[f"decoder.layers.{layer}.{rest}"] = tensor
            model[f"decoder.layers.{local}.input_layernorm.weight"] = torch.full((2,), 1.0 * layer)
            expected[f"decoder.layers.{layer}.input_layernorm.weight"] = torch.full(
                (2,), 1.0 * layer
            )
            model[f"decoder.layers.{local}.mlp._extra_state"] = None
        path = tmp_path / "iter_0000042" / f"mp_rank_00_{pp:03d}"
        path.mkdir(parents=True)
        state = {
            "args": argparse.Namespace(pipeline_model_parallel_size=2, num_layers=4),
            "iteration": 42,
            "model": model,
            "optimizer": {"state": {0: {"exp_avg": torch.ones(100)}}},
        }
        torch.save(state, path / "model_optim_rng.pt")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("42\n")
    reader = LegacyReader(tmp_path)
    assert reader.folder == tmp_path / "iter_0000042"
    assert reader.common["iteration"] == 42
    assert reader.common["args"] == {"pipeline_model_parallel_size": 2, "num_layers": 4}
    assert reader.keys() == sorted(expected)
    assert all(_same_bits(reader.read(key), tensor) for key, tensor in expected.items())


def test_one_suffix_is_a_stage_or_experts_as_the_args_say(tmp_path):
    # Prevents: mp_rank_00_001 read as the wrong one of the two.
    for layout in ((1, 2, 1, None, 1), (1, 1, 2, None, 1)):
        folder = _write(tmp_path / f"{layout[1]}", layout)
        names = sorted(path.name for path in (folder / "release").iterdir())
        assert names == ["mp_rank_00_000", "mp_rank_00_001"]
        assert LegacyReader(folder).keys() == sorted(_model())


def test_strided_parameters_are_read_as_values(tmp_path):
    # Prevents: a parameter saved as a view read in memory order.
    tensor = torch.arange(12.0).reshape(3, 4).t()
    (tmp_path / "mp_rank_00").mkdir()
    torch.save({"model": {"w": tensor}}, tmp_path / "mp_rank_00" / "model_optim_rng.pt")
    reader = LegacyReader(tmp_path)
    assert torch.equal(reader.read("w"), tensor)
    assert torch.equal(reader.read("w", rows=(1, 3)), tensor[1:3])


def test_files_are_archives_as_torch_makes_them(tmp_path):
    # Prevents: files that torch reads only by luck, or only by copying every tensor.
    folder = _write(tmp_path / "out", (1, 1, 1, None, 1))
    path = folder / "release" / "mp_rank_00" / "model_optim_rng.pt"
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert archive.read("archive/version") == b"3\n"
        data = path.read_bytes()
        for entry in archive.infolist():
            header = data[entry.header_offset : entry.header_offset + 30]
            rest = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:], "little")
            assert (entry.header_offset + 30 + rest) % 64 == 0, entry.filename
    with torch.serialization.safe_globals([argparse.Namespace]):
        state = torch.load(path, weights_only=True, mmap=True)
    expected = _model()["decoder.layers.3.mlp.experts.linear_fc2.weight7"][0]
    assert torch.equal(state["model"]["decoder.layers.3.mlp.experts.linear_fc2.weight7"], expected)


# --- damage -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "lost", "part"),
    [
        (
            (2, 2, 1, None, 1),
            "mp_rank_01_*",
            r"tensor_model_parallel_size=2; ranks \[1\] are missing",
        ),
        ((2, 2, 1, None, 1), "mp_rank_01_001", r"parts of tensor parallel ranks \[1\] are missing"),
        ((1, 2, 1, None, 1), "mp_rank_00_001", r"pipeline_model_parallel_size=2; ranks \[1\]"),
        ((1, 1, 4, None, 1), "mp_rank_00_002", r"expert_model_parallel_size=4; ranks \[2\]"),
        ((2, 1, 2, None, 1), "mp_rank_01_001", r"weight4: parts of tensor parallel ranks \[1\]"),
        ((1, 1, 1, None, 1), "mp_rank_00", "holds neither"),
    ],
)
def test_missing_ranks_are_named(tmp_path, layout, lost, part):
    # Prevents: a model converted from the ranks that happened to be copied.
    folder = _write(tmp_path / "out", layout)
    for path in (folder / "release").glob(lost):
        (path / "model_optim_rng.pt").unlink()
        path.rmdir()
    with pytest.raises(ValueError, match=part):
        LegacyReader(folder / "release")


def test_a_rank_without_its_file_is_named(tmp_path):
    # Prevents: a folder whose file was not copied counted as a rank without layers.
    folder = _write(tmp_path / "out", (2, 1, 1, None, 1))
    (folder / "release" / "mp_rank_01" / "model_optim_rng.pt").unlink()
    with pytest.raises(ValueError, match=r"mp_rank_01/model_optim_rng\.pt: is missing"):
        LegacyReader(folder)


@pytest.mark.parametrize("keep", [0, 10, 0.5, 0.999])
def test_truncated_files_are_refused(tmp_path, keep):
    # Prevents: a crash, or zeros, for a file that was copied in part.
    folder = _write(tmp_path / "out", (2, 1, 1, None, 1))
    path = folder / "release" / "mp_rank_01" / "model_optim_rng.pt"
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    with pytest.raises(ValueError, match=r"mp_rank_01/model_optim_rng\.pt: .*truncated"):
        LegacyReader(folder)


@pytest.mark.parametrize(
    ("state", "part"),
    [
        (
            {"model": {"language_model": {"encoder": {}}}},
            "language_model is nested: a format before",
        ),
        ({"optimizer": {}}, "holds no model"),
        ([1], "holds a list, not a checkpoint"),
        (
            {"model": {"decoder.layers.1.w": torch.ones(1)}},
            r"holds layers \[1\]",
        ),
        (
            {
                "args": argparse.Namespace(num_layers=3),
                "model": {"decoder.layers.0.w": torch.ones(1)},
            },
            "hold 1 layers, the args say num_layers=3",
        ),
        (
            {"args": argparse.Namespace(expert_tensor_parallel_size=2), "model": {}},
            "expert_tensor_parallel_size=2 does not divide",
        ),
    ],
)
def test_foreign_contents_are_refused(tmp_path, state, part):
    # Prevents: an empty or shifted model out of a file of another kind.
    (tmp_path / "mp_rank_00").mkdir()
    torch.save(state, tmp_path / "mp_rank_00" / "model_optim_rng.pt")
    with pytest.raises(ValueError, match=part):
        LegacyReader(tmp_path)


def test_parts_that_differ_are_refused(tmp_path):
    # Prevents: ranks of two different runs joined.
    for rank, shape in ((0, (2, 4)), (1, (3, 4))):
        path = tmp_path / f"mp_rank_{rank:02d}"
        path.mkdir()
        torch.save({"model": {"w": torch.ones(shape)}}, path / "model_optim_rng.pt")
    with pytest.raises(ValueError, match="w: its parts differ"):
        LegacyReader(tmp_path)
    (tmp_path / "mp_rank_00_000").mkdir()
    torch.save({"model": {}}, tmp_path / "mp_rank_00_000" / "model_optim_rng.pt")
    with pytest.raises(ValueError, match="rank folders of two runs"):
        LegacyReader(tmp_path)


def test_wrong_questions_are_refused(tmp_path):
    # Prevents: rows or cuts that a parameter does not have answered by Python's tolerant slices.
    reader = LegacyReader(_write(tmp_path / "out", (2, 1, 1, None, 1)))
    with pytest.raises(ValueError, match="no parameter gone"):
        reader.read("gone")
    with pytest.raises(ValueError, match=r"rows \[0, 17\)"):
        reader.read("output_layer.weight", "rows", rows=(0, 17))
    with pytest.raises(ValueError, match="were not cut by columns"):
        reader.read("decoder.final_layernorm.weight", "columns")


@pytest.mark.parametrize(
    ("sizes", "part"),
    [
        ({"pp": 3}, "num_layers=4 is no multiple of pp"),
        ({"pp": 2, "vpp": 4}, r"pp \* vpp = 8"),
        ({"vpp": 2}, "vpp=2 needs pp > 1"),
        ({"ep": 3}, "num_experts=8 is no multiple of ep=3"),
        ({"tp": 1, "etp": 2}, "etp=2 does not divide tp=1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(tmp_path, sizes, part):
    # Prevents: files for ranks that no Megatron run has.
    with pytest.raises(ValueError, match=part):
        LegacyWriter(tmp_path / "out", common={}, num_layers=4, num_experts=8, **sizes)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("write", "part"),
    [
        (
            lambda w: w.write("w", torch.ones(3, 4), "rows"),
            r"w: \(3, 4\) cannot be cut by rows into 2",
        ),
        (lambda w: w.write("w", torch.ones(2, 4), "halves"), "cannot be cut by halves into 2"),
        (lambda w: w.write("w", torch.ones(4), "columns"), "cannot be cut by columns into 2"),
        (lambda w: [w.write("w", torch.ones(1)) for _ in range(2)], "w: written twice"),
        (lambda w: w.write("decoder.layers.4.w", torch.ones(1)), "layer 4 of 4"),
        (lambda w: w.write("decoder.layers.1.w", torch.ones(1)), r"layers \[0, 2, 3\] were never"),
    ],
)
def test_wrong_use_of_the_writer_is_refused(tmp_path, write, part):
    # Prevents: a checkpoint published with less, or other, than the model has.
    with (
        pytest.raises(ValueError, match=part),
        LegacyWriter(tmp_path / "out", common={}, num_layers=4, tp=2) as writer,
    ):
        write(writer)
    assert os.listdir(tmp_path) == []

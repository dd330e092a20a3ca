"""The profiler's arithmetic by hand: classes, costs, gaps, attribution, tables."""

import re
import sys
from pathlib import Path

import pytest

from megatron_nvfp4.diagnostics import kernel_costs, profile_report, trace
from megatron_nvfp4.diagnostics.kernel_costs import Cost, classify, cost_of
from megatron_nvfp4.diagnostics.profile import module_name
from megatron_nvfp4.diagnostics.trace import Call, collapse, divide, find_gaps, read_steps, step_of

ROOT = Path(__file__).parents[1]

# --- classes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "operator", "in_optimizer", "expected"),
    [
        ("nvjet_tst_128x256_64x4_1x2_h_bz_TNT", "aten::mm", False, "computation"),
        ("void at::native::direct_copy_kernel_cuda", "aten::copy_", False, "preparation"),
        ("void at::native::direct_copy_kernel_cuda", "aten::copy_", True, "optimizer"),
        ("quantize_rows", "megatron_nvfp4::quantize_nvfp4", False, "preparation"),
        ("kernel", "megatron_nvfp4::dequantize_mxfp8", False, "preparation"),
        ("kernel", "megatron_nvfp4::pack_weights_nvfp4", False, "preparation"),
        ("kernel", "megatron_nvfp4::weighted_activation_quantize", False, "computation"),
        ("kernel", "megatron_nvfp4::combine_rows", False, "computation"),
        ("kernel", "megatron_nvfp4::gather_rows_nvfp4", False, "preparation"),
        ("kernel", "megatron_nvfp4::grouped_gemm_w4", False, "computation"),
        ("kernel", "megatron_nvfp4::grouped_wgrad_bf16", False, "computation"),
        ("void at::native::vectorized_elementwise_kernel", "aten::silu", False, "computation"),
        ("ncclDevKernel_AllGather_RING_LL", "c10d::_allgather_base_", False, "communication"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16", "", True, "communication"),
        ("c10d::allreduce_", "c10d::allreduce_", False, "communication"),
        # Launched by a library without an operator: the kernel's own name is all there is.
        ("void transformer_engine::cast_transpose_kernel", "_Linear", False, "preparation"),
        ("quantize_mxfp8_kernel", "_GroupedLinearBackward", False, "preparation"),
        ("_permute_kernel", "moe_permute", False, "preparation"),
        ("void broadcast_add", "_Linear", False, "computation"),
        ("cutlass_80_tensorop_bf16_s16816gemm", "_Linear", False, "computation"),
        ("Memcpy DtoD (Device -> Device)", "", False, "preparation"),
        ("Memset (Device)", "", False, "preparation"),
    ],
)
def test_kernels_are_classified(kernel, operator, in_optimizer, expected):
    # Prevents: casts that hide as computation, a broadcast taken for a cast, traffic counted as optimizer.
    assert classify(kernel, operator or None, in_optimizer=in_optimizer) == expected


def test_every_class_comes_from_one_list():
    # Prevents: a class that the tables and the plot leave out.
    assert kernel_costs.CLASSES == (
        "computation",
        "preparation",
        "communication",
        "optimizer",
        "gaps",
    )
    assert set(trace._PRECEDENCE) == set(kernel_costs.CLASSES) - {"gaps"}


# --- costs --------------------------------------------------------------------------------------------

BF16, FP32, U8, E4M3, I64 = "c10::BFloat16", "float", "unsigned char", "c10::Float8_e4m3fn", "long"


@pytest.mark.parametrize(
    ("operator", "dims", "types", "values", "expected"),
    [
        ("mm", [[4, 8], [8, 16]], [BF16, BF16], ["", ""], (1024, 2 * (32 + 128 + 64))),
        ("bmm", [[3, 4, 8], [3, 8, 2]], [FP32] * 2, ["", ""], (384, 4 * (96 + 48 + 24))),
        (
            "addmm",
            [[2], [4, 8], [8, 2], [], []],
            [FP32] * 3 + ["Scalar"] * 2,
            ["", "", "", "1", "1"],
            (128, 4 * (2 + 32 + 16 + 8)),
        ),
        ("_grouped_mm", [[6, 8], [3, 8, 2], [3]], [BF16, BF16, "int"], [""] * 3, (192, 312 - 96)),
        ("copy_", [[4, 8], [4, 8], []], [BF16, FP32, "Scalar"], ["", "", "False"], (None, 192)),
        ("mul", [[4, 8], [8]], [BF16, FP32], ["", ""], (None, 64 + 32 + 128)),
        ("sum", [[4, 8]], [FP32], [""], (None, None)),
        ("mm", [[4, 8], [8, 16]], ["some::Type", BF16], ["", ""], (None, None)),
    ],
)
def test_costs_of_torch_operators(operator, dims, types, values, expected):
    # Prevents: wrong rates; a guess, or a crash, where the recorded inputs do not tell.
    cost = cost_of(f"aten::{operator}", dims, types, values)
    assert (cost.flops, cost.bytes) == expected


def test_costs_of_our_operators():
    # Prevents: counting two codes in a byte as one value; ignoring that rows are gathered.
    rows = [[64, 16], [64, 2], [2, 1, 1, 2304], [3], [], [64], [2], [], [], [], []]
    types = [U8, E4M3, U8, I64, "Scalar", FP32, FP32, "", "", "Scalar", "Scalar"]
    values = ["", "", "", "", "48", "", "", "", "", "15", "-1"]
    read = 64 * 16 + 64 * 2 + 2 * 2304 + 3 * 8 + 64 * 4 + 2 * 4
    w4 = "megatron_nvfp4::grouped_gemm_w4"
    assert cost_of(w4, rows, types, values) == Cost(2 * 64 * 48 * 32, read + 64 * 48 * 2)
    gathered = [*rows[:8], [96], [], []]
    types[8] = "int"
    assert cost_of(w4, gathered, types, values).flops == 2 * 96 * 48 * 32
    x = ([[32, 64]], [BF16], [""])
    quantised = cost_of("megatron_nvfp4::quantize_nvfp4", *x)
    assert quantised == Cost(bytes=32 * 64 * 2 + 32 * 32 + 32 * 4)
    assert cost_of("megatron_nvfp4::quantize_mxfp8", *x).bytes == 32 * 64 * 3 + 32 * 2
    decoded = ([[32, 32], [32, 4]], [U8, E4M3], ["", ""])
    assert cost_of("megatron_nvfp4::decode_nvfp4", *decoded).bytes == 32 * 36 + 32 * 64 * 2
    # 40 rows of 32 + 4 + 4 bytes, read and written, by an index of int64.
    packed = ([[16, 32], [16, 4], [16], [40]], [U8, E4M3, FP32, I64], [""] * 4)
    assert cost_of("megatron_nvfp4::gather_rows_nvfp4", *packed).bytes == 40 * (2 * 40 + 8)
    # Six tokens of three choices each, rows of 64 BF16: 18 read and 6 written, index and weights read.
    chosen = ([[18, 64], [6, 3], [6, 3]], [BF16, I64, FP32], [""] * 3)
    assert cost_of("megatron_nvfp4::combine_rows", *chosen).bytes == 24 * 128 + 18 * (8 + 4)
    gate = ([[32, 128], [32], [], [], [], []], [BF16, FP32, *["Scalar"] * 4], [""] * 6)
    fused = cost_of("megatron_nvfp4::weighted_activation_quantize", *gate)
    assert fused.bytes == 32 * 256 + 32 * 4 + 32 * 36
    # (N, M) times (K, M), two groups of FP32 results, accumulated: read and written.
    wgrad = [[48, 64], [32, 64], [3], [], [], [], [[48, 32], [48, 32]]]
    kinds = [BF16, BF16, I64, "", "", "Scalar", "TensorList"]
    cost = cost_of(
        "megatron_nvfp4::grouped_wgrad_decoded", wgrad, kinds, ["", "", "", "", "", "True", ""]
    )
    assert cost == Cost(2 * 48 * 32 * 64, 2 * 64 * 80 + 2 * 4 * 2 * 48 * 32)


def test_the_inputs_that_costs_read_stand_where_the_schemas_say():
    # Prevents: a schema that gains an argument, and a table that then reads its neighbour.
    text = (ROOT / "csrc/bindings.cpp").read_text()
    text = re.sub(r'"\s*"|//[^\n]*', "", text)
    schemas = dict(re.findall(r'm\.def\(\s*"(\w+)\((.*?)\) ->', text, re.DOTALL))
    expected = {
        "grouped_gemm_w4": {4: "num_cols", 8: "row_index", 9: "out_dtype"},
        "grouped_gemm_bf16": {1: "weights", 2: "transposed", 8: "out_dtype"},
        "grouped_gemm_generic": {2: "b", 6: "num_cols", 11: "out_dtype"},
        "grouped_gemm_decoded": {1: "b", 2: "offsets", 7: "out_dtype"},
        "grouped_wgrad_decoded": {5: "accumulate", 6: "out"},
        "grouped_wgrad_bf16": {2: "token_major", 5: "accumulate", 6: "out"},
        "grouped_wgrad_generic": {2: "token_major", 5: "accumulate", 6: "out"},
        "gather_rows": {1: "index"},
        "gather_rows_nvfp4": {3: "index"},
        "gather_rows_amax": {1: "index"},
        "combine_rows": {1: "rows_of_token", 2: "weights"},
        "weighted_activation_quantize": {0: "h", 1: "probs"},
        "weighted_activation_backward": {1: "h", 2: "probs"},
        "dequantize_nvfp4": {3: "dtype"},
        "dequantize_mxfp8": {2: "dtype"},
    }
    ours = {
        name.split("::")[1] for name in kernel_costs._RULES if name.startswith("megatron_nvfp4")
    }
    assert ours <= set(schemas)
    for operator, places in expected.items():
        words = [word.strip() for word in schemas[operator].split(",") if word.strip() != "*"]
        for index, name in places.items():
            assert re.fullmatch(rf"\S+ {name}(?:=.*)?", words[index]), (operator, index, words)


def test_rates():
    # Prevents: rates off by the unit, or diluted by calls whose figures are not known.
    known = Call("k", "op", "a", "forward", "computation", [(0, 10)], cost=Cost(10**9, 10**7))
    unknown = Call("k", "op", "a", "forward", "computation", [(10, 40)])
    (row,) = trace.tabulate([unknown, known])
    assert (row.calls, row.time) == (2, 40)
    assert row.gb_per_s == pytest.approx(1000)  # 10 MB in 10 us
    assert row.tflop_per_s == pytest.approx(100)  # 1 GFLOP in 10 us


# --- gaps ---------------------------------------------------------------------------------------------


def _work(kind: str, *intervals, launched: float | None = 0.0) -> Call:
    return Call("k", "op", "m", "forward", kind, list(intervals), launched)


def _pieces(*calls: Call) -> list:
    pieces = [(begin, end, call) for call in calls for begin, end in call.intervals]
    return sorted(pieces, key=lambda piece: piece[0])


def test_gaps_by_hand():
    # Prevents: gaps inside overlapping streams; a short kernel inside a long one that ends it early.
    long, inside = _work("computation", (10, 30)), _work("communication", (12, 15))
    overlapping = _work("computation", (28, 40))
    after = _work("preparation", (45, 50), launched=42)
    waited = _work("preparation", (55, 60), launched=56)
    gaps = find_gaps(0, 70, _pieces(long, inside, overlapping, after, waited))
    assert [(gap.begin, gap.end, gap.host_bound) for gap in gaps] == [
        (0, 10, 0),  # issued before the step's window began
        (40, 45, 2),  # issued at 42, five microseconds after which nothing ran
        (50, 55, 5),  # issued later than it began: no more than the whole gap
        (60, 70, 10),  # nothing ends it
    ]
    assert [call.gap for call in (long, inside, overlapping, after, waited)] == [10, 0, 0, 5, 5]


def test_a_step_without_calls_is_one_gap():
    # Prevents: a division by nothing, or a step of which no class has the time.
    step = step_of(1, 5, 25, [])
    assert (step.gap, step.host_bound, step.shares["gaps"]) == (20, 20, 20)


def test_time_is_divided_once():
    # Prevents: bars longer than the step where streams overlap; communication that is hidden being charged.
    computing, talking = _work("computation", (10, 30)), _work("communication", (20, 50))
    packing = _work("preparation", (45, 60), (65, 70))
    shares = divide(0, 80, _pieces(computing, talking, packing))
    assert shares == {
        "computation": 20,
        "preparation": 20,
        "communication": 15,
        "optimizer": 0,
        "gaps": 25,
    }
    assert sum(shares.values()) == 80


def test_a_kernel_across_the_end_is_cut():
    # Prevents: a step busier than it is long.
    step = step_of(1, 0, 10, [_work("computation", (8, 14))])
    assert (step.shares["computation"], step.gap, sum(step.shares.values())) == (2, 8, 10)


# --- attribution --------------------------------------------------------------------------------------


def _event(cat: str, name: str, begin: float, end: float, tid=1, **args) -> dict:
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "tid": tid,
        "ts": begin,
        "dur": end - begin,
        "args": args,
    }


def _flow(id: int, begin: float, end: float, tids=(1, 2)) -> list[dict]:
    return [
        {"ph": ph, "cat": "fwdbwd", "id": id, "tid": tid, "ts": ts}
        for ph, tid, ts in (("s", tids[0], begin), ("f", tids[1], end))
    ]


SHAPES = {"Input Dims": [[4, 8], [8, 16]], "Input type": [FP32, FP32], "Concrete Inputs": ["", ""]}
MM = "autograd::engine::evaluate_function: MmBackward0"
STEP_OF_TWO_THREADS = [
    _event("user_annotation", "minite.step 7", 0, 100),
    _event("user_annotation", "minite.module decoder.layers.3.mlp", 5, 30),
    _event("user_annotation", "minite.module decoder.layers.3.mlp.fc1", 10, 25),
    _event("cpu_op", "aten::linear", 11, 20),
    _event("cpu_op", "aten::mm", 12, 18, **SHAPES),
    _event("cpu_op", "aten::silu", 26, 29),
    *_flow(1, 12, 41),
    _event("cpu_op", MM, 40, 60, tid=2),
    _event("cpu_op", "MmBackward0", 41, 55, tid=2),
    _event("cpu_op", "aten::mm", 42, 50, tid=2, **SHAPES),
    _event("cpu_op", "aten::add", 56, 59, tid=2),
    _event(
        "cpu_op",
        "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad",
        61,
        70,
        tid=2,
    ),
    _event("cpu_op", "aten::add_", 62, 69, tid=2),
    _event("user_annotation", "minite.optimizer", 75, 90),
    _event("cpu_op", "aten::addcmul_", 76, 89),
    _event("cpu_op", "aten::mm", 150, 160),  # outside every step
]


def _places(calls) -> list[tuple[str, str, str]]:
    return [(call.name, call.module, call.phase) for call in calls]


def test_a_cpu_step_by_hand():
    # Prevents: an operator's time counted again in the one around it; a backward without a module; the
    # engine's and Python's own time shown as computation.
    (step,) = read_steps(STEP_OF_TWO_THREADS)
    fc1 = "decoder.layers.3.mlp.fc1"
    assert _places(step.calls) == [
        ("aten::linear", fc1, "forward"),
        ("aten::mm", fc1, "forward"),
        ("aten::silu", "decoder.layers.3.mlp", "forward"),
        ("aten::mm", fc1, "backward"),
        ("aten::add", fc1, "backward"),
        ("aten::add_", "(gradient accumulation)", "backward"),
        ("aten::addcmul_", "(outside modules)", "optimizer"),
    ]
    assert [call.time for call in step.calls] == [3, 6, 3, 8, 3, 7, 13]
    assert step.calls[0].intervals == [(11, 12), (18, 20)]
    assert step.calls[1].cost == Cost(2 * 4 * 8 * 16, 4 * (32 + 128 + 64))
    assert (step.number, step.time, step.gap) == (7, 100, 100 - 9 - 3 - 8 - 3 - 7 - 13)
    assert step.host_bound == step.gap
    assert step.shares["optimizer"] == 13


def test_a_gpu_step_by_hand():
    # Prevents: kernels lost between host and device; host operators shown as device time; figures of an
    # operator counted for each of its kernels.
    launches = [
        _event("cuda_runtime", "cudaLaunchKernel", 13, 14, correlation=1),
        _event("cuda_runtime", "cudaLaunchKernel", 15, 16, correlation=2),
        _event("cuda_driver", "cuLaunchKernel", 43, 44, tid=2, correlation=3),
        _event("cuda_runtime", "cudaMemcpyAsync", 91, 92, correlation=4),
    ]
    device = [
        _event("kernel", "gemm", 20, 30, tid=70, correlation=1),
        _event("kernel", "reduce", 30, 32, tid=70, correlation=2),
        _event("kernel", "gemm", 46, 56, tid=70, correlation=3),
        _event("gpu_memcpy", "Memcpy DtoD", 93, 95, tid=70, correlation=4, bytes=500),
        _event("kernel", "stray", 96, 97, tid=70, correlation=9),
        _event("gpu_user_annotation", "minite.module x", 20, 30, tid=70),
    ]
    (step,) = read_steps([*STEP_OF_TWO_THREADS, *launches, *device])
    fc1 = "decoder.layers.3.mlp.fc1"
    assert _places(step.calls) == [
        ("gemm", fc1, "forward"),
        ("reduce", fc1, "forward"),
        ("gemm", fc1, "backward"),
        ("Memcpy DtoD", "(outside modules)", "other"),
        ("stray", "(outside modules)", "other"),
    ]
    assert [call.operator for call in step.calls[:3]] == ["aten::mm"] * 3
    assert [call.cost.flops for call in step.calls] == [1024, None, 1024, None, None]
    assert step.calls[3].cost.bytes == 1000
    assert [(gap.begin, gap.end, gap.host_bound) for gap in step.gaps] == [
        (0, 20, 14),
        (32, 46, 12),
        (56, 93, 36),
        (95, 96, 1),  # a launch that is not in the trace
        (97, 100, 3),
    ]


def test_recomputed_forward_belongs_to_its_module():
    # Prevents: recomputation, and the backward of what it recorded, charged to nobody.
    checkpoint = "autograd::engine::evaluate_function: CheckpointFunctionBackward"
    (step,) = read_steps(
        [
            _event("user_annotation", "minite.step 1", 0, 100),
            _event("cpu_op", checkpoint, 10, 90, tid=2),
            _event("user_annotation", "minite.module mlp", 20, 40, tid=2),
            _event("cpu_op", "aten::mm", 25, 30, tid=2),
            *_flow(1, 25, 50, tids=(2, 2)),
            _event("cpu_op", MM, 49, 60, tid=2),
            _event("cpu_op", "MmBackward0", 50, 60, tid=2),
            _event("cpu_op", "aten::mm", 51, 59, tid=2),
        ]
    )
    assert _places(step.calls) == [("aten::mm", "mlp", "backward")] * 2


def test_names():
    # Prevents: a row a layer; digits inside names taken for numbers; wrappers in every name.
    assert collapse("decoder.layers.12.mlp.experts.local_experts.3.linear_fc1") == (
        "decoder.layers.*.mlp.experts.local_experts.*.linear_fc1"
    )
    assert module_name("module.module.decoder.layers.0") == "decoder.layers.0"
    assert [module_name(path) for path in ("", "module", "module.module")] == ["(model)"] * 3


# --- tables -------------------------------------------------------------------------------------------


def test_report_without_matplotlib(tmp_path, monkeypatch):
    # Prevents: a profile lost for want of a plot, and a plot missing without a word.
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    call = _work("computation", (0, 5))
    call.name = "void f<a|b>(" + 200 * "x" + ")"
    profile_report.write_report(tmp_path, [step_of(1, 0, 10, [call])], "CPU")
    text = (tmp_path / "kernels.md").read_text()
    assert "matplotlib is not installed" in text
    (line,) = [line for line in text.splitlines() if "f<a" in line]
    assert line.count("|") == 10  # a bar in a name opens no column
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kernels.csv", "kernels.md"]

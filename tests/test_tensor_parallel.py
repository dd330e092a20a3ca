"""Two ranks over gloo compute what one computes: equal operand bits, sums within their rounding.

One pair of processes runs every check and records what failed; each test below reads one record. A
check communicates first and compares last, so that a failed comparison never leaves the other rank
waiting.
"""

import contextlib
import datetime
import json
import traceback
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from layer_oracle import BUILDABLE, expected, grid, outliers, params_of, quantized

from megatron_nvfp4.modules import GroupedLinear, LayerNormLinear, Linear, autograd, matmul
from megatron_nvfp4.modules.norm import normalize
from megatron_nvfp4.quant import QuantizedTensor, SimulatedTensor, quantize

M, K, N = 32, 128, 128
CPU = {"params_dtype": torch.bfloat16, "device": "cpu"}
NAMES = ("nvfp4_per_token", "nvfp4_per_token_dequant_bwd", "nvfp4_per_tensor", "sweep_e2m1")
UNIT = 2.0**-8  # unit roundoff of BF16


def _data() -> dict[str, torch.Tensor]:
    """x (M, K), w (N, K), bias (N,), dy (M, N); the amaxes of x and w lie in rank 0's half of both
    axes.
    """
    generator = torch.Generator().manual_seed(1)
    x, w = outliers(M, K, seed=2), torch.randn(N, K, generator=generator).mul(0.1).bfloat16()
    x[:, 3] = x[:, 3].abs() + 200
    w[5, 7] = 4
    return {"x": x, "w": w, "bias": grid(N, seed=3), "dy": grid(M, N, seed=4)}


def _half(rank: int, size: int) -> slice:
    return slice(rank * size // 2, (rank + 1) * size // 2)


@contextlib.contextmanager
def _recorded():
    """The NVFP4 operands made inside the block, in order: the weight's, then the activations'."""
    operands, original = [], matmul.quantize_operand

    def record(*args, **kwargs):
        operands.append(original(*args, **kwargs))
        return operands[-1]

    with (
        mock.patch.object(matmul, "quantize_operand", record),
        mock.patch.object(autograd, "quantize_operand", record),
    ):
        yield operands


def _step(layer, x, dy, *args):
    """(y, dx, weight operand, activation operand) of one forward and backward."""
    x = x.clone().requires_grad_()
    with _recorded() as operands:
        y = layer(x, *args)
    y.backward(dy)
    return y.detach(), x.grad, operands[0], operands[1]


def _layer(cls, name: str, weight, bias, **fields):
    layer = cls(K, N, qlinear_params=params_of(name), **(CPU | fields))
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)
    return layer


def _per_row(whole: QuantizedTensor | SimulatedTensor) -> bool:
    return isinstance(whole, SimulatedTensor) or whole.spec.outer == "token"


def _assert_slice(part, whole: QuantizedTensor | SimulatedTensor, rows, cols) -> None:
    """part is whole[rows, cols], amax included: the scales of the shards are the whole matrix's."""
    packed = slice(cols.start // 2, cols.stop // 2)
    blocks = slice(cols.start // 16, cols.stop // 16)
    if isinstance(whole, SimulatedTensor):
        assert torch.equal(part.values, whole.values[rows, cols])
    else:
        assert torch.equal(part.codes, whole.codes[rows, packed])
    scales = [qt.block_scales.view(torch.uint8) for qt in (part, whole)]
    assert torch.equal(scales[0], scales[1][rows, blocks])
    assert torch.equal(part.amax, whole.amax[rows] if _per_row(whole) else whole.amax)


def _assert_reduced(result, one_rank, size) -> None:
    """Partial sums rounded on each rank, their sum rounded, a bias rounded; one rank rounds once.

    |p0| + |p1| is at most `size`, the sum of |a||b|; three more roundings act on values near the
    result.
    """
    bound = UNIT * (1 + UNIT) * (size.double() + 4 * one_rank.double().abs() + 2)
    assert ((result.double() - one_rank.double()).abs() <= bound).all()
    assert (result - one_rank).double().norm() <= 4 * UNIT * one_rank.double().norm()


def check_column(rank, group, name, sequence_parallel):
    data, cols = _data(), _half(rank, N)
    rows = _half(rank, M) if sequence_parallel else slice(0, M)
    fields = {"parallel_mode": "column", "tp_group": group, "tp_size": 2}
    layer = _layer(
        Linear,
        name,
        data["w"][cols],
        data["bias"][cols],
        sequence_parallel=sequence_parallel,
        **fields,
    )
    y, dx, w_operand, x_operand = _step(layer, data["x"][rows], data["dy"][:, cols])
    one = _layer(Linear, name, data["w"], data["bias"])
    y_one, dx_one, w_one, x_one = _step(one, data["x"], data["dy"])
    _assert_slice(w_operand, w_one, cols, slice(0, K))
    _assert_slice(x_operand, x_one, slice(0, M), slice(0, K))
    assert torch.equal(y, y_one[:, cols])
    assert torch.equal(layer.weight.grad, one.weight.grad[cols])
    assert torch.equal(layer.bias.grad, one.bias.grad[cols])
    want = expected(BUILDABLE[name], data["x"], [data["w"]], data["dy"])
    _assert_reduced(dx, dx_one[rows], want.dx_size[rows])
    if rank == 1 and not _per_row(w_one):  # the reduction had work to do
        assert quantize(data["w"][cols]).amax < w_one.amax


def check_row(rank, group, name, sequence_parallel):
    data, cols = _data(), _half(rank, K)
    rows = _half(rank, M) if sequence_parallel else slice(0, M)
    fields = {"parallel_mode": "row", "tp_group": group, "tp_size": 2}
    layer = _layer(
        Linear,
        name,
        data["w"][:, cols],
        data["bias"],
        sequence_parallel=sequence_parallel,
        **fields,
    )
    y, dx, w_operand, x_operand = _step(layer, data["x"][:, cols], data["dy"][rows])
    one = _layer(Linear, name, data["w"], data["bias"])
    y_one, dx_one, w_one, x_one = _step(one, data["x"], data["dy"])
    _assert_slice(w_operand, w_one, slice(0, N), cols)
    _assert_slice(x_operand, x_one, slice(0, M), cols)
    assert torch.equal(dx, dx_one[:, cols])
    assert torch.equal(layer.weight.grad, one.weight.grad[:, cols])
    assert torch.equal(layer.bias.grad, data["dy"][rows].double().sum(0).bfloat16())
    want = expected(BUILDABLE[name], data["x"], [data["w"]], data["dy"])
    _assert_reduced(y, y_one[rows], want.y_size[rows])
    local = quantized(data["x"][:, cols], BUILDABLE[name].fprop.left)
    assert rank == 0 or (local.amax < x_one.amax).all()


def check_layernorm(rank, group, name, sequence_parallel):
    data, cols = _data(), _half(rank, N)
    rows = _half(rank, M) if sequence_parallel else slice(0, M)
    gamma = grid(K, seed=5)
    fields = {
        "normalization": "RMSNorm",
        "parallel_mode": "column",
        "tp_group": group,
        "tp_size": 2,
    }
    layer = _layer(
        LayerNormLinear,
        name,
        data["w"][cols],
        data["bias"][cols],
        sequence_parallel=sequence_parallel,
        **fields,
    )
    one = _layer(LayerNormLinear, name, data["w"], data["bias"], normalization="RMSNorm")
    for module in (layer, one):
        module.layer_norm_weight.data.copy_(gamma)
    y, _, w_operand, x_operand = _step(layer, data["x"][rows], data["dy"][:, cols])
    d_gamma = layer.layer_norm_weight.grad.double()
    if sequence_parallel:  # Megatron sums the gradients of parameters marked sequence_parallel
        assert layer.layer_norm_weight.sequence_parallel
        dist.all_reduce(d_gamma, group=group)
    y_one, _, w_one, x_one = _step(one, data["x"], data["dy"])
    _assert_slice(w_operand, w_one, cols, slice(0, K))
    _assert_slice(x_operand, x_one, slice(0, M), slice(0, K))
    assert torch.equal(y, y_one[:, cols])
    assert torch.equal(layer.weight.grad, one.weight.grad[cols])
    # d_gamma = sum over rows of dgrad * x / rms: the dgrad's bound carries over, then the result's
    # rounding.
    ln = normalize(data["x"], gamma, None, 1e-5, normalization="RMSNorm")
    want = expected(BUILDABLE[name], ln, [data["w"]], data["dy"])
    unit_rows = data["x"].double() / data["x"].double().square().mean(1, keepdim=True).sqrt()
    per_element = UNIT * (1 + UNIT) * (want.dx_size.double() + 4 * want.dx.double().abs())
    one_gamma = one.layer_norm_weight.grad.double()
    bound = (unit_rows.abs() * per_element).sum(0) + 4 * UNIT * one_gamma.abs() + 1e-6
    assert ((d_gamma - one_gamma).abs() <= bound).all()


def check_experts(rank, group, name, row):
    data, splits = _data(), [8, 0, 24]
    generator = torch.Generator().manual_seed(6)
    weights = [torch.randn(N, K, generator=generator).mul(0.1 * 2**e).bfloat16() for e in range(3)]
    for weight in weights:
        weight[5, 7] = 4 * weight.abs().max()
    part, axis = _half(rank, K if row else N), 1 if row else 0
    sizes = (K // 2, N) if row else (K, N // 2)
    mode = "row" if row else "column"
    shards = [w[:, part] if row else w[part] for w in weights]
    layers = []
    for shape, tensors, fields in (
        (sizes, shards, {"amax_group": group, "parallel_mode": mode}),
        ((K, N), weights, {}),
    ):
        layer = GroupedLinear(
            3, *shape, bias=False, qlinear_params=params_of(name), **(CPU | fields)
        )
        with torch.no_grad():
            for parameter, tensor in zip(layer.weights, tensors, strict=True):
                parameter.copy_(tensor)
        layers.append(layer)
    x, dy = (data["x"][:, part], data["dy"]) if row else (data["x"], data["dy"][:, part])
    y, dx, w_operand, x_operand = _step(layers[0], x, dy, splits)
    y_one, dx_one, w_one, x_one = _step(layers[1], data["x"], data["dy"], splits)
    rows = torch.arange(3 * N).reshape(3, N)[:, slice(None) if row else part].flatten()
    assert torch.equal(w_operand.amax, w_one.amax[rows] if _per_row(w_one) else w_one.amax)
    assert torch.equal(x_operand.amax, x_one.amax)
    assert torch.equal(dx, dx_one[:, part]) if row else torch.equal(y, y_one[:, part])
    for mine, whole in zip(layers[0].weights, layers[1].weights, strict=True):
        assert torch.equal(mine.grad, whole.grad.narrow(axis, part.start, part.stop - part.start))


def check_uneven_rows(rank, group, name, sequence_parallel):
    data = _data()
    fields = {"parallel_mode": "row", "tp_group": group, "sequence_parallel": sequence_parallel}
    layer = _layer(Linear, name, data["w"][:, _half(rank, K)], data["bias"], **fields)
    with pytest.raises(ValueError, match="31 rows do not divide over 2 ranks; pad the sequence"):
        layer(data["x"][:31, _half(rank, K)])


CHECKS = {
    f"{kind}-{'sp' if flag else 'tp'}-{name}": (check, name, flag)
    for kind, check in (("column", check_column), ("row", check_row), ("norm", check_layernorm))
    for flag in (False, True)
    for name in NAMES
}
CHECKS |= {
    f"experts-{'row' if row else 'column'}-{name}": (check_experts, name, row)
    for row in (False, True)
    for name in NAMES
}
CHECKS["uneven-rows"] = (check_uneven_rows, "nvfp4_per_token", True)


def _run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=60),
    )
    failures = {}
    for label, (check, *args) in CHECKS.items():
        try:
            check(rank, dist.group.WORLD, *args)
        except Exception:
            failures[label] = traceback.format_exc()
        dist.barrier()
    with open(f"{folder}/rank{rank}.json", "w") as file:
        json.dump(failures, file)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def failures(tmp_path_factory) -> list[dict[str, str]]:
    """Of each rank, the traceback of every check that failed."""
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(_run_rank, args=(str(folder),), nprocs=2)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("label", CHECKS)
def test_two_ranks_equal_one(failures, label):
    # Prevents: shards scaled by their own amax, partial sums returned, gradients reduced twice or
    # never.
    for rank, failed in enumerate(failures):
        assert label not in failed, f"rank {rank}:\n{failed[label]}"

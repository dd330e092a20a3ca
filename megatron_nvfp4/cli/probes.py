"""Runs a tiny case of every path a recipe takes, on every backend that claims it.

A claim is worth nothing until it ran: kernels have been seen to fail exactly when K is a multiple
of 128, so each path runs at K=128 and at K=192. The reference on the CPU is only seen to run where
it would be compared with itself (quantize); its GEMMs are compared with FP64.
"""

import traceback
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_nvfp4 import backends
from megatron_nvfp4.backends.reference import decode_fp64, row_scale
from megatron_nvfp4.deterministic.profiles import Profile
from megatron_nvfp4.modules.params import QLinearParams
from megatron_nvfp4.recipes import BF16, FORWARD, Format

CONTRACTIONS = (128, 192)
# Rows of three groups, one of them empty; multiples of 16, so that 16x16 tiles fit.
ROW_BOUNDS = (0, 16, 16, 48)
NUM_COLS = 32
SEED = 1


@dataclass(frozen=True, kw_only=True)
class Path:
    """One operation a recipe needs: `op` on operands of `formats`, by one of `candidates`."""

    op: str
    formats: tuple[Format, ...]
    candidates: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.op} {' x '.join(map(str, self.formats))}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one path at one K on one backend.

    status: "ok", "failed" (claimed, and then failed) or "no" (not claimed); detail says why.
    """

    path: Path
    backend: str
    contraction: int
    status: str
    detail: str = ""

    def __str__(self) -> str:
        return {"ok": "ok", "failed": "claimed, failed: ", "no": "no: "}[self.status] + self.detail


def paths_of(params: QLinearParams) -> list[Path]:
    """Every operation of a linear layer of the recipe, each once, in the order of its use."""
    recipe, paths = params.recipe, []
    ours = tuple(backends.candidates(params.backend))
    for operands, ops in (
        (recipe.fprop, ("gemm", "grouped_gemm")),
        (recipe.dgrad, ("gemm", "grouped_gemm")),
        (recipe.wgrad, ("grouped_wgrad",)),
    ):
        formats = (operands.left, operands.right)
        quantize = "quantize_rotated" if operands.hadamard else "quantize"
        paths += [
            Path(op=quantize, formats=(spec,), candidates=ours)
            for spec in formats
            if spec not in (BF16, FORWARD)
        ]
        formats = tuple(BF16 if spec == FORWARD else spec for spec in formats)
        name = params.gemm_backend if formats == (BF16, BF16) else params.backend
        candidates = tuple(backends.candidates(name))
        paths += [Path(op=op, formats=formats, candidates=candidates) for op in ops]
    return list(dict.fromkeys(paths))


def probe(path: Path, device: torch.device, *, verbose: bool = False) -> list[Outcome]:
    """Run one path at each K on each candidate that claims it; verbose adds tracebacks."""
    outcomes = []
    for name in path.candidates:
        for contraction in CONTRACTIONS:
            status, detail = _attempt(path, name, contraction, device, verbose)
            outcomes.append(
                Outcome(
                    path=path, backend=name, contraction=contraction, status=status, detail=detail
                )
            )
    return outcomes


def probe_profile(
    profile: Profile, attention: str, sampler: str, device: torch.device, *, verbose: bool = False
) -> tuple[str, str]:
    """Forward and backward of one layer by a deterministic profile: (status, detail) as an Outcome has them.

    "no" where the profile cannot be honoured on the device. Bits are compared with nothing.
    """
    from megatron_nvfp4.deterministic.model import Model

    config, weights = _small_model(profile, device)
    try:
        try:
            model = Model(weights, config, profile, attention_kind=attention, sampler=sampler)
        except ValueError as error:
            return "no", str(error)
        prompts, responses = [[1, 2, 3], [4]], [[5, 6], [7, 8, 9]]
        logprobs = torch.cat(model.logprobs(prompts, responses))
        logprobs.sum().backward()
        gradients = [weight.grad for weight in weights.values() if weight.grad is not None]
        if not all(bool(t.isfinite().all()) for t in (logprobs, *gradients)):
            raise RuntimeError("log-probabilities or gradients that are not finite")
    except Exception as error:  # whatever a claimed profile raises is the finding
        text = traceback.format_exc() if verbose else f"{type(error).__name__}: {error}"
        return "failed", text.strip()
    return "ok", ""


def _small_model(profile: Profile, device: torch.device) -> tuple[dict, dict[str, Tensor]]:
    """One random layer that the profile computes: a Hugging Face config, and BF16 weights by its names."""
    has_experts = "qwen3_moe" in profile.families
    hidden, width, heads, key_heads, size, num_experts, vocab = 128, 64, 4, 2, 64, 4, 128
    config = {
        "model_type": "qwen3_moe" if has_experts else "qwen3",
        "num_hidden_layers": 1,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": size,
        "intermediate_size": width,
        "vocab_size": vocab,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
    }
    mlps = ["mlp."]
    if has_experts:
        mlps = [f"mlp.experts.{expert}." for expert in range(num_experts)]
        config |= {"num_experts": num_experts, "num_experts_per_tok": 2}
        config |= {"moe_intermediate_size": width, "norm_topk_prob": True}
    layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_norm": (size,),
        "self_attn.k_norm": (size,),
        "self_attn.q_proj": (heads * size, hidden),
        "self_attn.k_proj": (key_heads * size, hidden),
        "self_attn.v_proj": (key_heads * size, hidden),
        "self_attn.o_proj": (hidden, heads * size),
        **({"mlp.gate": (num_experts, hidden)} if has_experts else {}),
        **{f"{mlp}{name}_proj": (width, hidden) for mlp in mlps for name in ("gate", "up")},
        **{f"{mlp}down_proj": (hidden, width) for mlp in mlps},
    }
    outside = {"model.embed_tokens": (vocab, hidden), "lm_head": (vocab, hidden)}
    shapes = {**outside, "model.norm": (hidden,)}
    shapes |= {f"model.layers.0.{name}": shape for name, shape in layer.items()}
    generator = torch.Generator().manual_seed(SEED)
    weights = {}
    for name, shape in shapes.items():
        x = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        x = 1 + x if len(shape) == 1 else x
        weights[f"{name}.weight"] = x.to(device, torch.bfloat16).requires_grad_()
    return config, weights


def _attempt(
    path: Path, name: str, contraction: int, device: torch.device, verbose: bool
) -> tuple[str, str]:
    try:
        backend = backends.get(name)
        reason = backend.why_not(path.op, path.formats, _shape(path.op, contraction), device)
        if reason is not None:
            return "no", reason
        _CASES[path.op](backend, path.formats, contraction, device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # a kernel's failure must not be the next case's
    except Exception as error:  # whatever a claimed path raises is the finding
        text = traceback.format_exc() if verbose else f"{type(error).__name__}: {error}"
        lines = text.strip().splitlines()
        return "failed", f"K={contraction}: " + ("\n".join(lines) if verbose else lines[0])
    return "ok", ""


def _shape(op: str, contraction: int) -> tuple[int, ...]:
    if op == "quantize":
        return (ROW_BOUNDS[-1], contraction)
    if op == "quantize_rotated":
        return (contraction, ROW_BOUNDS[-1])
    if op == "grouped_wgrad":
        return (NUM_COLS, ROW_BOUNDS[-1], contraction)
    return (ROW_BOUNDS[-1], NUM_COLS, contraction)


def _values(num_rows: int, num_cols: int, seed: int) -> Tensor:
    """BF16 on the CPU: normal, with one outlier row and one row of zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, num_cols, generator=generator).to(torch.bfloat16)
    x[1] *= 1000
    x[2] = 0
    return x


def _operand(spec: Format, x: Tensor, offsets: Tensor | None, device: torch.device):
    """The operand by the reference, whose bits are right by definition."""
    offsets = None if offsets is None else offsets.to(device)
    return backends.get("reference").quantize(x.to(device), spec, offsets=offsets, seed=SEED)


def _run_quantize(backend, formats: tuple[Format, ...], contraction: int, device) -> None:
    """Bits against the reference on the CPU, alone and by groups."""
    x = _values(ROW_BOUNDS[-1], contraction, seed=1)
    for offsets in (None, torch.tensor(ROW_BOUNDS)):
        expected = backends.get("reference").quantize(x, formats[0], offsets=offsets, seed=SEED)
        moved = None if offsets is None else offsets.to(device)
        got = backend.quantize(x.to(device), formats[0], offsets=moved, seed=SEED)
        _compare_operands(got, expected)


def _run_quantize_rotated(backend, formats: tuple[Format, ...], contraction: int, device) -> None:
    """The same of a transposed matrix after the random Hadamard transform, by groups of columns."""
    x = _values(ROW_BOUNDS[-1], contraction, seed=1)
    bounds = torch.tensor(ROW_BOUNDS)
    options = {"rotated": True, "seed": SEED}
    expected = backends.get("reference").quantize(
        x.t(), formats[0], column_offsets=bounds, **options
    )
    got = backend.quantize(
        x.to(device).t(), formats[0], column_offsets=bounds.to(device), **options
    )
    _compare_operands(got, expected)


def _compare_operands(got, expected) -> None:
    for part in ("codes", "values", "block_scales", "amax"):
        if hasattr(expected, part):
            _compare_bits(part, getattr(got, part), getattr(expected, part))


def _compare_bits(part: str, got: Tensor, expected: Tensor) -> None:
    if got.shape != expected.shape or got.dtype != expected.dtype:
        raise RuntimeError(
            f"{part} is {got.dtype} {tuple(got.shape)}, the reference's "
            f"{expected.dtype} {tuple(expected.shape)}"
        )
    bits = [t.cpu().contiguous().flatten().view(torch.uint8) for t in (got, expected)]
    different = int((bits[0] != bits[1]).sum())
    if different:
        raise RuntimeError(
            f"{part}: {different} of {bits[0].numel()} bytes differ from the reference"
        )


def _run_gemm(backend, formats: tuple[Format, ...], contraction: int, device) -> None:
    _run_forward(backend, formats, contraction, device, grouped=False)


def _run_grouped_gemm(backend, formats: tuple[Format, ...], contraction: int, device) -> None:
    _run_forward(backend, formats, contraction, device, grouped=True)


def _run_forward(backend, formats, contraction: int, device, *, grouped: bool) -> None:
    bounds = ROW_BOUNDS if grouped else (0, ROW_BOUNDS[-1])
    num_groups = len(bounds) - 1
    rows = torch.tensor(bounds, device=device)
    cols = torch.arange(num_groups + 1, device=device) * NUM_COLS
    a = _operand(formats[0], _values(bounds[-1], contraction, seed=2), rows, device)
    b = _operand(formats[1], _values(num_groups * NUM_COLS, contraction, seed=3), cols, device)
    bias = _values(num_groups + 3, NUM_COLS, seed=4)[3:].to(device)  # behind the special rows
    if grouped:
        got = backend.grouped_gemm(a, b, rows, bias=bias, out_dtype=torch.bfloat16)
    else:
        got = backend.gemm(a, b, bias=bias[0], out_dtype=torch.bfloat16)
    a, b = _decoded(a), _decoded(b)
    expected, magnitude = (
        torch.cat(
            [
                f(a[bounds[g] : bounds[g + 1]]) @ f(b[g * NUM_COLS : (g + 1) * NUM_COLS]).t()
                + f(bias[g].double())
                for g in range(num_groups)
            ]
        )
        for f in (lambda t: t, torch.abs)
    )
    _compare(got, expected, magnitude)


def _run_grouped_wgrad(backend, formats: tuple[Format, ...], contraction: int, device) -> None:
    """Contracts the tokens; written over NaN first, so that what is left unwritten shows."""
    bounds = (0, 64, 64, contraction)
    offsets = torch.tensor(bounds, device=device)
    a = _operand(formats[0], _values(NUM_COLS, contraction, seed=5), None, device)
    b = _operand(formats[1], _values(ROW_BOUNDS[-1], contraction, seed=6), None, device)
    a_values, b_values = _decoded(a), _decoded(b)
    for accumulate, start in ((False, float("nan")), (True, 1.0)):
        out = [torch.full((NUM_COLS, ROW_BOUNDS[-1]), start, device=device) for _ in bounds[1:]]
        backend.grouped_wgrad(a, b, offsets, out=out, accumulate=accumulate)
        for group, got in enumerate(out):
            tokens = slice(bounds[group], bounds[group + 1])
            left, right = a_values[:, tokens], b_values[:, tokens].t()
            expected, magnitude = left @ right, left.abs() @ right.abs()
            if accumulate:
                expected, magnitude = expected + start, magnitude + start
            _compare(got, expected, magnitude)


def _decoded(operand) -> Tensor:
    """FP64 values (M, K), outer scale included."""
    exact, scale = decode_fp64(operand), row_scale(operand)
    return exact if scale is None else exact * scale[:, None].double()


def _compare(got: Tensor, expected: Tensor, magnitude: Tensor) -> None:
    """RuntimeError unless got is within one BF16 ulp plus 2^-12 of the sum of |products|.

    FP32 accumulation of K <= 192 products errs by at most K * 2^-24 of that sum; tensor cores that
    align and cut the addends by about four times as much.
    """
    if got.shape != expected.shape:
        raise RuntimeError(f"output is {tuple(got.shape)}, not {tuple(expected.shape)}")
    bound = expected.abs() * 2.0**-8 + magnitude * 2.0**-12
    error = (got.double() - expected).abs()
    wrong = ~(error <= bound)  # NaN is wrong
    if bool(wrong.any()):
        worst = float((error - bound)[wrong].max())
        raise RuntimeError(
            f"{int(wrong.sum())} of {wrong.numel()} outputs exceed the bound, by up to {worst:.3g}"
        )


_CASES: dict[str, Callable] = {
    "quantize": _run_quantize,
    "quantize_rotated": _run_quantize_rotated,
    "gemm": _run_gemm,
    "grouped_gemm": _run_grouped_gemm,
    "grouped_wgrad": _run_grouped_wgrad,
}
assert set(_CASES) == set(backends.OPS)

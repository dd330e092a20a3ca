"""A small MoE model with Megatron's names and layouts, captured without Megatron; dumps edited by hand."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.utils.checkpoint import checkpoint

from megatron_nvfp4.checkpoint.atomic import AtomicFolder
from megatron_nvfp4.diagnostics.capture import Capture, PlainSeams
from megatron_nvfp4.diagnostics.capture_config import WHAT, CaptureConfig, CaptureRule, Steps
from megatron_nvfp4.modules import GroupedLinear, Linear, QLinearParams, moe
from megatron_nvfp4.modules.expert_matmul import ExpertMatmul
from megatron_nvfp4.modules.moe import ExpertDataflow
from megatron_nvfp4.quant import swiglu
from megatron_nvfp4.recipes import RECIPES

HIDDEN, FFN, NUM_EXPERTS, TOP_K, NUM_LAYERS, VOCABULARY = 32, 32, 4, 2, 3, 50
EVERYTHING = CaptureRule(match=("**", "model"), what=frozenset(WHAT), tensors=True)


class Router(torch.nn.Module):
    topk = TOP_K

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(NUM_EXPERTS, HIDDEN))

    def forward(self, h):
        # One row at a time: a batch of another size must not change a bit.
        rows = h.reshape(-1, HIDDEN).double()
        logits = torch.stack([(self.weight.double() * row).sum(dim=1) for row in rows])
        chosen = logits.topk(TOP_K).indices
        routing_map = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, chosen, True)
        probs = logits.softmax(dim=1).float() * routing_map
        return probs, routing_map


class Experts(torch.nn.Module):
    def __init__(self, params: QLinearParams, fused: bool) -> None:
        super().__init__()
        fields = {"params_dtype": torch.bfloat16, "bias": False, "qlinear_params": params}
        self.linear_fc1 = GroupedLinear(NUM_EXPERTS, HIDDEN, 2 * FFN, device="cpu", **fields)
        self.linear_fc2 = GroupedLinear(NUM_EXPERTS, FFN, HIDDEN, device="cpu", **fields)
        self.fused = fused

    def forward(self, x, routed):
        probs, routing_map = routed
        if self.fused:
            fc1, fc2 = (ExpertMatmul.of(each, x) for each in (self.linear_fc1, self.linear_fc2))
            return ExpertDataflow()(x, routing_map, probs, fc1, fc2, top_k=TOP_K)
        expert, token = routing_map.t().nonzero(as_tuple=True)
        splits = torch.bincount(expert, minlength=NUM_EXPERTS).tolist()
        h = self.linear_fc1(x[token], splits)
        y = swiglu.weighted_activation(h, probs[token, expert])
        out = self.linear_fc2(y, splits).float()
        return torch.zeros_like(x, dtype=torch.float32).index_add(0, token, out).bfloat16()


class Mlp(torch.nn.Module):
    def __init__(self, params: QLinearParams, fused: bool) -> None:
        super().__init__()
        self.router, self.experts = Router(), Experts(params, fused)

    def forward(self, h):
        return self.experts(h.reshape(-1, HIDDEN), self.router(h)).view(h.shape)


class Layer(torch.nn.Module):
    def __init__(self, number: int, params: QLinearParams, fused: bool) -> None:
        super().__init__()
        self.layer_number = number
        self.linear_proj = Linear(
            HIDDEN, HIDDEN, bias=False, params_dtype=torch.bfloat16, device="cpu", qlinear_params=params
        )  # fmt: skip
        self.mlp = Mlp(params, fused)
        for name in ("linear_fc1", "linear_fc2"):
            linear = getattr(self.mlp.experts, name)
            linear.layer_name = f"decoder.layers.{number - 1}.mlp.experts.{name}"

    def forward(self, h):
        h = h + self.linear_proj(h)
        return h + self.mlp(h)


class Decoder(torch.nn.Module):
    def __init__(self, params: QLinearParams, fused: bool) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(1 + n, params, fused) for n in range(NUM_LAYERS))


class Model(torch.nn.Module):
    """Called as GPTModel: ids and positions (B, S); with labels the negative log-probabilities (B, S)."""

    def __init__(
        self, recipe: str = "nvfp4_per_token", *, fused: bool = True, recompute: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.recompute = recompute
        self.embedding = torch.nn.Embedding(VOCABULARY, HIDDEN, dtype=torch.bfloat16)
        self.decoder = Decoder(QLinearParams(recipe=RECIPES[recipe]), fused)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise if parameter.dtype == torch.float32 else 0.3 * noise)

    def forward(self, input_ids, position_ids, labels=None):
        h = self.embedding(input_ids).transpose(0, 1).contiguous()
        for layer in self.decoder.layers:
            h = checkpoint(layer, h, use_reentrant=True) if self.recompute else layer(h)
        if labels is None:
            return h
        # Elementwise, for the same reason as the router's.
        logits = h.transpose(0, 1).float()[..., :VOCABULARY]
        return -logits.log_softmax(dim=-1).gather(2, (labels % HIDDEN)[..., None])[..., 0]


class Seams(PlainSeams):
    """tags: what a TensorBoard writer was given; None for no writer."""

    def __init__(self) -> None:
        self.tags: list[tuple[str, float, int]] | None = None

    def observe_experts(self, observer) -> None:
        moe.observe(observer)

    def tensorboard_writer(self):
        return None if self.tags is None else self

    def add_scalar(self, tag, value, step) -> None:
        self.tags.append((tag, value, step))


def config_of(out: Path, *rules: CaptureRule, **changes) -> CaptureConfig:
    steps = Steps(single=frozenset({1}))
    return replace(CaptureConfig(out=out, steps=steps, rules=rules or (EVERYTHING,)), **changes)


def capture_of(config: CaptureConfig, seams: Seams | None = None) -> Capture:
    def open_folder(path: Path) -> AtomicFolder:
        return AtomicFolder(path, force=True)

    return Capture(config, seams=seams or Seams(), open_folder=open_folder)


def batch(seed: int = 0, size: int = 2, length: int = 5) -> torch.Tensor:
    return torch.randint(
        1, VOCABULARY, (size, length), generator=torch.Generator().manual_seed(seed)
    )


def permuted(ids: torch.Tensor, padding: int = 3) -> torch.Tensor:
    """The sequences in another order, padded, after one more sequence."""
    other = batch(99, 1, ids.shape[1])
    ids = torch.cat([other, ids.flip(0)])
    return torch.nn.functional.pad(ids, (0, padding))


def run(model: Model, *microbatches: torch.Tensor, backward: bool = True) -> list[torch.Tensor]:
    """One step: the outputs of its microbatches, all forwards before the first backward."""
    outputs = []
    for ids in microbatches:
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        loss = model(ids, positions, labels=ids.roll(-1, 1))
        outputs.append(loss)
    for loss in outputs if backward else ():
        loss.sum().backward()
    return [loss.detach() for loss in outputs]


def captured(
    folder: Path, model: Model, *microbatches: torch.Tensor, rules=(), backward: bool = False
) -> Path:
    """The folder of a dump of one step."""
    capture = capture_of(config_of(folder, *rules))
    capture.begin_training([model], None, 1, 1)
    capture.begin_step(1)
    run(model, *microbatches, backward=backward)
    capture.end_step(1)
    capture.end_training(None)
    return folder / "step-000001" / "rank-00000"


class Edit:
    """A dump opened for a fault to be planted; written back at the end of the block."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> "Edit":
        self.tensors = load_file(self.folder / "tensors.safetensors")
        self.index = json.loads((self.folder / "index.json").read_text())
        return self

    def entry(self, module: str, what: str) -> dict:
        return next(e for e in self.index["entries"] if (e["module"], e["what"]) == (module, what))

    def tensor(self, module: str, what: str) -> torch.Tensor:
        return self.tensors[self.entry(module, what)["key"]]

    def __exit__(self, kind, value, trace) -> None:
        save_file(self.tensors, self.folder / "tensors.safetensors")
        (self.folder / "index.json").write_text(json.dumps(self.index))

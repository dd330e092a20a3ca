"""The laboratory's task, its policy and its sampler.

Task: a line of digits d_0..d_{W-1} and a number of lines c. The answer goes on with y_t = (y_{t-1} +
y_{t-W}) mod 10 for c * W digits and then stops. One wrong digit spoils what follows, as in a chain of
reasoning, and the answer's length is the prompt's to say.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_nvfp4.modules import Linear, get_qlinear_params

# Digits are tokens 0 to 9. The policy writes digits and stops; what lies behind a stop is padding.
STOP, PAD, FIRST_COUNT, VOCABULARY = 10, 11, 12, 32
NUM_WRITTEN = STOP + 1
NORM_EPS = 1e-5


@dataclass(frozen=True)
class Size:
    """A laboratory: the policy, the task, a GRPO batch and the supervised steps before it."""

    width: int
    heads: int
    layers: int
    digits: int  # of a line
    lines: tuple[int, int]  # fewest and most lines of an answer
    prompts: int  # of a rollout
    group: int  # responses to a prompt
    updates: int
    lr: float
    gate_width: int  # TRIAGE segments; 64 and twice that are the reported ones
    supervised_batch: int
    supervised_lr: float

    @property
    def prompt_length(self) -> int:
        return 1 + self.digits

    @property
    def response_length(self) -> int:
        """Of the longest right answer, its stop included; the sampler stops here too."""
        return self.digits * self.lines[1] + 1

    @property
    def length(self) -> int:
        return self.prompt_length + self.response_length


SIZES = {
    "small": Size(
        width=64,
        heads=4,
        layers=2,
        digits=8,
        lines=(2, 6),
        prompts=16,
        group=8,
        updates=60,
        lr=1e-3,
        gate_width=16,
        supervised_batch=64,
        supervised_lr=3e-3,
    ),
    "large": Size(
        width=128,
        heads=4,
        layers=4,
        digits=8,
        lines=(8, 20),
        prompts=32,
        group=16,
        updates=100,
        lr=3e-4,
        gate_width=64,
        supervised_batch=128,
        supervised_lr=2e-3,
    ),
}


# --- task -----------------------------------------------------------------------------------------


def problems(size: Size, num: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(prompts (num, 1 + W), answers (num, response_length), PAD behind the stop), int64."""
    device, (fewest, most) = generator.device, size.lines
    options = {"generator": generator, "device": device}
    counts = torch.randint(fewest, most + 1, (num, 1), **options)
    line = list(torch.randint(10, (num, size.digits), **options).unbind(1))
    for _ in range(size.response_length):
        line.append((line[-1] + line[-size.digits]) % 10)
    digits = torch.stack(line, dim=1)
    ends = counts * size.digits
    places = torch.arange(size.response_length, device=device)
    answers = torch.where(places < ends, digits[:, size.digits :], PAD)
    answers = torch.where(places == ends, STOP, answers)
    return torch.cat([counts - fewest + FIRST_COUNT, digits[:, : size.digits]], dim=1), answers


def valid_tokens(responses: Tensor) -> Tensor:
    """Mask of a response's tokens, its stop included."""
    return responses != PAD


def rewards(responses: Tensor, answers: Tensor) -> Tensor:
    """The share of the answer's tokens before the first wrong one, (N,) float32; 1 is a right answer."""
    right = (responses == answers) & valid_tokens(answers)
    return right.cumprod(dim=1).sum(dim=1) / valid_tokens(answers).sum(dim=1)


# --- policy ---------------------------------------------------------------------------------------


class ExactLinear(nn.Linear):
    """A linear layer that quantises nothing, with the call of the package's."""

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        return super().forward(x)


MakeLinear = Callable[[int, int, str], nn.Module]


def quantized_linears(recipe: str, device: str) -> MakeLinear:
    """Makes the package's BF16 layers with the numerics of a recipe."""
    params = get_qlinear_params(recipe, device=device)
    common = {
        "bias": False,
        "params_dtype": torch.bfloat16,
        "device": device,
        "qlinear_params": params,
    }
    return lambda inputs, outputs, name: Linear(inputs, outputs, name=name, **common)


def exact_linears(dtype: torch.dtype) -> MakeLinear:
    return lambda inputs, outputs, name: ExactLinear(inputs, outputs, bias=False, dtype=dtype)


class Block(nn.Module):
    """Attention with rotary positions, then SwiGLU; every matrix is quantised as the recipe says."""

    def __init__(self, size: Size, linear: MakeLinear, name: str, **memory) -> None:
        super().__init__()
        width, self.heads = size.width, size.heads
        self.attention_norm = nn.Parameter(torch.ones(width, **memory))
        self.qkv = linear(width, 3 * width, f"{name}.qkv")
        self.out = linear(width, width, f"{name}.out")
        self.mlp_norm = nn.Parameter(torch.ones(width, **memory))
        self.gate_up = linear(width, 8 * width, f"{name}.gate_up")
        self.down = linear(4 * width, width, f"{name}.down")

    def forward(
        self,
        x: Tensor,
        keep: Tensor,
        angles: tuple[Tensor, Tensor],
        start: int,
        cache: Tensor | None,
        first: bool | None,
    ) -> Tensor:
        num, length, width = x.shape
        h = F.rms_norm(x, (width,), self.attention_norm, NORM_EPS)
        h = self.qkv(h, first).view(num, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = rotate(h[:2], *angles)
        v = h[2]
        if cache is not None:
            cache[0, :, :, start : start + length] = k
            cache[1, :, :, start : start + length] = v
            k, v = cache[:, :, :, : start + length]
        h = F.scaled_dot_product_attention(q, k, v, is_causal=start == 0)
        h = h.transpose(1, 2).reshape(num, length, width) * keep
        x = x + self.out(h, first)
        h = F.rms_norm(x, (width,), self.mlp_norm, NORM_EPS)
        gate, up = self.gate_up(h, first).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up, first)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of (..., T, D)."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], dim=-1) * sin


class Policy(nn.Module):
    """A causal transformer over the task's tokens; embedding and head are not quantised."""

    def __init__(self, size: Size, linear: MakeLinear, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        memory = {"dtype": dtype, "device": device}
        self.embedding = nn.Parameter(torch.empty(VOCABULARY, size.width, **memory))
        self.position = nn.Parameter(torch.empty(size.length, size.width, **memory))
        self.blocks = nn.ModuleList(
            Block(size, linear, f"block{i}", **memory) for i in range(size.layers)
        )
        self.norm = nn.Parameter(torch.ones(size.width, **memory))
        self.head = nn.Parameter(torch.empty(NUM_WRITTEN, size.width, **memory))
        half = size.width // size.heads // 2
        rates = 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(size.length)[:, None] * rates.repeat(2)
        self.register_buffer("cos", angles.cos().to(**memory), persistent=False)
        self.register_buffer("sin", angles.sin().to(**memory), persistent=False)

    def initialize(self, seed: int) -> None:
        """The same start on every device."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() == 2:
                    table = name in ("embedding", "position")
                    scale = 0.5 if table else parameter.shape[1] ** -0.5
                    value = torch.randn(parameter.shape, generator=generator) * scale
                    parameter.copy_(value)

    def copy_from(self, other: "Policy") -> None:
        """Take over another policy's weights; each layer quantises them by its own recipe."""
        with torch.no_grad():
            for mine, theirs in zip(self.parameters(), other.parameters(), strict=True):
                mine.copy_(theirs)

    def forward(
        self,
        tokens: Tensor,
        keep: Tensor,
        *,
        start: int = 0,
        cache: Tensor | None = None,
        first: bool | None = None,
    ) -> Tensor:
        """Logits (N, T, NUM_WRITTEN) of tokens (N, T) at positions start.., float32 or wider.

        keep: bool (N, T); rows that are not kept are zeros in every linear layer, so that the amax of a
        whole tensor is that of its tokens. cache: (layers, 2, N, heads, length, D), read and written.
        first: is_first_microbatch of the layers.
        """
        length = tokens.shape[1]
        keep = keep[..., None].to(self.embedding.dtype)
        places = slice(start, start + length)
        x = (F.embedding(tokens, self.embedding) + self.position[places]) * keep
        angles = self.cos[places], self.sin[places]
        for index, block in enumerate(self.blocks):
            x = block(x, keep, angles, start, None if cache is None else cache[index], first)
        x = F.rms_norm(x, (x.shape[-1],), self.norm, NORM_EPS)
        logits = F.linear(x, self.head)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))


def response_logprobs(policy: Policy, prompts: Tensor, responses: Tensor) -> Tensor:
    """The policy's log-probability of each token of the responses (N, R), one pass over whole sequences.

    What stands at padding means nothing.
    """
    valid = valid_tokens(responses)
    tokens = torch.cat([prompts, responses[:, :-1]], dim=1)
    # The stop is not read by anything: like the padding behind it, it is a row of zeros.
    keep = torch.cat([torch.ones_like(prompts, dtype=torch.bool), valid[:, 1:]], dim=1)
    logits = policy(tokens, keep)[:, prompts.shape[1] - 1 :]
    written = responses.clamp_max(STOP)[..., None]
    return logits.log_softmax(-1).gather(-1, written)[..., 0]


# --- sampler --------------------------------------------------------------------------------------


class Sampler:
    """Generates with a key-value cache, a token at a time, with weights quantised once per update."""

    def __init__(self, size: Size, linear: MakeLinear, num: int, device: str) -> None:
        self.size = size
        self.policy = Policy(size, linear, torch.bfloat16, device).requires_grad_(False)
        shape = (size.layers, 2, num, size.heads, size.length, size.width // size.heads)
        self.cache = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        self._prompts = torch.zeros(num, size.prompt_length, dtype=torch.int64, device=device)
        self._noise = torch.zeros(size.response_length, num, NUM_WRITTEN, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: tuple[Tensor, Tensor] | None = None

    def __call__(self, prompts: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """(responses (N, R), their log-probabilities (N, R)) at temperature 1; PAD behind the stop.

        What stands at padding among the log-probabilities means nothing.

        On CUDA a rollout is one graph, captured at the first call; its outputs are written over by the next.
        """
        self._prompts.copy_(prompts)
        self._noise.exponential_(generator=generator).log_().neg_()  # Gumbel
        if prompts.device.type != "cuda":
            return self._generate()
        if self._graph is None:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._generate()
            torch.cuda.current_stream().wait_stream(stream)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._result = self._generate()
        self._graph.replay()
        return self._result

    def _generate(self) -> tuple[Tensor, Tensor]:
        # With gradients enabled, though none are needed: only then do the layers keep quantised weights.
        prompt_length = self.size.prompt_length
        tokens, keep, start, first = self._prompts, torch.ones_like(self._prompts).bool(), 0, True
        alive = keep[:, 0]
        responses, logprobs = [], []
        for noise in self._noise:
            logits = self.policy(tokens, keep, start=start, cache=self.cache, first=first)[:, -1]
            logp = logits.log_softmax(-1)
            written = (logp + noise).argmax(-1)
            token = torch.where(alive, written, PAD)
            responses.append(token)
            logprobs.append(logp.gather(1, written[:, None])[:, 0])
            alive = alive & (token != STOP)
            start, first = prompt_length if first else start + 1, False
            tokens, keep = token[:, None], alive[:, None]
        return torch.stack(responses, dim=1), torch.stack(logprobs, dim=1)

"""Fail-closed parity of log-probabilities, and operators' outputs by name to find where two forwards part.

`check_parity` runs between forward and backward: equal bits, or ParityError with the first difference.
`capture` collects what the operators return, in order; the verb `compare` compares dumps of both sides.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

Rows = Sequence[Tensor | Sequence]

_captured: ContextVar[dict[str, Tensor] | None] = ContextVar("captured", default=None)


class ParityError(RuntimeError):
    """Sampler and learner differ: `sequence` and `token` of the first difference, `num_unequal` in all."""

    def __init__(self, message: str, sequence: int, token: int, num_unequal: int) -> None:
        super().__init__(message)
        self.sequence, self.token, self.num_unequal = sequence, token, num_unequal


def check_parity(
    tokens: Tensor | Rows,
    sampler_logprobs: Tensor | Rows,
    learner_logprobs: Tensor | Rows,
    mask: Tensor | Rows | None = None,
) -> None:
    """Returns where both log-probabilities of all tokens are the same number, else raises ParityError.

    tokens: integers (B, T); log-probabilities FP32 (B, T); mask: bool (B, T), True where a token
    counts, None for all. Or of each a list of B sequences (T_b,), tensors or lists, as Model.logprobs
    returns them. A NaN, or a mask that lets nothing through, is a difference. Waits for the GPU. Raises
    ValueError for other shapes or dtypes: a sampler that reports BF16 proves nothing at FP32.
    """
    given = {"tokens": tokens, "sampler_logprobs": sampler_logprobs}
    given |= {"learner_logprobs": learner_logprobs} | ({} if mask is None else {"mask": mask})
    if not all(isinstance(each, Tensor) for each in given.values()):
        tokens, sampler_logprobs, learner_logprobs, mask = _padded(given)
    mask = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
    _check(tokens, sampler_logprobs, learner_logprobs, mask)
    sampler, learner, mask = (t.detach().cpu() for t in (sampler_logprobs, learner_logprobs, mask))
    num_checked = int(mask.sum())
    if not num_checked:
        raise ParityError("parity: the mask lets no token through; nothing was checked", 0, 0, 0)
    unequal = (sampler != learner) & mask  # NaN differs from itself
    num_unequal = int(unequal.sum())
    if not num_unequal:
        return
    sequence, token = divmod(int(unequal.flatten().int().argmax()), unequal.shape[1])
    mine, other = float(learner[sequence, token]), float(sampler[sequence, token])
    largest = float((sampler - learner).abs()[unequal].max())
    raise ParityError(
        f"parity: sequence {sequence}, token {token} (id {int(tokens[sequence, token])}): sampler "
        f"{other!r}, learner {mine!r}, {ulp_distance(other, mine)} ulp apart; {num_unequal} of "
        f"{num_checked} tokens differ, by up to {largest:.3g}. Capture the "
        "learner (deterministic.capture), let the sampler dump (docs/deterministic.md), and run: "
        "python -m megatron_nvfp4 compare LEARNER SAMPLER --common",
        sequence,
        token,
        num_unequal,
    )


def _row(name: str, row: Tensor | Sequence, empty: torch.dtype) -> Tensor:
    if not isinstance(row, Tensor) and not len(row):
        return torch.empty(0, dtype=empty)
    try:
        return torch.as_tensor(row).detach().cpu()
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"check_parity: a sequence of {name} holds {row[:1]}; give numbers"
        ) from error


def _padded(given: Mapping[str, Tensor | Rows]) -> list[Tensor]:
    """Tensors (B, T) of sequences, and the mask, which leaves the padding out."""
    empty = {"tokens": torch.int64, "mask": torch.bool}
    rows = {
        name: [_row(name, row, empty.get(name, torch.float32)) for row in each]
        for name, each in given.items()
    }
    for name, each in rows.items():
        if len(dtypes := sorted({str(row.dtype) for row in each})) != 1:
            raise ValueError(
                f"check_parity: {name} are {' and '.join(dtypes) or 'no sequences'}; give one dtype, FP32 "
                "for log-probabilities"
            )
    shapes = {name: [tuple(row.shape) for row in each] for name, each in rows.items()}
    wanted = shapes["tokens"]
    wrong = next((name for name, found in shapes.items() if found != wanted), None)
    if wrong or any(len(shape) != 1 for shape in wanted):
        name = wrong or "tokens"
        raise ValueError(
            f"check_parity: sequences of {name} are {shapes[name][:4]}, of tokens {wanted[:4]}, ...; give a "
            "value for each token"
        )
    masks = rows.pop("mask", None) or [torch.ones_like(row, dtype=bool) for row in rows["tokens"]]
    return [pad_sequence(each, batch_first=True) for each in (*rows.values(), masks)]


def _check(tokens: Tensor, sampler: Tensor, learner: Tensor, mask: Tensor) -> None:
    for name, t in (("sampler_logprobs", sampler), ("learner_logprobs", learner)):
        if t.dtype != torch.float32:
            raise ValueError(f"check_parity: {name} are {t.dtype}; give torch.float32")
    if mask.dtype != torch.bool:
        raise ValueError(f"check_parity: mask is {mask.dtype}; give torch.bool")
    shapes = {name: tuple(t.shape) for name, t in zip(
        ("tokens", "sampler_logprobs", "learner_logprobs", "mask"),
        (tokens, sampler, learner, mask), strict=True,
    )}  # fmt: skip
    if tokens.dim() != 2 or len(set(shapes.values())) > 1:
        raise ValueError(f"check_parity: shapes {shapes} differ; give (B, T) each")


def ulp_distance(a: float, b: float) -> int | float:
    """How many FP32 numbers lie between a and b, plus one; 0 for equal ones, NaN where either is none."""
    if math.isnan(a) or math.isnan(b):
        return math.nan
    bits = torch.tensor([a, b], dtype=torch.float32).view(torch.int32).tolist()
    # Sign and magnitude to a line on which neighbours are one apart.
    low, high = (n if n >= 0 else -(n & 0x7FFFFFFF) for n in bits)
    return abs(low - high)


@contextmanager
def capture() -> Iterator[dict[str, Tensor]]:
    """Inside the block, every `record` of this thread goes into the dictionary it gives, in order of
    computation.

    Blocks nest: an inner one collects alone, and leaving any, by an exception too, restores the one
    around it.
    """
    outputs: dict[str, Tensor] = {}
    token = _captured.set(outputs)
    try:
        yield outputs
    finally:
        _captured.reset(token)


def record(name: str, output: Tensor) -> Tensor:
    """The output itself; a copy goes into the open `capture`, if any, ValueError if it has that name."""
    outputs = _captured.get()
    if outputs is not None:
        if name in outputs:
            raise ValueError(
                f"capture: {name} is recorded twice; open a new capture for every forward"
            )
        outputs[name] = output.detach().clone()
    return output


def save_dump(outputs: Mapping[str, Tensor], path: str | Path) -> None:
    """Write captured outputs as a safetensors file that keeps their order; needs the package safetensors."""
    from safetensors.torch import save_file

    tensors = {name: t.cpu().contiguous() for name, t in outputs.items()}
    save_file(tensors, str(path), metadata={"order": json.dumps([*outputs])})

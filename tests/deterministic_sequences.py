"""Sequences of a prompt and a response, as Megatron's callers lay them out: padded or packed."""

import torch

# Sequences whose rows behind the 32nd add in another order when they are decoded.
PROMPTS = [list(range(1, 6)), list(range(40, 51)), [9]]
RESPONSES = [list(range(60, 116)), list(range(100, 103)), list(range(200, 240))]


def padded():
    """(tokens, labels) of the sequences, (3, 64), behind their ends padding that is no token of theirs."""
    tokens, labels = torch.full((3, 64), 7), torch.full((3, 64), -100)
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        sequence = torch.tensor([*prompt, *response])
        tokens[row, : len(sequence) - 1] = sequence[:-1]
        labels[row, len(prompt) - 1 : len(sequence) - 1] = sequence[len(prompt) :]
    return tokens, labels


def packed_sequences():
    """(tokens, labels, PackedSeqParams): gaps between sequences, an empty one, rows behind the last."""
    from megatron.core.packed_seq_params import PackedSeqParams

    tokens, labels = padded()
    ends, starts = [0], [0]
    flat, targets = [], []
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        length = len(prompt) + len(response) - 1
        stop = length + 3
        flat.append(torch.nn.functional.pad(tokens[row, :length], (0, 3), value=3))
        targets.append(torch.nn.functional.pad(labels[row, :length], (0, 3), value=-100))
        ends.append(ends[-1] + length)
        starts.append(starts[-1] + stop)
    flat.append(torch.full((5,), 3))
    targets.append(torch.full((5,), -100))
    # An empty sequence at the end, as fixed-size lists of boundaries have.
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=torch.tensor([*ends, ends[-1]], dtype=torch.int32),
        cu_seqlens_q_padded=torch.tensor([*starts, starts[-1]], dtype=torch.int32),
    )
    return torch.cat(flat)[None], torch.cat(targets)[None], packed

"""TRIAGE and the importance corrections token by token: no vectors, no code shared with the package.

A response is a tuple (delta, advantages, mask) of lists; a batch is a list of responses. Numbers are floats,
or 0-d float64 tensors where autograd goes through. Settings come as any object with TriageConfig's fields.
"""

import math
import random

import torch


def number(x):
    """The float of x, for decisions that carry no gradient."""
    return float(x.detach()) if isinstance(x, torch.Tensor) else float(x)


def segments(mask, width):
    """Lists of valid positions, one for each run of `width` positions that holds any."""
    runs = [range(begin, min(begin + width, len(mask))) for begin in range(0, len(mask), width)]
    kept = [[t for t in run if mask[t]] for run in runs]
    return [positions for positions in kept if positions]


def mean(values):
    return sum(values) / len(values)


def gate(batch, config):
    """The weight of each token of each response."""
    result = []
    for delta, advantages, mask in batch:
        weights = [1.0] * len(mask)
        for positions in segments(mask, config.gate_width):
            if not mean([advantages[t] for t in positions]) < 0:
                continue
            gap = mean([delta[t] for t in positions])
            tier = 1.0
            if gap < config.mild_mean:
                tier = config.mild_weight
            if gap < config.deep_mean:
                tier = config.deep_weight
            deep = len([t for t in positions if delta[t] < config.tail_gap])
            tail = 1.0 - config.tail_strength * min(deep / config.tail_count, 1.0)
            for t in positions:
                if delta[t] < 0:
                    weights[t] = min(tier, tail)
        result.append(weights)
    return result


def coefficients(batch, config):
    """What multiplies each token's advantage: its weight, with the lost mass given back."""
    weights = gate(batch, config)
    kept = [
        (sum(1 for m in mask if m), sum(w for w, m in zip(ws, mask, strict=True) if m))
        for ws, (_, _, mask) in zip(weights, batch, strict=True)
    ]
    everything = sum(n for n, _ in kept), sum(w for _, w in kept)
    result = []
    for ws, own in zip(weights, kept, strict=True):
        num, mass = own if config.norm == "response" else everything
        result.append([w * num / mass if num else w for w in ws])
    return result


def repair_parts(batch, config):
    """(response, positions, mean gap, whether it is of positive advantage) of each repair segment."""
    parts = []
    for i, (delta, advantages, mask) in enumerate(batch):
        for positions in segments(mask, config.repair_width):
            gap = mean([delta[t] for t in positions])
            parts.append((i, positions, gap, mean([advantages[t] for t in positions]) > 0))
    return parts


def repair_loss(batch, config):
    """The repair loss with its factor, by the definition of phi."""
    parts = repair_parts(batch, config)
    num = [sum(1 for m in mask if m) for _, _, mask in batch]
    total = 0.0
    for i, positions, gap, positive in parts:
        if not positive or number(gap) >= config.repair_boundary:
            continue
        u = (config.repair_boundary - gap) / config.repair_beta
        penalty = config.repair_beta**2 * ((1 + u**2) ** 0.5 - 1)
        if config.repair_norm == "segment":
            total = total + penalty / len(parts)
        elif config.norm == "response":
            responses = sum(1 for n in num if n)
            total = total + penalty * len(positions) / num[i] / responses
        else:
            total = total + penalty * len(positions) / sum(num)
    return config.repair_weight * total


def advantages(batch, config, tis):
    """The advantages that carry gate and repair; 0 at masked tokens."""
    num = [sum(1 for m in mask if m) for _, _, mask in batch]
    result = [
        [a * c if m else 0.0 for a, c, m in zip(adv, cs, mask, strict=True)]
        for cs, (_, adv, mask) in zip(coefficients(batch, config), batch, strict=True)
    ]
    parts = repair_parts(batch, config)
    for i, positions, gap, positive in parts:
        q = max(config.repair_boundary - gap, 0.0)
        if not positive:
            continue
        push = config.repair_weight * q / math.sqrt(1 + (q / config.repair_beta) ** 2)
        if config.repair_norm == "segment":
            push /= len(parts) * len(positions)
            push *= sum(1 for n in num if n) * num[i] if config.norm == "response" else sum(num)
        for t in positions:
            if tis[i][t] > 0:
                result[i][t] += push / tis[i][t]
    return result


def token_loss(live, old, advantage, tis, clip=(0.2, 0.28)):
    """PPO-clip of one token times its importance weight."""
    ratio = math.exp(live - old) if isinstance(live, float) else (live - old).exp()
    bounded = min(max(number(ratio), 1 - clip[0]), 1 + clip[1])
    clipped = ratio if bounded == number(ratio) else bounded
    first, second = -advantage * ratio, -advantage * clipped
    return tis * (first if number(first) >= number(second) else second)


def weighted_mean(losses, weights, batch, norm):
    """Mean of the losses by weight: over each response and then over responses, or over all tokens."""
    per_response = []
    for ls, ws, (_, _, mask) in zip(losses, weights, batch, strict=True):
        used = [t for t in range(len(mask)) if mask[t]]
        if used:
            per_response.append((sum(ws[t] * ls[t] for t in used), sum(ws[t] for t in used)))
    if norm == "response":
        return mean([loss / mass for loss, mass in per_response])
    return sum(loss for loss, _ in per_response) / sum(mass for _, mass in per_response)


def log_ratios(batch, level):
    """Each token's log-ratio, or its response's sum or mean, within +-20."""
    result = []
    for delta, _, mask in batch:
        used = [d for d, m in zip(delta, mask, strict=True) if m]
        whole = {"sequence": sum(used), "geometric": sum(used) / max(len(used), 1)}
        values = delta if level == "token" else [whole[level]] * len(delta)
        result.append(
            [min(max(v, -20.0), 20.0) if m else 0.0 for v, m in zip(values, mask, strict=True)]
        )
    return result


# --- batches --------------------------------------------------------------------------------------


def random_batch(seed, lengths=(1, 63, 64, 65, 0, 300, 129, 2), mixed=False):
    """Responses whose gaps reach every tier and the tail; a quarter of the tokens masked."""
    draw = random.Random(seed)
    batch = []
    for number_of, length in enumerate(lengths):
        level = draw.choice([0.0, -0.4, -1.0, -2.0])
        delta = [draw.gauss(level, 1.0) for _ in range(length)]
        for _ in range(length // 50):
            delta[draw.randrange(length)] = -7.0
        sign = draw.choice([-1.0, 1.0]) if number_of else -1.0
        adv = [sign * draw.uniform(0.1, 2)] * length
        if mixed:
            adv = [draw.gauss(0.0, 1.0) for _ in range(length)]
        batch.append((delta, adv, [int(draw.random() < 0.75) for _ in range(length)]))
    return batch


def ragged(lists, dtype=torch.float64):
    """The lists one after the other."""
    return torch.tensor([x for values in lists for x in values], dtype=dtype)


def offsets_of(batch):
    """int64 (N + 1)."""
    return torch.tensor([0, *(len(mask) for _, _, mask in batch)]).cumsum(0)


def padded(lists, fill=0.0, width=None, dtype=torch.float64):
    """(N, longest or width), filled up at the end."""
    width = max([len(values) for values in lists], default=0) if width is None else width
    rows = [[*values, *[fill] * (width - len(values))] for values in lists]
    return torch.tensor(rows, dtype=dtype).reshape(len(lists), width)


def unpadded(tensor, batch):
    """A padded result in ragged form."""
    return torch.cat([tensor[i, : len(mask)] for i, (_, _, mask) in enumerate(batch)])


def columns(batch):
    """(deltas, advantages, masks), each a list of lists."""
    return tuple([response[i] for response in batch] for i in range(3))


def as_ragged(batch, dtype=torch.float64):
    """(delta, advantages, mask) and offsets."""
    deltas, advantages, masks = columns(batch)
    tensors = ragged(deltas, dtype), ragged(advantages, dtype), ragged(masks, torch.bool)
    return tensors, offsets_of(batch)


def as_padded(batch, dtype=torch.float64, fill=0.0, width=None):
    deltas, advantages, masks = columns(batch)
    return (
        padded(deltas, fill, width, dtype),
        padded(advantages, fill, width, dtype),
        padded(masks, 0, width, torch.bool),
    )


def one_segment(gap, deep=(), advantage=-1.0, width=64):
    """A response of one segment: mean gap as given, with some tokens at the deep values."""
    rest = (gap * width - sum(deep)) / (width - len(deep))
    delta = [*deep, *[rest] * (width - len(deep))]
    return [(delta, [advantage] * width, [1] * width)]

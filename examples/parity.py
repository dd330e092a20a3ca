"""Sample with SGLang's own engine, score with the learner, and count log-probabilities that differ.

    python examples/parity.py --model moe --profile sglang_det_bf16 --attention triton
    python examples/parity.py --model path/to/Qwen3 --profile sglang_minite_nvfp4 --updates 20
    torchrun --nproc-per-node 2 examples/parity.py --sampler tp2

One GPU, or two for a sampler of two ranks (with torchrun the learner has two as well); SGLang >= 0.5.23
installed beside this package. --model names random weights (moe and dense are small, wide and wide_dense
have layers of Qwen3-30B-A3B's and Qwen3-1.7B's shape) or a Qwen3 checkpoint.
The engine runs unmodified, in processes of its own; the learner is a Megatron GPTModel under
`deterministic: PROFILE`, and for comparison the same model without it. Then the learner takes steps of
Megatron's optimizer on what was sampled and sends its weights to the engine: after every one the gap is
counted anew.
Exit status 1 where any log-probability of the profile differs. Writes --out.
"""

import argparse
import importlib.util
import json
import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import parity_model
import torch
import yaml
from parity_learner import Learner, Samples, Trainer

from megatron_nvfp4.deterministic.model import run_facts
from megatron_nvfp4.deterministic.profiles import (
    PROFILES,
    UNQUANTIZED,
    Profile,
    SamplerRanks,
    require,
)

# What the profiles ask of SGLang's environment (doctor --sampler checks it).
ENVIRONMENT = {
    "SGLANG_ENABLE_JIT_DEEPGEMM": "0",
    "SGLANG_BATCH_INVARIANT_OPS_ENABLE_MM_DEEPGEMM": "0",
}

TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
PROMPT_LENGTHS = (5, 18, 33, 64, 129, 257, 300, 520, 600, 1100)


@dataclass(frozen=True)
class Gap:
    """How far log-probabilities of one list are from those of another."""

    tokens: int
    unequal: int
    largest: float
    mean: float

    @classmethod
    def of(cls, found: torch.Tensor, wanted: torch.Tensor) -> "Gap":
        distance = (found.double() - wanted.double()).abs()
        unequal = int((found != wanted).sum())
        return cls(found.numel(), unequal, float(distance.max()), float(distance.mean()))

    def __str__(self) -> str:
        return (
            f"{self.unequal} of {self.tokens} differ, max {self.largest:.3g}, mean {self.mean:.3g}"
        )


def _nccl_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}


class Sampler:
    """SGLang's Engine, started as the profile asks."""

    def __init__(self, model: Path, profile: Profile, args: argparse.Namespace) -> None:
        import sglang

        settings = {name: True if v == "true" else v for name, v in profile.sampler}
        more = [pair.partition("=") for pair in args.engine]
        ranks = SamplerRanks.parse(args.sampler)
        for name in [n for n in os.environ if n in TORCHRUN or n.startswith("TORCHELASTIC_")]:
            del os.environ[name]  # the engine's processes are another world
        # The engine sets more of NCCL's for its processes; those of a learner's two ranks must agree.
        nccl = _nccl_variables()
        self.engine = sglang.Engine(
            model_path=str(model),
            attention_backend=args.attention,
            tp_size=ranks.tensor_parallel,
            ep_size=ranks.expert_parallel,
            skip_tokenizer_init=True,
            disable_cuda_graph=not args.cuda_graph,
            context_length=args.context,
            max_running_requests=args.running,
            max_total_tokens=args.running * args.context,
            mem_fraction_static=args.memory,
            chunked_prefill_size=-1,
            random_seed=7,
            log_level="warning",
            **settings,
            **{name: yaml.safe_load(value) for name, _, value in more},
        )
        for name in _nccl_variables():
            del os.environ[name]
        os.environ |= nccl

    def sample(
        self, prompts: list[list[int]], num_tokens: int, temperature: float, rescore: bool
    ) -> Samples:
        """Responses of `num_tokens` tokens to every prompt, and with `rescore` their prefilled log-probs.

        RuntimeError where the engine dropped and recomputed keys: the learner cannot know which.
        """
        settings = [
            {
                "temperature": temperature,
                "max_new_tokens": num_tokens,
                "ignore_eos": True,
                "sampling_seed": number,
            }
            for number in range(len(prompts))
        ]
        replies = self.engine.generate(
            input_ids=prompts, sampling_params=settings, return_logprob=True
        )
        infos = [reply["meta_info"] for reply in replies]
        if any(info.get("num_retractions") for info in infos):
            raise RuntimeError("the engine retracted requests; lower --running or raise --memory")
        scored = [info["output_token_logprobs"] for info in infos]
        responses = [[token for _, token, *_ in each] for each in scored]
        values = torch.tensor([value for each in scored for value, *_ in each])
        found = self._rescored(prompts, responses) if rescore else None
        return Samples(prompts, responses, values, temperature, found)

    def _rescored(self, prompts: list[list[int]], responses: list[list[int]]) -> torch.Tensor:
        self.flush()
        replies = self.engine.generate(
            input_ids=[[*p, *r] for p, r in zip(prompts, responses, strict=True)],
            sampling_params={"temperature": 1.0, "max_new_tokens": 1, "ignore_eos": True},
            return_logprob=True,
            logprob_start_len=0,
        )
        values = []
        for reply, response in zip(replies, responses, strict=True):
            values += reply["meta_info"]["input_token_logprobs"][-len(response) :]
        return torch.tensor([value for value, *_ in values])

    def flush(self) -> None:
        """Forget the keys of earlier requests; just after a reply the engine may still say no."""
        for _ in range(100):
            if getattr(self.engine.flush_cache(), "success", True):
                return
            time.sleep(0.05)
        raise RuntimeError("the engine does not flush its cache: requests are pending")

    def update(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        """Take new weights, under Hugging Face's names."""
        self.flush()
        self.engine.begin_weight_update()
        self.engine.update_weights_from_tensor(weights)
        self.engine.end_weight_update()


def new_prompts(args: argparse.Namespace, vocab_size: int, count: int) -> list[list[int]]:
    """Random tokens, in lengths from 5 to what leaves room for the response."""
    drawn = random.Random(args.seed)
    room = args.context - args.tokens - 1
    lengths = [n for n in PROMPT_LENGTHS if n <= room]
    return [
        [drawn.randrange(2, vocab_size) for _ in range(lengths[number % len(lengths)])]
        for number in range(count)
    ]


def checkpoint_folder(args: argparse.Namespace) -> Path:
    """The folder of --model; where that names random weights, the folder they belong in."""
    if args.model in parity_model.SIZES:
        return args.out.parent / f"{args.model}-{args.weights}-{args.seed}"
    folder = Path(args.model)
    if not (folder / "config.json").is_file():
        names = ", ".join(parity_model.SIZES)
        sys.exit(
            f"error: --model {args.model}: no config.json there; give a checkpoint, or {names}"
        )
    return folder


def write_checkpoint(args: argparse.Namespace, folder: Path) -> None:
    """The random weights of --model, where it names such."""
    if args.model not in parity_model.SIZES:
        return
    config = parity_model.SIZES[args.model]
    device = "cuda" if args.model.startswith("wide") else "cpu"
    weights = parity_model.random_weights(config, args.seed, device)
    if args.weights == "outliers":
        weights = parity_model.with_outliers(weights)
    parity_model.write_checkpoint(folder, config, weights)


def config_of(args: argparse.Namespace, folder: Path) -> dict:
    """The model's config.json, read or about to be written."""
    if args.model in parity_model.SIZES:
        return parity_model.SIZES[args.model]
    return json.loads((folder / "config.json").read_text())


def argument_faults(args: argparse.Namespace, profile: Profile, config: dict) -> list[str]:
    """What would fail minutes later, when the engine stands."""
    found = []
    for name in ("responses", "tokens", "update_responses", "update_tokens", "context", "running"):
        if getattr(args, name) < 1:
            found.append(f"--{name.replace('_', '-')} {getattr(args, name)}: give 1 or more")
    longest = max(args.tokens, args.update_tokens) + PROMPT_LENGTHS[0] + 1
    if args.context < longest:
        found.append(f"--context {args.context}: prompts and responses need {longest}; give more")
    if args.updates < 0:
        found.append(f"--updates {args.updates}: give 0 or more")
    found += [f"--temperatures {t}: give more than 0" for t in args.temperatures if not t > 0]
    found += [f"--engine {p}: give NAME=VALUE" for p in args.engine if not p.partition("=")[2]]
    if args.out.is_dir():
        found.append(f"--out {args.out}: a folder; give a file")
    if args.exported and (args.updates or profile.experts == UNQUANTIZED):
        found.append("--exported: give an NVFP4 profile, and no --updates, which come in BF16")
    if importlib.util.find_spec("sglang") is None:
        found.append("sglang is not installed beside this package; install 0.5.23 or later")
    try:
        ranks = SamplerRanks.parse(args.sampler)
        need, learner = ranks.tensor_parallel, int(os.environ.get("WORLD_SIZE", "1"))
        num_gpus = torch.cuda.device_count()
        require(profile, run_facts(config, args.attention, "cuda" if num_gpus else "cpu", ranks))
        if num_gpus < need:
            found.append(f"--sampler {ranks}: {num_gpus} of {need} GPUs are here")
        if learner not in (1, need):
            found.append(f"{learner} processes of torchrun: give 1, or {need} as --sampler {ranks}")
    except ValueError as error:
        found.append(str(error))
    return found


def exported(args: argparse.Namespace, profile: Profile, folder: Path) -> Path:
    """The checkpoint in ModelOpt's NVFP4 format, quantised where the profile is."""
    out = args.out.parent / "exported"
    command = [sys.executable, "-m", "megatron_nvfp4", "export-nvfp4", "--format", "modelopt"]
    places = ["--in", folder, "--out", out, "--policy", ordinary_policy(args, profile)]
    subprocess.run([*command, "--force", *places], check=True)
    return out


def ordinary_policy(args: argparse.Namespace, profile: Profile) -> Path:
    """A policy file that quantises what the profile does."""
    path = args.out.parent / f"{profile.name}.yaml"
    rule = "layers: [{match: '**.experts.**', recipe: nvfp4_per_token}]"
    path.write_text(f"recipe: bf16\n{'' if profile.experts == UNQUANTIZED else rule}\n")
    return path


def start_megatron() -> None:
    """The processes of torchrun share the learner by tensor parallelism; without it one is the world."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    rank, size = (
        int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1))
    )
    torch.cuda.set_device(rank)
    if size == 1:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "RANK": "0", "WORLD_SIZE": "1"}
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
    else:
        torch.distributed.init_process_group("nccl")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    model_parallel_cuda_manual_seed(1)


def shared(make):
    """What `make` gives on the first rank, on all of them."""
    found = [make() if torch.distributed.get_rank() == 0 else None]
    torch.distributed.broadcast_object_list(found, src=0)
    return found[0]


def main() -> int:
    args = parse_arguments()
    profile = PROFILES[args.profile]
    folder = checkpoint_folder(args)
    faults = argument_faults(args, profile, config_of(args, folder))
    if faults:
        sys.exit("\n".join(f"error: {fault}" for fault in faults))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    os.environ |= ENVIRONMENT
    start_megatron()
    is_first, sampler = torch.distributed.get_rank() == 0, None
    if is_first:
        write_checkpoint(args, folder)
        loaded = exported(args, profile, folder) if args.exported else folder
        sampler = Sampler(loaded, profile, args)
    torch.distributed.barrier()
    try:
        record = measure(args, profile, folder, sampler)
    finally:
        if is_first:
            sampler.engine.shutdown()
    gaps = [line["profile"] for line in record["lines"]]
    wrong, total = (sum(gap[name] for gap in gaps) for name in ("unequal", "tokens"))
    if is_first:
        args.out.write_text(json.dumps(record, indent=1))
        print(
            f"{args.profile}, {args.attention}: {wrong} of {total} log-probabilities differ; {args.out}"
        )
    return 1 if wrong else 0


def measure(
    args: argparse.Namespace, profile: Profile, folder: Path, sampler: Sampler | None
) -> dict:
    """All comparisons, as plain data. sampler: of the first rank."""
    learner = Learner(
        folder,
        args.context,
        deterministic=args.profile,
        deterministic_attention=args.attention,
        deterministic_sampler=args.sampler,
    )
    lines = []
    vocab_size = learner.model.vocab_size

    def say(text: str) -> None:
        if torch.distributed.get_rank() == 0:
            print(text, flush=True)

    def compare(stage: str, samples: Samples, ordinary: Learner | None = None) -> None:
        with torch.no_grad():
            started = time.perf_counter()
            gap = Gap.of(learner.logprobs(samples).cpu(), samples.logprobs)
            seconds = time.perf_counter() - started
            line = {"stage": stage, "temperature": samples.temperature, "profile": vars(gap)}
            line["longest"] = max(
                len(p) + len(r) for p, r in zip(samples.prompts, samples.responses, strict=True)
            )
            say(f"{stage}: {gap} ({seconds:.1f} s)")
            if samples.rescored is not None:
                again = Gap.of(samples.rescored, samples.logprobs)
                line["rescored"] = vars(again)
                say(f"  the engine's own prefill: {again}")
            if ordinary is not None:
                gap = Gap.of(ordinary.ordinary_logprobs(samples).cpu(), samples.logprobs)
                line["ordinary"] = vars(gap)
                say(f"  without the profile: {gap}")
        lines.append(line)

    prompts = new_prompts(args, vocab_size, args.responses)
    for temperature in args.temperatures:
        started = time.perf_counter()
        is_first = temperature == 1.0
        samples = shared(
            lambda t=temperature, r=is_first: sampler.sample(prompts, args.tokens, t, rescore=r)
        )
        say(f"sampled {samples.num_tokens} tokens in {time.perf_counter() - started:.1f} s")
        ordinary = None
        if is_first and not args.only_profile:
            ordinary = Learner(folder, args.context, config=ordinary_policy(args, profile))
        compare(f"T={temperature:g}", samples, ordinary)
        del ordinary
    if args.updates:
        update(args, learner, sampler, prompts, compare)
    versions = {name: __import__(name).__version__ for name in ("torch", "sglang", "triton")}
    gpu = torch.cuda.get_device_name()
    return {"gpu": gpu, **versions, **{k: str(v) for k, v in vars(args).items()}, "lines": lines}


def update(args, learner: Learner, sampler: Sampler, prompts: list, compare) -> None:
    """Steps of the optimizer, each followed by new weights for the engine and new samples from it."""
    trainer, prompts = Trainer(learner), prompts[: args.update_responses]

    def sample() -> Samples:
        return shared(lambda: sampler.sample(prompts, args.update_tokens, 1.0, rescore=False))

    samples = sample()
    drawn = torch.Generator().manual_seed(args.seed)
    for number in range(1, args.updates + 1):
        before = [parameter.detach().clone() for parameter in learner.model.parameters()]
        trainer.step(samples, torch.randn(len(prompts), generator=drawn))
        changed = sum(
            int((a != b).sum()) for a, b in zip(before, learner.model.parameters(), strict=True)
        ) / sum(parameter.numel() for parameter in before)
        del before
        weights = learner.weights()
        if sampler is not None:
            sampler.update(weights)
        samples = sample()
        compare(f"update {number} ({changed:.0%} of the weights changed)", samples)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    names = ", ".join(parity_model.SIZES)
    add("--model", default="moe", help=f"a Hugging Face checkpoint, or random weights: {names}")
    add("--weights", choices=("plain", "outliers"), default="plain", help="random weights' kind")
    add("--profile", choices=tuple(PROFILES), default="sglang_det_bf16")
    add("--attention", choices=("triton", "fa3"), default="triton")
    add("--sampler", default="tp1", help="the engine's ranks: tp1, tp2 or tp2ep2")
    add("--exported", action="store_true", help="let the engine load what export-nvfp4 writes")
    add("--only-profile", action="store_true", help="do not score without the profile")
    add("--responses", type=int, default=64, help="sequences sampled at each temperature")
    add("--tokens", type=int, default=64, help="of every response")
    add("--temperatures", type=float, nargs="+", default=[1.0, 0.8])
    add("--updates", type=int, default=0, help="optimizer steps with new weights for the engine")
    add("--update-responses", type=int, default=16)
    add("--update-tokens", type=int, default=64)
    add("--context", type=int, default=2048, help="tokens of the longest sequence")
    add("--running", type=int, default=64, help="requests the engine decodes at once")
    add("--memory", type=float, default=0.3, help="SGLang's mem_fraction_static")
    add("--cuda-graph", action="store_true", help="let the engine decode by CUDA graphs")
    add("--engine", nargs="*", default=[], metavar="NAME=VALUE", help="more arguments of Engine")
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=Path("runs/parity/parity.json"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

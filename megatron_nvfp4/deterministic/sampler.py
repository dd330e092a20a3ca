"""What a sampler must be started with, so that a profile holds: its environment and its command line.

Stdlib and recipes only. Reads text that the sampler's machine gave, never this process's environment.
Effects of the settings: SGLang 0.5.23, srt/environ.py, srt/arg_groups and srt/batch_invariant_ops.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import dropwhile, groupby, pairwise, takewhile

from .profiles import PROFILES, TREE, Profile, SamplerRanks, sampler_rank_faults

PLUGIN = "megatron_nvfp4"  # the name of our entry point in SGLang's group
# Variables that are to be 0: DeepGEMM's bits were not compared.
ZEROED = ("SGLANG_ENABLE_JIT_DEEPGEMM", "SGLANG_BATCH_INVARIANT_OPS_ENABLE_MM_DEEPGEMM")
# Arguments whose default, this value, is under deterministic inference the profile's.
DEFAULTED = {"sampling_backend": None, "dtype": "auto", "moe_runner_backend": "auto"}
# Second names that SGLang's parser has for arguments judged here.
ALIASES = {
    "model": "model_path",  # and no abbreviation of another
    "tensor_parallel_size": "tp_size",
    "expert_parallel_size": "ep_size",
    "ep": "ep_size",
    "pipeline_parallel_size": "pp_size",
    "decode_context_parallel_size": "dcp_size",
    "attention_data_parallel_size": "attn_dp_size",
    "attention_context_parallel_size": "attn_cp_size",
    "moe_data_parallel_size": "moe_dp_size",
}
# (argument, values that change nothing, why the sampler's bits are others with any other)
_OF_ANY_RANKS = (
    ("kv_cache_dtype", ("auto", "bfloat16", "bf16"), "keys and values are rounded again"),
    ("speculative_algorithm", (), "tokens are scored in other batches of rows"),
    ("enable_lora", ("false",), "adapters add other products"),
    ("lora_paths", (), "adapters add other products"),
    ("enable_fp32_lm_head", ("false",), "logits are not rounded to BF16"),
    ("enable_fused_moe_sum_all_reduce", ("false",), "slots are added as they come"),
    ("dcp_size", ("1",), "keys are spread over ranks"),
    ("pp_size", ("1",), "layers are spread over ranks"),
    ("moe_a2a_backend", ("none",), "experts' sums run elsewhere"),
    ("enable_torch_compile", ("false",), "a compiler fuses operators and leaves roundings out"),
    ("enable_fused_qk_norm_rope", ("false",), "heads are not rounded between norm and rotation"),
    ("bf16_gemm_backend", ("auto", "torch"), "products of few rows run in other kernels"),
    ("json_model_override_args", ("{}",), "the model is not its config.json's"),
    ("model_impl", ("auto", "sglang"), "the model has other operators"),
)
# (argument, values that change nothing, why the sum of two ranks is another with any other)
_OF_TWO_RANKS = (
    ("enable_symm_mem", ("false",), "sums run in other kernels"),
    ("enable_nccl_nvls", ("false",), "sums run in the switch"),
    ("enable_mscclpp", ("false",), "sums run in other kernels"),
    ("enable_quant_communications", ("false",), "partial sums are rounded to 8 bits"),
    ("enable_layernorm_sp", ("false",), "rows of the stream are spread over ranks"),
    ("enable_attn_tp_input_scattered", ("false",), "the residual is added before the sum"),
    ("enable_dp_attention", ("false",), "attention is whole on each rank"),
    ("attn_dp_size", ("1",), "attention is whole on each rank"),
    ("attn_cp_size", ("1",), "keys are spread over ranks"),
    ("moe_dp_size", ("1",), "experts are spread otherwise"),
    ("ep_num_redundant_experts", ("0",), "experts stand on other ranks"),
    ("enable_eplb", ("false",), "experts move between ranks"),
)
_VARIABLE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)")
_COMMENT = re.compile(r"(?:^|\s)#.*")
_PROMPT = re.compile(r"^\s*(?:\++|\$)\s+")  # of `set -x`, or of a shell
_ARRAY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\+?=\((.*)")
_OPERATORS = ";&|"
# Words of a shell before NAME=VALUE.
_DECLARING = ("export", "env", "declare", "-x", "then", "do", "else", "{")
# What starts a command without the shell's variables, but those named there.
_APART = frozenset({"docker", "podman", "nerdctl", "kubectl", "ssh", "sudo", "-i"})
_UNSET = re.compile(r"(?:-u|--unset=)(.+)")
_BARE = ("enable_", "disable_", "skip_", "trust_")  # such flags take no value
# slime and miles give SGLang's arguments with a prefix, and the number of ranks by another name.
_PREFIX, _PREFIXED_TP_SIZE = "sglang_", "rollout_num_gpus_per_engine"
_FALSE = ("0", "false", "no", "n")
_UNEXPANDED = "variables are not expanded here, write the command line as `set -x` prints it"
_BACKENDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
_RULES = (*_OF_ANY_RANKS, *_OF_TWO_RANKS)
_JUDGED = sorted(
    {"config", "quantization", "tp_size", "ep_size", "enable_mixed_chunk", *_BACKENDS, *ALIASES}
    | {name for profile in PROFILES.values() for name, _ in profile.sampler}
    | {name for name, _, _ in _RULES}
)


def canonical_name(flag: str) -> str:
    """SGLang's name of an argument `--flag`: aliases resolved, and abbreviations of what is judged here."""
    name = flag.replace("-", "_")
    if name not in _JUDGED:
        name = next((judged for judged in _JUDGED if judged.startswith(name)), name)
    return ALIASES.get(name, name)


@dataclass(frozen=True)
class SamplerSettings:
    """environment: by name; arguments: by SGLang's own name with underscores, "true" for a bare flag.

    places: lines of the environment's variables. unexpanded: words of the command that a shell would have
    replaced. in_container: whether the command starts one, which has no variables but those named there.
    """

    environment: Mapping[str, str]
    arguments: Mapping[str, str]
    places: Mapping[str, int] = field(default_factory=dict)
    unexpanded: tuple[str, ...] = ()
    in_container: bool = False

    @classmethod
    def parse(cls, text: str) -> "SamplerSettings":
        """From what `env` prints, NAME=VALUE a line, and the sampler's command line, in any order.

        Variables may also stand before the command, behind `export`, or behind -e of `docker run`; `unset`
        is honoured, a backslash continues a line. Of an argument given twice the last counts. In a file
        of slime's or miles' arguments those named --sglang-NAME are SGLang's, and no others. Raises
        ValueError for quotes that do not close, and for none or more than one command with arguments.
        """
        if "Engine(" in text:
            raise ValueError(
                "it holds an Engine in Python; write the Engine's arguments as flags, one line: "
                "--enable-deterministic-inference --attention-backend triton"
            )
        shell: dict[str, tuple[str, int]] = {}
        commands = []
        for number, line in _lines(text):
            for words in _simple_commands(line):
                command = _Command.of(number, words)
                if words[0] == "unset":
                    for name in words[1:]:
                        shell.pop(name, None)
                elif command.words:
                    commands.append(command)
                else:
                    shell |= command.variables
        return _the_samplers(commands).settings(shell)

    def not_judged(self) -> list[str]:
        """The arguments that `sampler_faults` knows nothing of, as flags."""
        return [_given(name) for name in self.arguments if name not in _JUDGED]


@dataclass(frozen=True)
class _Command:
    """One command of the file. words: those behind its variables, none where it only sets these.

    kind: "launch" of a server, "flags" alone, an "array" of a shell, or "other". variables: (value, line)
    by name. passed: names that its container takes over, None without one; dropped: those it unsets.
    """

    line: int
    words: tuple[str, ...]
    kind: str = "other"
    variables: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    passed: tuple[str, ...] | None = None
    dropped: tuple[str, ...] = ()
    arguments: tuple[tuple[str, str], ...] = ()
    unexpanded: tuple[str, ...] = ()

    @classmethod
    def of(cls, line: int, words: list[str]) -> "_Command":
        if array := _ARRAY.fullmatch(words[0]):
            words = [array[1], *words[1:]]
            words[-1] = words[-1].rstrip(")")
            return cls(line, tuple(words), "array", arguments=_arguments(words)[0])
        words = [*dropwhile(_DECLARING.__contains__, words)]
        assigned = [*takewhile(_VARIABLE.fullmatch, words)]
        words = words[len(assigned) :]
        server = _server(words)
        flags = (i for i, word in enumerate(words) if word.startswith("--"))
        start = next(flags, len(words)) if server is None else server + 1
        head = words[:start]
        arguments, unexpanded = _arguments(words[start:])
        names = [re.sub(r"^(?:-e|--env=)", "", word) for word in head if server is not None]
        found = [match for word in (*assigned, *names) if (match := _VARIABLE.fullmatch(word))]
        is_container = server is not None and any(n.rpartition("/")[2] in _APART for n in names)
        return cls(
            line=line,
            words=tuple(words),
            kind="launch" if server is not None else "other" if head else "flags",
            variables={match[1]: (match[2], line) for match in found},
            passed=tuple(names) if is_container else None,
            dropped=(
                *(name for option, name in pairwise(names) if option == "-u"),
                *(unset[1] for name in names if (unset := _UNSET.fullmatch(name))),
            ),
            arguments=arguments,
            unexpanded=unexpanded,
        )

    def settings(self, shell: Mapping[str, tuple[str, int]]) -> SamplerSettings:
        """Of the command, started from a shell with these variables."""
        names = shell.keys() if self.passed is None else shell.keys() & {*self.passed}
        variables = {name: shell[name] for name in shell if name in names - {*self.dropped}}
        variables |= self.variables
        return SamplerSettings(
            environment={name: value for name, (value, _) in variables.items()},
            arguments={canonical_name(name): value for name, value in self.arguments},
            places={name: line for name, (_, line) in variables.items()},
            unexpanded=self.unexpanded,
            in_container=self.passed is not None,
        )


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """(number of the first, line) with continued lines joined and prompts left out."""
    start, joined = 1, ""
    for number, line in enumerate(text.splitlines(), 1):
        start, joined = (start if joined else number), joined + line
        if joined.endswith("\\") and not joined.lstrip().startswith("#"):
            joined = joined[:-1] + " "
            continue
        yield start, _PROMPT.sub("", joined)
        joined = ""
    yield start, joined


def _simple_commands(line: str) -> list[list[str]]:
    """The words of each command in a line; a variable that `env` printed is one word."""
    printed = _VARIABLE.fullmatch(line.strip())
    lexer = shlex.shlex(_COMMENT.sub("", line), posix=True, punctuation_chars=_OPERATORS)
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        words = list(lexer)
    except ValueError as error:
        if printed:  # a value of `env`, which quotes nothing
            return [[line.strip()]]
        if "--" not in line:  # a part of a string of several lines
            return []
        raise ValueError(f"{error} in the line {line.strip()[:80]!r}; close the quotes") from error
    groups = groupby(words, lambda word: bool(word) and not word.strip(_OPERATORS))
    commands = [list(group) for is_operator, group in groups if not is_operator]
    is_set = all(_VARIABLE.fullmatch(word) for command in commands for word in command)
    is_run = _server(words) is not None or any(word.startswith("--") for word in words)
    if printed and not is_set and not is_run and not _ARRAY.match(words[0]):
        return [[line.strip()]]  # a value of `env` with spaces
    return commands


def _server(words: Sequence[str]) -> int | None:
    """The place of the word that names SGLang's server, None without one."""
    for place, (before, word) in enumerate(pairwise(["", *words])):
        is_serve = word == "serve" and before.endswith("sglang")
        if is_serve or word.removesuffix(".py").endswith("launch_server"):
            return place
    return None


def _arguments(words: Sequence[str]) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    """(name, value) of every flag, in order, and the words that a shell would have replaced by more."""
    found, unexpanded = [], []
    takes_value = False
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word[2:].partition("=")
            name = flag.replace("-", "_")
            if set(name) & set("$`{"):
                unexpanded.append(word)
            elif name:  # not the bare --
                found.append((name, value if equals else "true"))
            is_bare = (
                equals
                or not name
                or word in unexpanded
                or name.removeprefix(_PREFIX).startswith(_BARE)
            )
            takes_value = not is_bare
        elif takes_value:
            found[-1] = (found[-1][0], word)
            takes_value = False
        elif set(word) & set("$`"):
            unexpanded.append(word)
    return tuple(found), tuple(unexpanded)


def _the_samplers(commands: list[_Command]) -> _Command:
    """The one that starts the server; ValueError where none does, or more than one."""
    launches = [command for command in commands if command.kind == "launch"]
    # Others name the server too: pkill, grep.
    launches = [command for command in launches if command.arguments] or launches
    given = [command for command in commands if command.arguments]
    if not launches:
        given = _without_prefix(given)
    whole = launches or [command for command in given if command.kind == "other"]
    flags = [command for command in given if command.kind == "flags"]
    rivals = [*whole, *flags[:1]]
    if len(rivals) > 1:
        first, second = (f"line {c.line} ({' '.join(c.words)[:40]})" for c in rivals[:2])
        raise ValueError(f"arguments of two commands, in {first} and {second}; give one server's")
    if whole:
        return whole[0]
    if not given:
        raise ValueError(
            "no command line in it; add the sampler's, with its --arguments, to its environment"
        )
    return replace(
        given[0],
        arguments=tuple(argument for command in given for argument in command.arguments),
        unexpanded=tuple(word for command in given for word in command.unexpanded),
    )


def _without_prefix(commands: list[_Command]) -> list[_Command]:
    """Of slime's and miles' commands SGLang's arguments alone; others as they are."""
    if not any(name.startswith(_PREFIX) for c in commands for name, _ in c.arguments):
        return commands
    names = {_PREFIXED_TP_SIZE: "tp_size"}
    found = [
        replace(
            command,
            arguments=tuple(
                (names.get(name, name.removeprefix(_PREFIX)), value)
                for name, value in command.arguments
                if name in names or name.startswith(_PREFIX)
            ),
        )
        for command in commands
    ]
    return [command for command in found if command.arguments]


def _given(name: str, value: str | None = None) -> str:
    """An argument as a message names it."""
    flag = f"--{name.replace('_', '-')}"
    if value is None:
        return flag
    return f"{flag}={value}{_expansion(value)}"


def _expansion(value: str) -> str:
    return f" ({_UNEXPANDED})" if "$" in value else ""


def launch_command(profile: Profile, attention: str, ranks: SamplerRanks | str) -> str:
    """The variables and arguments that a sampler of the profile is started with."""
    ranks = SamplerRanks.parse(ranks)
    arguments = {name: right for name, right in profile.sampler if name not in DEFAULTED}
    arguments["attention_backend"] = attention
    if ranks.tensor_parallel > 1:
        arguments["tp_size"] = str(ranks.tensor_parallel)
    if ranks.expert_parallel > 1:
        arguments["ep_size"] = str(ranks.expert_parallel)
    words = [f"{name}=0" for name in ZEROED]
    words.append("python -m sglang.launch_server --model-path MODEL")
    for name, value in arguments.items():
        words.append(_given(name) if value == "true" else f"{_given(name)} {value}")
    return " ".join(words)


def sampler_faults(
    profile: Profile, settings: SamplerSettings, ranks: SamplerRanks | str = "tp1"
) -> list[str]:
    """Every setting under which the sampler's bits are not the profile's, each with its remedy.

    ranks: what the learner is told of the sampler, its deterministic_sampler.
    """
    return [
        *(f"{word} in the command line: {_UNEXPANDED}" for word in settings.unexpanded),
        *_argument_faults(profile, settings.arguments),
        *_variable_faults(profile, settings),
        *_parallel_faults(settings, SamplerRanks.parse(ranks)),
    ]


def _argument_faults(profile: Profile, arguments: Mapping[str, str]) -> list[str]:
    found = []
    for name, right in profile.sampler:
        value = arguments.get(name)
        if value is None and name not in DEFAULTED:
            wanted = _given(name) if right == "true" else f"{_given(name)} {right}"
            found.append(f"{_given(name)} is not given; give {wanted}")
        elif value not in (None, right, DEFAULTED.get(name)):
            found.append(f"{_given(name, value)}: {profile.name} has {right}; give that")
    attention = arguments.get("attention_backend")
    if attention not in profile.attention:
        name = "attention_backend"
        said = f"{_given(name)} is not given" if attention is None else _given(name, attention)
        found.append(f"{said}; give {' or '.join(profile.attention)}, and the learner the same")
    for name in ("quantization", "rl_on_policy_target"):
        if arguments.get(name) and name not in dict(profile.sampler):
            found.append(
                f"{_given(name, arguments[name])}: other kernels and roundings than {profile.name}'s; leave "
                "it out or choose another profile"
            )
    if "config" in arguments:
        found.append(
            f"{_given('config', arguments['config'])}: what it sets is unknown here; put its arguments "
            "themselves on the command line in the file"
        )
    rules = [(name, (attention,), "its order is not the learner's") for name in _BACKENDS[1:]]
    if attention == "triton":
        rules.append(("enable_mixed_chunk", ("false",), "decoded rows take a prompt's order"))
    return found + _refused(arguments, (*_OF_ANY_RANKS, *rules))


def _refused(
    arguments: Mapping[str, str], rules: Sequence[tuple[str, tuple[str | None, ...], str]]
) -> list[str]:
    """A fault for every (argument, harmless values, reason) that is given another value."""
    return [
        f"{_given(name, arguments[name])}: {reason}; leave it out"
        for name, harmless, reason in rules
        if name in arguments and arguments[name] not in harmless
    ]


def _variable_faults(profile: Profile, settings: SamplerSettings) -> list[str]:
    environment = settings.environment

    def said(name: str) -> str:
        value = environment[name]
        place = f" (line {settings.places[name]})" if name in settings.places else ""
        return f"{name} is {value!r}{place}{_expansion(value)}"

    found = []
    apart = "; docker, ssh, sudo and env -i hand over what they name, such as -e"
    by = apart if settings.in_container else "; set"
    for name in ZEROED:
        if name not in environment:
            found.append(f"{name} is not set: DeepGEMM's bits were not compared{by} {name}=0")
        elif environment[name].lower() not in _FALSE:
            found.append(f"{said(name)}: DeepGEMM's bits were not compared; give 0")
    tile = "SGLANG_TRITON_DECODE_SPLIT_TILE_SIZE"
    is_split = settings.arguments.get("attention_backend") == "triton"
    if is_split and environment.get(tile, "256") != "256":
        found.append(f"{said(tile)}: response rows are split elsewhere; unset it")
    original = "SGLANG_RETURN_ORIGINAL_LOGPROB"
    if environment.get(original, "0").lower() not in _FALSE:
        found.append(
            f"{said(original)}: log-probabilities are those before the temperature; unset it"
        )
    allowed = environment.get("SGLANG_PLUGINS")
    needs_plugin = "quantization" in dict(profile.sampler)
    if needs_plugin and allowed and PLUGIN not in allowed.split(","):
        found.append(f"{said('SGLANG_PLUGINS')} and leaves the plugin out; add {PLUGIN} to it")
    return found


def _parallel_faults(settings: SamplerSettings, told: SamplerRanks) -> list[str]:
    arguments = settings.arguments
    sizes = {name: arguments.get(name, "1") for name in ("tp_size", "ep_size")}
    both = " ".join(_given(name, size) for name, size in sizes.items())
    try:
        ranks = SamplerRanks.parse("tp{tp_size}ep{ep_size}".format(**sizes))
    except ValueError:
        return [f"{both}: give numbers"]
    found = sampler_rank_faults(ranks)
    if ranks != told and not found:
        found.append(
            f"{both}: the learner computes what a sampler of {told} does; give it deterministic_sampler: "
            f"{ranks} (here --sampler-ranks {ranks}), or start one of {told}"
        )
    if ranks.tensor_parallel > 1:
        algorithm = settings.environment.get("NCCL_ALGO", TREE)  # SGLang sets it where nobody did
        if algorithm != TREE:
            found.append(
                f"NCCL_ALGO={algorithm} with {_given('tp_size', sizes['tp_size'])}: SGLang's deterministic "
                f"mode has {TREE}; unset it"
            )
        found += _refused(arguments, _OF_TWO_RANKS)
    return found

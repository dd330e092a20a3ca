"""A Chrome trace of torch.profiler, read into calls with step, module, class and cost.

On a GPU a call is one kernel or copy on a stream; on a CPU one operator, and its time is what no
operator inside it spent. The own time of autograd's nodes, Python's among them, is no operator's: it
shows as gaps. A call belongs to the innermost annotated module around its launch, in the backward to
the module whose forward made the graph's node (the flow `fwdbwd`: torch's autograd sequence numbers),
and to the step in whose window it began. Times are microseconds.
"""

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .kernel_costs import (
    CLASSES,
    COMMUNICATION,
    COMPUTATION,
    GAPS,
    OPTIMIZER,
    PREPARATION,
    Cost,
    classify,
    cost_of,
    is_library_operator,
)

# Names of the annotations that profile.py records.
STEP_MARK, MODULE_MARK, OPTIMIZER_MARK = "minite.step ", "minite.module ", "minite.optimizer"
WHOLE_MODEL, OUTSIDE, ACCUMULATION = "(model)", "(outside modules)", "(gradient accumulation)"

# Where streams overlap, the first that runs has the time: what is hidden behind computation costs nothing.
_PRECEDENCE = (COMPUTATION, OPTIMIZER, PREPARATION, COMMUNICATION)
_NODE = "autograd::engine::evaluate_function: "
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHING = ("cuda_runtime", "cuda_driver")
_ON_HOST = ("cpu_op", "user_annotation", *_LAUNCHING)


@dataclass(slots=True)
class Call:
    """One kernel on a device, or one operator on a CPU.

    intervals: where its own time lies; launched: when the host had issued it, None if unknown and
    on a CPU; gap: idle time that ended with its beginning.
    """

    name: str
    operator: str
    module: str
    phase: str
    kind: str
    intervals: list[tuple[float, float]]
    launched: float | None = None
    cost: Cost = field(default_factory=Cost)
    gap: float = 0.0

    @property
    def begin(self) -> float:
        return self.intervals[0][0]

    @property
    def time(self) -> float:
        return sum(end - begin for begin, end in self.intervals)


@dataclass(slots=True)
class Gap:
    """Idle device time; host_bound: the part before the next call had been issued."""

    begin: float
    end: float
    host_bound: float


@dataclass(slots=True)
class Step:
    """One training step: its window, its calls, its gaps, and the window's time divided among CLASSES."""

    number: int
    begin: float
    end: float
    calls: list[Call]
    gaps: list[Gap]
    shares: dict[str, float]

    @property
    def time(self) -> float:
        return self.end - self.begin

    @property
    def gap(self) -> float:
        return sum(gap.end - gap.begin for gap in self.gaps)

    @property
    def host_bound(self) -> float:
        return sum(gap.host_bound for gap in self.gaps)


@dataclass(slots=True)
class _Host:
    """An event of a host thread and what holds inside it."""

    event: dict
    begin: float
    end: float
    parent: "_Host | None"
    operator: "_Host | None" = None
    module: str = OUTSIDE
    phase: str = "other"
    inner: list[tuple[float, float]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.event["name"]


def read_steps(events: Iterable[dict]) -> list[Step]:
    """The annotated steps of a trace's `traceEvents`, in order; without annotations there are none."""
    complete, flows, windows = [], [], []
    for event in events:
        if event.get("ph") == "X":
            complete.append(event)
        elif event.get("cat") == "fwdbwd":
            flows.append(event)
    hosts = _nest(complete, flows)
    for host in hosts:
        if host.event["cat"] == "user_annotation" and host.name.startswith(STEP_MARK):
            windows.append((int(host.name.removeprefix(STEP_MARK)), host.begin, host.end))
    on_device = [event for event in complete if event.get("cat") in _ON_DEVICE]
    calls = _device_calls(on_device, hosts) if on_device else _host_calls(hosts)
    calls.sort(key=lambda call: call.begin)
    return [
        step_of(number, begin, end, [call for call in calls if begin <= call.begin < end])
        for number, begin, end in sorted(windows)
    ]


def step_of(number: int, begin: float, end: float, calls: list[Call]) -> Step:
    """A step from its calls, sorted by begin; writes each call's gap."""
    pieces = [
        (max(first, begin), min(last, end), call)
        for call in calls
        for first, last in call.intervals
        if first < end and last > begin
    ]
    pieces.sort(key=lambda piece: piece[0])
    gaps = find_gaps(begin, end, pieces)
    return Step(number, begin, end, calls, gaps, divide(begin, end, pieces))


def find_gaps(begin: float, end: float, pieces: Sequence[tuple[float, float, Call]]) -> list[Gap]:
    """Times within [begin, end] in which none of the pieces, sorted by begin, runs; writes each call's gap.

    The host is to blame for a gap until it has issued the call that ends it; for the whole of a gap
    on a CPU, of one whose call has an unknown launch, and of the last one, which no call ends.
    """
    gaps, until = [], begin
    for first, last, call in pieces:
        if first > until:
            issued = first if call.launched is None else call.launched
            gaps.append(Gap(until, first, min(max(issued - until, 0.0), first - until)))
            call.gap += first - until
        until = max(until, last)
    if end > until:
        gaps.append(Gap(until, end, end - until))
    return gaps


def divide(
    begin: float, end: float, pieces: Iterable[tuple[float, float, Call]]
) -> dict[str, float]:
    """The time of [begin, end] by class; it sums to end - begin, for no moment counts twice."""
    changes = sorted(
        change
        for first, last, call in pieces
        for change in ((first, 1, call.kind), (last, -1, call.kind))
    )
    running = dict.fromkeys(_PRECEDENCE, 0)
    shares = dict.fromkeys(CLASSES, 0.0)
    now = begin
    for time, change, kind in changes:
        shares[next((k for k in _PRECEDENCE if running[k]), GAPS)] += time - now
        running[kind] += change
        now = time
    shares[GAPS] += end - now
    return shares


def collapse(module: str) -> str:
    """A module's name with its numbers as *: one row for all layers."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", module)


def _nest(complete: list[dict], flows: list[dict]) -> list[_Host]:
    """The hosts' events in the order of their begins, each with what it inherits from those around it."""
    starts = {flow["id"]: (flow["tid"], flow["ts"]) for flow in flows if flow["ph"] == "s"}
    made_by = {
        (flow["tid"], flow["ts"]): starts[flow["id"]]
        for flow in flows
        if flow["ph"] == "f" and flow["id"] in starts
    }
    events = [event for event in complete if event.get("cat") in _ON_HOST]
    events.sort(key=lambda event: (event["ts"], -event["dur"]))
    hosts: list[_Host] = []
    stacks: dict[int, list[_Host]] = {}
    modules: dict[tuple[int, float], str] = {}
    for event in events:
        stack = stacks.setdefault(event["tid"], [])
        while stack and stack[-1].end <= event["ts"]:
            stack.pop()
        host = _inherit(event, stack[-1] if stack else None)
        place = (event["tid"], event["ts"])
        if place in made_by and host.phase == "backward" and event["cat"] == "cpu_op":
            host.module = modules.get(made_by[place], OUTSIDE)
            if host.parent is not None and host.parent.name.startswith(_NODE):
                host.parent.module = host.module  # sums and hooks behind the node's own function
        if event["cat"] == "cpu_op":
            modules[place] = host.module
        stack.append(host)
        hosts.append(host)
    return hosts


def _inherit(event: dict, parent: _Host | None) -> _Host:
    end = event["ts"] + event["dur"]
    if parent is not None:
        end = min(end, parent.end)  # clocks of nested events are rounded apart
    host = _Host(event, event["ts"], end, parent)
    if parent is not None:
        host.operator, host.module, host.phase = parent.operator, parent.module, parent.phase
    name = event["name"]
    if event["cat"] == "cpu_op":
        host.operator = host
        if name.startswith(_NODE):
            host.phase = "backward"
            host.module = ACCUMULATION if name.endswith("AccumulateGrad") else OUTSIDE
        _exclude_from(parent, host)
    elif name.startswith(MODULE_MARK):
        host.module = name.removeprefix(MODULE_MARK)
        if host.phase == "other":
            host.phase = "forward"
    elif name == OPTIMIZER_MARK:
        host.phase = "optimizer"
    return host


def _exclude_from(parent: _Host | None, host: _Host) -> None:
    """Take an operator's time out of the operator around it, through annotations in between."""
    around = parent.operator if parent is not None else None
    if around is not None:
        around.inner.append((host.begin, host.end))


def _host_calls(hosts: list[_Host]) -> list[Call]:
    calls = []
    for host in hosts:
        if host.event["cat"] == "cpu_op" and is_library_operator(host.name):
            intervals = _own_intervals(host)
            if intervals:
                calls.append(_call(host.name, host, intervals))
                calls[-1].cost = _cost(host)
    return calls


def _own_intervals(host: _Host) -> list[tuple[float, float]]:
    """[begin, end] without the operators inside."""
    own, now = [], host.begin
    for begin, end in host.inner:
        if begin > now:
            own.append((now, begin))
        now = end
    if host.end > now:
        own.append((now, host.end))
    return own


def _device_calls(events: list[dict], hosts: list[_Host]) -> list[Call]:
    launches = {
        host.event["args"]["correlation"]: host
        for host in hosts
        if host.event["cat"] in _LAUNCHING and "correlation" in host.event.get("args", {})
    }
    calls, by_operator = [], {}
    for event in events:
        args = event.get("args", {})
        launch = launches.get(args.get("correlation"))
        interval = (event["ts"], event["ts"] + event["dur"])
        call = _call(event["name"], launch, [interval])
        call.launched = launch.end if launch is not None else None
        if event["cat"] != "kernel":
            # A copy within the device reads and writes there; others touch its memory once.
            passes = 2 if "DtoD" in event["name"] else 1
            call.cost = Cost(bytes=passes * args["bytes"] if "bytes" in args else None)
        elif launch is not None and launch.operator is not None:
            by_operator.setdefault(id(launch.operator), (launch.operator, []))[1].append(call)
        calls.append(call)
    for operator, kernels in by_operator.values():
        # The figures are the operator's; the kernel that takes longest does the work.
        max(kernels, key=lambda call: call.time).cost = _cost(operator)
    return calls


def _call(name: str, host: _Host | None, intervals: list[tuple[float, float]]) -> Call:
    if host is None:  # launched before the trace began
        return Call(name, "", OUTSIDE, "other", classify(name, None, in_optimizer=False), intervals)
    operator = host.operator.name.removeprefix(_NODE) if host.operator is not None else ""
    kind = classify(name, operator or None, in_optimizer=host.phase == "optimizer")
    return Call(name, operator, host.module, host.phase, kind, intervals)


def _cost(operator: _Host) -> Cost:
    args = operator.event.get("args", {})
    fields = [args.get(key) for key in ("Input Dims", "Input type", "Concrete Inputs")]
    return Cost() if None in fields else cost_of(operator.name, *fields)


@dataclass(slots=True)
class Row:
    """Sums over calls that agree in kernel, operator, module, phase and class.

    *_time: the time of those calls whose bytes or FLOPs are known.
    """

    kernel: str
    operator: str
    module: str
    phase: str
    kind: str
    calls: int = 0
    time: float = 0.0
    gap: float = 0.0
    bytes: int = 0
    bytes_time: float = 0.0
    flops: int = 0
    flops_time: float = 0.0

    @property
    def gb_per_s(self) -> float | None:
        return self.bytes / self.bytes_time / 1e3 if self.bytes_time else None

    @property
    def tflop_per_s(self) -> float | None:
        return self.flops / self.flops_time / 1e6 if self.flops_time else None


def tabulate(calls: Iterable[Call], *, by_module: bool = True) -> list[Row]:
    """Rows by falling time, all layers in one; without by_module, all modules and phases too."""
    rows: dict[tuple, Row] = {}
    for call in calls:
        place = (collapse(call.module), call.phase) if by_module else ("", "")
        key = (call.name, call.operator, *place, call.kind)
        row = rows.setdefault(key, Row(*key))
        row.calls += 1
        row.time += call.time
        row.gap += call.gap
        if call.cost.bytes is not None:
            row.bytes, row.bytes_time = row.bytes + call.cost.bytes, row.bytes_time + call.time
        if call.cost.flops is not None:
            row.flops, row.flops_time = row.flops + call.cost.flops, row.flops_time + call.time
    return sorted(rows.values(), key=lambda row: -row.time)


def calls_of(steps: Iterable[Step]) -> list[Call]:
    """The calls of all steps."""
    return list(itertools.chain.from_iterable(step.calls for step in steps))

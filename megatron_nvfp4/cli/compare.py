"""The verb `compare`: the first operator whose outputs differ between two dumps."""

import json
from pathlib import Path


def compare(
    left: str | Path,
    right: str | Path,
    *,
    html: str | Path | None = None,
    json_file: str | Path | None = None,
    common: bool = False,
    replay: bool = False,
) -> int:
    """Print the first difference of two dumps; 0 where there is none, else 1.

    left, right: a capture (--minite-capture), SGLang's tensor dump, or a file of deterministic.capture,
    which is compared with another such file or with SGLang's dump.
    html, json_file: also written there. common: what one side lacks, or cannot be compared, is no
    difference. replay: also run captured inputs through captured weights.
    ValueError where they are no dumps or have nothing in common, FileNotFoundError where one is missing.
    """
    from megatron_nvfp4.diagnostics import compare_replay, compare_report
    from megatron_nvfp4.diagnostics.compare import compare_sides
    from megatron_nvfp4.diagnostics.compare_html import page
    from megatron_nvfp4.diagnostics.compare_sides import read_sides

    from .whole_file import check_outputs, write_whole

    outputs = {"--html": html, "--json": json_file}
    inputs = [file for side in (left, right) for file in (Path(side), *Path(side).rglob("*"))]
    check_outputs({name: path and Path(path) for name, path in outputs.items()}, inputs)
    comparison = compare_sides(*read_sides(left, right, _megatron_name))
    replays, reasons = compare_replay.replay(comparison, _product) if replay else ([], {})
    for line in compare_report.text(comparison, replays, reasons, common):
        print(line)
    if html is not None:
        write_whole(html, page(comparison, replays, reasons))
    if json_file is not None:
        data = compare_report.as_data(comparison, replays, reasons)
        write_whole(json_file, json.dumps(data, indent=1, allow_nan=False) + "\n")
    return 0 if compare_report.same(comparison, common) else 1


def _megatron_name(name: str) -> str | None:
    """Megatron's name of SGLang's module; the experts as a whole, and the router."""
    from megatron_nvfp4.rollout.method import layer_name

    if name.endswith(".mlp.gate"):
        return f"decoder.{name.removeprefix('model.').removesuffix('gate')}router"
    found = layer_name(name)
    return found.removesuffix(".linear_fc1") if found and name.endswith(".experts") else found


def _product(x, weight, offsets, formats, dtype):
    """A linear's product by the backend that would train on this machine's CPU; see compare_replay."""
    from megatron_nvfp4 import backends

    num_groups = len(offsets) - 1
    op = "gemm" if num_groups == 1 else "grouped_gemm"
    shape = (x.shape[0], weight.shape[0] // num_groups, x.shape[1])
    backend = backends.select(
        op, formats, shape=shape, device=x.device, dtype=dtype, backend="auto"
    )
    if hasattr(weight, "codes"):
        weight = backend.pack_weights(weight, num_groups)
    else:
        weight = weight.view(num_groups, -1, weight.shape[1])
    if num_groups == 1:
        return backend.gemm(x, weight, out_dtype=dtype)
    return backend.grouped_gemm(x, weight, offsets, out_dtype=dtype)

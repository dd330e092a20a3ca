"""The verb `diagnose`: whether the gap between learner and sampler in some dumps is sound."""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import TextIO


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's own arguments."""
    # Words that argparse takes for negative numbers, not for options: -1e-3 and -inf, too.
    parser._negative_number_matcher = re.compile(r"-[.\d]|-inf")
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="dump of slime, miles, NeMo-RL, TRIAGE, or mismatch/1",
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        type=Path,
        help="write the JSON there and a table to standard output",
    )
    parser.add_argument(
        "--html", metavar="FILE", type=Path, help="write a page that loads nothing from elsewhere"
    )
    parser.add_argument(
        "--tau-ana",
        default="auto",
        metavar="X",
        help="gap below which a token is a tail; auto: 5 %% quantile of the first window",
    )
    parser.add_argument("--window", type=int, default=25, metavar="N", help="steps of a window")
    parser.add_argument("--tis-cap", type=float, default=2.0, metavar="C", help="default: 2")
    parser.add_argument("--seed", type=int, default=0, help="of resamples and shuffles")


def main(options: argparse.Namespace) -> int:
    """Diagnose and write; 0 where the gap is sound, 1 where a check failed or something was found.

    The JSON goes to --json or to standard output; the table to standard output beside --json, else to a
    terminal on standard error. ValueError and OSError for options and files that cannot be used.
    """
    from megatron_nvfp4.diagnostics.mismatch import Settings
    from megatron_nvfp4.diagnostics.readers import files, read
    from megatron_nvfp4.diagnostics.report import diagnose

    from .whole_file import check_outputs, write_whole

    settings = Settings(
        tau_ana=_tau(options.tau_ana),
        window=options.window,
        tis_cap=options.tis_cap,
        seed=options.seed,
    )
    check_outputs({"--json": options.json, "--html": options.html}, files(options.paths))
    diagnosis, gaps = diagnose(read(options.paths), settings)
    text = json.dumps(diagnosis, indent=2, allow_nan=False)
    if options.html:
        from megatron_nvfp4.diagnostics.report_html import page

        write_whole(options.html, page(diagnosis, gaps))
    if options.json:
        write_whole(options.json, text + "\n")
        _show(diagnosis, sys.stdout)
    else:
        print(text)
        if sys.stderr.isatty():
            _show(diagnosis, sys.stderr)
    return 0 if diagnosis["verdict"] == "sound" else 1


def _tau(text: str) -> float | None:
    if text == "auto":
        return None
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"--tau-ana {text}: give a number below 0, or auto") from None


def _show(diagnosis: dict, stream: TextIO) -> None:
    """Tables for people: by rich on a terminal that has it, else columns."""
    from megatron_nvfp4.diagnostics.report_html import key_rows

    checks = [[each["name"], each["status"], each["found"]] for each in diagnosis["checks"]]
    tables = [("checks", checks)]
    if diagnosis["gap"] is not None:
        tables.append(("gap, 95 % intervals over resampled responses", key_rows(diagnosis)))
    if not (stream.isatty() and _show_rich(tables, stream)):
        for title, rows in tables:
            widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
            print(f"{title}:", file=stream)
            for row in rows:
                cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
                print("  " + "  ".join([*cells, row[-1]]), file=stream)
            print(file=stream)
    for finding in diagnosis["findings"]:
        print(f"found: {finding['text']}", file=stream)
    print(f"{diagnosis['verdict']}: {diagnosis['advice']}", file=stream)


def _show_rich(tables: list[tuple[str, list[list[str]]]], stream: TextIO) -> bool:
    """Print by rich; False where it is not installed."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        return False
    console = Console(file=stream)
    for title, rows in tables:
        table = Table(title=title, title_justify="left", show_header=False)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    return True

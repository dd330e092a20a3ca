"""The verb `compare`: the first operator whose outputs differ between two dumps."""

from pathlib import Path


def compare(left: str | Path, right: str | Path) -> int:
    """Print the first difference of two dumps of captured outputs; 0 where there is none, else 1.

    ValueError where they are no dumps or of different forwards, FileNotFoundError where one is missing.
    """
    from megatron_nvfp4.deterministic.parity import first_difference, load_dump

    dumps = [load_dump(path) for path in (left, right)]
    difference = first_difference(*dumps)
    if difference is None:
        print(f"compare: all {len(dumps[0])} outputs have the same bits")
        return 0
    place = f" at {list(difference.index)}" if difference.index is not None else ""
    print(f"compare: {difference.name} differs{place}: {difference.reason}")
    names = list(dumps[0])
    before = names.index(difference.name)
    if difference.num_unequal:
        print(f"  {difference.num_unequal} of {dumps[0][difference.name].numel()} values")
    print(
        f"  the {before} outputs before it are the same"
        + (f", last {names[before - 1]}" if before else "")
    )
    return 1

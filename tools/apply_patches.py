#!/usr/bin/env python3
"""Apply, check or revert the patches of patches/megatron-lm on a Megatron-LM tree.

The tree is a checkout or a directory that holds an installed or unpacked `megatron/` package.
Only the content of the files decides: a hunk is pending when the lines it expects are there exactly
once and the lines it leaves are not, applied in the opposite case, and otherwise unfit. So a failed
check is never taken for "already applied", and no hunk lands in a second place that looks alike.

Standard library only (containers with a wheel often have no git); Linux, because of the file lock.
It does not install megatron_nvfp4 and does not create or delete files.
"""

import argparse
import contextlib
import enum
import fcntl
import hashlib
import os
import re
import shutil
import sys
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PATCHES_ROOT = Path(__file__).resolve().parent.parent / "patches" / "megatron-lm"
STAGING = ".minite-patches"  # One name, so that the next run finds what a killed one left.


class Exit(enum.IntEnum):
    """Exit codes; the first word of the message tells the successful outcomes apart."""

    OK = 0
    USAGE = 2
    WRONG_REVISION = 3
    HALF_APPLIED = 4
    CORRUPT = 5
    IO_FAILURE = 6


EPILOG = """exit codes:
  0  applied, already applied, reverted, nothing to revert; check: applied, check: not applied
  2  usage, or DIR is not a Megatron-LM tree
  3  wrong revision: hunks do not fit and none is applied
  4  half applied: some hunks are applied and some are not
  5  corrupt: a patch file or a file of the tree is damaged
  6  I/O failure: nothing was changed, or what was changed was put back

Every file is verified before the first one is replaced, each file is replaced in one step, and a
failure puts back those already replaced. Only a kill between two replacements leaves a tree half
applied; the next run says so, and --revert then restores the original files bit for bit."""


class PatchError(Exception):
    """An outcome other than success: the exit code and the message for the user."""

    def __init__(self, code: Exit, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Hunk:
    """One hunk: the whole lines it expects (`before`) and those it leaves (`after`)."""

    label: str
    before: bytes
    after: bytes


@dataclass(frozen=True)
class FilePatch:
    """The hunks of one patch for one file, and git's blob ids of that file before and after."""

    patch: str
    path: str
    old_blob: str
    new_blob: str
    hunks: tuple[Hunk, ...]


@dataclass(frozen=True)
class PatchSet:
    """The patches of one Megatron-LM revision in their order."""

    name: str
    patches: tuple[str, ...]
    files: tuple[FilePatch, ...]

    def on(self, paths: Container[str]) -> list[FilePatch]:
        """Return the file patches for `paths`, in order."""
        return [part for part in self.files if part.path in paths]


@dataclass(frozen=True)
class Tree:
    """The touched files as they are: LF text, whether each is CRLF on disk, and what is missing."""

    root: Path
    texts: dict[str, bytes]
    crlf: frozenset[str]
    missing: tuple[str, ...]
    skipped: tuple[str, ...]


@dataclass(frozen=True)
class Status:
    """What a tree is with regard to one patch set.

    `kind` is "clean", "applied", "half" or "wrong"; `patched` and `original` are the texts to write
    for apply and for revert (None: that direction is not possible); `details` is for messages.
    """

    kind: str
    patches: PatchSet
    tree: Tree
    patched: dict[str, bytes] | None = None
    original: dict[str, bytes] | None = None
    details: list[str] = field(default_factory=list)


def load_patches(directory: Path) -> PatchSet:
    """Parse every NNNN-*.patch of `directory`; PatchError USAGE if there is none."""
    try:
        names = sorted(p.name for p in directory.glob("[0-9][0-9][0-9][0-9]-*.patch"))
        contents = [(name, to_lf((directory / name).read_bytes())[0]) for name in names]
    except OSError as error:
        raise PatchError(Exit.IO_FAILURE, f"cannot read the patches: {error}") from error
    if not names:
        raise PatchError(Exit.USAGE, f"{directory} holds no patch files (NNNN-name.patch)")
    files = [part for name, data in contents for part in parse_patch(name, data)]
    return PatchSet(directory.resolve().name, tuple(names), tuple(files))


FILE_HEADER = re.compile(
    rb"diff --git a/(?P<path>[^\n]+) b/(?P=path)\n"
    rb"index (?P<old>[0-9a-f]{40})\.\.(?P<new>[0-9a-f]{40}) 100[0-7]{3}\n"
    rb"--- a/(?P=path)\n\+\+\+ b/(?P=path)\n"
)
HUNK_HEADER = re.compile(rb"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@[^\n]*\n")


def parse_patch(name: str, data: bytes) -> list[FilePatch]:
    """Parse one patch that modifies text files; PatchError CORRUPT for anything else.

    The header's `Hunks:` count is checked, because a file cut between two hunks is still a
    well-formed patch.
    """
    header, *sections = re.split(rb"^(?=diff --git )", data, flags=re.MULTILINE)
    count = re.search(rb"^Hunks: (\d+)$", header, re.MULTILINE)
    if count is None:
        raise corrupt(name, 'its header has no "Hunks: N"')
    parts = []
    for section in sections:
        head, *bodies = re.split(rb"^(?=@@)", section, flags=re.MULTILINE)
        match = FILE_HEADER.fullmatch(head)
        if match is None:
            raise corrupt(name, f"not a file header with full blob ids: {head[:80]!r}")
        path = match["path"].decode("utf-8", "replace")
        if path.startswith("/") or ".." in path.split("/"):
            raise corrupt(name, f"{path} is outside the tree")
        labels = [f"{path} hunk {number} ({name})" for number in range(1, len(bodies) + 1)]
        hunks = tuple(map(parse_hunk, labels, bodies))
        parts.append(FilePatch(name, path, match["old"].decode(), match["new"].decode(), hunks))
    num_hunks = sum(len(part.hunks) for part in parts)
    if num_hunks != int(count[1]):
        raise corrupt(name, f"it has {num_hunks} hunks and its header says {int(count[1])}")
    return parts


def parse_hunk(label: str, data: bytes) -> Hunk:
    """Parse one hunk, which must have context on both sides; PatchError CORRUPT otherwise."""
    header = HUNK_HEADER.match(data)
    if header is None:
        raise corrupt(label, "not a hunk header")
    if not data.endswith(b"\n"):
        raise corrupt(label, "its last line is cut")
    # Editors strip the blank of an empty context line.
    lines = [line or b" " for line in data[header.end() :].split(b"\n")[:-1]]
    signs = b"".join(line[:1] for line in lines).decode("ascii", "replace")
    before = [line[1:] + b"\n" for line in lines if line[:1] in b" -"]
    after = [line[1:] + b"\n" for line in lines if line[:1] in b" +"]
    if not re.fullmatch(r" +[-+][-+ ]* ", signs):
        raise corrupt(label, "its lines are not changes with context on both sides")
    if [len(before), len(after)] != [int(header[1] or 1), int(header[2] or 1)]:
        raise corrupt(label, "its lines are not as many as its header says")
    return Hunk(label, b"".join(before), b"".join(after))


def corrupt(name: str, why: str) -> PatchError:
    """Build the error for a damaged patch file."""
    return PatchError(Exit.CORRUPT, f"corrupt patch: {name}: {why}; restore the patch file")


def open_root(directory: Path) -> Path:
    """Return the resolved root of a Megatron-LM tree; PatchError USAGE if it is none."""
    root = directory.resolve()
    if (root / "megatron" / "core" / "__init__.py").is_file():
        return root
    hint = f"; pass its parent: --megatron {root.parent}" if root.name == "megatron" else ""
    message = f"not a Megatron-LM tree: {directory} has no megatron/core/__init__.py{hint}"
    raise PatchError(Exit.USAGE, message)


def read_tree(root: Path, patches: PatchSet) -> Tree:
    """Read the files that `patches` touches; those beside megatron/ are no part of a wheel."""
    texts: dict[str, bytes] = {}
    crlf, missing, skipped = set(), [], []
    is_wheel = not (root / "pretrain_gpt.py").exists()
    for path in dict.fromkeys(part.path for part in patches.files):
        if os.path.lexists(root / path):
            texts[path], is_crlf = to_lf(read_file(root, path))
            crlf.update([path] if is_crlf else [])
        else:
            lacks = is_wheel and not path.startswith("megatron/")
            (skipped if lacks else missing).append(path)
    return Tree(root, texts, frozenset(crlf), tuple(missing), tuple(skipped))


def real_path(root: Path, path: str) -> Path:
    """Follow links within the tree; PatchError USAGE for a file that is really elsewhere."""
    real = (root / path).resolve()
    if not real.is_relative_to(root):
        raise PatchError(
            Exit.USAGE,
            f"{path} is a link to {real}, outside {root}: patching it would change every tree that "
            "links to it; pass the tree it belongs to, or replace the link by a copy",
        )
    return real


def read_file(root: Path, path: str) -> bytes:
    """Read one file of the tree as bytes; PatchError CORRUPT if it is not a text file."""
    real = real_path(root, path)
    try:
        if not real.is_file():
            raise PatchError(Exit.CORRUPT, f"corrupt file: {path} is not a regular file")
        data = real.read_bytes()
        data.decode("utf-8")
    except OSError as error:
        raise PatchError(Exit.IO_FAILURE, f"cannot read {path}: {error}") from error
    except UnicodeDecodeError as error:
        raise PatchError(Exit.CORRUPT, f"corrupt file: {path} is not UTF-8: {error}") from error
    if b"\0" in data:
        raise PatchError(Exit.CORRUPT, f"corrupt file: {path} has NUL bytes")
    return data


def to_lf(data: bytes) -> tuple[bytes, bool]:
    """Return `data` with LF line ends if all of its line ends are CRLF, and whether they are."""
    ends = data.count(b"\n")
    is_crlf = 0 < ends == data.count(b"\r\n")
    return (data.replace(b"\r\n", b"\n"), True) if is_crlf else (data, False)


def tree_version(root: Path) -> str:
    """Return the version that megatron/core/package_info.py states, for messages only."""
    try:
        text = (root / "megatron" / "core" / "package_info.py").read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return "unknown"
    return ".".join(re.findall(r"^(?:MAJOR|MINOR|PATCH) = (\d+)", text, re.M))


def hunk_state(text: bytes, hunk: Hunk) -> str:
    """Return "pending", "applied", or the reason why the hunk is neither."""
    before, after = (  # Counted at line starts, overlaps included.
        len(re.findall(b"(?=" + re.escape(b"\n" + lines) + b")", b"\n" + text))
        for lines in (hunk.before, hunk.after)
    )
    if before + after == 1:
        return "pending" if before else "applied"
    return f"fits in {before + after} places" if before + after else "does not fit"


def blob_id(text: bytes) -> str:
    """Return git's id of a file with this content."""
    return hashlib.sha1(b"blob %d\0" % len(text) + text, usedforsecurity=False).hexdigest()


def rewrite(
    texts: dict[str, bytes], parts: Sequence[FilePatch], *, forward: bool, partly: bool = False
) -> dict[str, bytes] | None:
    """Apply (or, with forward=False, revert) every hunk; None as soon as one does not allow it.

    partly=True leaves alone the hunks that are already on the wanted side. The blob ids in the
    patch prove the result wherever the file was exactly what the patch was made from.
    """
    texts = dict(texts)
    wanted, done = ("pending", "applied") if forward else ("applied", "pending")
    for part in parts if forward else reversed(parts):
        text = start = texts[part.path]
        for hunk in part.hunks:
            state = hunk_state(text, hunk)
            if state == wanted:
                old, new = (hunk.before, hunk.after) if forward else (hunk.after, hunk.before)
                text = (b"\n" + text).replace(b"\n" + old, b"\n" + new)[1:]
            elif not (partly and state == done):
                return None
        blobs = (part.old_blob, part.new_blob)
        source, target = blobs if forward else blobs[::-1]
        if blob_id(start) == source and blob_id(text) != target:
            raise corrupt(part.patch, f"its result for {part.path} is not the one it records")
        texts[part.path] = text
    return texts


def refuse_damaged(tree: Tree, patches: PatchSet) -> None:
    """Raise CORRUPT where a file is exactly what a patch records and its hunks do not fit it."""
    for part in patches.on(tree.texts):
        text = tree.texts[part.path]
        state = {part.old_blob: "pending", part.new_blob: "applied"}.get(blob_id(text))
        for hunk in part.hunks if state else ():
            if hunk_state(text, hunk) != state:
                raise corrupt(part.patch, f"{hunk.label} does not fit the file it was made from")


def examine(root: Path, patches: PatchSet) -> Status:
    """Say what the tree at `root` is with regard to `patches`; changes nothing."""
    tree = read_tree(root, patches)
    refuse_damaged(tree, patches)
    parts = patches.on(tree.texts)
    if not tree.missing:
        original = rewrite(tree.texts, parts, forward=False)
        if original is not None:
            return Status("applied", patches, tree, original=original)
        patched = rewrite(tree.texts, parts, forward=True)
        if patched is not None:
            return Status("clean", patches, tree, patched=patched)
    states = [(h.label, hunk_state(tree.texts[p.path], h)) for p in parts for h in p.hunks]
    states += [(path, "file is missing") for path in tree.missing]
    details = [": ".join(pair) for pair in states]
    if "applied" not in dict(states).values():
        return Status("wrong", patches, tree, details=details)
    original = None if tree.missing else rewrite(tree.texts, parts, forward=False, partly=True)
    return Status("half", patches, tree, original=original, details=details)


@contextlib.contextmanager
def staging(root: Path) -> Iterator[Path]:
    """Hold the tree's lock and a staging directory; it is removed, with what a killed run left.

    The lock dies with its process: so a killed run is told from one that is still at work.
    """
    directory = root / STAGING
    try:
        directory.mkdir(exist_ok=True)
        with (directory / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                yield directory
            except PatchError:
                raise  # put_back: the originals in there are still needed.
            except BaseException:
                shutil.rmtree(directory, ignore_errors=True)
                raise
            shutil.rmtree(directory, ignore_errors=True)
    except BlockingIOError as error:
        raise PatchError(Exit.IO_FAILURE, f"another run is patching {root}; wait for it") from error
    except OSError as error:
        raise PatchError(Exit.IO_FAILURE, f"nothing was changed in {root}: {error}") from error


def stage(target: Path, like: Path, data: bytes) -> None:
    """Write `data` to `target` with the mode and, where permitted, the owner of `like`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)  # A killed run's, perhaps read-only.
    with target.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    info = like.stat()
    with contextlib.suppress(PermissionError):
        os.chown(target, info.st_uid, info.st_gid)
    target.chmod(info.st_mode & 0o7777)


def replace_files(tree: Tree, texts: dict[str, bytes]) -> None:
    """Replace the files whose text differs.

    All are staged first, each is then replaced in one step, and a failure puts the replaced ones
    back. PatchError IO_FAILURE says what happened.
    """

    def on_disk(path: str, text: bytes) -> bytes:
        return text.replace(b"\n", b"\r\n") if path in tree.crlf else text

    changed = [path for path in texts if texts[path] != tree.texts[path]]
    with staging(tree.root) as directory:
        for path in changed:
            real, old = real_path(tree.root, path), on_disk(path, tree.texts[path])
            if real.read_bytes() != old:
                raise OSError(f"{path} was edited meanwhile; run again")
            stage(directory / "old" / path, real, old)
            stage(directory / "new" / path, real, on_disk(path, texts[path]))
        try:
            for path in changed:
                os.replace(directory / "new" / path, real_path(tree.root, path))
        except BaseException as error:
            put_back(tree.root, directory, changed, error)
            raise


def put_back(root: Path, directory: Path, changed: list[str], cause: BaseException) -> None:
    """Restore those of `changed` that were replaced; PatchError naming those that fail."""
    failed = []
    for path in changed:
        try:
            if not (directory / "new" / path).exists():  # Else it was not replaced.
                os.replace(directory / "old" / path, real_path(root, path))
        except OSError:
            failed.append(path)
    if failed:
        raise PatchError(
            Exit.IO_FAILURE,
            f"{cause}; and could not put back {', '.join(failed)}: the originals are in "
            f"{directory / 'old'}. Make the tree writable and copy them back, or run --revert",
        ) from cause


def choose(root: Path, directory: Path | None) -> Status:
    """Examine the tree with `directory`'s patches, or with those of the revision that fits it."""
    if directory is not None:
        return examine(root, load_patches(directory))
    found = [examine(root, load_patches(d)) for d in sorted(PATCHES_ROOT.glob("*/"), reverse=True)]
    if not found:
        raise PatchError(Exit.USAGE, f"{PATCHES_ROOT} holds no revisions; pass --patches DIR")
    return min(found, key=lambda status: ("applied", "clean", "half", "wrong").index(status.kind))


def refuse(status: Status) -> PatchError:
    """Build the error for a tree that is half applied or of another revision."""
    root, name = status.tree.root, status.patches.name
    lines = "".join(f"\n  {line}" for line in status.details)
    if status.kind == "wrong":
        return PatchError(
            Exit.WRONG_REVISION,
            f"wrong revision: {root} (megatron-core {tree_version(root)}) is not one the patches "
            f"for {name} fit; nothing of them is applied and nothing was changed. "
            f"Use Megatron-LM at {name}, or pass --patches for another revision:{lines}",
        )
    remedy = "restore these files from your Megatron-LM (git restore, pip --force-reinstall)"
    if status.original is not None:
        remedy = "run --revert, which restores the original files bit for bit, then apply again"
    return PatchError(
        Exit.HALF_APPLIED,
        f"half applied: {root} has some hunks of {name} and lacks others, as after an interrupted "
        f"run, during another one or after a partial edit; nothing was changed. "
        f"To recover, {remedy}:{lines}",
    )


def run(megatron: Path, directory: Path | None, action: str) -> str:
    """Do `action` ("apply", "check" or "revert") and return the message; PatchError otherwise."""
    status = choose(open_root(megatron), directory)
    tree, patches, kind = status.tree, status.patches, status.kind
    revertible = action == "revert" and status.original is not None
    if kind == "wrong" or (kind == "half" and not revertible):
        raise refuse(status)
    texts: dict[str, bytes] = {}
    if action == "check":
        done = "check: applied" if kind == "applied" else "check: not applied, applies cleanly"
    elif action == "apply":
        done, texts = "already applied", status.patched or texts
    else:
        done, texts = "nothing to revert", status.original or texts
    if texts or (action != "check" and (tree.root / STAGING).exists()):  # Left by a killed run.
        replace_files(tree, texts)
    if texts:
        done = "applied" if action == "apply" else "reverted"
    num_hunks = sum(len(part.hunks) for part in patches.on(tree.texts))
    size = f"{len(patches.patches)} patches, {num_hunks} hunks, {len(tree.texts)} files"
    skipped = "".join(f"\n  skipped: {path} (no part of a wheel)" for path in tree.skipped)
    return f"{done}: {patches.name} ({size}) in {tree.root}{skipped}"


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, run, print one message; return the exit code."""
    what_for = "Apply the patches for a Megatron-LM revision, all or nothing."
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=what_for, epilog=EPILOG, formatter_class=form)
    add = parser.add_argument
    add("--megatron", type=Path, required=True, metavar="DIR", help="what holds megatron/")
    add("--patches", type=Path, metavar="DIR", help="patch files (default: those that fit)")
    either = parser.add_mutually_exclusive_group().add_argument
    either("--check", action="store_true", help="say what the tree is and change nothing")
    either("--revert", action="store_true", help="restore the original files")
    args = parser.parse_args(argv)
    action = "check" if args.check else "revert" if args.revert else "apply"
    try:
        sys.stdout.write(run(args.megatron, args.patches, action) + "\n")
    except PatchError as error:
        print(f"apply_patches: {error}", file=sys.stderr)
        return error.code
    return Exit.OK


if __name__ == "__main__":
    sys.exit(main())

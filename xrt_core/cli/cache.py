"""`xrt cache`: list, verify, export, import and delete cache entries, and explain why two cache keys differ."""

from __future__ import annotations

import difflib
import itertools
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final

import typer
from msgspec import convert, structs

from xrt_core.cache.archive import export_entries, import_entries
from xrt_core.cache.disk import DiskCache, EntryFile, Manifest, default_folder
from xrt_core.cache.live_notes import forget_suspects
from xrt_core.cli import results
from xrt_core.cli.display import FailedCheck, duration, giving, say, show_table
from xrt_core.errors import CacheError
from xrt_core.options import resolve

cache = typer.Typer(help="The cache of executables on disk.", no_args_is_help=True)

_SHORT: Final = 12
_LEAST_PREFIX: Final = 4
_DIFFERENT_LINES: Final = 20
_WIDTH: Final = 160

Folder = Annotated[
    pathlib.Path | None, typer.Option("--dir", help="The cache's folder. Default: XRT_CACHE_DIR, or the user's own.")
]
Entries = Annotated[list[str] | None, typer.Argument(help="Entries, by the first digits of their names. Default: all.")]


@cache.command()
@giving(results.CacheList)
def ls(folder: Folder = None) -> Callable[[], results.CacheList]:
    """List the entries, the most recently used first."""
    disk = _disk(folder)
    rows: list[dict[str, Any]] = []
    for entry in reversed(disk.files()):
        try:
            manifest = disk.manifest(entry.path)
        except CacheError as e:
            rows.append({"entry": entry.digest, "bytes": entry.size, "used": entry.used, "problem": str(e)})
            continue
        rows.append(
            {
                "entry": entry.digest,
                "engine": manifest.key.row("engine"),
                "device": manifest.key.row("device"),
                **dict(manifest.info),
                "bytes": entry.size,
                "used": entry.used,
            }
        )
    now = time.time()
    show_table(
        ("entry", "engine", "device", "cluster", "nodes", "compiled in", "size", "last used", "problem"),
        [
            (
                str(r["entry"])[:_SHORT],
                str(r.get("engine", "")),
                str(r.get("device", "")),
                str(r.get("cluster", "")),
                str(r.get("nodes", "")),
                duration(float(r["compile_seconds"])) if "compile_seconds" in r else "",
                _bytes(int(r["bytes"])),
                _ago(now - float(r["used"])),
                str(r.get("problem", "")),
            )
            for r in rows
        ],
    )
    return lambda: results.CacheList(entries=[convert(_named(r), results.CacheEntry) for r in rows])


@cache.command()
@giving(results.CacheInfo)
def info(
    entry: Annotated[str | None, typer.Argument(help="An entry, by the first digits of its name.")] = None,
    folder: Folder = None,
) -> results.CacheInfo:
    """Show the cache's folder, size and settings; with an entry, its key and the manifest of its blobs."""
    disk = _disk(folder)
    options, files = resolve(), disk.files()
    size = sum(f.size for f in files)
    about = results.CacheInfo(
        folder=str(disk.folder), mode=options.cache, limit=disk.limit, entries=len(files), bytes=size
    )
    if entry is None:
        show_table(
            ("setting", "value", "from"),
            [
                ("folder", str(disk.folder), options.source("cache_dir") if folder is None else "--dir"),
                ("mode", options.cache, options.source("cache")),
                ("limit", _bytes(disk.limit), options.source("cache_bytes")),
                ("entries", str(len(files)), ""),
                ("size", _bytes(size), ""),
            ],
        )
        return about
    found = _find(disk, entry)
    manifest = disk.manifest(found.path)
    rows = [*manifest.key.rows, *((k, str(v)) for k, v in manifest.info.items())]
    rows += [(f"blob {name}", f"{b.size} bytes, {b.digest}") for name, b in manifest.blobs.items()]
    rows.append(("problem", disk.check(found.path) or "none"))
    show_table(("row", "value"), rows)
    return structs.replace(about, entry=dict(rows))


@cache.command()
@giving(results.CacheDifference)
def explain(
    one: Annotated[str, typer.Argument(help="An entry, by the first digits of its name, or a file.")],
    other: Annotated[str, typer.Argument(help="Another.")],
    folder: Folder = None,
) -> results.CacheDifference:
    """Show the rows in which the keys of two entries differ, which is why one does not hit the other."""
    disk = _disk(folder)
    a, b = _find(disk, one), _find(disk, other)
    mine, theirs = disk.manifest(a.path).key, disk.manifest(b.path).key
    differences = mine.differences(theirs)
    functions: list[str] = []
    if not differences:
        say("the keys are the same")
    for line in differences:
        say(line)
    if mine.row("function") != theirs.row("function"):
        say("the functions differ in:")
        before, after = (disk.function_text(x.path).splitlines() for x in (a, b))
        lines = difflib.unified_diff(before, after, a.digest[:_SHORT], b.digest[:_SHORT], n=0, lineterm="")
        functions = list(itertools.islice(lines, _DIFFERENT_LINES))
        for line in functions:
            say("  " + (line if len(line) <= _WIDTH else line[: _WIDTH - 3] + "..."))
    return results.CacheDifference(differences=list(differences), functions=functions)


@cache.command()
@giving(results.CacheDeleted)
def clear(
    entries: Entries = None,
    engine: Annotated[str | None, typer.Option("--engine", "-e", help="Only entries of this engine.")] = None,
    folder: Folder = None,
) -> results.CacheDeleted:
    """Delete entries: all, or the given ones."""
    disk = _disk(folder)
    chosen = [e for e in _chosen(disk, entries) if engine is None or _engine_of(disk, e) == engine]
    gone = [e for e in chosen if disk.remove(e.path)]
    if not entries and engine is None:
        disk.evict(0)
        forget_suspects(disk.folder)
        for path in (disk.entries / "digests").glob("*.json"):
            path.unlink(missing_ok=True)
    freed = sum(e.size for e in gone)
    say(f"{_count(len(gone))} deleted, {_bytes(freed)}")
    return results.CacheDeleted(entries=len(gone), bytes=freed)


@cache.command()
@giving(results.CacheVerified)
def verify(
    remove: Annotated[bool, typer.Option("--remove", help="Delete the damaged entries.")] = False,
    folder: Folder = None,
) -> results.CacheVerified | FailedCheck:
    """Check the digests of every entry without loading it. Exit code 1 if a damaged entry remains."""
    disk = _disk(folder)
    files = disk.files()
    bad = [(e, reason) for e in files if (reason := disk.check(e.path))]
    for e, reason in bad:
        say(f"{e.digest[:_SHORT]}: {reason}" + ("; deleted" if remove and disk.remove(e.path) else ""))
    say(f"{_count(len(files))} checked, {len(bad)} damaged")
    result = results.CacheVerified(checked=len(files), damaged={e.digest: reason for e, reason in bad})
    return FailedCheck(result) if bad and not remove else result


@cache.command("export")
@giving(results.CacheExported)
def export_(
    target: Annotated[pathlib.Path, typer.Argument(help="The file to write.")],
    entries: Entries = None,
    folder: Folder = None,
) -> results.CacheExported:
    """Write entries into one archive, to import on another machine of the same kind."""
    disk = _disk(folder)
    written = export_entries(disk, _chosen(disk, entries), target)
    say(f"{_count(len(written))} written to {target}")
    return results.CacheExported(entries=len(written), file=str(target))


@cache.command("import")
@giving(results.CacheImported)
def import_(
    source: Annotated[pathlib.Path, typer.Argument(help="A file that `xrt cache export` wrote.")],
    folder: Folder = None,
) -> results.CacheImported | FailedCheck:
    """Store the entries of an archive. Executables are code: import only archives that you trust."""
    disk = _disk(folder)
    stored, refused = import_entries(disk, source)
    for name, reason in refused:
        say(f"{name}: rejected: {reason}")
    say(f"{_count(len(stored))} stored in {disk.folder}")
    result = results.CacheImported(stored=len(stored), rejected=dict(refused), folder=str(disk.folder))
    return FailedCheck(result) if refused else result


def _named(row: dict[str, Any]) -> dict[str, Any]:
    """A row under the names of `results.CacheEntry`."""
    return {k.replace(" ", "_"): v for k, v in row.items()}


def _disk(folder: pathlib.Path | None) -> DiskCache:
    options = resolve()
    if folder is None:
        folder = pathlib.Path(options.cache_dir).expanduser() if options.cache_dir else default_folder()
    return DiskCache(folder, options.cache_bytes)


def _find(disk: DiskCache, name: str) -> EntryFile:
    """Find an entry by path or by a prefix of its digest. Raises CacheError unless exactly one matches."""
    path = pathlib.Path(name)
    if path.is_file():
        status = path.stat()
        return EntryFile(path, status.st_size, status.st_mtime)
    found = [e for e in disk.files() if e.digest.startswith(name)] if len(name) >= _LEAST_PREFIX else []
    if len(found) != 1:
        reason = f"{len(found)} entries match" if found else "there is no such entry"
        raise CacheError(f"{name!r}: {reason} in {disk.folder}; give at least {_LEAST_PREFIX} digits of `xrt cache ls`")
    return found[0]


def _chosen(disk: DiskCache, names: Sequence[str] | None) -> list[EntryFile]:
    return [_find(disk, n) for n in names] if names else disk.files()


def _engine_of(disk: DiskCache, entry: EntryFile) -> str:
    try:
        manifest: Manifest = disk.manifest(entry.path)
    except CacheError:
        return ""
    return manifest.key.row("engine")


def _count(n: int) -> str:
    return f"{n} entr{'y' if n == 1 else 'ies'}"


def _bytes(count: int) -> str:
    size: Any = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} GiB"


def _ago(seconds: float) -> str:
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{max(seconds, 0):.0f} s ago"

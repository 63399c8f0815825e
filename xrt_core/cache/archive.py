"""Entries of the cache in one file, to carry them to another machine of the same kind."""

from __future__ import annotations

import io
import os
import pathlib
import tarfile
from collections.abc import Iterable

from xrt_core.cache.disk import SUFFIX, DiskCache, EntryFile, check_entry, open_trusted, read_manifest
from xrt_core.errors import CacheError
from xrt_core.files import PRIVATE, replace_file


def export_entries(disk: DiskCache, entries: Iterable[EntryFile], target: pathlib.Path) -> list[str]:
    """Write sound entries into a tar file, which appears whole or not at all. Returns the names of those written.

    Raises OSError where the file cannot be written.
    """
    written = []
    with replace_file(target) as whole, tarfile.open(fileobj=whole, mode="w") as tar:
        for entry in entries:
            if disk.check(entry.path):
                continue
            with open_trusted(entry.path) as file:
                member = tarfile.TarInfo(entry.path.name)
                member.size = os.fstat(file.fileno()).st_size
                member.mode = PRIVATE
                tar.addfile(member, file)
            written.append(entry.digest)
    return written


def import_entries(disk: DiskCache, source: pathlib.Path) -> tuple[list[str], list[tuple[str, str]]]:
    """Store the entries of an exported file. Returns the digests of those stored, and (name, reason) of the others.

    Whoever made the file can run code in the processes that use these entries: its digests show damage, not intent.
    Raises CacheError for what is no such file, or a cache that cannot be written.
    """
    if not disk.prepare():
        raise CacheError(f"the cache folder {disk.folder} cannot be written to")
    stored, refused = [], []
    try:
        with tarfile.open(source, "r:") as tar:
            for member in tar:
                reader = tar.extractfile(member) if member.isreg() else None
                content = reader.read() if reader is not None else b""
                reason = check_entry(io.BytesIO(content)) if reader is not None else "it is no regular file"
                if reason:
                    refused.append((member.name, reason))
                    continue
                # under the name that its key gives it, whatever it was called
                digest = read_manifest(io.BytesIO(content)).key.digest
                with replace_file(disk.entries / f"{digest}{SUFFIX}", mode=PRIVATE) as stored_file:
                    stored_file.write(content)
                stored.append(digest)
    except tarfile.TarError as e:
        raise CacheError(f"{source} is no exported cache: {e}") from None
    disk.evict()
    return stored, refused

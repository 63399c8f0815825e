"""Entries of the cache in one file, to carry them to another machine of the same kind."""

from __future__ import annotations

import io
import os
import pathlib
import tarfile
from collections.abc import Iterable

from xrt_core.cache.disk import SUFFIX, DiskCache, EntryFile, check_entry, open_trusted, read_manifest
from xrt_core.errors import CacheError
from xrt_core.files import PRIVATE, reading, replace_file


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
    with reading(f"the exported cache {source}", CacheError):
        if not source.is_file():
            raise CacheError(f"{source} is no exported cache: there is no such file")
        most = source.stat().st_size
        with tarfile.open(source, "r:") as tar:
            at = -1
            for member in tar:
                if member.offset <= at:  # a negative size leads back, and would never end
                    raise CacheError(f"{source} is damaged: its member {member.name!r} lies before the last one")
                at = member.offset
                content = b""
                if not (reason := _why_not(member, most)) and (reader := tar.extractfile(member)) is not None:
                    content = reader.read()
                    reason = check_entry(io.BytesIO(content))
                if reason:
                    refused.append((member.name, reason))
                    continue
                # under the name that its key gives it, whatever it was called
                digest = read_manifest(io.BytesIO(content)).key.digest
                with replace_file(disk.entries / f"{digest}{SUFFIX}", mode=PRIVATE) as stored_file:
                    stored_file.write(content)
                stored.append(digest)
    disk.evict()
    return stored, refused


def _why_not(member: tarfile.TarInfo, most: int) -> str:
    """Why a member is not even read. Nothing is unpacked under its own name, so that may be any."""
    if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.issparse():
        return "it is no regular file"
    if not 0 <= member.size <= most:
        return f"it claims {member.size} bytes, the whole file has {most}"
    return ""

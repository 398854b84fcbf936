"""Compiled objects on disk, named by a hash of everything that went into them.

An entry is machine code that this process will run, so it is taken only if it is whole (length
and checksum), belongs to the current user, and nobody else may write it. Anything else counts as
absent and is removed. Writers put a complete file in place with one rename, so any number of
processes may share a folder; the oldest-used entries go when the folder grows too large.

Entry: magic (8 bytes) · format version (u32) · reserved, 0 (u32) · payload length (u64) ·
key (32 bytes) · SHA-256 of all the header before it and of the payload (32 bytes) · payload.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import stat
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from amxq import knobs
from amxq.errors import CacheError
from amxq.runtime.targets import raw_environment

_log = logging.getLogger(__name__)

DEFAULT_MAX_BYTES = 256 << 20
_MAGIC = b"AMXQOBJ\n"
_FORMAT = 1
_HEADER = struct.Struct("<8sIIQ32s")
_DIGEST_BYTES = 32
_PREFIX_BYTES = _HEADER.size + _DIGEST_BYTES
_SUFFIX = ".amxqobj"
_TEMPORARY = ".writing-"
_STALE_SECONDS = 3600  # a temporary file this old was left behind by a process that died
# O_NOFOLLOW: a link could lead to a file that someone else controls.
# O_NONBLOCK: opening a pipe in its place must not wait for a writer.
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True)
class CacheInfo:
    """What a cache holds now.

    Attributes:
        directory: its folder; None when there is none (no home folder, for example).
        usable: whether objects can be kept there. A folder that does not exist yet is made
            with the first object and counts as usable.
        reason: why not, else an empty string.
        entries, bytes: number and total size of the objects.
        max_bytes: total size from which the oldest-used objects are removed.
    """

    directory: str | None
    usable: bool
    reason: str
    entries: int
    bytes: int
    max_bytes: int


def make_key(*parts: str | bytes | int | None) -> str:
    """The name of an object: SHA-256 (64 hexadecimal digits) over all parts.

    Order, type and boundaries of the parts count: ``("ab", "c")`` differs from ``("a", "bc")``.
    """
    digest = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        digest.update(f"{type(part).__name__}:{len(data)}:".encode())
        digest.update(data)
    return digest.hexdigest()


def open_cache() -> ObjectCache:
    """The cache that the environment names: AMXQ_CACHE_DIR, else amxq's folder of the user.

    A folder that was named explicitly and cannot be used is a CacheError at its first use; the
    user's default folder is only missed, with one warning.
    """
    explicit = bool(raw_environment(knobs.CACHE_DIR.name.encode()))
    try:
        directory: Path | None = knobs.CACHE_DIR.get().expanduser()
    except RuntimeError:  # Path.home() for a user without a home
        directory = None
    return ObjectCache(directory, explicit=explicit)


class ObjectCache:
    """Objects in one folder. Safe for many threads and processes; nothing is kept in memory.

    Args:
        directory: the folder, made with mode 0700 when first needed; None for no cache.
        max_bytes: total size of the entries. It is exact for one process; several that write
            at once may exceed it by an eighth each until the next one looks.
        explicit: the user named this folder, so not being able to use it is an error.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None,
        *,
        max_bytes: int = DEFAULT_MAX_BYTES,
        explicit: bool = False,
    ) -> None:
        self.directory = None if directory is None else Path(os.path.abspath(directory))
        self.max_bytes = max_bytes
        self.explicit = explicit
        self._ready = False
        self._problem = ""
        # Bytes that may be written before the folder's size has to be looked at again.
        self._room = 0

    def get(self, key: str) -> bytes | None:
        """The object of that key, or None when there is none that can be trusted.

        Raises:
            CacheError: the key is not one of make_key's, or the explicit folder cannot be used.
        """
        path = self._path(key)
        if path is None:
            return None
        try:
            file = os.open(path, _READ_FLAGS)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._reject(path, f"it cannot be opened ({error.strerror})")
            return None
        try:
            data, why = _read_entry(file, key)
            if data is not None:
                _touch(file)
        except OSError as error:
            data, why = None, f"it cannot be read ({error.strerror})"
        finally:
            os.close(file)
        if data is None:
            self._reject(path, why)
        return data

    def put(self, key: str, data: bytes) -> None:
        """Keep an object. One that cannot be written (a full disk) is only missed later.

        Raises:
            CacheError: the key is not one of make_key's, or the explicit folder cannot be used.
        """
        path = self._path(key)
        if path is None or _PREFIX_BYTES + len(data) > self.max_bytes:
            return
        try:
            try:
                _write_entry(path, key, data)
            except FileNotFoundError:  # someone has removed the folder meanwhile
                self._make_folder()
                _write_entry(path, key, data)
        except OSError as error:
            self._warn_once(f"{path.parent} takes no more objects ({error.strerror})")
            return
        self._room -= _PREFIX_BYTES + len(data)
        if self._room < 0:
            self._evict()

    def clear(self) -> int:
        """Remove all objects and leftovers; returns how many objects there were."""
        removed = 0
        for entry in self._files():
            if _remove(entry.path) and entry.name.endswith(_SUFFIX):
                removed += 1
        self._room = 0
        return removed

    def info(self) -> CacheInfo:
        """What the cache holds; looks only, makes no folder and raises nothing."""
        reason = self._problem or self._look()
        sizes = [size for _, size, _ in self._entries()]
        where = None if self.directory is None else str(self.directory)
        return CacheInfo(where, not reason, reason, len(sizes), sum(sizes), self.max_bytes)

    def payloads(self) -> Iterator[bytes]:
        """What is in every entry that can be trusted; looking does not count as a use."""
        for _, _, path in self._entries():
            try:
                file = os.open(path, _READ_FLAGS)
            except OSError:
                continue
            try:
                data, _ = _read_entry(file, Path(path).stem)
            except (OSError, ValueError):  # also a name that is no key
                continue
            finally:
                os.close(file)
            if data is not None:
                yield data

    def _path(self, key: str) -> Path | None:
        """Where the key's entry is, with the folder ready; None when there is no cache."""
        if len(key) != 64 or not all(c in "0123456789abcdef" for c in key):
            raise CacheError(f"cache key {key!r} is not 64 hexadecimal digits: use make_key()")
        if not self._ready and not self._prepare():
            return None
        assert self.directory is not None
        return self.directory / (key + _SUFFIX)

    def _prepare(self) -> bool:
        if not self._problem:
            why = self._make_folder() or self._look()
            if not why:
                self._ready = True
                return True
            self._problem = why
            if not self.explicit:
                _log.warning("kernels will be compiled anew in every process: %s", why)
        if self.explicit:
            raise CacheError(
                f"{knobs.CACHE_DIR.name}={str(self.directory)!r} cannot be used: {self._problem}; "
                f"name a folder of your own, or unset {knobs.CACHE_DIR.name}"
            )
        return False

    def _make_folder(self) -> str:
        if self.directory is None:
            return ""
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            return f"the folder {self.directory} cannot be made ({error.strerror})"
        return ""

    def _look(self) -> str:
        """Why the folder cannot be trusted or written; empty when it can, or is yet to be made."""
        if self.directory is None:
            return "there is no home folder to keep them in; AMXQ_CACHE_DIR names another"
        try:
            found = self.directory.stat()
        except FileNotFoundError:
            above = next(p for p in self.directory.parents if p.exists())
            if os.access(above, os.W_OK | os.X_OK):
                return ""
            return f"the folder {self.directory} cannot be made ({above} cannot be written)"
        except OSError as error:
            return f"the folder {self.directory} cannot be reached ({error.strerror})"
        if not stat.S_ISDIR(found.st_mode):
            return f"{self.directory} is not a folder"
        if found.st_uid != os.geteuid():
            return f"the folder {self.directory} belongs to another user (id {found.st_uid})"
        # A group that may write the folder is let pass, since many systems make folders so
        # (umask 002): it can remove entries, but none that it plants belongs to this user.
        if found.st_mode & stat.S_IWOTH:
            return (
                f"everybody may write the folder {self.directory} "
                f"(mode {stat.S_IMODE(found.st_mode):04o}; chmod o-w makes it safe)"
            )
        if not os.access(self.directory, os.R_OK | os.W_OK | os.X_OK):
            return f"the folder {self.directory} cannot be written"
        return ""

    def _reject(self, path: Path, why: str) -> None:
        _log.warning("the cached object %s is not used and removed: %s", path, why)
        _remove(path)

    def _warn_once(self, why: str) -> None:
        if not self._problem:
            self._problem = why
            _log.warning("a compiled kernel is not kept: %s", why)

    def _files(self) -> Iterator[os.DirEntry[str]]:
        if self.directory is None:
            return
        try:
            with os.scandir(self.directory) as listing:
                for entry in listing:
                    if entry.name.endswith(_SUFFIX) or entry.name.startswith(_TEMPORARY):
                        yield entry
        except OSError:
            return

    def _entries(self) -> Iterator[tuple[float, int, str]]:
        """Time of the last use, size and path of every object."""
        for entry in self._files():
            if entry.name.endswith(_SUFFIX):
                try:
                    found = entry.stat(follow_symlinks=False)
                except OSError:
                    continue
                yield found.st_mtime, found.st_size, entry.path

    def _evict(self) -> None:
        """Remove the least recently used objects if there are too many bytes of them.

        It stops at seven eighths of the limit, so that the next look at the whole folder comes
        after another eighth of it has been written, not with every object.
        """
        self._remove_leftovers()
        entries = sorted(self._entries())
        total = sum(size for _, size, _ in entries)
        if total > self.max_bytes:
            for _, size, path in entries[:-1]:
                if total <= self.max_bytes - self.max_bytes // 8:
                    break
                if _remove(path):
                    total -= size
        self._room = min(self.max_bytes - total, self.max_bytes // 8)

    def _remove_leftovers(self) -> None:
        limit = time.time() - _STALE_SECONDS
        for entry in self._files():
            if entry.name.startswith(_TEMPORARY):
                try:
                    stale = entry.stat(follow_symlinks=False).st_mtime < limit
                except OSError:
                    continue
                if stale:
                    _remove(entry.path)


def _read_entry(file: int, key: str) -> tuple[bytes | None, str]:
    """The payload of an open entry, or None and why it is not to be trusted."""
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode):
        return None, "it is not a regular file"
    if found.st_uid != os.geteuid():
        return None, f"it belongs to another user (id {found.st_uid})"
    if found.st_mode & _OTHERS_WRITE:
        return None, f"other users may write it (mode {stat.S_IMODE(found.st_mode):04o})"
    with os.fdopen(os.dup(file), "rb") as stream:
        content = stream.read()
    if len(content) < _PREFIX_BYTES:
        return None, f"it is cut short at {len(content)} bytes"
    magic, version, _, length, raw_key = _HEADER.unpack_from(content)
    if magic != _MAGIC or version != _FORMAT:
        return None, "it is not an object of this format"
    if raw_key != bytes.fromhex(key):
        return None, "it holds an object of another key"
    payload = content[_PREFIX_BYTES:]
    if len(payload) != length:
        return None, f"it has {len(payload)} bytes of {length}"
    if content[_HEADER.size : _PREFIX_BYTES] != _checksum(content[: _HEADER.size], payload):
        return None, "its checksum is wrong"
    return payload, ""


def _write_entry(path: Path, key: str, data: bytes) -> None:
    """Write a whole entry under a name of its own, then rename it into place.

    It is not forced to the disk: after a power failure the checksum finds out.
    """
    header = _HEADER.pack(_MAGIC, _FORMAT, 0, len(data), bytes.fromhex(key))
    temporary = path.parent / f"{_TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(temporary, flags, 0o600), "wb") as stream:
            stream.write(header + _checksum(header, data) + data)
        os.replace(temporary, path)
    except BaseException:
        _remove(temporary)
        raise


def _checksum(header: bytes, payload: bytes) -> bytes:
    return hashlib.sha256(header + payload).digest()


def _touch(file: int) -> None:
    """Note the use, for the order of removal; a file system that refuses loses only the order."""
    try:
        os.utime(file)
    except OSError:
        _log.debug("the time of use of a cached object could not be noted", exc_info=True)


def _remove(path: str | Path) -> bool:
    """Whether the file is gone because of this call; another process may have been first."""
    try:
        os.unlink(path)
    except OSError:
        return False
    return True

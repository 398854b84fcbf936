"""amxq.runtime.cache: whole entries only, many processes, hostile and broken folders."""

from __future__ import annotations

import logging
import multiprocessing
import os
import time

import pytest

from amxq.errors import CacheError
from amxq.runtime import cache as module
from amxq.runtime.cache import ObjectCache, make_key, open_cache

KEY = make_key("kernel", b"features", 1)
DATA = bytes(range(256)) * 64


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "deep" / "cache"


@pytest.fixture
def cache(folder):
    return ObjectCache(folder)


def entry(folder, key=KEY):
    return folder / f"{key}.amxqobj"


def test_keys_depend_on_every_part():
    parts = [("ab", "c"), ("a", "bc"), ("abc",), (b"ab", "c"), ("c", "ab"), (1,), ("1",), (None,)]
    keys = {make_key(*some) for some in parts}
    assert len(keys) == len(parts)
    assert all(len(key) == 64 for key in keys)
    assert make_key("tile-IR", 3) == make_key("tile-IR", 3)


def test_what_is_put_is_got(cache, folder):
    assert cache.get(KEY) is None
    cache.put(KEY, DATA)
    assert cache.get(KEY) == DATA
    assert ObjectCache(folder).get(KEY) == DATA
    assert cache.get(make_key("other")) is None
    cache.put(KEY, b"")
    assert cache.get(KEY) == b""


def test_files_are_private(cache, folder):
    before = os.umask(0)
    try:
        cache.put(KEY, DATA)
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert entry(folder).stat().st_mode & 0o777 == 0o600
    assert [path.name for path in folder.iterdir()] == [entry(folder).name]


@pytest.mark.parametrize("key", ["", "../../etc/passwd", KEY.upper(), KEY[:-1], KEY + "0"])
def test_only_hashes_are_keys(cache, key):
    with pytest.raises(CacheError, match="make_key"):
        cache.get(key)
    with pytest.raises(CacheError, match="make_key"):
        cache.put(key, DATA)


def _damages():
    whole = module._PREFIX_BYTES + len(DATA)
    for position in (0, 8, 12, 16, 24, 60, module._PREFIX_BYTES, whole - 1):
        yield (
            f"byte {position}",
            lambda raw, p=position: raw[:p] + bytes([raw[p] ^ 0x40]) + raw[p + 1 :],
        )
    for length in (0, 5, module._PREFIX_BYTES - 1, module._PREFIX_BYTES, whole - 1):
        yield f"cut at {length}", lambda raw, n=length: raw[:n]
    yield "too long", lambda raw: raw + b"x"
    yield "zeros", lambda raw: bytes(len(raw))


@pytest.mark.parametrize("damage", [pytest.param(d, id=name) for name, d in _damages()])
def test_damaged_entries_are_removed_and_never_loaded(cache, folder, damage, caplog):
    cache.put(KEY, DATA)
    path = entry(folder)
    path.write_bytes(damage(path.read_bytes()))
    assert cache.get(KEY) is None
    assert not path.exists()
    assert "is not used and removed" in caplog.text
    cache.put(KEY, DATA)
    assert cache.get(KEY) == DATA


def test_an_entry_under_another_name_is_rejected(cache, folder):
    other = make_key("other")
    cache.put(KEY, DATA)
    os.rename(entry(folder), entry(folder, other))
    assert cache.get(other) is None


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_entries_that_others_may_write_are_rejected(cache, folder, mode):
    cache.put(KEY, DATA)
    entry(folder).chmod(mode)
    assert cache.get(KEY) is None
    assert not entry(folder).exists()


def test_entries_of_another_user_are_rejected(cache, folder, monkeypatch):
    cache.put(KEY, DATA)
    cache.get(KEY)
    monkeypatch.setattr(module.os, "geteuid", lambda: os.getuid() + 1)
    assert cache.get(KEY) is None


def test_links_pipes_and_folders_are_not_entries(cache, folder, tmp_path):
    cache.put(KEY, DATA)
    path = entry(folder)
    outside = tmp_path / "outside"
    os.rename(path, outside)
    path.symlink_to(outside)
    assert cache.get(KEY) is None
    assert outside.exists()
    assert not path.is_symlink()
    os.mkfifo(path)
    assert cache.get(KEY) is None
    path.mkdir()
    assert cache.get(KEY) is None


def _unusable(folder, kind):
    folder.parent.mkdir(parents=True)
    if kind == "a file":
        folder.write_text("")
    elif kind == "below a file":
        folder.parent.joinpath("x").write_text("")
        return folder.parent / "x" / "cache"
    elif kind == "writable by all":
        folder.mkdir()
        folder.chmod(0o777)
    return folder


KINDS = ["a file", "below a file", "writable by all"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_default_folder_that_cannot_be_used_is_missed_with_one_warning(folder, kind, caplog):
    cache = ObjectCache(_unusable(folder, kind))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            cache.put(KEY, DATA)
            assert cache.get(KEY) is None
    assert len(caplog.records) == 1
    assert "compiled anew in every process" in caplog.text
    info = cache.info()
    assert not info.usable
    assert info.reason
    assert cache.clear() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_an_explicit_folder_that_cannot_be_used_is_an_error(folder, kind, monkeypatch):
    monkeypatch.setenv("AMXQ_CACHE_DIR", str(_unusable(folder, kind)))
    cache = open_cache()
    assert not cache.info().usable
    for call in (lambda: cache.get(KEY), lambda: cache.put(KEY, DATA)):
        with pytest.raises(CacheError, match=r"AMXQ_CACHE_DIR=.* cannot be used: .*unset"):
            call()


def test_a_folder_that_the_group_may_write_is_used(cache, folder):
    folder.mkdir(parents=True)
    folder.chmod(0o775)
    cache.put(KEY, DATA)
    assert cache.get(KEY) == DATA


def test_a_folder_that_cannot_be_made_is_known_beforehand(folder, monkeypatch):
    monkeypatch.setattr(module.os, "access", lambda *_: False)
    assert "cannot be made" in ObjectCache(folder).info().reason


def test_a_folder_without_permission(folder, monkeypatch, caplog):
    folder.mkdir(parents=True)
    monkeypatch.setattr(module.os, "access", lambda *_: False)
    cache = ObjectCache(folder)
    cache.put(KEY, DATA)
    assert "cannot be written" in caplog.text
    with pytest.raises(CacheError):
        ObjectCache(folder, explicit=True).get(KEY)


def test_a_folder_of_another_user(folder, monkeypatch):
    folder.mkdir(parents=True)
    monkeypatch.setattr(module.os, "geteuid", lambda: os.getuid() + 1)
    info = ObjectCache(folder).info()
    assert "belongs to another user" in info.reason


def test_the_environment_names_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("AMXQ_CACHE_DIR", str(tmp_path / "mine"))
    cache = open_cache()
    assert cache.explicit
    cache.put(KEY, DATA)
    assert entry(tmp_path / "mine").exists()
    monkeypatch.delenv("AMXQ_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    cache = open_cache()
    assert cache.directory == tmp_path / "xdg" / "amxq"
    assert not cache.explicit
    monkeypatch.setenv("AMXQ_CACHE_DIR", "~/objects")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert open_cache().directory == tmp_path / "home" / "objects"


def test_a_user_without_a_home(monkeypatch, caplog):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("AMXQ_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(module.knobs.Path, "home", homeless)
    cache = open_cache()
    cache.put(KEY, DATA)
    assert cache.get(KEY) is None
    assert "AMXQ_CACHE_DIR names another" in caplog.text
    assert cache.info().directory is None


def test_a_relative_folder_does_not_move_with_the_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cache = ObjectCache("here")
    cache.put(KEY, DATA)
    monkeypatch.chdir("/")
    assert cache.get(KEY) == DATA


def test_a_full_disk_is_only_a_warning(cache, folder, monkeypatch, caplog):
    cache.put(KEY, DATA)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "replace", full)
    for _ in range(3):
        cache.put(make_key("next"), DATA)
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text
    assert cache.get(KEY) == DATA
    assert [path.name for path in folder.iterdir()] == [entry(folder).name]


def test_a_folder_removed_meanwhile_is_made_again(cache, folder):
    cache.put(KEY, DATA)
    cache.clear()
    folder.rmdir()
    assert cache.get(KEY) is None
    cache.put(KEY, DATA)
    assert cache.get(KEY) == DATA


def test_least_recently_used_objects_go_first(folder):
    size = module._PREFIX_BYTES + 1000
    cache = ObjectCache(folder, max_bytes=8 * size)
    keys = [make_key(number) for number in range(8)]
    past = time.time() - 1000
    for age, key in enumerate(keys):
        cache.put(key, b"x" * 1000)
        os.utime(entry(folder, key), (past + age, past + age))
    assert cache.get(keys[0]) is not None  # now the most recently used
    cache.put(make_key("new"), b"x" * 1000)
    held = [key for key in keys if entry(folder, key).exists()]
    assert held == [keys[0], *keys[3:]]
    assert cache.get(make_key("new")) is not None
    assert cache.info().bytes <= 8 * size


def test_the_limit_holds_whatever_the_sizes(folder):
    cache = ObjectCache(folder, max_bytes=20_000)
    for number in range(200):
        cache.put(make_key(number), b"y" * (37 * number % 3000))
        assert cache.info().bytes <= 20_000
    assert cache.info().entries > 2


def test_an_object_larger_than_the_limit_is_not_kept(folder):
    cache = ObjectCache(folder, max_bytes=1000)
    cache.put(KEY, DATA)
    assert cache.get(KEY) is None


def test_clear_and_info(cache, folder):
    assert cache.info().entries == 0
    assert not folder.exists()  # looking makes nothing
    for number in range(5):
        cache.put(make_key(number), DATA)
    (folder / "notes.txt").write_text("not ours")
    (folder / ".writing-1-dead").write_text("half")
    info = cache.info()
    assert (info.entries, info.usable, info.reason) == (5, True, "")
    assert info.bytes == 5 * (module._PREFIX_BYTES + len(DATA))
    assert info.directory == str(folder)
    assert cache.clear() == 5
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def test_leftovers_of_dead_writers_go(folder):
    cache = ObjectCache(folder)
    folder.mkdir(parents=True)
    old, new = folder / ".writing-1-a", folder / ".writing-2-b"
    for path in (old, new):
        path.write_text("half")
    os.utime(old, (1, 1))
    cache.put(KEY, DATA)
    assert not old.exists()
    assert new.exists()


def _payload(number):
    return bytes([number % 251]) * (500 + 97 * (number % 31))


def _hammer(folder, seed, rounds, max_bytes, wrong):
    """Put, get, damage and sometimes clear; count objects that are not what their key says."""
    cache = ObjectCache(folder, max_bytes=max_bytes)
    for turn in range(rounds):
        number = (turn * 7 + seed * 3) % 40
        key = make_key(number)
        found = cache.get(key)
        if found is not None and found != _payload(number):
            wrong.value += 1
        cache.put(key, _payload(number))
        if turn % 50 == seed:
            try:
                with open(entry(folder, key), "r+b") as file:
                    file.truncate(60)
            except FileNotFoundError:
                pass
        if seed == 0 and turn % 100 == 99:
            cache.clear()


def test_many_processes_at_once(tmp_path):
    context = multiprocessing.get_context("fork")
    wrong = context.Value("i", 0)
    folder = tmp_path / "shared"
    arguments = [(folder, seed, 200, 15_000, wrong) for seed in range(6)]
    workers = [context.Process(target=_hammer, args=args) for args in arguments]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
        assert worker.exitcode == 0
    assert wrong.value == 0
    assert not list(folder.glob(".writing-*"))


def _die_while_writing(folder):
    module.os.replace = lambda *_: os._exit(9)
    ObjectCache(folder).put(KEY, DATA)


def test_a_process_killed_while_writing_leaves_no_entry(tmp_path):
    context = multiprocessing.get_context("fork")
    worker = context.Process(target=_die_while_writing, args=(tmp_path / "shared",))
    worker.start()
    worker.join(30)
    assert worker.exitcode == 9
    cache = ObjectCache(tmp_path / "shared")
    assert cache.get(KEY) is None
    assert cache.info().entries == 0
    cache.put(KEY, DATA)
    assert cache.get(KEY) == DATA

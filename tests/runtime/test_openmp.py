"""amxq.runtime.openmp: torch's own runtime, its number of threads, nesting, threads and forks."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
import timeit

import pytest
import torch

from amxq.errors import TargetError
from amxq.runtime import openmp

WORK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@pytest.fixture(autouse=True)
def torch_threads(monkeypatch):
    monkeypatch.delenv("AMXQ_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def launch(function, threads):
    """Call a Python function on the threads of one parallel region."""
    gomp_parallel = ctypes.CFUNCTYPE(
        None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint
    )(openmp.gomp_parallel_address())
    callback = WORK(lambda _: function())
    gomp_parallel(ctypes.cast(callback, ctypes.c_void_p), None, threads, 0)


def team():
    """Number of this thread and size of its team."""
    number = ctypes.CFUNCTYPE(ctypes.c_int)
    size = openmp._address(openmp._torch_library(), "omp_get_num_threads")
    return number(openmp.runtime().get_thread_num)(), number(size)()


def test_it_is_the_runtime_that_torch_loaded():
    before = openmp.openmp_libraries()
    found = openmp.runtime()
    assert openmp.gomp_parallel_address() == found.gomp_parallel > 0
    assert os.path.exists(found.library)
    assert openmp.openmp_libraries() == before
    assert os.path.realpath(found.library) in {os.path.realpath(path) for path in before}


def test_no_second_runtime_is_loaded_in_a_fresh_process():
    code = (
        "import torch\n"
        "from amxq.runtime import openmp\n"
        "before = openmp.openmp_libraries()\n"
        "openmp.gomp_parallel_address(); openmp.max_threads()\n"
        "assert len(before) == 1 and openmp.openmp_libraries() == before, before\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_torch_without_openmp_is_a_typed_error(monkeypatch):
    monkeypatch.setattr(openmp, "_address", lambda library, name: 0)
    with pytest.raises(TargetError, match="leads to no GOMP_parallel"):
        openmp.runtime.__wrapped__()


def test_torch_library_that_is_not_loaded_is_a_typed_error(monkeypatch, tmp_path):
    monkeypatch.setattr(openmp, "mapped_files", lambda: [])
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    with pytest.raises(TargetError, match="is not loaded in this process"):
        openmp._torch_library()


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_max_threads_follows_torch(threads):
    torch.set_num_threads(threads)
    assert openmp.max_threads() == threads == torch.get_num_threads()


def test_max_threads_in_a_new_thread_is_torchs_number_there():
    torch.set_num_threads(3)
    seen = []
    thread = threading.Thread(
        target=lambda: seen.extend((openmp.max_threads(), torch.get_num_threads()))
    )
    thread.start()
    thread.join()
    assert seen == [3, 3]


def test_the_environment_has_the_last_word(monkeypatch):
    torch.set_num_threads(2)
    monkeypatch.setenv("AMXQ_NUM_THREADS", "7")
    assert openmp.max_threads() == 7
    monkeypatch.setenv("AMXQ_NUM_THREADS", "3")
    assert openmp.max_threads() == 3
    monkeypatch.setenv("AMXQ_NUM_THREADS", "")
    assert openmp.max_threads() == 2
    for text in ("0", "-1", "two"):
        monkeypatch.setenv("AMXQ_NUM_THREADS", text)
        with pytest.raises(ValueError, match="AMXQ_NUM_THREADS"):
            openmp.max_threads()


def test_max_threads_is_fast():
    openmp.max_threads()
    best = min(timeit.repeat(openmp.max_threads, number=5000, repeat=20)) / 5000
    assert best < 1e-6  # about 0.12 µs on an idle machine


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_a_launch_has_the_threads_it_asked_for(threads):
    seen = []
    launch(lambda: seen.append(team()), threads)
    assert sorted(seen) == [(number, threads) for number in range(threads)]
    assert not openmp.in_parallel()


def test_the_threads_are_those_of_torch():
    """The same pool serves torch's operators: no thread is added for kernels."""
    torch.set_num_threads(4)
    x = torch.ones(1 << 20)
    (x + 1).sum()
    seen = set()
    launch(lambda: seen.add(threading.get_native_id()), 4)
    before = _thread_count()
    for _ in range(5):
        (x + 1).sum()
        launch(lambda: seen.add(threading.get_native_id()), 4)
    assert len(seen) == 4
    assert _thread_count() == before


def _thread_count():
    return len(os.listdir("/proc/self/task"))


def test_a_launch_inside_a_region_is_serial():
    """Nested: one call on the calling thread, whatever number was asked for."""
    outer, inner = [], []

    def nested():
        outer.append(openmp.in_parallel())
        me = threading.get_native_id()
        launch(lambda: inner.append((team(), threading.get_native_id() == me)), 4)

    launch(nested, 2)
    assert outer == [True, True]
    assert inner == [((0, 1), True)] * 2


def test_torch_operators_inside_a_region_agree():
    x = torch.arange(1 << 18, dtype=torch.float64)
    sums = []
    launch(lambda: sums.append(float((x * 2).sum())), 2)
    assert sums == [float((x * 2).sum())] * 2


def test_launches_of_python_threads_at_once():
    sizes = []
    barrier = threading.Barrier(3)

    def work():
        barrier.wait()
        for _ in range(20):
            launch(lambda: sizes.append(team()[1]), 2)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert sizes == [2] * (3 * 20 * 2)


def _child_ends(work):
    """Fork; whether the child did its work within ten seconds."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    for _ in range(1000):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return False


def test_a_forked_child_has_all_its_threads():
    """GNU's runtime alone would wait for ever in the child for threads of the parent."""
    torch.set_num_threads(2)
    x = torch.ones(1 << 20)
    (x + 1).sum()
    launch(lambda: None, 2)

    def work():
        seen = []
        launch(lambda: seen.append(team()), 2)
        assert sorted(seen) == [(0, 2), (1, 2)]
        assert float((x + 1).sum()) == 2 << 20
        assert openmp.max_threads() == 2

    assert _child_ends(work)
    assert _child_ends(lambda: launch(lambda: None, 2))
    # The parent goes on as before.
    seen = []
    launch(lambda: seen.append(team()), 2)
    assert sorted(seen) == [(0, 2), (1, 2)]


def test_fork_before_torch_is_imported():
    code = (
        "import os, sys\n"
        "sys.modules.pop('torch', None)\n"
        "from amxq.runtime import openmp\n"
        "sys.modules['torch'] = None\n"
        "child = os.fork()\n"
        "if child == 0: os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

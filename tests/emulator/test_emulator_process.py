"""Installing, handing signals on, faults, threads and forks; each in its own process."""

from __future__ import annotations

import signal

import pytest
from emulator_lab import child

from amxq.emulator import signals

needs_precise_faults = pytest.mark.skipif(
    not signals.can_copy_own_memory(), reason="process_vm_readv is forbidden here"
)


def test_lifecycle() -> None:
    seen = child.result("process.lifecycle")
    assert seen["before"] == [False, 0]
    assert seen["installed"] is True
    number, text = seen["records"]
    assert number == 1 and text.startswith("WARNING AMX emulator installed")
    assert seen["uninstalled"] == [False, True]
    assert seen["again"] == [True, 1]


def test_a_run_of_instructions_is_one_trap() -> None:
    seen = child.result("process.run_of_instructions")
    assert seen["fault"] is None
    # where LDTILECFG runs in hardware it is counted when first seen, in this trap
    seen["counts"].pop("LDTILECFG", None)
    assert seen["counts"] == {
        "TILEZERO": 1,
        "TILELOADD": 2,
        "TILESTORED": 1,
        "TDPBF16PS": 3,
        "TDPBSSD": 3,
    }
    assert seen["traps"] == 1
    assert seen["page ends"] is True


def test_mxcsr_is_neither_used_nor_changed() -> None:
    assert child.result("process.mxcsr") == {"same result": True, "kept": True}


@pytest.mark.parametrize("siginfo", [True, False])
def test_other_illegal_instructions_go_to_the_previous_handler(siginfo: bool) -> None:
    seen = child.result("process.handed_on", siginfo)
    at = seen["length"]
    number, code, rip, _ = seen["ud2"]
    assert (number, code, rip) == (4, 2, at + 5)  # after TILEZERO
    number, code, rip, address = seen["bad"]
    assert (number, code, rip) == (4, 2, at)
    assert address == seen["ud2"][3] - 5  # si_addr is the instruction


@pytest.mark.parametrize(
    ("how", "number"),
    [
        ("ud2", signal.SIGILL),
        ("tile", signal.SIGILL),
        ("sent", signal.SIGILL),
        ("ignored ud2", signal.SIGILL),
        ("page", signal.SIGSEGV),
        ("ignored page", signal.SIGSEGV),
        ("blocked page", signal.SIGSEGV),
        ("direct page", signal.SIGSEGV),
    ],
)
def test_default_actions_kill(how: str, number: int) -> None:
    ended = child.run("process.dies", how)
    assert (ended.status, ended.result) == (-number, None)


@pytest.mark.parametrize("how", ["faulthandler", "late faulthandler"])
def test_faulthandler_still_reports(how: str) -> None:
    ended = child.run("process.dies", how)
    assert ended.status == -signal.SIGILL
    assert ended.stderr.count("Fatal Python error: Illegal instruction") == 1


def test_sent_signals_are_the_programs_business() -> None:
    assert child.result("process.sent_and_ignored") == "alive"
    assert child.result("process.sent_and_handled") == 1


@needs_precise_faults
def test_a_handler_that_repairs_the_page_lets_the_instruction_finish() -> None:
    seen = child.result("process.repaired_page")
    assert seen == {"load": [None, 1, True], "store": [None, 2, True]}


def test_fork_keeps_the_configuration_and_clears_the_tiles() -> None:
    assert child.result("process.forked") == {"child": [1, 1, 1], "parent": True}


def test_exec_ends_it() -> None:
    assert child.result("process.replaced") == [False, 0, True]


def test_an_alternate_signal_stack_may_be_small() -> None:
    assert child.result("process.small_signal_stack") in (True, None)


def test_a_new_thread_starts_without_configuration() -> None:
    assert child.result("process.ended_thread") == [True, True]


def test_dead_threads_make_room_in_a_full_table() -> None:
    assert child.result("process.small_table") == [15, 15, 4]

"""Runs one scenario in a process of its own: ``run("faults.chain_default")``.

A scenario is a function of a ``scenario_*`` module that returns something JSON can carry.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).resolve().parent.parent
_REPOSITORY = _TESTS.parent.parent
_MARK = "RESULT "


@dataclass(frozen=True)
class Ended:
    """How a scenario's process ended: exit status (negative: signal), result, stderr."""

    status: int
    result: Any
    stderr: str


def run(scenario: str, *arguments: Any, environment: dict[str, str] | None = None) -> Ended:
    """Run ``scenario_<module>.<function>(*arguments)`` in a new process."""
    path = os.pathsep.join([str(_TESTS), str(_REPOSITORY)])
    env = {**os.environ, "PYTHONPATH": path, **(environment or {})}
    command = [sys.executable, "-m", "emulator_lab.child", scenario, json.dumps(arguments)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    results = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    result = json.loads(results[-1][len(_MARK) :]) if results else None
    return Ended(done.returncode, result, done.stderr)


def result(scenario: str, *arguments: Any) -> Any:
    """The result of a scenario that must end well."""
    ended = run(scenario, *arguments)
    assert ended.status == 0, f"{scenario} ended with {ended.status}\n{ended.stderr}"
    return ended.result


if __name__ == "__main__":
    module, function = sys.argv[1].split(".")
    scenario = getattr(importlib.import_module(f"emulator_lab.scenario_{module}"), function)
    print(_MARK + json.dumps(scenario(*json.loads(sys.argv[2]))), flush=True)

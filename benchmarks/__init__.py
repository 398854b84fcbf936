"""Measuring amxq: beside other implementations, against the machine's limits, and its overhead.

``python -m benchmarks --help`` says what can be measured.
"""

PROGRAM = "python -m benchmarks"
"""What usages call this program; ``amxq bench`` puts its own name here."""

"""Measuring amxq: beside other implementations, against the machine's limits, and its overhead.

``python -m benchmarks --help`` says what can be measured.
"""

"""Contestants for mixtures of experts; see :mod:`benchmarks.contestants`."""

"""Kernels written in the language of amxq."""

"""Runs kernels as plain Python on NumPy (``AMXQ_INTERPRET=1``), with the compiler's typing rules:
``print``, ``breakpoint()`` and any Python work inside of them, and no access leaves a tensor."""

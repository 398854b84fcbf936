"""What the emulator's tests share: an assembler, memory, random programs, runners.

Nothing here is imported by pytest's own process except :mod:`emulator_lab.child`'s
``run``: signal handlers and fixed addresses belong in processes of their own.
"""

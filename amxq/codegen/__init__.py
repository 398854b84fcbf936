"""Lowered tile-IR to LLVM and to object code."""

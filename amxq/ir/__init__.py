"""Tile-IR: types, operations, builder, printer, verifier."""

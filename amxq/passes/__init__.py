"""Rewrites of tile-IR, one pass a file; pipeline.py lists them."""

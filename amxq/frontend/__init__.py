"""Python AST to tile-IR."""

"""Rows to and from float8 by index."""

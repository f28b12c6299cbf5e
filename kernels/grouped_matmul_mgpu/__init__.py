"""Grouped matrix products on rows for Hopper, in Pallas Mosaic GPU."""

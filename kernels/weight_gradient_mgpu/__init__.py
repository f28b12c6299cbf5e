"""Gradients of grouped matrices for Hopper, in Pallas Mosaic GPU."""

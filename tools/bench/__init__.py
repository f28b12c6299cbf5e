"""Benchmarks that can be trusted: correctness first, device times with their spread, the physical limit beside them."""

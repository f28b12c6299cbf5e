"""Weighted sums of gathered rows."""

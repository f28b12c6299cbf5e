"""Matrix products of rows that are grouped by expert."""

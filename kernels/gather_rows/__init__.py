"""Moving rows by index."""

"""Moving rows to several places each."""

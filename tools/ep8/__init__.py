"""All checks and figures of one machine with several GPUs in one command; see __main__.py."""

"""One-sided row movements between the GPUs of an ep group; op.py has the functions, exchange.py the ordering rules."""

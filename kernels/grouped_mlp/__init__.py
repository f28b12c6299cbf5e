"""SwiGLU experts on rows that are grouped by expert."""

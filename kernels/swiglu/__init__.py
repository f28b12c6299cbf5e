"""SwiGLU on rows that are grouped by expert."""

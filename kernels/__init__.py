"""Kernels and what loads them. Nothing here knows the core or any plugin."""

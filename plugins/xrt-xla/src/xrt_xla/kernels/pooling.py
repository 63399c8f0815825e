"""Pooling through `lax.reduce_window`."""

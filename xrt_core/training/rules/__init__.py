"""Gradient rules by operator family."""

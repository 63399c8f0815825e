"""Reduced precision within a budget of errors: what the option `accuracy` does."""

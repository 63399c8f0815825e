"""The command `xrt`; nothing in the library imports it."""

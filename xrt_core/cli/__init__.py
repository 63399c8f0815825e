"""The command-line interface `xrt`. No other part of the library imports it."""

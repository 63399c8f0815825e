"""Human-readable partitions: diagrams (HTML, DOT), comparison of two partitions, an assertion for users' tests."""

from xrt_core.reports.difference import Difference, difference
from xrt_core.reports.dot import to_dot
from xrt_core.reports.html import to_html
from xrt_core.reports.notebook import to_notebook
from xrt_core.reports.offloaded import assert_offloaded

__all__ = ["Difference", "assert_offloaded", "difference", "to_dot", "to_html", "to_notebook"]

"""`python -m xrt_ort`: see `xrt_ort.command`."""

import sys

from xrt_ort.command import run_program

run_program(sys.argv[1:], "python -m xrt_ort")

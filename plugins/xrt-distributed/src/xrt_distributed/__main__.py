"""`python -m xrt_distributed`: see `xrt_distributed.command`."""

import sys

from xrt_distributed.command import run

sys.exit(run(sys.argv[1:], "python -m xrt_distributed"))

"""What every test runs under."""

from __future__ import annotations

import os

os.environ.setdefault("XRT_VERIFY", "1")  # the graph is held against the IR's rules after every stage
for _name in [n for n in os.environ if n.startswith("FLAGS_") or n == "XRT_DISABLE_PLUGINS"]:
    del os.environ[_name]  # a developer's own switches must not decide what the tests see

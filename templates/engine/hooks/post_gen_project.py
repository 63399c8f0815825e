"""Says what to do next."""

from __future__ import annotations

import importlib.util
import json

ANSWERS = json.loads(r"""{{ cookiecutter|jsonify }}""")
NEXT = """
{package} is ready. It works as it is; these are the next steps:

    cd {package}
    pip install -e . --group dev      # pip 25.1 or newer
    xrt engines                       # lists {engine}
    pytest                            # its own tests, and XRT's conformance kit
    grep -rn "YOUR ENGINE" .          # the places where yours comes in, each with what to decide
"""


def missing() -> str:
    """A note if the library that the engine computes with cannot be imported here, else ""."""
    if ANSWERS["array_library"] != "namespace" or importlib.util.find_spec(ANSWERS["__root"]) is not None:
        return ""
    return (
        f"\n{ANSWERS['namespace']!r} cannot be imported here: until it can, `xrt engines` says that "
        f"{ANSWERS['engine']} is unavailable, and the tests that need it are skipped.\n"
    )


if __name__ == "__main__":
    print(NEXT.format(**ANSWERS) + missing())

"""Development models on engines in several orders: clusters, crossings and time, without and with handing over.

    python benchmarks/partition_engines.py [--models ppocr_cls,smart_turn] [--precision use_bf16]

A row is a model and an order of engines: clusters of each engine and values at their boundaries where every cluster
stays (`prune=False`), then where the cost model decides, and milliseconds of a call of both, interleaved.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections import Counter
from functools import partial
from itertools import permutations
from typing import Any

from rounds import interleaved

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))  # the development models are part of the tests

from tests.conformance import dev_models
from xrt_core.module import XRTModule

ENGINES = ("openvino", "onnxruntime", "xla")
ROUNDS = 30


def told(module: XRTModule, inputs: dict[str, Any]) -> str:
    """The clusters of each engine, and the values at all boundaries."""
    report = module.explain(inputs).report
    count = Counter(c.engine for c in report.clusters)
    values = sum(len(c.inputs) + len(c.outputs) for c in report.clusters)
    left = f", {len(report.host_nodes)} nodes on the host" if report.host_nodes else ""
    return f"{' + '.join(f'{n} {e}' for e, n in count.items()) or 'none'}{left}; {values} values"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="ppocr_cls,smart_turn")
    parser.add_argument("--precision", default="use_bf16", help="an option to switch on; '' for none")
    arguments = parser.parse_args()
    options: dict[str, Any] = {arguments.precision: True} if arguments.precision else {}
    print("| model | engines | all stay | the cost model decides | ms a call |")
    print("|---|---|---|---|---|")
    for name in arguments.models.split(","):
        given = dev_models.inputs_for(name)
        for order in (*permutations(ENGINES, 2), ENGINES):
            modules = [
                XRTModule(dev_models.path(name), engine=order, prune=prune, cache="off", guard=False, **options)
                for prune in (False, True)
            ]
            calls = [partial(m.run, given) for m in modules]
            interleaved(calls, rounds=20)  # "auto" has tried its ways after that
            times = interleaved(calls, rounds=ROUNDS)
            cells = [told(m, given) for m in modules]
            ms = ", ".join(f"{t.median * 1e3:.2f}" for t in times)
            print(f"| {name} | {', '.join(order)} | {cells[0]} | {cells[1]} | {ms} |", flush=True)


if __name__ == "__main__":
    main()

"""The order of compilation: captured -> optimised -> partitioned -> planned.

`Pipeline.compile` (pipeline.py) is that order, to be read downward; `DEFAULT_PASSES` (passes.py) is the list of passes
with the reason why each stands where it does. The stages (stages.py) are plain data, services.py holds what a pipeline
works with, lowering.py what each node becomes in a plan, support.py what engines say about nodes, tiering.py the host's
plan that answers until the one with engines is ready, and compiled_graph.py a graph behind a call with arrays.
"""

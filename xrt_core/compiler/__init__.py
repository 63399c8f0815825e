"""The compile driver: captured -> optimised -> partitioned -> planned.

`Pipeline.compile` (pipeline.py) calls the stages in order; `DEFAULT_PASSES` (passes.py) lists the passes, each with
the reason for its position. stages.py: the stages as plain data. services.py: the components a pipeline is built from.
lowering.py: translation of each node to a step of a plan. support.py: support queries to the engines. tiering.py:
tiered compilation, with a baseline plan on the host. buckets/: one padded executable for calls of many sizes.
models.py: what a module calls.
"""

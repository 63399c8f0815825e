"""What commands print with `--json`: one type for each, from which docs/cli.md and the tests take their schemas."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct


def _is(text: str) -> Meta:
    return Meta(description=text)


class Result(Struct, forbid_unknown_fields=True):
    """What a command found."""


class ErrorText(Result):
    """An error of the command."""

    kind: Annotated[str, _is("the class of the error: one of `xrt.XRTError`, `OSError`, `internal`")]
    message: Annotated[str, _is("what is wrong, and what to do")]


class Error(Result):
    """Printed in the place of a result by a command that fails."""

    error: ErrorText


# --- run, train, compile ----------------------------------------------------------------------------------------------


class Value(Result):
    """An input or an output."""

    name: str
    type: Annotated[str, _is('such as "float32[1, 3]"; "absent" for none, "sequence of 2"')]
    min: float | None = None
    max: float | None = None
    mean: float | None = None


class Run(Result):
    """`xrt run`."""

    inputs: list[Value]
    outputs: list[Value]
    summary: Annotated[str, _is("clusters by engine, shares, operators on the host")]
    load_seconds: float
    compile_seconds: float
    run_seconds: Annotated[list[float], _is("of each run")]
    wrote: Annotated[list[str], _is("files")]


class Train(Result):
    """`xrt train`."""

    first_step: int
    last_step: int
    first_loss: float
    last_loss: float
    seconds: float
    summary: Annotated[str, _is("clusters by engine, shares, operators on the host")]
    wrote: Annotated[list[str], _is("files")]


class Compile(Result):
    """`xrt compile`."""

    file: str
    bytes: int
    seconds: float
    target: str | None
    summary: Annotated[str, _is("clusters by engine, shares, operators on the host")]
    not_compiled: Annotated[list[str], _is("with --partial: clusters that the host runs, and why")]


# --- partition, inspect -----------------------------------------------------------------------------------------------


class Tensor(Result):
    """A value at the boundary of a cluster."""

    name: str
    type: str


class Cluster(Result):
    """A cluster."""

    name: str
    engine: str
    device: str
    node_count: int
    inputs: list[Tensor]
    outputs: list[Tensor]
    operators: Annotated[dict[str, int], _is("operator -> how many")]
    nodes: Annotated[list[str], _is("names")]
    pinned: Annotated[bool, _is("by a mark of the user")]
    model_update: Annotated[bool, _is("it updates variables")]
    note: str
    region: Annotated[str, _is("the label of its marked region")]
    estimate: Annotated[dict[str, float] | None, _is("of the cost model, in microseconds")]


class HostNode(Result):
    """A node that the host runs."""

    index: int
    name: str
    operator: str
    reason: str


class Partition(Result):
    """`xrt partition`: the decisions for one signature."""

    name: Annotated[str, _is("of the graph")]
    signature: Annotated[dict[str, str], _is("input -> type")]
    nodes: int
    node_share: Annotated[float, _is("of the nodes on engines, 0 to 1")]
    flops: int
    flop_share: float
    peak_bytes: int | None
    symbols: list[str]
    guards: list[str]
    node_count: Annotated[int, _is("without those of subgraphs")]
    offloaded_share: float
    clusters: list[Cluster]
    host_nodes: list[HostNode]
    errors: Annotated[dict[str, str], _is("cluster -> its failure")]
    lost: Annotated[list[str], _is("clusters that the host runs because of a failure")]
    ran_on: Annotated[dict[str, str], _is("cluster -> devices")]
    sharding: dict[str, Any] | None
    precision: dict[str, Any] | None
    nested: Annotated[dict[str, list[Partition]], _is("subgraphs that were planned separately")]


class PartitionDifference(Result):
    """`xrt partition --diff`."""

    moved: Annotated[list[str], _is("nodes that run elsewhere")]
    reasons: Annotated[list[str], _is("host nodes with another reason")]
    clusters: Annotated[list[str], _is("gone, new or changed")]
    nodes: Annotated[list[str], _is("that only one report has")]
    figures: list[str]


class InspectedCluster(Result):
    """A cluster, and the texts that there are of it."""

    number: int
    name: str
    engine: str
    nodes: int
    origin: Annotated[str, _is("where its executable came from")]
    stages: Annotated[dict[str, str], _is("stage -> what it is")]


class Inspect(Result):
    """`xrt inspect`."""

    clusters: list[InspectedCluster]
    cluster: Annotated[str | None, _is("the one that was asked for")] = None
    stage: str | None = None
    text: Annotated[str | None, _is("at that stage")] = None
    compiled_again: Annotated[bool, _is("there is an executable, and it was compiled again for the text")] = False
    diff: Annotated[list[str] | None, _is("with --diff: lines of a unified diff")] = None


class Export(Result):
    """`xrt export`."""

    file: str
    stage: str
    nodes: int
    validity: Annotated[str, _is("what ONNX's checker says, and which operators only XRT knows")]


# --- profile ----------------------------------------------------------------------------------------------------------


class ProfileRow(Result):
    """A step of a plan over all its runs."""

    plan: str
    label: str
    kind: Annotated[str, _is("cluster, host, control, conversion or between")]
    engine: str
    nodes: list[str]
    runs: int
    seconds: Annotated[float, _is("in all, with what ran inside of it")]
    own: Annotated[float, _is("without that")]
    best: float
    moved: Annotated[int, _is("bytes")]
    flops: int
    peak: Annotated[float | None, _is("the least time for these on this machine, as a share of `own`")]


class ProfiledNode(Result):
    """The time of a node in all runs."""

    name: str
    operator: str
    engine: str
    seconds: float
    estimated: bool


class Profile(Result):
    """`xrt profile`."""

    name: str
    seconds: float
    calls: int
    call_seconds: float
    background_calls: int
    background_seconds: float
    bandwidth: Annotated[float, _is("of this machine, bytes per second")]
    peak_flops: float
    rows: list[ProfileRow]
    nodes: list[ProfiledNode]
    memory: Annotated[list[tuple[float, int]], _is("(seconds, bytes that the process holds)")]


# --- engines, doctor, passes ------------------------------------------------------------------------------------------


class EngineLine(Result):
    """An installed engine."""

    name: str
    package: str
    version: str
    status: Annotated[str, _is("ready, unavailable, broken, disabled or installed")]
    devices: list[str]
    library_version: str
    reason: str
    remedy: str


class Engines(Result):
    """`xrt engines`."""

    engines: list[EngineLine]


class NewEngine(Result):
    """`xrt new-engine`."""

    folder: str


class Share(Result):
    """How many operators of a family an engine takes and passes."""

    operators: int
    taken: int
    passed: int


class DtypeCases(Result):
    """How many of the kit's cases of a dtype an engine takes, ran and passed."""

    cases: int
    taken: int
    run: int
    passed: int


class CheckEngine(Result):
    """`xrt check-engine`: the score card of an engine."""

    engine: str
    version: str
    device: str
    score: Annotated[float, _is("share of the kit's operators that it takes and passes, 0 to 1")]
    summary: Annotated[dict[str, int], _is("state of operators -> how many")]
    families: Annotated[dict[str, Share], _is("family of operators -> counts")]
    dtypes: Annotated[dict[str, DtypeCases], _is("dtype -> counts")]
    tests: Annotated[dict[str, int], _is("outcome of the tests that are about no operator -> how many")]
    operators: Annotated[dict[str, dict[str, Any]], _is("operator -> its state, with the reason or counts of cases")]
    failures: Annotated[list[str], _is("cases that failed")]
    contract: Annotated[dict[str, str], _is("test that is about no operator -> its outcome")]
    reasons: Annotated[dict[str, str], _is("test that did not pass -> why")]


class FoundProblem(Result):
    """A problem of the installation or the configuration."""

    what: str
    remedy: str
    command: Annotated[str, _is('a shell command that mends it, "" where there is none')]


class Doctor(Result):
    """`xrt doctor`."""

    versions: Annotated[dict[str, str], _is("package -> version")]
    processor: str
    engines: list[EngineLine]
    devices: list[str]
    cuda: dict[str, str]
    environment: Annotated[dict[str, str], _is("variables that XRT reads")]
    settings: Annotated[dict[str, str], _is("option -> value and where it is from")]
    problems: list[FoundProblem]


class Pass(Result):
    """A pass."""

    name: str
    stage: str
    owner: str
    origin: str
    before: list[str]
    after: list[str]
    requires: list[str]
    reason: Annotated[str, _is("for its position")]


class Passes(Result):
    """`xrt passes`."""

    passes: Annotated[list[Pass], _is("in execution order")]
    left_out: Annotated[dict[str, str], _is("pass of a plugin -> why")]


# --- report -----------------------------------------------------------------------------------------------------------


class FaultCount(Result):
    """How often a cluster failed in one way."""

    stage: str
    kind: str
    count: int


class OutcomePiece(Result):
    """Nodes of a cluster that one engine runs."""

    engine: str
    nodes: list[int]
    fused: bool


class ClusterOutcome(Result):
    """What runs a cluster."""

    verdict: str
    pieces: list[OutcomePiece]
    reason: str
    timings: Annotated[dict[str, float], _is("seconds, by engine, host, compile, verify")]
    errors: list[str]
    finite_only: bool
    serialised: bool
    notes: list[str]
    timed: str
    provisional: bool
    untried: list[str]


class Moment(Result):
    """An entry of a history. time: seconds since the epoch."""

    time: float
    state: str
    reason: str


class ClusterFault(Result):
    """A failure."""

    time: float
    stage: str
    kind: str
    message: str
    log: str
    exit_code: int | None


class GuardedCluster(Result):
    """A cluster under guard."""

    name: str
    number: int
    engine: str
    nodes: int
    operators: str
    state: Annotated[str, _is("queued, compiling, verifying, ready, live, failed or rejected")]
    reason: str
    chosen: Annotated[str, _is('what runs it: engines, or "host"')]
    calls: int
    host_calls: int
    failures: int
    shadow_runs: int
    races: int
    fault_counts: list[FaultCount]
    outcome: ClusterOutcome | None
    history: list[Moment]
    faults: list[ClusterFault]
    saved_seconds: float


class Planning(Result):
    """A compilation in the background that has not ended, or failed."""

    graph: str
    state: str
    reason: str
    since: float


class Report(Result):
    """`xrt report`."""

    clusters: list[GuardedCluster]
    calls: int
    host_calls: int
    accelerated_share: float
    saved_seconds: float
    seconds: float
    planning: list[Planning]


# --- bisect, replay ---------------------------------------------------------------------------------------------------


class FaultyNode(Result):
    """A node that an engine computes wrongly, or does not compile."""

    index: int
    operator: str
    name: str
    absolute: Annotated[str, _is("its largest absolute error")]
    relative: str
    reason: str
    bundle: Annotated[str | None, _is("the repro bundle that was written")]


class BisectedCluster(Result):
    """A cluster that was examined."""

    cluster: str
    right: bool
    summary: str
    faults: list[FaultyNode]


class Bisect(Result):
    """`xrt bisect`."""

    engine: str
    clusters: list[BisectedCluster]


class Replay(Result):
    """`xrt replay`."""

    fails: bool
    then: Annotated[str, _is("what failed when the bundle was written")]
    now: str


# --- cache ------------------------------------------------------------------------------------------------------------


class CacheEntry(Result):
    """An entry."""

    entry: Annotated[str, _is("its name")]
    bytes: int
    used: Annotated[float, _is("seconds since the epoch")]
    engine: str = ""
    device: str = ""
    cluster: str = ""
    nodes: int = 0
    created: float = 0.0
    compile_seconds: float = 0.0
    not_stored: str = ""
    problem: str = ""


class CacheList(Result):
    """`xrt cache ls`."""

    entries: Annotated[list[CacheEntry], _is("the most recently used first")]


class CacheInfo(Result):
    """`xrt cache info`."""

    folder: str
    mode: str
    limit: Annotated[int, _is("bytes")]
    entries: int
    bytes: int
    entry: Annotated[dict[str, str] | None, _is("with an entry: its key, manifest and problem")] = None


class CacheDifference(Result):
    """`xrt cache explain`."""

    differences: Annotated[list[str], _is("rows of the keys")]
    functions: Annotated[list[str], _is("lines of a diff")]


class CacheDeleted(Result):
    """`xrt cache clear`."""

    entries: int
    bytes: int


class CacheVerified(Result):
    """`xrt cache verify`."""

    checked: int
    damaged: Annotated[dict[str, str], _is("entry -> what is wrong")]


class CacheExported(Result):
    """`xrt cache export`."""

    entries: int
    file: str


class CacheImported(Result):
    """`xrt cache import`."""

    stored: int
    rejected: Annotated[dict[str, str], _is("entry -> why")]
    folder: str

"""`xrt launch --hosts`: processes on other machines, for which a program stands in the place of ssh.

Most tests run all on this machine, each "host" in an environment of its own. `lan` makes two network namespaces, with
addresses of their own and nothing shared but the files.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from test_launch import REGRESSION, is_running
from xrt_distributed._toolkit import local_devices, own_address
from xrt_distributed.command import run
from xrt_distributed.hosts import Host
from xrt_distributed.launcher import Settings, _order

pytest.importorskip("jax")

SSH = """#!/bin/sh
host=$1; shift
echo $$ > "{folder}/agent.$host"
echo "Welcome to $host"
cd / && exec {inside} env -i PATH="$PATH" HOME="{folder}" PYTHONPATH="{path}" JAX_PLATFORMS=cpu sh -c "$*"
"""
SLEEPS = "import os, sys, time\nprint(os.getpid(), os.environ['RANK'], flush=True)\ntime.sleep(120)\n"


@pytest.fixture
def ssh(tmp_path: pathlib.Path, environment: dict[str, str]) -> pathlib.Path:
    """A program that does what ssh would, here: by a shell, in another folder, with none of our variables."""
    made = tmp_path / "ssh"
    made.write_text(SSH.format(folder=tmp_path, path=environment["PYTHONPATH"], inside=""))
    made.chmod(0o755)
    return made


def command(ssh: pathlib.Path, *arguments: str, hosts: str = "localhost,127.0.0.1") -> list[str]:
    """The launcher, with one process on each of two hosts."""
    return [sys.executable, "-m", "xrt_distributed", "-n", "1", "--hosts", hosts, "--ssh", str(ssh), *arguments]


def started(
    ssh: pathlib.Path, environment: dict[str, str], *arguments: str
) -> tuple[subprocess.Popen[str], list[int]]:
    """A launcher with two processes that sleep, once both are there; the processes by rank."""
    program = ssh.with_name("program.py")
    program.write_text(SLEEPS)
    handle = subprocess.Popen(
        command(ssh, *arguments, str(program)), env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert handle.stdout is not None
    own = dict(re.findall(r"\[(\d)\] (\d+)", handle.stdout.readline() + handle.stdout.readline()))
    return handle, [int(own["0"]), int(own["1"])]


def gone(processes: list[int], seconds: float = 20.0) -> bool:
    """Whether all of them end in time."""
    deadline = time.monotonic() + seconds
    while any(map(is_running, processes)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not any(map(is_running, processes))


def test_what_a_host_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks go on from host to host; variables of ours, JAX's and so on go along, others do not."""
    monkeypatch.setenv("XLA_FLAGS", "--a --xla_force_host_platform_device_count=8")
    monkeypatch.setenv("XRT_CACHE_DIR", "/x")
    monkeypatch.setenv("SECRET", "s")
    settings = Settings(2, devices=3, hosts=("a", "me@b"), job="j")
    order = _order(["train.py"], settings, 1, 1, "a", 99)
    assert list(order.variables) == [2, 3]
    own = order.variables[3]
    assert (own["RANK"], own["LOCAL_RANK"], own["WORLD_SIZE"], own["LOCAL_WORLD_SIZE"]) == ("3", "1", "4", "2")
    assert (own["MASTER_ADDR"], own["MASTER_PORT"], own["XRT_LAUNCH_ATTEMPT"]) == ("a", "99", "1")
    assert own["XLA_FLAGS"] == "--a --xla_force_host_platform_device_count=3"
    assert order.shared["XRT_CACHE_DIR"] == "/x"
    assert "SECRET" not in order.shared
    assert order.defaults["XRT_DISTRIBUTED_JOB"] == "j"
    assert not _order(["train.py"], Settings(2), 0, 0, "127.0.0.1", 99).shared


def test_addresses_and_gpus() -> None:
    """An address of this machine is no answer for others; each process of several has the GPU of its local rank."""
    assert own_address("127.0.0.1", 1) is None
    assert own_address("no.such.host.invalid", 1) is None
    assert local_devices({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}) == [1]
    assert local_devices({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}) is None
    assert local_devices({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": "1"}) is None
    assert local_devices({}) is None


def test_out_of_reach(capfd: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    """Hosts that cannot be reached, or have another version, are named with the reason; nothing is started."""
    refuses = tmp_path / "refuses"
    refuses.write_text("#!/bin/sh\necho 'Permission denied (publickey).' >&2\nexit 255\n")
    other = tmp_path / "other"
    other.write_text("#!/bin/sh\necho hello\necho '[-1,\"hello\",1,\"9.9\"]'\nread x\n")
    for path in (refuses, other):
        path.chmod(0o755)
    assert run(["-n", "1", "--hosts", "a,b", "--ssh", str(refuses), "train.py"], "xrt launch") == 255
    said = capfd.readouterr().err
    assert "host a: the connection ended with exit code 255: Permission denied (publickey).; host b: the" in said
    host = Host("a", [str(other)], "python", lambda rank, line: None)
    assert host.connected() == "xrt-distributed is 9.9 there, and 0.1.0 here"
    host.join()
    absent = Host("a", [str(tmp_path / "absent")], "python", lambda rank, line: None)
    assert "cannot be run: No such file" in absent.connected()
    for wrong in ("a,,b", "a,a", "-oProxyCommand=x"):
        with pytest.raises(SystemExit):
            run(["-n", "1", f"--hosts={wrong}", "train.py"], "xrt launch")
    assert "names of machines" in capfd.readouterr().err


@pytest.mark.slow
def test_a_program_on_two_hosts(ssh: pathlib.Path, environment: dict[str, str], tmp_path: pathlib.Path) -> None:
    """Processes run in the launcher's folder, with its variables of the kinds that go along; one that fails ends all,
    with a message that names its host and has its last lines."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys, time\nprint(os.getcwd(), sys.argv[1:], os.environ.get('SECRET'), flush=True)\n"
        "if os.environ['RANK'] == '1':\n    raise ValueError('no more')\ntime.sleep(120)\n"
    )
    done = subprocess.run(
        command(ssh, "--logs", "logs", "program.py", "a b", "-x"), cwd=tmp_path,
        env={**environment, "SECRET": "s"}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    for rank in range(2):
        assert f"[{rank}] {tmp_path} ['a b', '-x'] None" in done.stdout
    assert re.search(r"rank 1 \(process \d+ on 127.0.0.1\) ended with exit code 1 after .* all are ended", done.stderr)
    assert "ValueError: no more" in done.stderr
    assert "ValueError: no more" in (tmp_path / "logs" / "rank1.log").read_text()
    assert gone([int((tmp_path / f"agent.{h}").read_text()) for h in ("localhost", "127.0.0.1")])


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("number", "message", "code"),
    [
        (signal.SIGKILL, r"on localhost\) is out of reach: the connection ended with exit code -9", 255),
        (signal.SIGSTOP, r"on localhost\) hangs \(no heartbeat for 4 s\)", 75),
    ],
)
def test_a_host_that_is_lost(
    ssh: pathlib.Path, environment: dict[str, str], number: int, message: str, code: int
) -> None:
    """A host whose agent dies, or is silent, ends all; its processes end with it, or when it goes on."""
    handle, own = started(ssh, environment, "--hang", "4")
    agent = int(ssh.with_name("agent.localhost").read_text())
    os.kill(agent, number)
    _, said = handle.communicate(timeout=60)
    assert handle.returncode == code, said
    assert re.search(message, said), said
    assert gone([own[1]])
    if number == signal.SIGSTOP and is_running(agent):  # ssh itself would be killed; here that is the agent
        os.kill(agent, signal.SIGCONT)
    assert gone([own[0], agent])


@pytest.mark.nightly
def test_a_launcher_that_dies(ssh: pathlib.Path, environment: dict[str, str]) -> None:
    """The processes on all hosts end too."""
    handle, own = started(ssh, environment)
    handle.kill()
    handle.communicate()
    assert gone(own)


@pytest.fixture
def lan(tmp_path: pathlib.Path, environment: dict[str, str]) -> Iterator[pathlib.Path]:
    """In the place of ssh: two network namespaces as machines 10.77.31.1 and 10.77.31.2."""
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("network namespaces need root, and iproute2")

    def ip(*arguments: str, check: bool = True) -> None:
        subprocess.run(["ip", *arguments], check=check, capture_output=True)

    names = [f"xrt{os.getpid()}-{n}" for n in (1, 2)]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
        except subprocess.CalledProcessError as e:
            pytest.skip(f"network namespaces cannot be made: {e.stderr!r}")
        ip("link", "add", "veth1", "netns", names[0], "type", "veth", "peer", "name", "veth2", "netns", names[1])
        for n, name in enumerate(names, 1):
            ip("-n", name, "addr", "add", f"10.77.31.{n}/24", "dev", f"veth{n}")
            for device in ("lo", f"veth{n}"):
                ip("-n", name, "link", "set", device, "up")
        made = tmp_path / "ssh"
        inside = f"ip netns exec {names[0][:-1]}${{host##*.}}"
        made.write_text(SSH.format(folder=tmp_path, path=environment["PYTHONPATH"], inside=inside))
        made.chmod(0o755)
        yield made
    finally:
        for name in names:
            ip("netns", "del", name, check=False)


@pytest.mark.nightly
def test_training_over_a_network(lan: pathlib.Path, environment: dict[str, str], tmp_path: pathlib.Path) -> None:
    """Two machines of two devices train as one process does: collectives go over the network, though the machines'
    own names mean 127.0.0.1 there."""
    from regression import numbers

    want: dict[str, Any] = numbers(10)
    done = subprocess.run(
        command(lan, "--devices", "2", str(REGRESSION), "numbers", str(tmp_path), hosts="10.77.31.1,10.77.31.2"),
        env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for rank in range(2):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        for name in ("losses", "uneven", "epochs", "evaluate", "predict", "inference"):
            np.testing.assert_allclose(found[name], want[name], rtol=0, atol=1e-5)


@pytest.mark.nightly
def test_faults_over_a_network(lan: pathlib.Path, environment: dict[str, str], tmp_path: pathlib.Path) -> None:
    """Ranks on two machines that are killed or stopped: all start again from the last checkpoint."""
    done = subprocess.run(
        command(lan, "--devices", "2", "--restarts", "3", "--hang", "4", str(REGRESSION), "faulty", str(tmp_path), "3",
                hosts="10.77.31.1,10.77.31.2"),
        env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    faults = re.findall(r"rank [01] \(process \d+ on 10.77.31.[12]\) (was ended by SIGKILL|hangs)", done.stderr)
    assert len(faults) == 3, done.stderr
    steps = [json.loads(line[4:])["step"] for line in done.stdout.splitlines() if line.startswith("[0] {")]
    assert sorted(set(steps)) == list(range(1, 14))

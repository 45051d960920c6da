"""What an environment needs to run an SGLang server, step by step, and the command that makes each step hold.

On CUDA it is an extra of ours (`pip install 'flowgraph-rl[sglang]'`), on CPU the recipe in the folder sglang_cpu.
A step fails when a server would not start, or not live through a weight sync; it warns of what was not tested.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from flowgraph.engines.environment import (
    AFFECTS,
    OWN,
    Environment,
    Unmet,
    absolute,
    make,
    probe,
    unmet,
    within,
)
from flowgraph.errors import Check

Device = Literal["cpu", "cuda"]

SUPPORTED = ">=0.5.23,<0.6"  # of sglang; the extra in pyproject.toml says the same
TESTED = "0.5.23"
TORCHVISION = "0.28.0"  # the one made for the torch of the recipe
PYTHON = ">=3.11"  # of sglang and of the plugin
RECIPE = Path(__file__).parent / "sglang_cpu"
PLUGIN = "flowgraph_sglang_cpu"
CPU_SWITCH = "SGLANG_USE_CPU_ENGINE"  # the only thing by which SGLang takes the CPU
SERVER = ("sglang.launch_server", "sglang.srt.entrypoints.http_server")
DRIVER, WSL = Path("/proc/driver/nvidia/version"), Path("/dev/dxg")
START_DEADLINE = 300.0  # seconds; the imports take 7, on a cold disk or beside other work several times that


def missing(python: str, device: Device) -> list[str]:
    """Why an SGLang server can't be started by this interpreter, each with what to do; [] when nothing is known to be.

    Reads metadata only, in about 0.3 s.
    """
    return [f"{c.name}: {c.found}; to do: {c.fix}" for c in recipe(python, device) if c.status == "fail"]


def recipe(python: str, device: Device) -> list[Check]:
    """Every step in the order in which it is made to hold. Without an interpreter that is the only one."""
    env = probe(python)
    if isinstance(env, Check):
        return [env]
    if device == "cpu" and env.ours and "sglang" not in env.packages:
        return [_apart(env), *_cpu(env, f"{OWN} -m pip install")]
    return [_interpreter(env), *(_cpu(env, env.install) if device == "cpu" else _cuda(env))]


def server_environment(device: Device) -> dict[str, str]:
    """The variables that a server of ours is started with."""
    rest = {name: value for name, value in os.environ.items() if name != CPU_SWITCH}
    return rest | {CPU_SWITCH: "1"} if device == "cpu" else rest


def starts(python: str, device: Device, deadline: float = START_DEADLINE) -> Check:
    """Import what a server imports in that interpreter, where every package that is missing or broken shows."""
    name, affects = "imports", "a server starts"
    code = "import " + ", ".join(SERVER)
    began = time.monotonic()
    with subprocess.Popen(
        [absolute(python), "-W", "ignore", "-c", code],
        env=server_environment(device),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # so that what it starts can be ended with it
    ) as process:
        try:
            _, printed = process.communicate(timeout=deadline)
        except subprocess.TimeoutExpired:
            found = f"{SERVER[0]} is not imported after {deadline:.0f} s"
            return Check(name, "fail", found, affects, "end what else runs on this machine, and try again")
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        lines = [line for line in printed.splitlines() if line.strip()] or [f"exit code {process.returncode}"]
        switch = f"{CPU_SWITCH}=1 " if device == "cpu" else ""
        fix = f'{switch}{shlex.quote(absolute(python))} -c "{code}", to see where it breaks'
        return Check(name, "fail", lines[-1], affects, fix)
    return Check(name, "ok", f"{SERVER[0]} in {time.monotonic() - began:.1f} s", affects)


def pinned() -> list[str]:
    """The requirements of a server on CPU, a line each."""
    lines = (RECIPE / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def _interpreter(env: Environment) -> Check:
    found = f"{env.python} is Python {env.version}"
    if within(env.version, PYTHON):
        return Check("interpreter", "ok", found, AFFECTS)
    fix = make(OWN).replace("python3", "python3.11", 1)
    return Check("interpreter", "fail", f"{found}, not {PYTHON}", AFFECTS, fix)


def _apart(env: Environment) -> Check:
    """The pins of a CPU server would replace what flowgraph itself runs with, so it gets an environment of its own."""
    found = f"{env.python} is flowgraph's own, and the pins of SGLang differ"
    return Check("interpreter", "warn", found, AFFECTS, f"{make(OWN)} --device cpu")


def _cpu(env: Environment, install: str) -> Iterator[Check]:
    """install: the command that installs where the server is to run"""
    bare = f"{install} --no-deps sglang=={TESTED} torchvision=={TORCHVISION}"
    requirements = f"{install} -r {shlex.quote(str(RECIPE / 'requirements.txt'))}"
    yield _requirements(env, pinned(), requirements, absent="fail")
    yield _cpu_torch(env, install, requirements)
    yield _sglang(env, bare)
    yield _torchvision(env, bare)
    yield _plugin(env, f"{install} {shlex.quote(str(RECIPE))}")
    yield Check(
        CPU_SWITCH,
        "ok",
        f"set to 1 for the servers that flowgraph starts; here it is {os.environ.get(CPU_SWITCH, 'not set')}",
        "nothing else makes SGLang take the CPU; set it for a server that you start yourself",
    )


def _requirements(env: Environment, wanted: list[str], fix: str, *, absent: Literal["fail", "warn"]) -> Check:
    wrong = list(unmet(wanted, env))
    affects = "what the server imports"
    if not wrong:
        return Check("requirements", "ok", f"all {len(wanted)} are there", affects)
    status = absent if any(one.version is None for one in wrong) else "warn"
    return Check("requirements", status, _listed(wrong), affects, fix)


def _listed(wrong: list[Unmet], most: int = 6) -> str:
    """One command mends all, so the first few are named: an environment without any of them has dozens."""
    more = f"; and {len(wrong) - most} more" if len(wrong) > most else ""
    return "; ".join(str(one) for one in sorted(wrong, key=lambda one: one.version is not None)[:most]) + more


def _cpu_torch(env: Environment, install: str, requirements: str) -> Check:
    version = env.packages.get("torch")
    affects = "weight sync: a torch for CUDA kills a CPU server that releases its cache"
    if version is None:
        return Check("torch", "fail", "is not installed", affects, requirements)
    if env.cuda is None:
        return Check("torch", "ok", f"{version}, a CPU build", affects)
    plain = version.partition("+")[0]
    index = "https://download.pytorch.org/whl/cpu"
    fix = f"{install} --force-reinstall --no-deps torch=={plain}+cpu --extra-index-url {index}"
    return Check("torch", "fail", f"{version} is built for CUDA {env.cuda}", affects, fix)


def _sglang(env: Environment, fix: str) -> Check:
    version = env.packages.get("sglang")
    affects = "the server; what its replies and its control requests mean"
    if version is None:
        return Check("sglang", "fail", f"is not installed in {env.python}", affects, fix)
    if not within(version, SUPPORTED):
        return Check("sglang", "fail", f"{version}, not {SUPPORTED}", affects, fix)
    if version != TESTED:
        return Check("sglang", "warn", f"{version}; tested is {TESTED}", affects, fix)
    return Check("sglang", "ok", f"{version} ({SUPPORTED})", affects)


def _torchvision(env: Environment, fix: str) -> Check:
    version = env.packages.get("torchvision")
    affects = "the server's imports; nothing of it is called for text"
    if version is None:
        return Check("torchvision", "fail", "is not installed", affects, fix)
    if not within(version, f"=={TORCHVISION}"):
        return Check("torchvision", "warn", f"{version}; tested is {TORCHVISION}", affects, fix)
    return Check("torchvision", "ok", version, affects)


def _plugin(env: Environment, fix: str) -> Check:
    """Another plugin, or kernels that were compiled for the CPU, may well do the same; neither is tested."""
    affects = "the server's imports: it stands in for what has no CPU build"
    if any(value.partition(":")[0] == PLUGIN for value in env.plugins):
        kernel = "sgl_kernel is there too" if env.kernel else "in place of sgl_kernel: attention by torch"
        return Check("plugin", "ok", f"installed; {kernel}", affects)
    others = [*env.plugins, *(["an sgl_kernel"] if env.kernel else [])]
    if others:
        found = f"{PLUGIN} is not installed; there is {', '.join(others)}, not tested"
        return Check("plugin", "warn", found, affects, fix)
    return Check("plugin", "fail", f"{PLUGIN} is not installed, and there is no sgl_kernel", affects, fix)


def _cuda(env: Environment) -> Iterator[Check]:
    what = "flowgraph-rl[sglang]" if env.ours else f"sglang{SUPPORTED}"
    fix = f"{env.install} '{what}'"
    yield _sglang(env, fix)
    if "sglang" in env.packages:
        yield _requirements(env, env.requires, fix, absent="warn")
    yield _cuda_torch(env, fix)
    yield driver()
    yield _memory_saver(env)
    if CPU_SWITCH in os.environ:
        found = f"is {os.environ[CPU_SWITCH]!r} here, and left out for the servers that flowgraph starts"
        yield Check(CPU_SWITCH, "warn", found, "SGLang takes the CPU by it", f"unset {CPU_SWITCH}")


def _cuda_torch(env: Environment, fix: str) -> Check:
    version = env.packages.get("torch")
    if version is None:
        return Check("torch", "fail", "is not installed", "the server", fix)
    if env.cuda is None:
        plain = version.partition("+")[0]
        fix = f"{env.install} --force-reinstall torch=={plain} --index-url https://pypi.org/simple"
        return Check("torch", "fail", f"{version} is a CPU build", "the server", fix)
    return Check("torch", "ok", f"{version}, built for CUDA {env.cuda}", "the server")


def driver() -> Check:
    """The NVIDIA driver of this machine, without a call into it."""
    affects = "every use of a GPU"
    if WSL.exists():
        return Check("driver", "ok", "that of Windows", affects)
    try:
        found = DRIVER.read_text().splitlines()[0].partition(":")[2].strip()
    except (OSError, IndexError):
        fix = "install NVIDIA's driver; in a container, start it with --gpus all"
        return Check("driver", "fail", "no NVIDIA driver is loaded", affects, fix)
    return Check("driver", "ok", found, affects)


def _memory_saver(env: Environment) -> Check:
    version = env.packages.get("torch-memory-saver")
    affects = "weight sync: without it the KV cache keeps its memory meanwhile"
    if version is None:
        fix = f"{env.install} torch-memory-saver"
        return Check("memory saver", "warn", "torch-memory-saver is not installed", affects, fix)
    return Check("memory saver", "ok", version, affects)

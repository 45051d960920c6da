"""Python, the packages that flowgraph asks for, and whether its torch reaches a GPU."""

from __future__ import annotations

import importlib.metadata
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator

from flowgraph.engines.environment import Environment, probe, unmet, within
from flowgraph.engines.sglang_recipe import driver
from flowgraph.errors import Check
from flowgraph.spec.units import counted, size_text

DISTRIBUTION = "flowgraph-rl"
ALONE = ("torch", "transformers")  # a check each; of the rest only what does not fit is told
PIP = f"{shlex.quote(sys.executable)} -m pip install"
CUDA_DEADLINE = 120.0  # seconds; torch takes 3 to import and to find the devices

# In a process of its own: neither the import nor a context on a GPU stays with us.
DEVICES = """
import json, torch
torch.ones(1, device="cuda").sum().item()
found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
print(json.dumps([(one.name, one.total_memory) for one in found]))
"""


def software() -> Iterator[Check]:
    """Python and the packages against the ranges that flowgraph's own metadata states, then CUDA."""
    env = probe(sys.executable)
    if isinstance(env, Check):
        yield env
        return
    try:
        about = importlib.metadata.metadata(DISTRIBUTION)
        wanted = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        found, fix = "runs uninstalled, so no ranges are known", f"{PIP} -e . in a checkout of it"
        yield Check("flowgraph", "warn", found, "the checks of packages", fix)
    else:
        yield _python(env, about["Requires-Python"])
        yield Check("flowgraph", "ok", about["Version"], "graphs and plans that another version wrote")
        for name in ALONE:
            lines = [line for line in wanted if line.startswith(name)]
            well = f"{env.packages.get(name)} ({', '.join(line.removeprefix(name) for line in lines)})"
            yield _packages(name, lines, env, well, "the embedded engine and learner")
        rest = [line for line in wanted if not line.startswith(ALONE) and "extra ==" not in line]
        yield _packages("packages", rest, env, f"all other {len(rest)} are there", "commands and hops")
    yield cuda(env)


def _python(env: Environment, allowed: str) -> Check:
    if within(env.version, allowed):
        return Check("python", "ok", f"{env.version} ({allowed})", "everything")
    fix = "python3.11 -m venv .venv, and install flowgraph there"
    return Check("python", "fail", f"{env.version}, not {allowed}", "everything", fix)


def _packages(name: str, wanted: list[str], env: Environment, well: str, affects: str) -> Check:
    wrong = list(unmet(wanted, env))
    if not wrong:
        return Check(name, "ok", well, affects)
    fix = f"{PIP} {' '.join(shlex.quote(one.name + one.allowed) for one in wrong)}"
    return Check(name, "fail", "; ".join(map(str, wrong)), affects, fix)


def cuda(env: Environment) -> Check:
    """The devices that torch reaches, each by a kernel that it ran there; skipped with a CPU build of torch."""
    affects = "device: cuda; without it everything runs on the CPU"
    if env.cuda is None:
        found = "torch is a CPU build" if "torch" in env.packages else "torch is not installed"
        return Check("cuda", "skip", found, affects)
    loaded = driver()
    if loaded.status == "fail":
        return Check("cuda", "skip", loaded.found, affects)
    try:
        ran = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", DEVICES],
            capture_output=True,
            text=True,
            timeout=CUDA_DEADLINE,
        )
    except subprocess.TimeoutExpired:
        found = f"torch does not answer within {CUDA_DEADLINE:.0f} s"
        return Check("cuda", "fail", found, affects, "nvidia-smi, to see who holds the devices")
    if ran.returncode:
        why = ran.stderr.strip().rpartition("\n")[2]
        return Check(
            "cuda", "fail", why, affects, f"install a driver for CUDA {env.cuda}, or a torch for the driver"
        )
    devices = json.loads(ran.stdout)
    listed = ", ".join(f"{name} ({size_text(memory)})" for name, memory in devices)
    return Check("cuda", "ok", f"{counted(len(devices), 'device')}: {listed}; driver {loaded.found}", affects)

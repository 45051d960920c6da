"""What an SGLang server needs of an environment: real interpreters, with the metadata of what is to be found there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import time
import tomllib
import venv
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from flowgraph.cli import main
from flowgraph.engines.environment import Environment, probe, unmet, within
from flowgraph.engines.sglang_recipe import (
    CPU_SWITCH,
    PLUGIN,
    RECIPE,
    SUPPORTED,
    TESTED,
    TORCHVISION,
    Device,
    missing,
    pinned,
    recipe,
    server_environment,
    starts,
)
from flowgraph.errors import Check

ROOT = Path(__file__).parents[2]
REAL = os.environ.get("FLOWGRAPH_SGLANG_PYTHON")  # an interpreter with the recipe installed


class Made:
    """A virtual environment without pip, and packages in it that are nothing but metadata."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, symlinks=True, with_pip=False)
        self.python = str(folder / "bin/python")
        self.site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))

    def add(self, name: str, version: str, *requires: str, plugin: str = "") -> None:
        info = self.site / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        (info / "METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {r}" for r in requires)]) + "\n")
        if plugin:
            (info / "entry_points.txt").write_text(f"[sglang.srt.platforms]\nx = {plugin}\n")

    def add_torch(self, version: str, cuda: str | None) -> None:
        self.add("torch", version)
        (self.site / "torch").mkdir()
        (self.site / "torch/version.py").write_text(f"cuda = {cuda!r}\n")

    def add_recipe(self) -> None:
        for line in pinned():
            name, _, version = line.replace(">=", "==").partition("==")
            if name != "torch":
                self.add(name, version or "1.0")
        self.add_torch("2.13.0+cpu", None)
        self.add("sglang", TESTED)
        self.add("torchvision", TORCHVISION)
        self.add("flowgraph-sglang-cpu", "0.1.0", plugin=f"{PLUGIN}:activate")

    def steps(self, device: Device) -> dict[str, Check]:
        return {check.name: check for check in recipe(self.python, device)}


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path / "with space")


def sglang(*arguments: str) -> tuple[int, list[dict[str, Any]]]:
    result = CliRunner().invoke(main, ["doctor", "sglang", "--json", *arguments])
    return result.exit_code, json.loads(result.stdout)["checks"]


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_an_interpreter_that_is_not_there_is_the_only_finding(tmp_path: Path) -> None:
    python = tmp_path / "env/bin/python"
    code, checks = sglang("--python", str(python), "--device", "cpu")
    assert code == 1
    first, proof = checks
    assert (first["status"], first["found"]) == ("fail", f"there is no {python}")
    assert first["fix"].startswith(f"python3 -m venv {tmp_path / 'env'} && ")
    assert proof["status"] == "skip"


def test_what_is_no_python_is_said_to_be_none(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("")
    other = script(tmp_path / "other", "echo hello")
    late = script(tmp_path / "late", "sleep 60")
    for python, found in (
        (str(plain), "can't be executed"),
        (other, "does not work as a Python interpreter"),
        (late, "does not answer within 0 s"),
    ):
        check = probe(python, deadline=0.3)
        assert isinstance(check, Check)
        assert check.found == f"{python} {found}"
        assert "python3 -m venv .venv-sglang && " in check.fix  # not into a folder that is there


def test_flowgraphs_own_environment_is_left_as_it_is() -> None:
    """Its pins differ, so what is missing is to be installed elsewhere."""
    if "sglang" in _ours().packages:
        pytest.skip("sglang is installed beside flowgraph")
    code, checks = sglang("--device", "cpu")
    assert code == 1
    by_name = {check["name"]: check for check in checks}
    assert by_name["interpreter"]["status"] == "warn"
    assert by_name["sglang"]["found"] == f"is not installed in {_ours().python}"
    assert by_name["imports"]["status"] == "skip"
    fixes = [check["fix"] for check in checks if check["status"] in ("warn", "fail")]
    assert all(".venv-sglang" in fix and sys.executable not in fix for fix in fixes)


def _ours() -> Environment:
    env = probe(sys.executable)
    assert isinstance(env, Environment)
    return env


def test_an_empty_environment_is_told_every_command_of_the_recipe_in_order(made: Made) -> None:
    fixes = [check.fix for check in made.steps("cpu").values() if check.fix]
    install = f"uv pip install --python '{made.python}'"  # it has no pip
    assert list(dict.fromkeys(fixes)) == [
        f"{install} -r {RECIPE}/requirements.txt",
        f"{install} --no-deps sglang=={TESTED} torchvision=={TORCHVISION}",
        f"{install} {RECIPE}",
    ]
    assert len(missing(made.python, "cpu")) == 5


def test_what_the_recipe_installs_has_nothing_missing(made: Made) -> None:
    made.add_recipe()
    assert {check.status for check in made.steps("cpu").values()} == {"ok"}
    assert missing(made.python, "cpu") == []


def test_missing_takes_no_import_of_sglang(made: Made) -> None:
    made.add_recipe()
    (made.site / "sglang").mkdir()
    (made.site / "sglang/__init__.py").write_text("raise RuntimeError('imported')\n")
    assert missing(made.python, "cpu") == []
    check = starts(made.python, "cpu")
    assert (check.status, check.found) == ("fail", "RuntimeError: imported")
    assert check.fix.startswith(f"{CPU_SWITCH}=1 '{made.python}' -c ")


@pytest.mark.parametrize(("version", "status"), [("0.5.22", "fail"), ("0.6.0", "fail"), ("0.5.99", "warn")])
def test_sglang_has_to_lie_in_the_range(made: Made, version: str, status: str) -> None:
    made.add("sglang", version)
    step = made.steps("cpu")["sglang"]
    assert step.status == status
    assert (
        step.found == f"{version}, not {SUPPORTED}" if status == "fail" else f"{version}; tested is {TESTED}"
    )


def test_what_is_absent_fails_and_another_version_is_a_warning(made: Made) -> None:
    made.add_recipe()
    (made.site / "xgrammar-0.2.7.dist-info").rename(made.site / "elsewhere")
    assert "xgrammar==0.2.7 is absent" in made.steps("cpu")["requirements"].found
    assert made.steps("cpu")["requirements"].status == "fail"
    made.add("xgrammar", "0.3.0")
    step = made.steps("cpu")["requirements"]
    assert (step.status, step.found) == ("warn", "xgrammar is 0.3.0, not ==0.2.7")
    assert missing(made.python, "cpu") == []


def test_a_torch_for_cuda_fails_on_cpu_and_one_without_on_cuda(made: Made) -> None:
    made.add_torch("2.13.0+cu130", "13.0")
    on_cpu = made.steps("cpu")["torch"]
    assert (on_cpu.status, on_cpu.found) == ("fail", "2.13.0+cu130 is built for CUDA 13.0")
    assert "torch==2.13.0+cpu" in on_cpu.fix
    assert made.steps("cuda")["torch"].status == "ok"
    (made.site / "torch/version.py").write_text("cuda = None\n")
    assert made.steps("cuda")["torch"].status == "fail"
    assert made.steps("cpu")["torch"].status == "ok"


def test_another_plugin_is_a_warning(made: Made) -> None:
    made.add("someone", "1.0", plugin="someone:activate")
    step = made.steps("cpu")["plugin"]
    assert step.status == "warn"
    assert "someone:activate" in step.found


def test_on_cuda_what_sglang_itself_asks_for_is_held_to(made: Made) -> None:
    asked = ("torch==2.14.1", "numpy", "win>1; sys_platform=='win32'", "more; extra=='more'")
    made.add("sglang", TESTED, *asked)
    made.add("numpy", "2.0")
    steps = made.steps("cuda")
    assert (steps["requirements"].status, steps["requirements"].found) == ("warn", "torch==2.14.1 is absent")
    assert steps["memory saver"].status == "warn"
    assert "keeps its memory" in steps["memory saver"].affects
    made.add("torch_memory_saver", "0.0.10")
    assert made.steps("cuda")["memory saver"].found == "0.0.10"


def test_on_cuda_the_switch_to_the_cpu_is_left_out(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CPU_SWITCH, "1")
    assert made.steps("cuda")[CPU_SWITCH].fix == f"unset {CPU_SWITCH}"
    assert CPU_SWITCH not in server_environment("cuda")
    monkeypatch.delenv(CPU_SWITCH)
    assert CPU_SWITCH not in made.steps("cuda")
    assert server_environment("cpu")[CPU_SWITCH] == "1"


def test_a_start_that_takes_too_long_is_ended_with_what_it_started(tmp_path: Path) -> None:
    python = script(tmp_path / "python", f"sleep 60 & echo $! > {tmp_path}/pid; wait")
    check = starts(python, "cpu", deadline=0.5)
    assert check.status == "fail"
    assert "not imported after 0 s" in check.found
    stat = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/stat")
    for _ in range(100):
        if not stat.exists() or ") Z " in stat.read_text():
            break
        time.sleep(0.02)
    else:
        pytest.fail("it still runs")


def test_requirements_are_read_as_pip_reads_them() -> None:
    env = Environment("3.11.7", {"a-b": "2.0+cpu", "c": "3.0rc1", "odd": "?"}, [], None, [], False, True)
    lines = ["A_B==2.0", "c>=3.0rc1", "-r other", "", "d; python_version < '3.11'", "odd>1", "e[x]>2"]
    assert [str(one) for one in unmet(lines, env)] == ["odd is ?, not >1", "e>2 is absent"]


def test_one_range_is_stated() -> None:
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert ours["project"]["optional-dependencies"]["sglang"] == [f"sglang{SUPPORTED}"]
    assert within(TESTED, SUPPORTED)
    readme = (RECIPE / "README.md").read_text()
    assert f"--no-deps sglang=={TESTED} torchvision=={TORCHVISION}" in readme
    plugin = tomllib.loads((RECIPE / "pyproject.toml").read_text())["project"]
    assert plugin["entry-points"]["sglang.srt.platforms"] == {"flowgraph_cpu": f"{PLUGIN}:activate"}
    assert plugin["entry-points"]["sglang.srt.plugins"] == {"flowgraph_cpu": f"{PLUGIN}:experts"}
    assert plugin["name"].replace("-", "_") == PLUGIN
    assert (RECIPE / f"{PLUGIN}.py").exists()


PLUGGED = """
import sys
sys.path.insert(0, sys.argv[1])
import torch, flowgraph_sglang_cpu
for _ in range(2):
    assert flowgraph_sglang_cpu.activate() is None
import sgl_kernel
from sgl_kernel import rmsnorm
try:
    rmsnorm(1)
except NotImplementedError as error:
    print(error)
print(torch.ops.torchvision.nms.default._schema.name)
"""


def test_the_plugin_stands_in_for_kernels_and_schemas() -> None:
    run = _plugged(CPU_SWITCH, "1")
    assert run.stdout.splitlines() == ["sgl_kernel.rmsnorm has no CPU build here", "torchvision::nms"], (
        run.stderr
    )


ROUTED = """
import sys
sys.path.insert(0, sys.argv[1])
import torch, flowgraph_sglang_cpu as plugin
logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 0.0]])
weights, ids = torch.empty(2, 2), torch.empty(2, 2, dtype=torch.int32)
for renormalize in (False, True):
    plugin._topk_softmax(weights, ids, logits, renormalize)
    share = logits.softmax(dim=-1).gather(1, ids.long())
    torch.testing.assert_close(weights, share / share.sum(dim=-1, keepdim=True) if renormalize else share)
print(ids[0].tolist(), ids[1, 0].item())
"""


def test_the_plugin_routes_as_the_kernel_of_that_name_does() -> None:
    run = _plugged(CPU_SWITCH, "1", ROUTED)
    assert run.stdout == "[1, 2] 0\n", run.stderr


def test_the_plugin_does_nothing_without_the_switch() -> None:
    assert "No module named 'sgl_kernel'" in _plugged(CPU_SWITCH, "0").stderr


def _plugged(name: str, value: str, code: str = PLUGGED) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-B", "-c", code, str(RECIPE)]
    return subprocess.run(
        command, env=os.environ | {name: value}, capture_output=True, text=True, timeout=120
    )


@pytest.mark.sglang
def test_a_real_environment_holds_every_step() -> None:
    assert REAL is not None
    assert missing(REAL, "cpu") == []
    code, checks = sglang("--python", REAL, "--device", "cpu")
    assert code == 0
    assert [check["name"] for check in checks][-1] == "imports"
    assert all(check["status"] in ("ok", "warn") for check in checks), checks

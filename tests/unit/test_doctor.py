"""`flowgraph doctor`: what it finds on this machine, and on one where the real thing is made to fail."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from flowgraph.cli import main
from flowgraph.errors import Check
from flowgraph.limits import available, core_limit, memory_limit
from flowgraph.report.doctor import Report, check_machine, render

ROOT = Path(__file__).parents[2]
DOCTOR = f"exec {shlex.quote(sys.executable)} -m flowgraph.cli doctor --json"


def doctor(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["doctor", *arguments])


def elsewhere(script: str, **env: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """The exit code and the checks by name of a doctor that a shell script starts."""
    ran = subprocess.run(
        ["sh", "-ec", script], cwd=ROOT, env=os.environ | env, capture_output=True, text=True, timeout=120
    )
    assert not ran.stderr
    return ran.returncode, {check["name"]: check for check in json.loads(ran.stdout)["checks"]}


def may_unshare(what: str) -> bool:
    tool = shutil.which("unshare")
    return tool is not None and subprocess.run([tool, what, "true"], capture_output=True).returncode == 0


mounts = pytest.mark.skipif(not may_unshare("-rm"), reason="no mount namespaces for this user")
networks = pytest.mark.skipif(not may_unshare("-rn"), reason="no network namespaces for this user")


def test_json_says_of_each_check_what_it_found_and_affects_and_how_to_mend_what_is_wrong() -> None:
    result = doctor("--json")
    found = json.loads(result.stdout)
    assert [check["name"] for check in found["checks"]] == [
        "python", "flowgraph", "torch", "transformers", "packages", "cuda", "cores", "memory", "memfd", "/dev/shm",
        "open files", "ports", "model cache",
    ]  # fmt: skip
    for check in found["checks"]:
        assert check["status"] in ("ok", "warn", "fail", "skip")
        assert check["found"]
        assert check["affects"]
        assert bool(check["fix"]) == (check["status"] in ("warn", "fail")), check["name"]
    assert found["failed"] == any(check["status"] == "fail" for check in found["checks"])
    assert result.exit_code == found["failed"]


def test_the_table_has_a_line_a_check() -> None:
    lines = [line.split(maxsplit=1) for line in doctor().stdout.splitlines() if line.strip()]
    for check in check_machine().checks:
        assert any(words[0] == check.status and words[1].startswith(check.name) for words in lines), check


def test_it_imports_no_torch() -> None:
    code = "import sys; from flowgraph.report import doctor as d; d.check_machine(); print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"


def test_json_is_an_option_of_the_command_that_runs() -> None:
    assert doctor("--json", "sglang").exit_code == 2


@pytest.mark.parametrize(("limit", "fix"), [("-S", "ulimit -n"), ("", "--ulimit nofile=")])
def test_few_open_files_fail(limit: str, fix: str) -> None:
    code, checks = elsewhere(f"ulimit {limit} -n 64; {DOCTOR}")
    assert code == 1
    assert checks["open files"]["status"] == "fail"
    assert checks["open files"]["found"] == "64 at most"
    assert fix in checks["open files"]["fix"]
    assert checks["ports"]["status"] == checks["memfd"]["status"] == "ok"


def test_fewer_open_files_than_several_servers_take_are_a_warning() -> None:
    code, checks = elsewhere(f"ulimit -S -n 512; {DOCTOR}")
    assert checks["open files"]["status"] == "warn"
    assert code == any(check["status"] == "fail" for check in checks.values())


def test_one_core_is_a_warning() -> None:
    core = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, [{core}]); from flowgraph.cli import main; main(['doctor', '--json'])"
    _, checks = elsewhere(f'exec {shlex.quote(sys.executable)} -c "{code}"', OMP_NUM_THREADS="3")
    assert checks["cores"]["status"] == "warn"
    assert checks["cores"]["found"] == f"1 of {os.cpu_count()}, OMP_NUM_THREADS=3"


def test_a_cache_where_a_file_stands_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, checks = elsewhere(DOCTOR, FLOWGRAPH_CACHE=str(tmp_path / "file/models"))
    assert code == 1
    assert checks["model cache"]["status"] == "fail"
    assert checks["model cache"]["found"] == f"can't write {tmp_path / 'file'}: Not a directory"
    assert "FLOWGRAPH_CACHE" in checks["model cache"]["fix"]


def test_a_cache_that_is_not_there_yet_is_not_made(tmp_path: Path) -> None:
    _, checks = elsewhere(DOCTOR, FLOWGRAPH_CACHE=str(tmp_path / "a/b"))
    assert checks["model cache"]["status"] in ("ok", "warn")
    assert not list(tmp_path.iterdir())


@mounts
def test_small_disks_are_a_warning(tmp_path: Path) -> None:
    script = f"mount -t tmpfs -o size=64m none {tmp_path}; mount -t tmpfs -o size=64m none /dev/shm; {DOCTOR}"
    _, checks = elsewhere(f"exec unshare -rm sh -ec {shlex.quote(script)}", FLOWGRAPH_CACHE=str(tmp_path))
    assert checks["model cache"]["status"] == checks["/dev/shm"]["status"] == "warn"
    assert checks["/dev/shm"]["found"] == "67.1 MB of 67.1 MB free"
    assert "--shm-size" in checks["/dev/shm"]["fix"]


@mounts
def test_a_full_disk_and_a_read_only_one_fail(tmp_path: Path) -> None:
    full = f"mount -t tmpfs -o size=64k none {tmp_path}; head -c 64k /dev/zero > {tmp_path}/all"
    script = f"{full}; mount -t tmpfs -o ro none /dev/shm; {DOCTOR}"
    code, checks = elsewhere(f"exec unshare -rm sh -ec {shlex.quote(script)}", FLOWGRAPH_CACHE=str(tmp_path))
    assert code == 1
    assert checks["model cache"]["found"] == f"can't write {tmp_path}: No space left on device"
    assert checks["/dev/shm"]["found"] == "can't be written: Read-only file system"


@networks
def test_no_loopback_fails() -> None:
    code, checks = elsewhere(f"exec unshare -rn sh -c {shlex.quote(DOCTOR)}")
    assert code == 1
    assert checks["ports"]["status"] == "fail"
    assert checks["ports"]["fix"].endswith("ip link set lo up")


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def test_the_least_limit_up_to_the_root_counts(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/pod/one\n")
    write(tmp_path / "pod/one", memory__max="max", cpu__max="max 100000")
    assert (memory_limit(tmp_path, own), core_limit(tmp_path, own)) == (None, None)
    write(tmp_path / "pod", memory__max="4000000000", cpu__max="150000 100000")
    write(tmp_path, memory__max="8000000000")
    assert (memory_limit(tmp_path, own), core_limit(tmp_path, own)) == (4_000_000_000, 1.5)


def test_limits_of_the_first_version_are_read_too(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("9:name=systemd:/\n4:memory:/box/a\n1:cpu,cpuacct:/box/a\n")
    write(tmp_path / "memory/box/a", memory__limit_in_bytes="9223372036854771712")
    write(tmp_path / "cpu,cpuacct/box/a", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert (memory_limit(tmp_path, own), core_limit(tmp_path, own)) == (None, None)
    write(tmp_path / "memory/box", memory__limit_in_bytes="2000000000")
    write(tmp_path / "cpu,cpuacct", cpu__cfs_quota_us="50000", cpu__cfs_period_us="100000")
    assert (memory_limit(tmp_path, own), core_limit(tmp_path, own)) == (2_000_000_000, 0.5)


def test_a_group_whose_path_is_that_of_the_host_has_the_limit_of_the_root(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/../../docker/abc\n")
    write(tmp_path, memory__max="1000000000")
    assert memory_limit(tmp_path, own) == 1_000_000_000


def test_memory_is_what_every_group_around_allows_and_cached_files_give_way(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/job/step\n")
    write(tmp_path / "job/step", memory__max="9000", memory__current="8000")
    (tmp_path / "job/step/memory.stat").write_text("anon 1000\ninactive_file 7000\n")
    assert available(tmp_path, own) == 8000
    write(tmp_path / "job", memory__max="9500", memory__current="9000")
    assert available(tmp_path, own) == 500
    write(tmp_path / "job", memory__current="9600")
    assert available(tmp_path, own) == 0


def test_memory_of_groups_of_the_first_version(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("4:memory:/box\n")
    box = tmp_path / "memory/box"
    write(box, memory__limit_in_bytes="9000", memory__usage_in_bytes="8000")
    (box / "memory.stat").write_text("total_inactive_file 6000\n")
    assert available(tmp_path, own) == 7000
    write(box, memory__limit_in_bytes=str(2**63 - 4096))
    assert available(tmp_path, own) == pytest.approx(available(tmp_path / "none", own), rel=0.2)


def test_a_command_is_never_broken_and_told_once() -> None:
    command = "pip install " + " ".join(f"package-{i}" for i in range(40))
    checks = (
        Check("one", "fail", "absent", "much", command),
        Check("two", "warn", "old", "little", command),
        Check("three", "skip", "not tried", "nothing"),
    )
    lines = render(Report("here", checks), 80).splitlines()
    assert lines.count(f"    {command}") == 1
    assert lines[lines.index(f"    {command}") - 1] == "  one, two"
    assert lines[-1] == "0 ok, 1 warning, 1 failure, 1 skipped"
    assert all(len(line) <= 80 for line in lines if command not in line)

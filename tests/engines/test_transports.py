"""How weights get into a server, each way into a real one; SGLang's behind the marker.

The conformance suite syncs in every order over the default way. Here it is the ways themselves: that the server then
computes with the new weights and says so, what was sent, that a push is repeatable wherever it ended, and that nothing
is left of it.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web
from conftest import SGLANG
from hypothesis import given
from hypothesis import strategies as st
from running import NEAR, SLOTS, Running
from safetensors.torch import save_file
from served_model import EMBED, ServedModel
from torch import Tensor

from flowgraph.engines.registry import EngineOptions, SglangOptions, TransformersOptions
from flowgraph.engines.served import deltas, group, handover
from flowgraph.engines.served.client import Client, Refused
from flowgraph.engines.served.group import FromGroup, Group
from flowgraph.engines.served.handover import Segment, described
from flowgraph.engines.served.process import free_port
from flowgraph.engines.served.session import act, buckets, fill, nbytes
from flowgraph.engines.served.staging import Staged
from flowgraph.engines.sync import Entry
from flowgraph.engines.transformers import TransformersEngine
from flowgraph.engines.weights.delta import Delta, DeltaMismatch, encode, pack
from flowgraph.engines.weights.layout import entries
from flowgraph.engines.weights.stage import Stage
from flowgraph.errors import MemoryShort

NORM = "model.norm.weight"
PROMPT = np.random.default_rng(6).integers(0, 256, 24)
Weights = dict[str, Tensor]


def nudged(weights: Weights, step: int) -> Weights:
    """As after a small step: every 50th number of two tensors changed."""
    out = dict(weights)
    for name in (EMBED, "model.layers.1.mlp.down_proj.weight"):
        out[name] = out[name].clone()
        out[name].view(-1)[1::50] *= 1 + 0.1 * step
    return out


def total(weights: Weights) -> int:
    return sum(tensor.nbytes for tensor in weights.values())


class Served:
    """A running engine of one server, and what its weights should be."""

    def __init__(self, running: Running, way: str) -> None:
        self.running, self.engine, self.way = running, running.engine, way
        self.replica: Any = self.engine.members[0].replica
        self.journal: list[Entry] = []
        running.seen = self.journal.append

    def sync(self, weights: Weights, seconds: float = 120.0) -> int:
        """To the next version, and check that it computes with it; → bytes that were sent."""
        version = self.engine.version + 1
        done = self.running.do(self.engine.sync(weights, version, seconds=seconds))
        assert (done.version, done.replicas) == (version, 1)
        self.check(weights)
        return done.pushed

    def check(self, weights: Weights) -> None:
        model = self.running.model
        model._kinds["now"] = weights
        got = self.running.do(self.engine.logprobs(PROMPT))
        np.testing.assert_allclose(got, model.logprobs("now", PROMPT), atol=NEAR, rtol=0)
        assert set(self.running.answer(PROMPT, 3).versions) == {self.engine.version}

    async def cut(self, weights: Weights, seconds: float) -> bool:
        """Begin an update and be cancelled in the midst of it, however far it is by then; False: it was done."""
        await self.replica.pause("retract")
        staged = self.engine.rotation.stage(weights, self.engine.version + 1)
        try:
            await asyncio.wait_for(self.replica.update(staged, self.engine.version + 1), seconds)
        except TimeoutError:
            return True
        return False


WAYS = {
    "ours by disk": (TransformersOptions, "disk"),
    "ours by delta": (TransformersOptions, "delta"),
    "sglang by disk": (SglangOptions, "disk"),
    "sglang by tensor": (SglangOptions, "tensor"),
    "sglang by distributed": (SglangOptions, "distributed"),
    "sglang by delta": (SglangOptions, "delta"),
}


@pytest.fixture(scope="module")
def served(
    request: pytest.FixtureRequest, served_model: ServedModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """Each kind of server and way in turn, started once for all its tests."""
    kind, way = WAYS[request.param]
    model, python = str(served_model.directory), os.environ.get(SGLANG)
    options: EngineOptions
    if kind is TransformersOptions:
        options = TransformersOptions(model, slots=SLOTS, dtype="float32", processes=1, weights=way)
    else:
        options = SglangOptions(model, slots=SLOTS, dtype="float32", device="cpu", python=python, weights=way)
    running = Running(request.param, options, served_model, tmp_path_factory.mktemp("logs"))
    yield Served(running, way)
    running.close()


def over(*names: str) -> pytest.MarkDecorator:
    """The test is of these servers and ways."""
    sglang = pytest.mark.sglang
    params = [pytest.param(name, marks=[sglang] if "sglang" in name else []) for name in names]
    return pytest.mark.parametrize("served", params, indirect=True)


# --- each way, into a real server ------------------------------------------------------------------------------------


@over(*WAYS)
def test_a_server_computes_with_what_it_was_sent(served: Served, served_model: ServedModel) -> None:
    base = served_model.weights("base")
    served.sync(served_model.weights("other"))
    sent = [served.sync(base), served.sync(nudged(base, 1)), served.sync(nudged(base, 2))]
    if served.way == "delta":
        assert max(sent[1:]) < total(base) / 5  # two of the tensors, a fiftieth of each, and their bits
    else:
        assert all(total(base) <= one < total(base) + 8192 for one in sent)
    assert all(entry.outcome != "failed" for entry in served.journal)


@over(*WAYS)
def test_a_push_that_was_cut_is_repeated_from_the_start(served: Served, served_model: ServedModel) -> None:
    base = served_model.weights("base")
    served.sync(base)
    cuts = 0
    for seconds in (0.001, 0.003, 0.01, 0.03):
        cuts += served.running.do(served.cut(nudged(base, 3), seconds))
        served.sync(nudged(base, 4))
    assert cuts
    served.sync(base)


@over("sglang by tensor", "sglang by distributed", "sglang by delta")
def test_a_session_that_was_left_open_is_ended_first(served: Served, served_model: ServedModel) -> None:
    client = served.replica._client
    served.running.do(act(client, "/begin_weight_update", {"selector": "all"}))
    served.sync(served_model.weights("base"))
    with pytest.raises(Refused, match="no weight-update session is open"):
        served.running.do(act(client, "/end_weight_update", {}))


@over("sglang by tensor", "sglang by distributed")
def test_all_buckets_land_before_their_version(
    served: Served, served_model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked after each bucket, the server names the version before, until the last one."""
    client, seen = served.replica._client, []
    ask = client.ask

    async def watched(path: str, *rest: Any, **more: Any) -> Any:
        answer = await ask(path, *rest, **more)
        if path.startswith("/update_weights"):
            seen.append((await ask("/model_info", seconds=10))["weight_version"])
        return answer

    monkeypatch.setattr(client, "ask", watched)
    for module in (handover, group):
        monkeypatch.setattr(module, "buckets", lambda tensors: buckets(tensors, 20_000))
    before = served.engine.version
    served.sync(served_model.weights("base"))
    assert len(seen) > 3
    assert seen == [str(before)] * (len(seen) - 1) + [str(before + 1)]


@over("ours by delta", "sglang by delta")
def test_a_delta_that_does_not_fit_is_followed_by_the_whole_set(
    served: Served, served_model: ServedModel
) -> None:
    """The server has other weights than it was sent, as after a fault of its memory."""
    base = served_model.weights("base")
    served.sync(base)
    served.running.do(_hand_over(served, served_model.weights("other")))
    sent = served.sync(nudged(base, 1))
    assert sent > total(base)  # the delta in vain, and everything
    assert served.sync(nudged(base, 2)) < total(base) / 5


@over(*WAYS)
def test_a_server_that_was_replaced_is_sent_the_whole_set(served: Served, served_model: ServedModel) -> None:
    """What a way kept for the old one (a group, a file, a version) is of no use for the new one."""
    base = served_model.weights("base")
    served.sync(nudged(base, 1))
    os.kill(served.replica.pid, signal.SIGKILL)
    assert served.sync(nudged(base, 2), seconds=240.0) >= total(base)
    served.sync(base)


@over(*WAYS)
def test_nothing_is_left_of_a_way_when_its_engine_is_closed(served: Served) -> None:
    """What a server that was killed leaves of its own making in /dev/shm is another matter."""
    served.running.close()
    assert [name for name in served.running.left() if name.startswith("flowgraph-")] == []


# --- deltas ----------------------------------------------------------------------------------------------------------


async def _hand_over(served: Served, weights: Weights) -> None:
    """Have the server hold other weights under the version that it says it has."""
    version = served.engine.version
    stage = Stage(entries(weights), served.running.model.directory.parent)
    try:
        stage.write(weights, version)
        await served.replica.pause("retract")
        staged = Staged(stage.directory, version, stage.nbytes, stage.tensors)
        await served.replica._carrier.whole(served.replica._client, staged, version, True)
    finally:
        stage.close()


def test_an_engine_takes_a_delta_only_while_paused_and_only_from_its_own_weights(
    served_model: ServedModel,
) -> None:
    engine = TransformersEngine(str(served_model.directory), slots=1, context=64, dtype="float32")
    base = served_model.weights("base")
    first, second = nudged(base, 1), nudged(base, 2)
    with pytest.raises(RuntimeError, match="only while the engine is paused"):
        engine.change_weights(encode(base, first, base=0, version=1))
    engine.pause("retract")
    engine.change_weights(encode(base, first, base=0, version=1))
    assert engine.version == 1
    assert torch.equal(engine.weights()[EMBED], first[EMBED])
    with pytest.raises(DeltaMismatch, match="from version 0, and the weights are of version 1"):
        engine.change_weights(encode(base, first, base=0, version=1))
    with pytest.raises(DeltaMismatch, match="are not those that were encoded"):
        engine.change_weights(_off(second))
    engine.update_weights(second, 2)
    assert torch.equal(engine.weights()[EMBED], second[EMBED])


def _off(weights: Weights) -> Delta:
    """From weights that are like these but for one number, which the engine has otherwise."""
    old = {name: tensor.clone() for name, tensor in weights.items()}
    old[NORM][0] += 1
    new = dict(old)
    new[NORM] = old[NORM].clone()
    new[NORM][1] += 1
    return encode(old, new, base=1, version=2)


LOADER = """
import json, os, pathlib, sys
sys.modules["flowgraph"] = None
import torch, flowgraph_delta

class Model:
    def load_weights(self, named):
        for name, tensor in named:
            got[name] = tensor.tolist()

def load(**order):
    global got
    got = {}
    pathlib.Path("answer").write_bytes(bytes(2))
    inode = os.stat("answer").st_ino
    text = json.dumps({"answer": "answer", "inode": inode, "rank": 1, **order}).encode()
    flowgraph_delta.load(Model(), [("order", torch.tensor(list(text), dtype=torch.uint8))])
    print(json.dumps([list(pathlib.Path("answer").read_bytes()), got]))

load(delta="first", version=1)
load(directory="whole", version=0)
load(delta="first", version=1)
load(delta="first", version=1)
load(directory="absent.json", version=0, answer="/nowhere/answer")
load(delta="second", version=2)
load(directory="whole", version=0, inode=0)
load(directory="whole", version=0)
load(delta="second", version=2)
flowgraph_delta.load(Model(), [])
"""


def test_the_loader_in_sglang_needs_no_flowgraph_and_never_raises(tmp_path: Path) -> None:
    base = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0])}
    first = {"a": torch.tensor([1.0, 5.0]), "b": base["b"]}
    second = {"a": base["a"], "b": torch.tensor([4.0])}
    (tmp_path / "whole").mkdir()
    save_file(base, tmp_path / "whole" / "model.safetensors")
    (tmp_path / "first").write_bytes(pack(encode(base, first, base=0, version=1)))
    (tmp_path / "second").write_bytes(pack(encode(first, second, base=1, version=2)))
    loader = Path(deltas.__file__).with_name("sglang_loader")
    run = subprocess.run(
        [sys.executable, "-c", LOADER],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(loader)},
        capture_output=True,
        text=True,
        check=True,
    )
    done, failed = [0, 1], [0, 0]
    assert [json.loads(line) for line in run.stdout.splitlines()] == [
        [failed, {}],  # it has nothing yet
        [done, {"a": [1.0, 2.0], "b": [3.0]}],
        [done, {"a": [1.0, 5.0]}],  # only what changed is loaded
        [failed, {}],  # from version 0, and it has 1
        [failed, {}],
        [failed, {}],  # after a failure it has no version
        [failed, {"a": [1.0, 2.0], "b": [3.0]}],  # another file is there now, and is left alone
        [done, {"a": [1.0, 2.0], "b": [3.0]}],
        [failed, {}],  # from version 1
    ]
    assert run.stderr.count("the weights were not loaded") == 7


# --- tensors by shared memory ----------------------------------------------------------------------------------------

READER = """
import base64, pickle, sys, torch
for line in sys.stdin:
    named = pickle.loads(base64.b64decode(line))
    torch.save({name: tensor.clone() for name, tensor in named}, sys.argv[1])
    print("read", flush=True)
"""


def test_another_process_finds_every_tensor_where_it_is_said_to_lie(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {
        "matrix": torch.randn(5, 7).bfloat16(),
        "row": torch.randn(3),
        "scalar": torch.tensor(2.0),
        "turned": torch.randn(4, 6).T,
        "none": torch.empty(0, 4),
        "wide": torch.randn(2, 2).double(),
    }
    (bucket,) = buckets(tensors)
    segment = Segment(nbytes(bucket))
    command = [sys.executable, "-c", READER, str(tmp_path / "read")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None
        for step in (1, 2):  # the same memory, refilled
            scaled = {name: tensor * step for name, tensor in tensors.items()}
            (bucket,) = buckets(scaled)
            fill(segment.bytes, bucket)
            print(described(segment, bucket), file=reader.stdin, flush=True)
            assert reader.stdout.readline() == "read\n"
            read: Weights = torch.load(tmp_path / "read")
            assert read.keys() == tensors.keys()
            for name, tensor in read.items():
                assert (tensor.dtype, tensor.shape) == (tensors[name].dtype, tensors[name].shape)
                assert torch.equal(tensor, scaled[name])
        assert segment.named()
    until = time.monotonic() + 60
    while segment.named():  # the reader's torch_shm_manager removes it, so another server needs another name
        assert time.monotonic() < until
        time.sleep(0.05)
    segment.close()  # harmless then


def test_the_name_of_shared_memory_goes_with_the_process_that_made_it() -> None:
    code = "from flowgraph.engines.served.handover import Segment; s = Segment(100); print(s.name)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"flowgraph-\d+-[0-9a-f]{8}\n", run.stdout)
    assert not Path("/dev/shm", run.stdout.strip()).exists()


def test_shared_memory_that_is_not_to_be_had_is_named_with_what_to_do() -> None:
    with pytest.raises(MemoryShort, match=r"/dev/shm has no room for 1,000,000,000 MB of weights") as caught:
        Segment(10**15)
    assert "weights: disk" in str(caught.value)
    assert not list(Path("/dev/shm").glob(f"flowgraph-{os.getpid()}-*"))


# --- a group ---------------------------------------------------------------------------------------------------------

# What SGLang's init_custom_process_group does, and then its receive_weights_from_distributed.
RANK = """
import datetime, sys, torch, torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _new_process_group_helper, _world, rendezvous
address, port, name, size = sys.argv[1:]
limit = datetime.timedelta(minutes=30)
store, rank, world = next(rendezvous(f"tcp://{address}:{port}", 1, 2, timeout=limit))
group, _ = _new_process_group_helper(
    2, 1, [], dist.Backend("gloo"), PrefixStore(name, store), group_name=name, timeout=limit
)
_world.pg_group_ranks[group] = {0: 0, 1: 1}
flat = torch.empty(int(size), dtype=torch.uint8)
for _ in range(2):
    dist.broadcast(flat, src=0, group=group)
    print(int(flat.sum()), flush=True)
"""


def rank(group: Group, size: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", RANK, group.address, str(group.port), group.name, str(size)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_rank_gets_what_is_broadcast_and_ends_when_we_leave() -> None:
    ours = Group(2, "gloo", "127.0.0.1")
    with rank(ours, 1000) as process:
        ours.join()
        ours.broadcast(torch.full((1000,), 3, dtype=torch.uint8))
        assert process.stdout is not None
        assert process.stdout.readline() == "3000\n"
        ours.leave()
        _, errors = process.communicate(timeout=60)
        assert process.returncode
        assert re.search("Connection (closed|reset) by peer", errors)


def test_a_rank_that_waits_for_us_ends_when_we_leave_before_we_joined() -> None:
    ours = Group(2, "gloo", "127.0.0.1")
    with rank(ours, 1000) as process:
        time.sleep(3)  # it imports torch, connects, and waits
        assert process.poll() is None
        ours.leave()
        _, errors = process.communicate(timeout=60)
        assert "DistNetworkError" in errors


def test_a_rendezvous_that_hangs_does_not_outlive_its_push() -> None:
    """A server that takes the request and never joins; the next push begins anew."""
    asked: list[str] = []

    async def never(request: web.Request) -> web.Response:
        asked.append((await request.json())["group_name"])
        await asyncio.sleep(60)
        return web.Response()

    async def refused(request: web.Request) -> web.Response:
        return web.Response(status=400)

    async def work() -> None:
        app = web.Application()
        app.router.add_post("/init_weights_update_group", never)
        app.router.add_post("/destroy_weights_update_group", refused)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        port = free_port()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        client, carrier = Client(f"http://127.0.0.1:{port}"), FromGroup(1, "cpu")
        weights = Staged("", 1, 4, {"a": torch.ones(1)})
        for _ in range(2):
            began = time.monotonic()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(carrier.push(client, weights, 1, flush=True), 0.5)
            assert time.monotonic() - began < 5
        await carrier.close(client)
        await client.close()
        await runner.cleanup()

    asyncio.run(work())
    assert len(set(asked)) == 2


# --- pieces, and what is refused -------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.sampled_from([torch.float64, torch.bfloat16, torch.uint8]), st.integers(0, 9))),
    st.integers(1, 40),
)
def test_buckets_hold_every_tensor_once_aligned_and_within_the_limit(
    table: list[tuple[torch.dtype, int]], limit: int
) -> None:
    tensors = {f"t{at}": torch.ones(count, dtype=dtype) for at, (dtype, count) in enumerate(table)}
    pieces = list(buckets(tensors, limit))
    assert sorted(name for bucket in pieces for name, _ in bucket) == sorted(tensors)
    for bucket in pieces:
        assert nbytes(bucket) <= limit or len(bucket) == 1
        start = 0
        for _, tensor in bucket:
            assert start % tensor.dtype.itemsize == 0
            start += tensor.nbytes


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        ({"dp": 2, "weights": "tensor"}, "weights: tensor goes to servers of dp 1; use processes"),
        ({"dp": 2, "weights": "delta"}, "weights: delta goes to servers of dp 1"),
        ({"urls": ("http://127.0.0.1:1",), "weights": "delta"}, "those at urls have none"),
        (
            {"urls": ("http://10.0.0.5:1",), "weights": "disk"},
            "http://10.0.0.5:1 is another; take weights: dist",
        ),
    ],
)
def test_ways_that_can_not_work_are_refused_before_anything_starts(given_: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        SglangOptions("m", **given_)

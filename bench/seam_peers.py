"""The same tensors as others carry them: `python bench/seam_peers.py WAY NBYTES RUNS` prints the seconds of each run.

Two processes, A that has the tensors and B that reads each byte once. A stamps them, so that no two runs carry the
same, and says when it began; B says when they were there and when they were read. Both checksums must be equal.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from bench.seam_hops import DTYPES, checksum, stamp, tensors

DEADLINE = 60.0  # seconds that any one message may take
WARM = 2  # runs before those that count
Tensors = dict[str, Any]


Took = tuple[float, float, int]  # when the tensors were there, when they were read, and their checksum


def as_bytes(found: Any) -> Tensors:
    """What came, as numpy arrays of bytes; without a copy where it lies in one piece."""
    out = {}
    for name in DTYPES:
        one = found[name]
        if hasattr(one, "is_nested"):  # a torch tensor; numpy knows no bfloat16 of torch's
            import torch

            one = (one.values() if one.is_nested else one).contiguous().view(-1).view(torch.uint8).numpy()
        out[name] = np.ascontiguousarray(one).reshape(-1).view(np.uint8)
    return out


def numpy_tensors(nbytes: int) -> Tensors:
    """bfloat16 as int16: pickle copies the former once more, because it is no dtype of numpy's own."""
    found = tensors(nbytes)
    return found | {"hidden": found["hidden"].view(np.int16)}


def torch_tensors(nbytes: int) -> Tensors:
    import torch

    found = {name: torch.from_numpy(array) for name, array in numpy_tensors(nbytes).items()}
    return found | {"hidden": found["hidden"].view(torch.bfloat16)}


def stamped(own: Tensors, run: int) -> int:
    """The checksum of the tensors, which are those of this run from now on."""
    seen = as_bytes(own)
    stamp(seen, run)
    return checksum(seen)


def took(found: Any, there: float) -> Took:
    total = checksum(as_bytes(found))
    return there, time.monotonic(), total


# --- between two processes that multiprocessing starts -----------------------------------------------------------


class Pipe:
    """pickle over multiprocessing's Pipe. over: what both processes were given"""

    def __init__(self, over: Any) -> None:
        self.over = over

    @staticmethod
    def make(folder: str) -> Any:
        return multiprocessing.get_context("spawn").Pipe(duplex=False)

    def tensors(self, nbytes: int) -> Tensors:
        """What A has."""
        return numpy_tensors(nbytes)

    def fresh(self, own: Tensors) -> Tensors:
        """What A sends this time, made before the clock starts."""
        return own

    def send(self, own: Tensors) -> None:
        self.over[1].send(own)

    def receive(self) -> Tensors:
        assert self.over[0].poll(DEADLINE), "nothing came"
        out: Tensors = self.over[0].recv()
        return out

    def done(self) -> None:
        """After a run, in B and then in A."""


class TorchFresh(Pipe):
    """torch.multiprocessing moves tensors to shared memory when it sends them."""

    @staticmethod
    def make(folder: str) -> Any:
        import torch.multiprocessing

        return torch.multiprocessing.get_context("spawn").Queue()

    def tensors(self, nbytes: int) -> Tensors:
        return torch_tensors(nbytes)

    def fresh(self, own: Tensors) -> Tensors:
        return {name: tensor.clone() for name, tensor in own.items()}

    def send(self, own: Tensors) -> None:
        import torch.multiprocessing

        torch.multiprocessing.set_sharing_strategy("file_system")  # the faster one for small tensors
        self.over.put(own)

    def receive(self) -> Tensors:
        out: Tensors = self.over.get(timeout=DEADLINE)
        return out


class TorchShared(TorchFresh):
    def tensors(self, nbytes: int) -> Tensors:
        import torch.multiprocessing

        torch.multiprocessing.set_sharing_strategy("file_system")
        return {name: tensor.share_memory_() for name, tensor in torch_tensors(nbytes).items()}

    def fresh(self, own: Tensors) -> Tensors:
        return own


class Segment(Pipe):
    """A new shared-memory segment for every dict, by its name."""

    def send(self, own: Tensors) -> None:
        self.memory, self.is_mine = SharedMemory(create=True, size=sum(a.nbytes for a in own.values())), True
        places, at = [], 0
        for name, array in own.items():
            np.copyto(np.frombuffer(self.memory.buf, array.dtype, array.size, at), array)
            places.append((name, at, array.nbytes))
            at += array.nbytes
        self.over[1].send((self.memory.name, places))

    def receive(self) -> Tensors:
        name, places = super().receive()
        self.memory, self.is_mine = SharedMemory(name), False
        return {name: np.frombuffer(self.memory.buf, np.uint8, size, at) for name, at, size in places}

    def done(self) -> None:
        self.memory.close()
        if self.is_mine:
            self.memory.unlink()


class Zmq(Pipe):
    @staticmethod
    def make(folder: str) -> Any:
        return f"ipc://{folder}/zmq"

    def __init__(self, over: Any) -> None:
        import zmq

        self.over, self.connected = over, False
        self.socket = zmq.Context.instance().socket(zmq.PAIR)
        self.socket.linger = 0
        self.socket.rcvtimeo = self.socket.sndtimeo = int(1000 * DEADLINE)

    def tensors(self, nbytes: int) -> Tensors:
        self.socket.bind(self.over)
        return numpy_tensors(nbytes)

    def send(self, own: Tensors) -> None:
        self.socket.send_multipart([array.view(np.uint8) for array in own.values()], copy=False)

    def receive(self) -> Tensors:
        if not self.connected:
            self.socket.connect(self.over)
            self.connected = True
        frames = self.socket.recv_multipart(copy=False)
        return {name: np.frombuffer(f.buffer, np.uint8) for name, f in zip(DTYPES, frames, strict=True)}


def giver(kind: type[Pipe], over: Any, control: Any, nbytes: int) -> None:
    """A: for each run that is named it answers (when it began, checksum), and waits until the other has read."""
    way = kind(over)
    own = way.tensors(nbytes)
    control.send("ready")
    while (run := control.recv()) is not None:
        total = stamped(own, run)
        sent = way.fresh(own)
        began = time.monotonic()
        way.send(sent)
        control.send((began, total))
        control.recv()
        del sent
        way.done()


def taker(kind: type[Pipe], over: Any, control: Any) -> None:
    """B: for each run it answers what it took."""
    way = kind(over)
    control.send("ready")
    while control.recv() is not None:
        found = way.receive()
        answer = took(found, time.monotonic())
        del found
        way.done()
        control.send(answer)


def answer(control: Any) -> Any:
    assert control.poll(DEADLINE), f"no answer in {DEADLINE:.0f} s"
    return control.recv()


def between_processes(kind: type[Pipe], nbytes: int, runs: int) -> Iterator[tuple[float, int, Took]]:
    """Of each run: when A began, its checksum, and what B took."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        over = kind.make(folder)
        (a, a_end), (b, b_end) = context.Pipe(), context.Pipe()
        started = [
            context.Process(target=giver, args=(kind, over, a_end, nbytes), daemon=True),
            context.Process(target=taker, args=(kind, over, b_end), daemon=True),
        ]
        for process in started:
            process.start()
        assert answer(a) == answer(b) == "ready"
        for run in range(runs):
            b.send(run)
            a.send(run)
            began, total = answer(a)
            yield began, total, answer(b)
            a.send("over")
        for control in (a, b):
            control.send(None)
        for process in started:
            process.join(10)


# --- Ray, and what stands on it ----------------------------------------------------------------------------------


class Put:
    """Actors of Ray: A puts a dict into the object store and hands B the reference. kind: numpy or torch"""

    def __init__(self, kind: str, nbytes: int) -> None:
        self.own = torch_tensors(nbytes) if kind == "torch" else numpy_tensors(nbytes)

    def give(self, run: int, other: Any) -> tuple[float, int, Took]:
        import ray

        total = stamped(self.own, run)
        began = time.monotonic()
        ref = ray.put(self.own)
        return began, total, ray.get(other.take.remote([ref]), timeout=DEADLINE)

    def take(self, refs: list[Any]) -> Took:
        import ray

        found = ray.get(refs[0], timeout=DEADLINE)
        return took(found, time.monotonic())


class Queue(Put):
    """Actors of Ray: A puts 64 rows into TransferQueue's SimpleStorage and tells B their keys."""

    ROWS = 64

    def give(self, run: int, other: Any) -> tuple[float, int, Took]:
        import ray
        import transfer_queue
        from tensordict import TensorDict

        transfer_queue.init()
        total = stamped(self.own, run)
        keys = [f"{run}-{i}" for i in range(self.ROWS)]
        rows = {name: tensor.view(self.ROWS, -1) for name, tensor in self.own.items()}
        began = time.monotonic()
        fields = TensorDict(rows, batch_size=self.ROWS)
        transfer_queue.kv_batch_put(keys=keys, partition_id="seams", fields=fields)
        answer = ray.get(other.take.remote(keys), timeout=DEADLINE)
        transfer_queue.kv_clear(keys=keys, partition_id="seams")
        return began, total, answer

    def take(self, refs: list[Any]) -> Took:
        import transfer_queue

        transfer_queue.init()
        found = transfer_queue.kv_batch_get(keys=refs, partition_id="seams")
        return took(found, time.monotonic())


def between_actors(actor: type[Put], kind: str, nbytes: int, runs: int) -> Iterator[tuple[float, int, Took]]:
    os.environ["RAY_ENABLE_ZERO_COPY_TORCH_TENSORS"] = "1"
    import ray

    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        ray.init(
            num_cpus=8,  # of slots: nothing waits for one
            object_store_memory=max(1 << 30, 4 * nbytes),
            include_dashboard=False,
            configure_logging=False,
            log_to_driver=False,
            _temp_dir=folder,
        )
        try:
            if actor is Queue:
                import transfer_queue

                transfer_queue.init()
            remote = ray.remote(actor)
            a, b = remote.remote(kind, nbytes), remote.remote(kind, 1 << 16)
            for run in range(runs):
                yield ray.get(a.give.remote(run, b), timeout=DEADLINE)
            if actor is Queue:
                transfer_queue.close()
        finally:
            ray.shutdown()


QUEUE = ("ray", "transfer_queue", "tensordict")
# Name → what it is, the packages that it needs, and what gives its runs.
WAYS: dict[str, tuple[str, tuple[str, ...], Any]] = {
    "pipe": ("pickle over a pipe", (), (between_processes, Pipe)),
    "torch": ("torch.multiprocessing, fresh tensors", (), (between_processes, TorchFresh)),
    "torch-shared": ("torch.multiprocessing, shared already", (), (between_processes, TorchShared)),
    "segment": ("a fresh shared-memory segment", (), (between_processes, Segment)),
    "zmq": ("zmq, ipc, copy=False", ("zmq",), (between_processes, Zmq)),
    "ray-torch": ("Ray put/get, torch, zero copy", ("ray",), (between_actors, Put, "torch")),
    "ray-numpy": ("Ray put/get, numpy", ("ray",), (between_actors, Put, "numpy")),
    "transfer-queue": (
        "TransferQueue put/get",
        ("ray", "transfer_queue", "tensordict"),
        (between_actors, Queue, "torch"),
    ),
}


def main() -> None:
    way, nbytes, runs = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    _, _, (between, *how) = WAYS[way]
    rows = []
    for began, total, (there, taken, seen) in between(*how, nbytes, runs + WARM):
        assert total == seen, "other bytes came than were sent"
        rows.append({"there": there - began, "done": taken - began})
    print(json.dumps(rows[WARM:]))


if __name__ == "__main__":
    main()

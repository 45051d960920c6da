"""The processes that hold one learner between them, as one of them sees the others.

They meet in a file of this host (no port is chosen and none is known outside of it), and every collective has
a deadline, so that a rank that died or hangs ends the others with an error that names it. Imports torch only
where a group is opened.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flowgraph.errors import DeadlineError, WorkerDied

_MOMENT = 0.3


class Ranks:
    """Rank `rank` of `of` data-parallel processes on this host.

    store: path of a file in an existing directory where all ranks meet; the same for all, one that no other
        learner uses or has used. Whoever starts the ranks removes it when they have ended.
    places: i64[leaf], where this rank's rows stand among those of the whole step that it works on, which whoever hands
        them out says; None: they are all of it
    deadline: seconds that a rank waits for the others in any collective: they may be apart by as much

    Everything but the constructor is collective when of > 1: all ranks call it, in the same order. With of = 1
    it opens nothing, and sums and maxima are what was given.
    """

    def __init__(self, rank: int = 0, of: int = 1, *, store: str = "", deadline: float = 600.0) -> None:
        if not 0 <= rank < of:
            raise ValueError(f"rank must be 0 to {of - 1}, not {rank}")
        if of > 1 and not Path(store).parent.is_dir():
            raise ValueError(f"the ranks of a learner meet in a file, and {store!r} lies in no directory")
        self.rank, self.of, self.deadline = rank, of, deadline
        self.places: npt.NDArray[np.int64] | None = None
        self._path = store
        self._store: Any = None
        self._mesh: Any = None

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def mesh(self) -> Any:
        """torch's device mesh of one dim over the ranks, on the CPU. RuntimeError before `open`."""
        if self._mesh is None:
            raise RuntimeError("the ranks have not met: open() comes first")
        return self._mesh

    def open(self) -> None:
        """Meet the others. Harmless when repeated. Raises DeadlineError naming the ranks that don't come."""
        if self.of == 1 or self._mesh is not None:
            return
        from datetime import timedelta

        import torch.distributed as dist

        # One host: nothing of it listens on an address that another host could reach.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        wait = timedelta(seconds=self.deadline)
        with self._named("to meet"):
            store = dist.FileStore(self._path, self.of)  # type: ignore[attr-defined]
            store.set_timeout(wait)
            self._store = store
            self._note("process", str(os.getpid()))
            dist.init_process_group(
                backend="gloo", store=store, rank=self.rank, world_size=self.of, timeout=wait
            )
            self._mesh = dist.device_mesh.init_device_mesh("cpu", (self.of,), mesh_dim_names=("trajectory",))

    def gather(self, value: Any) -> list[Any]:
        """What each rank gave, by rank; on all of them. Pickled: for numbers, and small arrays."""
        if self.of == 1:
            return [value]
        import torch.distributed as dist

        found: list[Any] = [None] * self.of
        with self._named("for numbers of the batch"):
            dist.all_gather_object(found, value)
        return found

    def sum(self, values: Mapping[str, float]) -> dict[str, float]:
        """Of each value over the ranks, the same bits on all; a name that one of them lacks is 0 there."""
        total: dict[str, float] = {}
        for each in self.gather(dict(values)):
            for name, value in each.items():
                total[name] = total.get(name, 0.0) + value
        return total

    def most(self, value: int) -> int:
        """The largest over the ranks."""
        return int(max(self.gather(value)))

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Around collective work: WorkerDied names a rank that died or failed, DeadlineError one that is late.

        what: what the ranks do together, as in "rank 0 waited {what}". An error of this rank's own leaves a note,
        so that the others, who wait for it in vain, can say why.
        """
        if self.of == 1:
            yield
            return
        with self._named(what):
            yield

    def close(self) -> None:
        """Leave the group. Harmless when repeated, and not collective: others that still wait are ended."""
        if self._mesh is not None:
            import torch.distributed as dist

            self._mesh = None
            dist.destroy_process_group()

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except (WorkerDied, DeadlineError):
            raise
        except Exception as error:
            if not _lost(error):
                self._note("failed", f"{type(error).__name__}: {error}")
                raise
            self._note("waits", what)
            time.sleep(_MOMENT)  # those who wait in vain as this rank does say so, and are not blamed
            raise self._blame(what) from error

    def _note(self, kind: str, text: str) -> None:
        if self._store is not None:
            self._store.set(f"{kind}/{self.rank}", text)

    def _read(self, kind: str, rank: int) -> str | None:
        """What a rank has noted."""
        key = f"{kind}/{rank}"
        if self._store is None or not self._store.check([key]):
            return None
        text: str = self._store.get(key).decode()
        return text

    def _blame(self, what: str) -> WorkerDied | DeadlineError:
        others = [rank for rank in range(self.of) if rank != self.rank]
        ended = [text for rank in others if (text := self._ended(rank))]
        late = [f"rank {rank}" for rank in others if self._read("waits", rank) is None]
        waited = f"rank {self.rank} of a learner's {self.of} ranks waited {what}: "
        if ended:
            return WorkerDied(waited + "; ".join(ended), "look at that rank's log")
        who = " and ".join(late) or "another rank"
        return DeadlineError(
            f"{waited}{who} did not come within {self.deadline:g} s",
            "look at that rank's log; if it is only slow, give the ranks a longer deadline",
        )

    def _ended(self, rank: int) -> str | None:
        """How another rank ended, if it did."""
        if failed := self._read("failed", rank):
            return f"rank {rank} failed with {failed}"
        process = self._read("process", rank)
        if process is not None and not _alive(int(process)):
            return f"rank {rank} (process {process}) has died"
        return None


ALONE = Ranks()


def _lost(error: Exception) -> bool:
    """Whether a collective failed for want of another rank: gloo has no class for it, only words."""
    import torch.distributed as dist

    said = str(error).lower()
    words = ("gloo", "connection closed", "connection reset", "timed out", "wait timeout")
    return isinstance(error, dist.DistError) or (
        type(error) is RuntimeError and any(word in said for word in words)
    )


def _alive(process: int) -> bool:
    """Of this host; one that ended and was not waited for has died, too."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"

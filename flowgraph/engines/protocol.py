"""What every engine does, and the values that cross its door. Imports no torch.

An engine is the only holder of the rollout owner's large mutable state: weights and KV cache. It keeps no meaning
across steps: given (weights of a version, prompt ids, sampling, key) it samples the same whatever else it is doing.

An engine is made of replicas: copies of the model that serve side by side. One replica may live in the worker's own
process, or each in a server process of its own; `fleet.Fleet` is the engine over either kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol, get_args

import msgspec
import numpy as np
import numpy.typing as npt

# stop: EOS or a stop string; length: max_new_tokens; context: the model's context ended first; abort: somebody's will.
FinishReason = Literal["stop", "length", "context", "abort"]
# What becomes of requests under way while weights change. retract: their KV is dropped, and computed anew under the new
# weights; in_place: they go on with the KV they have; abort: they end, and what they have is the prefix of a new one.
PauseMode = Literal["retract", "in_place", "abort"]
PAUSE_MODES: tuple[PauseMode, ...] = ("retract", "in_place", "abort")
# What an engine may record of every token beside its log-probability.
SideChannel = Literal["routed_experts", "indexer_topk"]


# The share of the KV cache in use above which an engine will soon drop requests to make room.
HIGH_MARK = 0.95


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to sample one response.

    temperature: 0 means greedy. Log-probabilities are those of the temperature-scaled distribution.
    stop: strings; generation ends with the token that completes one (the token is kept: ids are the truth).
    record: side channels to return
    """

    max_new_tokens: int
    temperature: float = 1.0
    stop: tuple[str, ...] = ()
    record: tuple[SideChannel, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.max_new_tokens, int) or isinstance(self.max_new_tokens, bool):
            raise ValueError(f"max_new_tokens is a count, not {self.max_new_tokens!r}")
        if not isinstance(self.temperature, int | float) or isinstance(self.temperature, bool):
            raise ValueError(f"temperature is a number, not {self.temperature!r}")
        if not isinstance(self.stop, tuple) or not all(isinstance(stop, str) for stop in self.stop):
            raise ValueError(f"stop is a tuple of strings, not {self.stop!r}")
        if unknown := set(self.record) - set(get_args(SideChannel)):
            raise ValueError(f"record: there is no {sorted(map(str, unknown))[0]}")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, not {self.max_new_tokens}")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be finite and not negative, not {self.temperature}")
        if "" in self.stop:
            raise ValueError("a stop string must not be empty")


class Side(msgspec.Struct, frozen=True, eq=False):
    """One side channel of a trajectory of n tokens, in the parts in which it was recorded; not to be written to.

    parts: integers [rows, layers, k], one behind the other a row for each token as its id has one; 0 where nothing is
    recorded, and a part may be other's memory
    recorded: bool[n]; False for the last token, and wherever the engine gave nothing: there a 0 is no expert
    dtype: unsigned, that holds every value, though a part may have a wider one
    """

    parts: tuple[npt.NDArray[Any], ...]
    recorded: npt.NDArray[np.bool_]
    dtype: np.dtype[Any]

    @property
    def shape(self) -> tuple[int, int, int]:
        """n, layers, k"""
        _, layers, k = self.parts[0].shape
        return len(self.recorded), layers, k

    def write(self, out: npt.NDArray[Any]) -> None:
        """Copy it into an array of its shape. Raises ValueError for another shape."""
        if out.shape != self.shape:
            raise ValueError(f"a side channel of {list(self.shape)} does not fit into {list(out.shape)}")
        at = 0
        for part in self.parts:
            np.copyto(out[at : at + len(part)], part, casting="unsafe")
            at += len(part)

    @property
    def values(self) -> npt.NDArray[np.unsignedinteger[Any]]:
        """[n, layers, k], copied unless it is one part."""
        if len(self.parts) == 1 and self.parts[0].dtype == self.dtype:
            return self.parts[0]
        out = np.empty(self.shape, self.dtype)
        self.write(out)
        return out

    def rows(self, start: int, end: int) -> Side:
        """Those of the tokens from `start` to before `end`."""
        ends = np.cumsum([0, *map(len, self.parts)]).tolist()
        cut = [
            part[max(0, start - at) : max(0, end - at)] for part, at in zip(self.parts, ends, strict=False)
        ]
        return Side(tuple(cut), self.recorded[start:end], self.dtype)

    def then(self, other: Side) -> Side:
        """Its rows, and behind them those of another of equal layers and k."""
        parts, recorded = (*self.parts, *other.parts), np.concatenate([self.recorded, other.recorded])
        return Side(parts, recorded, np.promote_types(self.dtype, other.dtype))

    @property
    def start(self) -> int:
        """The first token without a row: the `routed_experts_start_len` of a request that goes on from here."""
        return int(np.argmin(self.recorded)) if len(self.recorded) else 0


class Generation(msgspec.Struct, frozen=True):
    """One sampled response of r tokens; the three arrays have the same length r (0 after an early abort).

    versions: of the weights that each token was sampled under
    retractions: how often the engine dropped the request's KV to make room, or to change weights
    side: the side channels that were asked for, over prompt and response
    """

    ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    finish_reason: FinishReason
    retractions: int = 0
    side: Mapping[str, Side] = {}

    @property
    def pressed(self) -> bool:
        """Whether its KV was dropped, and not for new weights: so for want of memory."""
        return self.retractions > 0 and len(set(self.versions.tolist())) == 1


def nothing(reason: FinishReason = "abort") -> Generation:
    """A response without a token."""
    return Generation(np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32), reason)


class EngineLoad(msgspec.Struct, frozen=True):
    """Requests being decoded, requests waiting for a slot, and slots; of all replicas that serve.

    kv_used: the fullest replica's share of its KV cache in use, 0 to 1
    retractions: requests whose KV was dropped to make room since the engine started
    """

    running: int
    waiting: int
    slots: int
    kv_used: float = 0.0
    retractions: int = 0

    @property
    def backlog(self) -> int:
        """Requests that it can't compute now: those that wait, and one more while the KV cache is nearly full."""
        return self.waiting + (self.kv_used > HIGH_MARK)


class Synced(msgspec.Struct, frozen=True):
    """What one sync did. seconds: until every replica served or was given up for now; pushed: bytes to replicas

    replicas: that serve the new version; retries: attempts beyond the first, of all replicas
    """

    version: int
    seconds: float
    pushed: int
    replicas: int
    retries: int


class Engine(Protocol):
    """Generate with token ids in and out; weights replaced while requests are under way."""

    @property
    def version(self) -> int:
        """The version that new requests are sampled from."""
        ...

    async def generate(
        self, prompt: npt.NDArray[np.int32], sampling: Sampling, *, key: int, rid: str
    ) -> Generation:
        """Sample one response. `key` (64 bits) alone decides the randomness; position is the counter.

        A prompt that leaves less than max_new_tokens of the context ends with reason "context", without a token when
        it leaves none. Raises ValueError for an empty prompt, an id outside the vocabulary, a key that isn't one, or a
        rid in use; EngineFailed when no replica can serve.
        """
        ...

    def abort(self, rid: str) -> bool:
        """End a request now; its `generate` returns what it has, with reason "abort". False if unknown."""
        ...

    async def logprobs(self, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        """f32[n]: the log-probability of each of n tokens given those before it, at temperature 1; 0 for the first.

        Raises ValueError for no token, one outside the vocabulary, or more than the context holds.
        """
        ...

    async def sync(
        self,
        weights: Mapping[str, Any],
        version: int,
        *,
        pause: PauseMode = "retract",
        seconds: float = 300.0,
    ) -> Synced:
        """Make every replica serve these weights: pause → release → update → resume → continue, each repeatable.

        weights: names as in the model's files → tensors on the CPU, valid until this returns. A name that is missing,
        unknown or of another shape or dtype is a ValueError naming it, and then no weight has changed. A tied head is
        no missing weight. No replica serves a version before its last tensor has landed. One that fails or is late
        stays out of rotation, and is brought back by itself. EngineFailed when after `seconds` none serves; then the
        next sync brings them back.
        """
        ...

    def load(self) -> EngineLoad:
        """As last heard of."""
        ...

    async def close(self) -> None:
        """Abort everything, free the model, end the processes. Harmless when repeated."""
        ...


class Replica(Protocol):
    """One copy of the model. The five actions of a sync are called in the order that `sync.Sync` allows."""

    name: str

    @property
    def computed(self) -> float:
        """A number that grows while it computes, as last heard of."""
        ...

    async def start(self, seconds: float) -> None:
        """Be there and answer: launch what ended, connect to what runs. Nothing is said of the version it serves."""
        ...

    def alive(self) -> bool:
        """False once its process is known to have ended."""
        ...

    def kill(self) -> None:
        """It hangs: end its process, so that `start` launches another. Nothing where the process is not ours."""
        ...

    async def generate(
        self,
        prompt: npt.NDArray[np.int32],
        sampling: Sampling,
        *,
        key: int,
        drawn: int,
        rid: str,
        recorded: int = 0,
    ) -> Generation:
        """Sample; `drawn` tokens of the response end the prompt, and their random numbers are used up.

        recorded: side channels of so many tokens are known, and need not be sent
        """
        ...

    async def abort(self, rid: str) -> None: ...

    async def logprobs(self, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]: ...

    async def pause(self, mode: PauseMode) -> None:
        """Return when no token is being computed."""
        ...

    async def release(self) -> str:
        """Give back the KV cache's physical memory, and keep its addresses. Says why, where it is not done, else ""."""
        ...

    async def update(self, weights: Any, version: int) -> int:
        """Load the weights, whose form is the replica's own, and verify them. Returns the bytes that were sent."""
        ...

    async def resume(self) -> None:
        """Have memory for the KV cache again."""
        ...

    async def proceed(self) -> None:
        """Compute again."""
        ...

    @property
    def heard(self) -> EngineLoad:
        """Its load, as last heard of."""
        ...

    async def load(self) -> EngineLoad:
        """Its load now."""
        ...

    async def close(self) -> None: ...

"""A replica behind HTTP: SGLang, or the embedded engine in a server of its own, which speaks the same API.

Whatever fails is a ReplicaError. The five actions keep no state but what the server can't be asked for: the mode it was
paused in, and whether its KV memory is released.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from flowgraph.engines.protocol import EngineLoad, Generation, PauseMode, Sampling, Side
from flowgraph.engines.served import wire
from flowgraph.engines.served.client import Client, Cut, Refused
from flowgraph.engines.served.process import ServerProcess
from flowgraph.engines.served.side import Channels, indexed, routed
from flowgraph.engines.sync import ReplicaError

QUICK = 30.0  # seconds for what a server answers at once
FOREVER = 3600.0  # for a generation; the fleet watches its progress


class Carrier(Protocol):
    """How weights get to a server: one of the transports in `transports.py`."""

    async def push(self, client: Client, weights: Any, version: int, *, flush: bool) -> int:
        """Have the server load them; returns the bytes that were sent. Raises ReplicaError."""
        ...

    def forget(self) -> None:
        """The server was started anew: it has none of what was sent before."""
        ...

    async def close(self, client: Client) -> None:
        """Give back what this kept beside the server. The server may be gone already."""
        ...


class HttpReplica:
    """Implements `flowgraph.engines.protocol.Replica`.

    process: that we start and may replace; None for a server that somebody else runs
    saver: whether the server gives back KV memory when it is told to; without that, release and resume are no-ops
    repeatable: whether it may be told to release what is released, and to resume what was not
    channels: what side channels the model has
    rerecords: whether it records the tokens of a retracted request anew, as SGLang does; ours keeps what it had
    verify: the checksums that a server must have when it holds the given weights, by its own names; see `verify.py`
    connect: gives the client of an address
    """

    def __init__(
        self,
        name: str,
        carrier: Carrier,
        *,
        process: ServerProcess | None = None,
        url: str = "",
        saver: bool = False,
        repeatable: bool = False,
        verify: Any = None,
        channels: Channels | None = None,
        rerecords: bool = True,
        connect: Callable[[str], Client] = Client,
    ) -> None:
        assert (process is None) == bool(url)
        self.name = name
        self._carrier, self._process, self._saver = carrier, process, saver
        self._repeatable, self._verify = repeatable, verify
        self._channels, self._rerecords = channels, rerecords
        self._connect = connect
        self._client = connect(url or "http://127.0.0.1:0")
        self._mode: PauseMode = "retract"
        self._released: bool | None = False  # None: not known
        self._version = 0
        self.computed = 0.0
        self.heard = EngineLoad(0, 0, 0)
        self._retractions = 0

    @property
    def url(self) -> str:
        return self._client.url

    @property
    def pid(self) -> int:
        """Of the process that we started, else 0."""
        return self._process.pid if self._process is not None else 0

    async def start(self, seconds: float) -> None:
        process = self._process
        if process is None:
            self._carrier.forget()  # whoever runs it may have started it anew
            await self._patiently(seconds)
            return
        # Whether KV memory is released can't be asked for, and a wrong guess kills SGLang: so start it anew.
        if process.alive() and (self._repeatable or self._released is not None):
            try:
                return await process.until(self._answers, seconds)
            except ReplicaError:  # it was about to end
                if process.alive():
                    raise
        await self._client.close()
        process.launch()
        self._client = self._connect(f"http://127.0.0.1:{process.port}")
        self._released, self._version = False, 0
        self._carrier.forget()
        await process.until(self._answers, seconds)

    async def _answers(self) -> None:
        await self._client.ask("/model_info", seconds=QUICK, form=None)

    async def _patiently(self, seconds: float) -> None:
        clock = asyncio.get_running_loop().time
        end = clock() + 0.9 * seconds  # so that the reason is told before the caller's own time is over
        while True:
            try:
                return await self._answers()
            except ReplicaError:
                if clock() >= end:
                    raise
                await asyncio.sleep(0.2)

    def alive(self) -> bool:
        return self._process is None or self._process.alive()

    def kill(self) -> None:
        if self._process is not None:
            self._process.end()

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
        made, meta = await self._once(prompt, sampling, key, drawn, rid, recorded)
        # One that waited in the server while weights changed in place may have begun with KV of the old ones.
        while (
            self._mode == "in_place" and meta.cached_tokens and len(made.ids) and made.versions[0] > meta.sent
        ):
            made, meta = await self._once(prompt, sampling, key, drawn, rid, recorded)
        waited = made.finish_reason == "abort" and not len(
            made.ids
        )  # nothing was computed, and nothing recorded
        if waited or not sampling.record:
            return made
        side = self._side(meta, sampling, len(prompt), len(made.ids), recorded, rid)
        return msgspec.structs.replace(made, side=side)

    async def _once(
        self, prompt: npt.NDArray[np.int32], sampling: Sampling, key: int, drawn: int, rid: str, recorded: int
    ) -> tuple[Generation, wire.Meta]:
        sent = self._version
        body = wire.request(prompt, sampling, key=key, drawn=drawn, rid=rid, cache=f"v{sent}")
        if "routed_experts" in sampling.record:
            body["routed_experts_start_len"] = recorded
        try:
            reply: wire.Reply = await self._client.ask("/generate", body, seconds=FOREVER, form=wire.Reply)
        except Refused as error:
            if error.status == 400:  # the request is at fault, and would be anywhere
                raise ValueError(f"{rid}: {error.text}") from error
            raise
        except Cut as error:
            raise self._said(error) from error
        self._retractions += reply.meta_info.num_retractions
        return wire.generation(reply, rid), msgspec.structs.replace(reply.meta_info, sent=sent)

    def _side(
        self, meta: wire.Meta, sampling: Sampling, prompt: int, response: int, recorded: int, rid: str
    ) -> dict[str, Side]:
        if self._channels is None:
            raise ValueError(f"{rid}: nobody knows what side channels the model of {self.url} has")
        # Rows of a retracted request are recorded anew, under the weights of its last tokens, which may be other ones.
        mixed = self._rerecords and meta.num_retractions and len(meta.weight_versions) > 1
        since = max(0, prompt + meta.weight_versions[-1].start - 1) if mixed else 0
        common: dict[str, Any] = {"rid": rid, "tokens": prompt + response, "since": since}
        side: dict[str, Side] = {}
        if "routed_experts" in sampling.record:
            side["routed_experts"] = routed(meta.routed_experts, self._channels, start=recorded, **common)
        if "indexer_topk" in sampling.record:
            side["indexer_topk"] = indexed(meta.indexer_topk, self._channels, **common)
        return side

    def _said(self, error: ReplicaError) -> ReplicaError:
        """The same, with how the process ended where that is the reason."""
        return error if self.alive() or self._process is None else ReplicaError(self._process.ended())

    async def abort(self, rid: str) -> None:
        await self._client.ask("/abort_request", {"rid": rid}, seconds=QUICK, form=None)

    async def logprobs(self, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        body = {
            "input_ids": tokens.tolist(),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "rid": uuid.uuid4().hex,
            "extra_key": f"v{self._version}",
        }
        reply: wire.Reply = await self._client.ask("/generate", body, seconds=FOREVER, form=wire.Reply)
        values = [value for value, _, _ in reply.meta_info.input_token_logprobs]
        if len(values) != len(tokens):
            raise ReplicaError(f"{self.url} gave {len(values)} log-probabilities of {len(tokens)} tokens")
        if None in values[1:]:  # JSON has no NaN
            raise ReplicaError(f"{self.url} gave no log-probability of token {values.index(None, 1)}")
        return np.array([0.0, *values[1:]], np.float32)

    # --- the five actions -------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode) -> None:
        """The answer may come before the scheduler has stopped, but it takes what follows in order."""
        self._mode = mode
        await self._do("/pause_generation", {"mode": mode})

    async def release(self) -> str:
        if self._mode == "in_place":
            return "requests keep their KV"
        if not self._saver:
            kind = "was started without --enable-memory-saver" if self._process is not None else "is not ours"
            return f"the server {kind}"
        if not self._released:
            self._released = None
            await self._do("/release_memory_occupation", {"tags": ["kv_cache"]})
            self._released = True
        return ""

    async def update(self, weights: Any, version: int) -> int:
        """The prefix cache is emptied, but for in_place, where requests hold it. It is safe all the same: KV is shared
        only between requests that were sent under one version, because each says which (`extra_key`).
        """
        sent = await self._carrier.push(self._client, weights, version, flush=self._mode != "in_place")
        if self._verify is not None:
            await self._verify(self._client, weights)
        self._version = version
        return sent

    async def resume(self) -> None:
        if self._released is False:
            return
        self._released = None
        await self._do("/resume_memory_occupation", {"tags": ["kv_cache"]})
        self._released = False

    async def proceed(self) -> None:
        await self._do("/continue_generation", {})

    async def _do(self, path: str, body: Mapping[str, Any]) -> None:
        try:
            await self._client.ask(path, body, seconds=FOREVER, form=None)
        except Cut as error:
            raise self._said(error) from error

    # --- health -----------------------------------------------------------------------------------------------

    async def load(self) -> EngineLoad:
        loads: wire.Loads = await self._client.ask("/v1/loads?include=core", seconds=QUICK, form=wire.Loads)
        ranks = loads.loads
        self.computed = sum(
            r.total_prefill_uncached_tokens + (r.decode_moments[0] if r.decode_moments else 0) for r in ranks
        )
        self.heard = EngineLoad(
            sum(r.num_running_reqs for r in ranks),
            sum(r.num_waiting_reqs for r in ranks),
            sum(r.max_running_requests for r in ranks),
            max((r.token_usage for r in ranks), default=0.0),
            self._retractions,
        )
        return self.heard

    async def close(self) -> None:
        try:
            await self._carrier.close(self._client)
        finally:
            await self._client.close()
            if self._process is not None:
                self._process.end()

"""The engine `transformers`: continuous batching over a Hugging Face causal model on the CPU. One replica's worth: the
engine that hops see is a `fleet.Fleet` over it, in this process (`embedded.py`) or in servers (`served/serve.py`).

Life of a request:

1. `generate` checks it and queues it; the loop runs as a task while there is anything to compute.
2. When a slot is free, the oldest waiting request is admitted: its prompt is prefilled, unless a sibling's
   prefill is still cached, and its first token is sampled from the prompt's last logits.
3. Each step decodes all slots by one token and samples each running request's next one.
4. After EOS, a completed stop string, max_new_tokens or an abort, the future resolves and the slot is free.

Between two admissions or steps the loop yields once to the event loop; there requests, aborts and pauses
get in. No token is being computed whenever other code runs on the event loop, so `pause` never waits.

Why the decode loop is ours and not `generate_batch` of transformers: there, cached prefixes cannot be
flushed and no token knows its weight version when weights change in place; a cancelled request delivers
nothing of what it had; the random state is the batch's, not the request's; and requests are packed into
shapes that vary with the load, so that the bits of a request's logits vary too.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Mapping, Set
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from flowgraph.engines.caches import Prefix, PrefixCache
from flowgraph.engines.protocol import EngineLoad, FinishReason, Generation, PauseMode, Sampling
from flowgraph.engines.request import Request
from flowgraph.engines.routing import RECORDERS, Recording
from flowgraph.engines.sampling import KEY_LIMIT, Sampler
from flowgraph.engines.slots import SlotModel
from flowgraph.engines.stops import StopStrings, tokenizer_of
from flowgraph.engines.weights.delta import Delta, apply
from flowgraph.errors import ModelError

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class TransformersEngine:
    """The model of one replica; see `flowgraph.engines.protocol.Replica` for what its methods promise.

    model_dir: a directory with config, weights and, for stop strings, tokenizer.json.
    slots: requests decoded at once. context: most prompt and response tokens of a request together.
    Both are part of the arithmetic: results are equal bit for bit between engines of equal slots, context,
    dtype and threads on one kind of machine. threads: for all of torch in this process; None leaves it.
    Sampling defaults in the model's generation_config are ignored, its EOS ids are not.

    Not thread-safe: every method belongs to the thread of the event loop. Raises ValueError for a bad
    argument or an unsupported model, RuntimeError for a method that the engine's state doesn't allow.
    """

    def __init__(
        self, model_dir: str, *, slots: int, context: int, dtype: str = "bfloat16", threads: int | None = None
    ) -> None:
        if slots < 1 or context < 2:
            raise ValueError(f"slots must be at least 1 and context at least 2, not {slots} and {context}")
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
        if threads is not None:
            torch.set_num_threads(threads)
        self._tokenizer = tokenizer_of(model_dir)
        self.dtype = DTYPES[dtype]
        model = SlotModel(model_dir, slots=slots, context=context, dtype=self.dtype)
        self._model: SlotModel | None = model
        self._sample_first, self._sample_next = (Sampler(rows, model.vocabulary) for rows in (1, slots))
        self._slots, self._context, self.vocabulary = slots, context, model.vocabulary
        self._version = 0
        self._paused = False
        self._requests: dict[str, Request] = {}
        self._waiting: deque[Request] = deque()
        self._running: list[Request | None] = [None] * slots
        self._prefixes = PrefixCache(capacity=slots)
        self._task: asyncio.Task[None] | None = None
        self.computed = 0  # tokens sampled since the start

    @property
    def version(self) -> int:
        return self._version

    async def generate(
        self,
        prompt: npt.NDArray[np.int32],
        sampling: Sampling,
        *,
        key: int,
        rid: str,
        drawn: int = 0,
        recorded: int = 0,
    ) -> Generation:
        """drawn, recorded: see `Replica.generate`; rows of a side channel that are known are marked as not recorded.

        Raises ValueError for a rid in use, a prompt that is empty, too long or outside the vocabulary, a key beyond 64
        bits, or a side channel that the model has not.
        """
        request = self._checked(np.asarray(prompt), sampling, key, drawn, rid, recorded)
        self._requests[rid] = request
        self._waiting.append(request)
        self._wake()
        try:
            return await request.future
        finally:
            self._release(request)  # a cancelled caller's slot; else it is free already

    def _checked(
        self, prompt: npt.NDArray[Any], sampling: Sampling, key: int, drawn: int, rid: str, recorded: int
    ) -> Request:
        model = self._open()
        if prompt.ndim != 1 or not len(prompt) or prompt.dtype.kind not in "iu":
            raise ValueError(f"{rid}: a prompt is a non-empty row of ids, not {prompt.dtype} {prompt.shape}")
        if prompt.min() < 0 or prompt.max() >= model.vocabulary:
            raise ValueError(f"{rid}: the prompt holds ids outside the vocabulary of {model.vocabulary}")
        if len(prompt) + sampling.max_new_tokens > self._context:
            raise ValueError(
                f"{rid}: {len(prompt)} prompt tokens and {sampling.max_new_tokens} new ones exceed "
                f"the context of {self._context}"
            )
        if not 0 <= key < KEY_LIMIT:
            raise ValueError(f"{rid}: a key has 64 bits and no sign, unlike {key}")
        if rid in self._requests:
            raise ValueError(f"{rid}: a request of this name is under way")
        stops = None
        if sampling.stop:
            if self._tokenizer is None:
                raise ValueError(f"{rid}: stop strings need a tokenizer.json beside the model")
            stops = StopStrings(self._tokenizer, sampling.stop)
        recordings: dict[str, Recording] = {
            name: self._recording(rid, name, sampling.max_new_tokens, len(prompt), recorded)
            for name in sampling.record
        }
        return Request(rid, prompt.astype(np.int32), sampling, key, drawn, stops, recordings)

    def _recording(self, rid: str, name: str, new: int, prompt: int, recorded: int) -> Recording:
        if name not in RECORDERS:
            raise ValueError(f"{rid}: this engine records no {name}")
        if not 0 <= recorded <= prompt:
            raise ValueError(f"{rid}: rows of {recorded} tokens can't be known of a prompt of {prompt}")
        try:
            recorder = self._open().recorder(name)
        except ModelError as error:
            raise ValueError(f"{rid}: this engine can't record {name}: {error.message}") from error
        # SGLang is told so of experts alone, and sends positions from the first on.
        return Recording(recorder.empty(new), recorded if name == "routed_experts" else 0)

    def abort(self, rid: str) -> bool:
        request = self._requests.get(rid)
        if request is None:
            return False
        self._finish(request, "abort")
        return True

    def pause(self, mode: PauseMode) -> None:
        """Compute no further token. Of requests under way `retract` drops the KV, and they go on from their tokens;
        `in_place` keeps it; `abort` ends them all. Harmless when repeated.
        """
        self._paused = True
        if mode == "abort":
            for request in list(self._requests.values()):
                self._finish(request, "abort")
        if mode == "retract":
            running = [request for request in self._running if request is not None]
            for request in running:
                request.slot = None
                request.retractions += 1
            self._running = [None] * self._slots
            self._waiting.extendleft(reversed(running))

    def proceed(self) -> None:
        """Compute again. Harmless when not paused; RuntimeError while the KV memory is released."""
        if self._open().released:
            raise RuntimeError("the KV cache is released: resume it first")
        self._paused = False
        self._wake()

    @property
    def released(self) -> bool:
        """Whether the KV cache has no memory."""
        return self._open().released

    def release(self) -> int:
        """Give the memory of the KV cache and of the cached prefixes back; returns the bytes of the cache. Skipped
        while paused requests hold KV. RuntimeError unless paused.
        """
        if not self._paused:
            raise RuntimeError("memory may be released only while the engine is paused")
        if any(self._running):
            return 0
        self._prefixes.clear()
        return self._open().release_cache()

    def resume(self) -> None:
        """Have memory for the KV cache again."""
        self._open().resume_cache()

    def update_weights(self, tensors: Mapping[str, Any], version: int) -> None:
        """Copy every tensor into the paused engine's model, and drop all cached prefixes. The version of each token
        tells under which weights it was sampled. RuntimeError unless paused; ValueError as `Engine.sync` says.
        """
        model = self._open()
        if not self._paused:
            raise RuntimeError("weights may change only while the engine is paused")
        if not 0 <= version < 1 << 31:
            raise ValueError(f"a version is a 32-bit count, unlike {version}")
        model.load_weights(tensors)
        self._prefixes.clear()
        self._version = version

    def check_weights(self, tensors: Mapping[str, Any]) -> None:
        """ValueError as `Engine.sync` says; nothing changes."""
        self._open().check_weights(tensors)

    def change_weights(self, delta: Delta) -> None:
        """The same, where only elements of the weights change; DeltaMismatch when the delta isn't one from these. They
        may then be half changed, and update_weights is the way on.
        """
        model = self._open()
        if not self._paused:
            raise RuntimeError("weights may change only while the engine is paused")
        apply(delta, model.weights(), at=self._version)
        self._prefixes.clear()
        self._version = delta.version

    def logprobs(self, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        """f32[n]: of each of n tokens given those before it, at temperature 1; 0 for the first."""
        return self._open().score(tokens.tolist())

    def load(self) -> EngineLoad:
        running = self._slots - self._running.count(None)
        held = sum(request.position + 1 for request in self._running if request is not None)
        return EngineLoad(running, len(self._waiting), self._slots, held / (self._slots * self._context))

    def weights(self) -> dict[str, Any]:
        """Names as in the model's files → the tensors that it serves, tied ones once; not to be written to."""
        return self._open().weights()

    def close(self) -> None:
        for request in list(self._requests.values()):
            self._finish(request, "abort")
        self._prefixes.clear()
        self._model = None

    def _open(self) -> SlotModel:
        if self._model is None:
            raise RuntimeError("the engine is closed")
        return self._model

    def _wake(self) -> None:
        """Run the loop unless it runs already; it ends by itself when there is nothing to compute."""
        if not self._has_work():
            return
        loop = asyncio.get_running_loop()
        if self._task is None or self._task.done() or self._task.get_loop() is not loop:
            self._task = loop.create_task(self._run(), name="transformers engine")

    def _has_work(self) -> bool:
        return not self._paused and bool(self._requests)

    async def _run(self) -> None:
        try:
            while self._has_work():
                if self._waiting and None in self._running:
                    self._admit()
                else:
                    self._decode()
                await asyncio.sleep(0)
        except Exception as error:
            for request in list(self._requests.values()):
                self._release(request)
                if not request.future.done():
                    request.future.set_exception(error)
        except BaseException:  # the event loop is ending: nobody would resolve these futures any more
            for request in list(self._requests.values()):
                self._release(request)
                request.future.cancel()
            raise

    def _admit(self) -> None:
        """Prefill the oldest waiting request, sample its next token, and give it the lowest free slot."""
        request = self._waiting.popleft()
        record = request.recordings.keys()
        if request.ids:  # it was retracted: nobody shares this prefix
            prefix = self._open().prefill([*request.prompt.tolist(), *request.ids], record)
        else:
            prefix = self._prefix(request.prompt, record)
        for name, recording in request.recordings.items():
            recording.take(0, prefix.chosen[name])
        temperatures, draws = [request.sampling.temperature], [request.draw]
        tokens, logprobs = self._sample_first(prefix.logits_V[None], temperatures, draws)
        self._append(request, tokens[0], logprobs[0])
        if not request.future.done():
            request.slot = self._running.index(None)
            self._running[request.slot] = request
            self._open().fill(request.slot, prefix)

    def _prefix(self, prompt: npt.NDArray[np.int32], record: Set[str]) -> Prefix:
        name = prompt.tobytes()
        prefix = self._prefixes.get(self._version, name)
        if prefix is None or not record <= prefix.chosen.keys():
            prefix = self._open().prefill(prompt.tolist(), record)
            self._prefixes.put(self._version, name, prefix)
        return prefix

    def _decode(self) -> None:
        """One token for every running request. Free slots are computed too: the shapes never change."""
        tokens, positions = [0] * self._slots, [0] * self._slots
        temperatures, draws = [1.0] * self._slots, [0.0] * self._slots
        running = [(slot, request) for slot, request in enumerate(self._running) if request is not None]
        for slot, request in running:
            tokens[slot], positions[slot] = request.ids[-1], request.position
            temperatures[slot], draws[slot] = request.sampling.temperature, request.draw
        record = {name for _, request in running for name in request.recordings}
        logits_SV, chosen = self._open().decode(tokens, positions, record)
        sampled, logprobs = self._sample_next(logits_SV, temperatures, draws)
        for slot, request in running:
            for name, recording in request.recordings.items():
                recording.take(positions[slot], chosen[name][slot : slot + 1])
            self._append(request, sampled[slot], logprobs[slot])

    def _append(self, request: Request, token: int, logprob: float) -> None:
        """Give a request its next token; finish it if that is its last one."""
        if not math.isfinite(logprob):
            raise FloatingPointError(f"{request.rid}: the logits of version {self._version} are not finite")
        self.computed += 1
        request.ids.append(token)
        request.logprobs.append(logprob)
        request.versions.append(self._version)
        completed = request.stops is not None and request.stops.completed(request.ids)
        if token in self._open().eos_ids or completed:
            self._finish(request, "stop")
        elif len(request.ids) == request.sampling.max_new_tokens:
            self._finish(request, "length")

    def _finish(self, request: Request, reason: FinishReason) -> None:
        self._release(request)
        if not request.future.done():
            request.future.set_result(request.generation(reason))

    def _release(self, request: Request) -> None:
        """Forget a request: its name, its place in the queue, its slot. Harmless when repeated."""
        if self._requests.get(request.rid) is not request:
            return
        del self._requests[request.rid]
        if request.slot is not None:
            self._running[request.slot] = None
        elif request in self._waiting:
            self._waiting.remove(request)

"""The embedded engine as a server of its own: `python -m flowgraph.engines.served.serve --model-path DIR --port N …`.

It speaks as much of SGLang's HTTP API as `replica.HttpReplica` uses, so that several processes may serve a rollout
without SGLang, and an engine's process can die and be replaced. Unlike SGLang on a CPU it really releases KV memory.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import numpy.typing as npt
from aiohttp import web

from flowgraph.engines.protocol import Sampling, SideChannel
from flowgraph.engines.served.deltas import MISMATCH
from flowgraph.engines.served.verify import digest
from flowgraph.engines.transformers import TransformersEngine
from flowgraph.engines.weights.delta import DeltaMismatch, unpack


class Server:
    """HTTP paths to methods of one engine."""

    def __init__(self, engine: TransformersEngine) -> None:
        self.engine = engine

    async def generate(self, body: dict[str, Any]) -> Any:
        asked = body["sampling_params"]
        prompt, rid = np.array(body["input_ids"], np.int32), body["rid"]
        if asked["max_new_tokens"] == 0:
            if not len(prompt):
                raise ValueError(f"{rid}: a prompt is a non-empty row of ids")
            values = self.engine.logprobs(prompt)
            pairs = [[None if at == 0 else float(v), int(prompt[at]), None] for at, v in enumerate(values)]
            finish = {"type": "length"}
            return {
                "output_ids": [],
                "meta_info": {"id": rid, "finish_reason": finish, "input_token_logprobs": pairs},
            }
        record = tuple(channel for channel in get_args(SideChannel) if body.get(f"return_{channel}"))
        sampling = Sampling(asked["max_new_tokens"], asked["temperature"], tuple(asked["stop"]), record)
        key, start = asked["sampling_seed"] % (1 << 64), body.get("routed_experts_start_len", 0)
        out = await self.engine.generate(
            prompt, sampling, key=key, rid=rid, drawn=body.get("drawn", 0), recorded=start
        )
        edges = [0, *(np.flatnonzero(np.diff(out.versions)) + 1).tolist(), len(out.ids)]
        spans = [
            {"version": str(out.versions[a]), "start": a, "end": b}
            for a, b in itertools.pairwise(edges)
            if b > a
        ]
        chosen = zip(out.logprobs.tolist(), out.ids.tolist(), strict=True)
        meta = {
            "id": rid,
            "finish_reason": {"type": out.finish_reason},
            "weight_versions": spans,
            "output_token_logprobs": [[value, id, None] for value, id in chosen],
            "num_retractions": out.retractions,
        }
        for name, side in out.side.items():  # bytes become base64
            rows = side.values[:-1].astype("<i4")
            meta[name] = (_positions(rows) if name == "indexer_topk" else rows[start:]).tobytes()
        return {"output_ids": out.ids.tolist(), "meta_info": meta}

    async def abort(self, body: dict[str, Any]) -> None:
        self.engine.abort(body["rid"])

    async def pause(self, body: dict[str, Any]) -> None:
        self.engine.pause(body["mode"])

    async def proceed(self, body: dict[str, Any]) -> None:
        self.engine.proceed()

    async def release(self, body: dict[str, Any]) -> None:
        self.engine.release()

    async def resume(self, body: dict[str, Any]) -> None:
        self.engine.resume()

    async def update(self, body: dict[str, Any]) -> Any:
        from safetensors.torch import load_file

        tensors: dict[str, Any] = {}
        for file in sorted(Path(body["model_path"]).glob("*.safetensors")):
            tensors |= load_file(file)
        dtype = self.engine.dtype  # the model's own files may have another
        tensors = {n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors.items()}
        self.engine.update_weights(tensors, int(body["weight_version"]))
        return {"success": True}

    async def update_from_delta(self, packed: bytes) -> Any:
        self.engine.change_weights(unpack(bytearray(packed)))
        return {"success": True}

    async def check(self, body: dict[str, Any]) -> Any:
        return {
            "success": True,
            "ranks": [{"checksums": {n: digest(t) for n, t in self.engine.weights().items()}}],
        }

    async def info(self, body: dict[str, Any]) -> Any:
        return {"weight_version": str(self.engine.version)}

    async def loads(self, body: dict[str, Any]) -> Any:
        load = self.engine.load()
        of = {
            "num_running_reqs": load.running,
            "num_waiting_reqs": load.waiting,
            "max_running_requests": load.slots,
            "token_usage": load.kv_used,
            "decode_moments": [self.engine.computed],
        }
        return {"loads": [of]}

    def app(self) -> web.Application:
        app = web.Application(client_max_size=0)  # bodies of any size: a delta has megabytes
        app.router.add_post("/generate", _answer(self.generate))
        app.router.add_post("/abort_request", _answer(self.abort))
        app.router.add_post("/pause_generation", _answer(self.pause))
        app.router.add_post("/continue_generation", _answer(self.proceed))
        app.router.add_post("/release_memory_occupation", _answer(self.release))
        app.router.add_post("/resume_memory_occupation", _answer(self.resume))
        app.router.add_post("/update_weights_from_disk", _answer(self.update))
        app.router.add_post("/update_weights_from_delta", _answer(self.update_from_delta, raw=True))
        app.router.add_post("/weights_checker", _answer(self.check))
        app.router.add_get("/model_info", _answer(self.info))
        app.router.add_get("/server_info", _answer(self.info))
        app.router.add_get("/v1/loads", _answer(self.loads))
        return app


def _positions(rows: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """As SGLang sends them, [tokens, layers, k]: -1 for what only fills a row up, which is the own position again."""
    own = rows == np.arange(len(rows))[:, None, None]
    return np.where(own & (own.cumsum(axis=2) > 1), np.int32(-1), rows)


def _answer(handler: Any, *, raw: bool = False) -> Callable[[web.Request], Awaitable[web.Response]]:
    """JSON in, or bytes when raw, and JSON out. With the reason, 400 for a request that is at fault, 409 for a delta
    that doesn't fit the engine's weights, 500 for whatever is wrong with the engine.
    """

    async def answer(request: web.Request) -> web.Response:
        try:
            body: Any = await request.read()
            if not raw:
                body = msgspec.json.decode(body) if body else {}
            result = await handler(body)
        except Exception as error:
            at_fault = isinstance(error, ValueError | KeyError)
            status = MISMATCH if isinstance(error, DeltaMismatch) else 400 if at_fault else 500
            said = f"{error}" if at_fault else f"{type(error).__name__}: {error}"
            text = msgspec.json.encode({"error": {"message": said}})
            return web.Response(status=status, body=text, content_type="application/json")
        return web.Response(body=msgspec.json.encode(result), content_type="application/json")

    return answer


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m flowgraph.engines.served.serve")
    for name in ("model-path", "dtype"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("port", "slots", "context", "threads"):
        parser.add_argument(f"--{name}", required=True, type=int)
    given = parser.parse_args()
    engine = TransformersEngine(
        given.model_path, slots=given.slots, context=given.context, dtype=given.dtype, threads=given.threads
    )
    web.run_app(
        Server(engine).app(),
        host="127.0.0.1",
        port=given.port,
        print=lambda *_: None,
        handler_cancellation=True,  # a request whose caller is gone frees its slot
    )


if __name__ == "__main__":
    main()

"""What a server is asked and answers, in the names of SGLang's HTTP API; fields that we don't read are not declared."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from flowgraph.engines.protocol import FinishReason, Generation, Sampling
from flowgraph.engines.sync import ReplicaError


class Span(msgspec.Struct):
    """Output tokens [start, end) were sampled under one version of the weights."""

    version: str
    start: int
    end: int


class Finish(msgspec.Struct):
    type: str


class Meta(msgspec.Struct):
    """output_token_logprobs, input_token_logprobs: [log-probability, id, text] of each token

    sent: the version that the server was known to hold when the request was sent; ours, not the server's
    """

    id: str
    finish_reason: Finish
    weight_versions: list[Span] = []
    output_token_logprobs: list[tuple[float | None, int, Any]] = []
    input_token_logprobs: list[tuple[float | None, int, Any]] = []
    num_retractions: int = 0
    cached_tokens: int = 0
    sent: int = 0
    routed_experts: bytes | None = None
    indexer_topk: bytes | None = None


class Reply(msgspec.Struct):
    meta_info: Meta
    output_ids: list[int] = []


class Load(msgspec.Struct):
    """Of one data-parallel rank. decode_moments[0] and total_prefill_uncached_tokens grow while it computes."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    max_running_requests: int = 0
    token_usage: float = 0.0
    total_prefill_uncached_tokens: float = 0
    decode_moments: list[float] | None = None


class Loads(msgspec.Struct):
    loads: list[Load]


class Done(msgspec.Struct):
    """The answer to an action. SGLang answers 400 when it was not done; `success` says so too."""

    success: bool = True
    message: str = ""


class Rank(msgspec.Struct):
    checksums: dict[str, str]


class Checked(msgspec.Struct):
    success: bool = True
    message: str = ""
    ranks: list[Rank] = []


def request(
    prompt: np.ndarray[Any, Any], sampling: Sampling, *, key: int, drawn: int, rid: str, cache: str
) -> dict[str, Any]:
    """The body of /generate. cache: prompts share KV only with those of equal `cache`, which is the version.

    The key is sent as a signed 64-bit seed. Where the server draws by seed and position (ours; SGLang only with
    --enable-deterministic-inference), a response that goes on in a second request
    draws what it would have in the first.
    """
    body: dict[str, Any] = {
        "input_ids": prompt.tolist(),
        "sampling_params": {
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "stop": list(sampling.stop),
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "sampling_seed": key - (1 << 64) if key >= 1 << 63 else key,
        },
        "return_logprob": True,
        "rid": rid,
        "extra_key": cache,
        "stream": False,
        "drawn": drawn,
    }
    return body | {f"return_{channel}": True for channel in sampling.record}


def generation(reply: Reply, rid: str) -> Generation:
    """Raises ValueError, naming the request, for an answer whose parts do not fit each other."""
    meta = reply.meta_info
    ids, chosen = reply.output_ids, meta.output_token_logprobs
    if [id for _, id, _ in chosen] != ids or any(value is None for value, _, _ in chosen):
        raise ValueError(
            f"{rid}: the server gave {len(ids)} ids, and log-probabilities of {len(chosen)} others"
        )
    versions = np.empty(len(ids), np.int32)
    filled = 0
    for span in meta.weight_versions:
        if span.start != filled or span.end < span.start:
            raise ValueError(f"{rid}: the versions {meta.weight_versions} do not follow each other")
        if span.end > span.start:
            versions[span.start : span.end] = number(span.version, rid)
        filled = span.end
    if filled != len(ids):
        raise ValueError(f"{rid}: the server gave {len(ids)} ids, and versions of {filled}")
    reason: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
    if meta.finish_reason.type not in reason:
        raise ValueError(f"{rid}: the server ended it for {meta.finish_reason.type!r}")
    return Generation(
        np.array(ids, np.int32),
        np.array([value for value, _, _ in chosen], np.float32),
        versions,
        reason[meta.finish_reason.type],
        meta.num_retractions,
    )


def number(version: str, rid: str) -> int:
    """Raises ReplicaError for one that we never gave: the server was started anew, by somebody else."""
    if not version.isdecimal():
        raise ReplicaError(f"{rid}: the server's weights are of version {version!r}, which is none of ours")
    return int(version)

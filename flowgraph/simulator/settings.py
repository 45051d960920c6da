"""What a simulation assumes: how many engines, how fast, how long a batch trains, how long responses are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from flowgraph.engines.registry import servers
from flowgraph.plan.plan import Plan
from flowgraph.simulator.engines import Speed
from flowgraph.simulator.facts import Sampler, samplers
from flowgraph.simulator.lengths import parse, parse_share
from flowgraph.spec.reader import near

TRAIN_RATE = 50_000.0  # tokens/s, when nothing is said of how long a batch trains
LONGEST, SHORTEST = 1e9, 1e-9  # seconds that anything may take: thirty years, and what no clock tells
MOST = 2**31 - 1  # tokens


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that a simulation knows and its graph does not. Seconds are of the virtual clock.

    engines, slots: replicas, and requests that each decodes at once; None: as the graph's engine says
    kv: tokens of each engine's KV cache; None: enough
    lengths, prompts: of responses and prompts in tokens, see `lengths.parse`; None: fixed at the mean of the dim
    most: tokens of the longest response; None: as the dim says
    train_seconds, train_rate: a batch takes train_seconds + tokens / train_rate; None of both: 50,000 tokens/s, of
        one of them: it adds nothing
    sync_seconds: every engine stands still for so long when weights come
    seconds: of a firing of any other hop, by name; 0 for those that are not named
    solve: how often a group's task is solved, as a distribution over groups, where a batch reads scores
    failures: share of trajectories that come to nothing halfway
    warmup: steps before anything is measured; None: a tenth
    """

    engines: int | None = None
    slots: int | None = None
    speed: Speed = Speed()
    kv: float | None = None
    lengths: str | None = None
    prompts: str | None = None
    most: int | None = None
    train_seconds: float | None = None
    train_rate: float | None = None
    sync_seconds: float = 0.0
    seconds: dict[str, float] = {}
    solve: str | None = None
    failures: float = 0.0
    warmup: int | None = None
    seed: int = 0

    def of_batch(self, tokens: int) -> float:
        """Seconds that a batch trains."""
        if self.train_seconds is None:
            return tokens / (self.train_rate or TRAIN_RATE)
        return self.train_seconds + (tokens / self.train_rate if self.train_rate else 0.0)


def make(given: Mapping[str, Any]) -> Settings:
    """Settings of plain values, texts included. Raises ValueError that names what is wrong, and what there is."""
    try:
        return msgspec.convert(given, Settings, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"settings: {error}; they are {', '.join(NAMES)}") from None


NAMES = tuple(field.name for field in msgspec.structs.fields(Settings))


def decode(text: str) -> dict[str, float]:
    """`A,B` or `A,B,C`: seconds of a step, and more of them a request and a cached token. Raises ValueError."""
    names = ("step", "per_request", "per_token")
    try:
        numbers = [float(one) for one in text.split(",")]
    except ValueError:
        numbers = []
    if not 0 < len(numbers) <= len(names):
        raise ValueError(f"--decode {text}: give seconds as A,B or A,B,C, such as 0.012,4e-5")
    return dict(zip(names, numbers, strict=False))


class Fitted(msgspec.Struct, frozen=True):
    """Settings with every value that the graph gives. most: tokens of the longest prompt and response.

    samplers: the hops that make requests, by name
    """

    settings: Settings
    engines: int
    slots: int
    kv: float
    lengths: str
    prompts: str
    most: tuple[int, int]
    samplers: dict[str, Sampler]


def fit(settings: Settings, plan: Plan) -> Fitted:
    """Raises ValueError that names the option and what to write."""
    made = samplers(plan)
    for problem in _problems(settings, plan, made):
        raise ValueError(problem)
    owner = next((o for o in plan.owners.values() if o.engine is not None), None)
    engine = owner.engine if owner is not None else None
    slots = settings.slots or (engine.slots if engine is not None else 64)
    count = settings.engines or (max(1, servers(engine)) if engine is not None else 1)
    kv = settings.kv
    if kv is None:
        kv = float(getattr(engine, "kv_tokens", None) or math.inf)
    prompt, response = plan.dims["prompt"], plan.dims["response"]
    most = settings.most or response.max
    longest = prompt.max + most
    if kv < longest:
        raise ValueError(
            f"kv: {kv:g} tokens hold no prompt and response of {longest}; give {longest} or more"
        )
    lengths = settings.lengths or f"fixed:{response.mean:g}"
    prompts = settings.prompts or f"fixed:{prompt.mean:g}"
    return Fitted(settings, count, slots, kv, lengths, prompts, (prompt.max, most), made)


def _problems(s: Settings, plan: Plan, made: Mapping[str, Sampler]) -> Iterator[str]:
    for name in ("prompt", "response"):
        if name not in plan.dims:
            yield f"graph {plan.graph} has no dim {name}: write how long it is under dims:"
    for name in ("engines", "slots", "kv", "most"):
        value = getattr(s, name)
        if value is not None and not value > 0:
            yield f"{name} must be above 0, not {value:g}"
    if s.most is not None and s.most > MOST:
        yield f"most (--max) must be at most {MOST:,}, not {s.most:,}"
    for name in ("train_seconds", "sync_seconds"):
        yield from _times(name, getattr(s, name) or 0.0)
    for name, value in s.seconds.items():
        takes = [n for n, h in plan.hops.items() if h.kind != "fold" and n not in _sampling(made)]
        if name in _sampling(made):
            yield (
                f"seconds: how long {name} takes is how long its requests are decoded; set decode, prefill or lengths "
                "(--decode, --prefill, --lengths)"
            )
        elif name not in takes:
            hint = f"{near(name, takes)}hops: {', '.join(takes)}"
            yield f"seconds: there is no hop {name or '(without a name)'} that takes time; {hint}"
        yield from _times(f"seconds of {name}", value)
    for hop in plan.hops.values():
        if hop.kind == "fold" and hop.reads and s.solve is None:
            columns = ", ".join(dict.fromkeys(read.column for read in hop.reads))
            yield (
                f"hop {hop.name} reads {columns} of the rows that it is shown: say how often tasks are solved, such as "
                "solve beta:1,1 (--solve beta:1,1)"
            )
    speed = s.speed
    for name, value, least in (
        ("step", speed.step, SHORTEST), ("per_request", speed.per_request, 0.0), ("per_token", speed.per_token, 0.0)
    ):  # fmt: skip
        yield from _times(f"speed: {name} (--decode)", value, least)
    for name, rate in (("speed: prefill", speed.prefill), ("train_rate", s.train_rate)):
        if rate is not None and not rate >= 1 / LONGEST:
            yield f"{name} must be at least {1 / LONGEST:g} tokens/s, not {rate:g}"
    if not 0 <= s.failures < 1:
        yield f"failures must be from 0 to below 1, not {s.failures:g}: at 1 nothing would ever be trained"
    for text in (s.lengths, s.prompts):
        if text is not None:
            parse(text)
    if s.solve is not None:
        parse_share(s.solve)


def _times(name: str, seconds: float, least: float = 0.0) -> Iterator[str]:
    if not least <= seconds <= LONGEST:
        yield f"{name} must be from {least:g} to {LONGEST:g} seconds, not {seconds:g}"


def _sampling(made: Mapping[str, Sampler]) -> set[str]:
    """Every hop whose time is that of a request."""
    return {name for one in made.values() for name in one.names}

"""Engines under virtual time: slots, decode speed by batch size, a KV cache, a prefix cache, and a choice among them.

Nothing is stepped token by token. All requests that an engine decodes gain tokens at one pace, so its service clock
S(t), the tokens that each of them has gained since the start, says it all: one of L tokens that begins at S ends at
S + L, whatever else comes and goes meanwhile. An engine's next event is the smallest such end, or the clock at which
its KV cache is full; the earliest of all engines' next events is the fleet's.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Iterator
from heapq import heappop, heappush, heapreplace
from operator import attrgetter
from typing import Any

import msgspec

ADMIT = (
    0.9  # share of the KV cache up to which a request is admitted beside others: what runs goes on growing
)
SLACK = 4  # requests by which the engine that has a group's prompt may be busier than the least busy one
KNOWN = 1 << 16  # groups whose engine is remembered


class Speed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One decode step of n requests with k tokens in the KV cache takes step + per_request·n + per_token·k seconds.

    prefill: tokens a second of prompts, and of KV that is computed again; decoding stands still meanwhile
    """

    step: float = 0.012
    per_request: float = 4e-5
    per_token: float = 0.0
    prefill: float = 20_000.0


class Request(msgspec.Struct, eq=False):
    """One trajectory in an engine. left, done: tokens that it has yet to decode, and has

    offset: done − the clock, while it is decoded; by, of: who asks, and for what
    began: the how-manieth of its engine to begin; over: the engine is done with it, or has let go of it
    """

    key: int
    uid: int
    prompt: int
    left: int
    by: Any = None
    of: Any = None
    done: int = 0
    retractions: int = 0
    over: bool = False
    offset: float = 0.0
    began: int = 0
    engine: Any = None


class Engine:
    """One engine. service: its clock, as it is at the time `at`; until then, if that is to come, it stands still.

    running: requests being decoded, by their ends and then their keys; ends: of each; begun: how many ever were
    base: tokens in the KV cache are base + len(running)·service; members: group → how many of it are running
    pace: seconds of a step as short as can be; when: its next event; planned: when the fleet looks for it, no later
    """

    __slots__ = (
        "at", "base", "begun", "ends", "index", "members", "pace", "planned", "running", "service", "waiting", "when",
    )  # fmt: skip

    def __init__(self, index: int) -> None:
        self.index = index
        self.service = self.at = self.base = self.pace = 0.0
        # In order and no heap, and numbers side by side: memory that is far apart is what takes time here.
        self.running: list[Request] = []
        self.ends = array("d")
        self.waiting: deque[Request] = deque()
        self.members: dict[int, int] = {}
        self.begun = 0
        self.when = self.planned = math.inf

    @property
    def kv(self) -> float:
        return self.base + len(self.running) * self.service


class Fleet:
    """All engines. slots: requests that each decodes at once; kv: tokens that each has memory for.

    running, waiting: requests of all engines; serving: engines that run any; load: requests that each engine has
    retractions: requests that lost their KV for want of memory
    prefilled: tokens, prompts that were cached left out
    """

    def __init__(self, engines: int, slots: int, speed: Speed, kv: float = math.inf) -> None:
        self.slots, self.kv, self.speed = slots, kv, speed
        self._bounded = kv != math.inf
        self.all = [Engine(i) for i in range(engines)]
        self.running = self.waiting = self.serving = 0
        self.retractions = self.prefilled = 0
        self.load = [0] * engines
        self._by_load = [list(range(engines))]  # requests → engines that have so many
        self._place = list(range(engines))  # of each engine among those
        self._least = 0
        self._home: OrderedDict[int, Engine] = OrderedDict()
        self._planned: list[tuple[float, int]] = []

    # --- what the simulator asks ------------------------------------------------------------------------------

    def submit(self, request: Request, now: float) -> None:
        """Give a request to the least busy engine, or to the one that has its group's prompt, while not much busier."""
        by_load, least = self._by_load, self._least
        while not by_load[least]:
            least += 1
        self._least = least
        home = self._home.get(request.uid)
        if home is None or self.load[home.index] > least + SLACK:
            home = self._home[request.uid] = self.all[by_load[least][-1]]
            if len(self._home) > KNOWN:
                self._home.popitem(last=False)
        request.engine = home
        self._shift(home.index, 1)
        if home.at < now:
            self._advance(home, now)
        home.waiting.append(request)
        self.waiting += 1
        self._fill(home)

    def next(self) -> float:
        """When something happens next; infinity when nothing is under way.

        An engine that got slower meanwhile is found too early, and put where it belongs now; so whatever comes to an
        engine between two of its events moves it once.
        """
        planned, all = self._planned, self.all
        while planned:
            when, index = planned[0]
            engine = all[index]
            if when == engine.when:
                return when
            if when != engine.planned or engine.when == math.inf:
                heappop(planned)  # it had become faster, and has another place; or has nothing to do
                if when == engine.planned:
                    engine.planned = math.inf
            else:
                engine.planned = engine.when
                heapreplace(planned, (engine.when, index))
        return math.inf

    def pop(self) -> Request | None:
        """Let happen what happens next. The request that is over; None when one was retracted. Call after `next`."""
        now, index = self._planned[0]
        engine = self.all[index]
        end = engine.ends[0]
        if self._bounded and (full := self._full(engine)) < end:
            engine.service, engine.at = full, now
            self._retract(engine)
            self._fill(engine)
            return None
        engine.service, engine.at = end, now
        del engine.ends[0]
        request = engine.running.pop(0)
        request.done += request.left
        request.left = 0
        request.over = True
        self._leave(engine, request)
        self._shift(engine.index, -1)
        if engine.waiting:
            self._fill(engine)
        else:
            self._plan(engine)
        return request

    def cancel(self, request: Request, now: float) -> None:
        """Give a request up that is waiting or running; what it has decoded is lost."""
        engine = request.engine
        request.over = True
        self._advance(engine, now)
        if request in engine.running:
            self._forget(engine, request)
        else:
            engine.waiting.remove(request)
            self.waiting -= 1
        self._shift(engine.index, -1)
        self._fill(engine)

    def requests(self) -> Iterator[Request]:
        """All that wait or run."""
        for engine in self.all:
            yield from engine.running
            yield from engine.waiting

    def pause(self, now: float, seconds: float, again: bool) -> None:
        """Every engine stands still. again: and then computes the KV of what it has under way anew."""
        for engine in self.all:
            self._advance(engine, now)
            engine.at = max(engine.at, now) + seconds
            if again and engine.running:
                kv = round(engine.kv)
                self.prefilled += kv
                engine.at += kv / self.speed.prefill
            self._plan(engine)

    # --- one engine -------------------------------------------------------------------------------------------

    def _advance(self, engine: Engine, now: float) -> None:
        """Bring its clock to now."""
        seconds = now - engine.at
        if seconds <= 0:
            return
        engine.at = now
        n, pace = len(engine.running), engine.pace
        if n:
            # The inverse of `_plan`, in the form that loses no digits.
            per_token = self.speed.per_token
            engine.service += 2 * seconds / (pace + math.sqrt(pace**2 + 2 * per_token * n * seconds))

    def _full(self, engine: Engine) -> float:
        """The clock after the last whole step that there is memory for. One request alone always has it."""
        n = len(engine.running)
        if n < 2 or not self._bounded:
            return math.inf
        return engine.service + max(0, (self.kv - engine.kv) // n)

    def _fill(self, engine: Engine) -> None:
        """Begin what waits, in order, while there is a slot and memory; not before all that end with this step have."""
        waiting, ends = engine.waiting, engine.ends
        if waiting and not (ends and ends[0] <= engine.service):
            running, members, service = engine.running, engine.members, engine.service
            while waiting and len(running) < self.slots:
                request = waiting[0]
                shared = members.get(request.uid, 0)
                context = request.done if shared else request.done + request.prompt
                if running and self._bounded and not self._fits(engine, context):
                    break
                waiting.popleft()
                self.waiting -= 1
                self.running += 1
                if not running:
                    self.serving += 1
                members[request.uid] = shared + 1
                request.began = engine.begun = engine.begun + 1
                request.offset = request.done - service
                end = service + request.left
                engine.base += context - service
                place = bisect_right(ends, end)
                while place and ends[place - 1] == end and running[place - 1].key > request.key:
                    place -= 1
                ends.insert(place, end)
                running.insert(place, request)
                if context:
                    self.prefilled += context
                    engine.at += context / self.speed.prefill
        self._plan(engine)

    def _fits(self, engine: Engine, context: int) -> bool:
        """Whether there is memory for it beside the others, and for one step of them all."""
        used = engine.kv + context
        return used <= ADMIT * self.kv and used + len(engine.running) + 1 <= self.kv

    def _leave(self, engine: Engine, request: Request) -> None:
        """A request that is off `running` frees its slot and its KV; the last of its group the prompt's too."""
        engine.base -= request.offset
        left = engine.members[request.uid] - 1
        if left:
            engine.members[request.uid] = left
        else:
            del engine.members[request.uid]
            engine.base -= request.prompt
        self.running -= 1
        if not engine.running:
            self.serving -= 1
            engine.base, engine.service = 0.0, 0.0  # nothing depends on them; so that rounding never adds up

    def _retract(self, engine: Engine) -> None:
        """The youngest gives its KV up. It goes on, with the tokens that it has, when there is memory again."""
        request = max(engine.running, key=attrgetter("began"))
        gained = engine.service + request.offset - request.done
        request.done += round(gained)
        request.left -= round(gained)
        request.retractions += 1
        self.retractions += 1
        self._forget(engine, request)
        engine.waiting.appendleft(request)
        self.waiting += 1

    def _forget(self, engine: Engine, request: Request) -> None:
        """A request is off `running` before its end."""
        place = engine.running.index(request)
        del engine.running[place], engine.ends[place]
        self._leave(engine, request)

    def _plan(self, engine: Engine) -> None:
        """Set its next event, after anything happened to it: a step costs what is in the cache halfway through it."""
        n = len(engine.running)
        if not n:
            engine.when = math.inf
            return
        speed, service, end = self.speed, engine.service, engine.ends[0]
        if self._bounded:
            end = min(end, self._full(engine))
        per_token, gain = speed.per_token, end - service
        engine.pace = pace = speed.step + speed.per_request * n + per_token * (engine.base + n * service)
        engine.when = when = engine.at + gain * (pace + per_token * n * gain / 2)
        if when < engine.planned:
            engine.planned = when
            heappush(self._planned, (when, engine.index))

    # --- among them -------------------------------------------------------------------------------------------

    def _shift(self, engine: int, by: int) -> None:
        """An engine has more or fewer requests: move it among those that have as many, in constant time."""
        by_load, places, load = self._by_load, self._place, self.load[engine]
        group = by_load[load]
        last = group.pop()
        if last != engine:
            place = places[last] = places[engine]
            group[place] = last
        load += by
        self.load[engine] = load
        if load == len(by_load):
            by_load.append([])
        group = by_load[load]
        places[engine] = len(group)
        group.append(engine)
        if load < self._least:
            self._least = load

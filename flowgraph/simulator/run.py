"""Simulate a plan: as many steps of virtual time as are asked for, and what came of them."""

from __future__ import annotations

from msgspec.structs import replace

from flowgraph.plan.plan import Plan
from flowgraph.simulator.outcome import Cut, Simulated, lags, spread
from flowgraph.simulator.ring import Ring
from flowgraph.simulator.settings import Fitted, Settings, fit
from flowgraph.simulator.trace import LEVELS, spare
from flowgraph.spec.config import import_object
from flowgraph.spec.hop import read_spec

ENDLESS = (
    2**31 - 1
)  # `run.steps` of a plan that is simulated: it goes on beyond what is measured, and nothing drains


def simulate_plan(plan: Plan, steps: int, settings: Settings) -> Simulated:
    """Drive a plan's folds for so many steps of virtual time. The same settings give the same result, bit by bit.

    Raises ValueError for settings that don't fit the plan, RunError when nothing can happen any more.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, not {steps}")
    warmup = settings.warmup if settings.warmup is not None else steps // 10
    if not 0 <= warmup < steps:
        raise ValueError(f"warmup must leave a step to measure, and is {warmup} of {steps} steps")
    fitted = fit(settings, plan)
    ring = Ring(endless(plan), fitted)
    try:
        ring.run(steps, warmup)
        return _outcome(ring, fitted, warmup)
    finally:
        ring.close()


def _outcome(ring: Ring, fitted: Fitted, warmup: int) -> Simulated:
    meter, fleet, counts = ring.meter, ring.fleet, ring.ledger.counts
    seconds = meter.now - meter.began
    mean = {name: area / seconds if seconds else 0.0 for name, area in zip(LEVELS, meter.area, strict=True)}
    step_seconds, step_spread = spread([point.seconds for point in meter.points[warmup:]])
    return Simulated(
        graph=ring.plan.graph,
        engines=fitted.engines,
        slots=fitted.slots,
        lengths=fitted.lengths,
        prompts=fitted.prompts,
        cut=_cut(ring, fitted),
        seed=fitted.settings.seed,
        steps=ring.steps_done,
        warmup=warmup,
        seconds=seconds,
        trajectories=meter.trajectories,
        tokens=meter.tokens,
        step_seconds=step_seconds,
        step_spread=step_spread,
        slots_empty=spare(mean["running"], fitted.engines * fitted.slots),
        engines_idle=spare(mean["serving"], fitted.engines),
        trainer_idle=spare(mean["training"], 1),
        lag=lags(meter.lags),
        weights_lag=lags(meter.published),
        in_flight=mean["in_flight"],
        watermark=mean["watermark"],
        ready=mean["ready"],
        queued=mean["queued"],
        waiting=mean["waiting"],
        finished=meter.finished,
        flight_seconds=meter.flights / max(1, meter.finished),
        residence=meter.residence,
        retractions=fleet.retractions,
        prefilled=fleet.prefilled,
        ledger=counts,
        events=counts.events,
        points=tuple(meter.points),
    )


def _cut(ring: Ring, fitted: Fitted) -> tuple[Cut, ...]:
    """What was longer than may be, of all that was asked for."""
    made, prompt = ring.table.next_key, "dims.prompt.max"
    by = "--max" if fitted.settings.most else "dims.response.max"
    drawn = (
        ("responses", ring.lengths.cut(made.get("trajectory", 0)), fitted.most[1], by, "--max"),
        ("prompts", ring.prompts.cut(made.get("group", 0)), fitted.most[0], prompt, f"--set {prompt}=…"),
    )  # fmt: skip
    return tuple(Cut(*one) for one in drawn if one[1] > 0)


def endless(plan: Plan) -> Plan:
    """The same plan without a last step, for all that looks at it."""
    hops = {}
    for name, hop in plan.hops.items():
        spec = read_spec(hop.use, import_object(hop.use))
        steps = {p.name: ENDLESS for p in spec.params if (p.origin, p.detail) == ("run", "steps")}
        hops[name] = replace(hop, bound={**hop.bound, **steps})
    return replace(plan, hops=hops, run=replace(plan.run, steps=ENDLESS))

"""The checks in the order in which they are shown."""

from __future__ import annotations

import msgspec

from flowgraph.engines.sglang_recipe import Device, recipe, starts
from flowgraph.errors import Check
from flowgraph.report.doctor.machine import cores, descriptors, memory, model_cache, ports
from flowgraph.report.doctor.shared import memfd, shm
from flowgraph.report.doctor.software import software


class Report(msgspec.Struct, frozen=True):
    """subject: what was looked at; checks: in order"""

    subject: str
    checks: tuple[Check, ...]

    @property
    def failed(self) -> bool:
        return any(check.status == "fail" for check in self.checks)

    @property
    def fixes(self) -> dict[str, list[str]]:
        """What to do → the checks that ask for it, in order: steps of a recipe often share a command."""
        out: dict[str, list[str]] = {}
        for check in self.checks:
            if check.fix:
                out.setdefault(check.fix, []).append(check.name)
        return out


def check_machine() -> Report:
    """Python and its packages, then what the machine gives. Takes 0.3 s without CUDA, and some seconds with it."""
    machine = (cores(), memory(), memfd(), shm(), descriptors(), ports(), model_cache())
    return Report("this machine", (*software(), *machine))


def check_sglang(python: str, device: Device) -> Report:
    """Every step of the recipe, and then the proof: what a server imports is imported, which takes seconds."""
    steps = recipe(python, device)
    if any(step.status == "fail" for step in steps):
        proof = Check("imports", "skip", "not tried before the other steps hold", "a server starts")
    else:
        proof = starts(python, device)
    return Report(f"an SGLang server on {device} in {python}", (*steps, proof))


def to_json(report: Report) -> bytes:
    found = {"subject": report.subject, "failed": report.failed, "checks": report.checks}
    return msgspec.json.format(msgspec.json.encode(found), indent=1)

"""A hue for each owner, told apart by every kind of colour vision and dark or light enough for text to stand on it.

The hues are those of Okabe and Ito (https://jfly.uni-koeln.de/color), as tints behind dark text and as shades behind
light text. After eight owners they begin again: the owner's name stands on every hop anyway.
"""

from __future__ import annotations

from flowgraph.plan.plan import Plan

LIGHT = ("#d6e6f5", "#ffe2bd", "#cdebdd", "#f3d9e8", "#fbdccb", "#d8eefb", "#fbf3b8", "#e6e8eb")
DARK = ("#1f3a5c", "#5c3d14", "#14493a", "#5a2a49", "#63301a", "#1d4a66", "#4d470f", "#32383f")
TEXT_LIGHT, TEXT_DARK = "#1f2328", "#e6edf3"


def owner_classes(plan: Plan) -> dict[str, str]:
    """Owner → its class in the picture, in the order of the plan; of owners that have a hop."""
    used = dict.fromkeys(hop.owner for hop in plan.hops.values())
    ordered = [name for name in plan.owners if name in used] + [n for n in used if n not in plan.owners]
    return {name: f"o{i % len(LIGHT)}" for i, name in enumerate(ordered)}

"""Advantage: rewards of a batch become one number a token, what the loss makes more or less likely.

| hop | compares a trajectory with | gives |
|---|---|---|
| `grpo`, `rloo`, `opo` | the others of its group | one value a leaf |
| `maxrl`, `pkpo`, `pass_at_k` | the others of its group, for hard prompts or the best of k | one value a leaf |
| `reinforce_pp_baseline` | the others of its group, then the batch | one value a leaf |
| `reinforce_pp` | the batch | one value a token |
| `gae` | what a critic expected of it | one value a token |

`by_group` says how the rewards of a batch lie, for a graph whose estimator forms no groups.
"""

from hops.advantage.groups import Advantages, by_group
from hops.advantage.passes import maxrl, pass_at_k, pkpo
from hops.advantage.relative import grpo, opo, reinforce_pp_baseline, rloo
from hops.advantage.tokenwise import TokenAdvantages, ValueAdvantages, gae, reinforce_pp

__all__ = [
    "Advantages",
    "TokenAdvantages",
    "ValueAdvantages",
    "by_group",
    "gae",
    "grpo",
    "maxrl",
    "opo",
    "pass_at_k",
    "pkpo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "rloo",
]

"""Stands for `shaped.explore.worker` without torch: a line for each panel of a unit, then it waits to be cancelled if gamma is 0.5.

With gamma 0.25 it ends without a word, as a process that is killed for its memory.
"""

import json
import os
import sys

UNITS = {
    "laws": ("paths", "density", "eigenvalue", "entropy"),
    "blocks": ("blocks", "blocks_length", "blocks_entropy"),
    "gradients": ("gradients", "blocks_gradients"),
    "map": ("map",),
}


def say(**message) -> None:
    print(json.dumps(message), flush=True)


say(ready=os.getpid())
for text in sys.stdin:
    asked = json.loads(text)
    if "cancel" in asked:
        say(job=asked["cancel"], ended=True)
        continue
    if asked["values"]["gamma"] == 0.25:
        os._exit(1)
    for panel in UNITS[asked["unit"]]:
        say(job=asked["job"], line={"kind": "panel", "panel": panel, "stage": asked["stage"], "chart": {}})
    if asked["values"]["gamma"] != 0.5 or asked["stage"] == 0:
        say(job=asked["job"], ended=True)

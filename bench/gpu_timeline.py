#!/usr/bin/env python3
"""The host time and the transfers of gpt on a GPU, from a timeline (gpt --trace FILE), as JSON.

    bench/gpu_timeline.py FILE [WARM_STEPS]

Scopes are timed on the host, the engine's operations on their streams. A host that is ahead of its device
costs no time. All figures are medians over the steps, in milliseconds:

    step            from the first scope of a step to the first scope of the next
    issue           from the first scope's opening to the last one's close: the host issues the layers
    wait            from the last close to the next step: the host waits for the device, and reports
    ahead           the least time from a backward scope's close on the host to its reduction on the device:
                    if it is above 0, the device has not waited for the host within the step
    verdict         from the verdict of all ranks to the first update, with the host's decision if it decides
    start           from the last operation of a step to the end of the next step's first scope, if positive:
                    the device is idle until the host has issued that scope
    host_percent    verdict and start over step: the host's time on the critical path, if ahead is above 0
    upload, download, host_sum, host_update     time of a step's copies, and of the host's sums and updates
"""

import collections
import json
import statistics
import sys


def median(values):
    return statistics.median(values) if values else None


def read(path):
    """Spans by step; a span is (track, operation, subject, begin, end) in milliseconds."""
    with open(path) as file:
        events = json.load(file)
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    steps = collections.defaultdict(list)
    for e in events:
        if e["ph"] == "X" and e["pid"] == 0 and "step" in e["args"]:
            operation, _, subject = e["name"].partition(" ")
            begin = e["ts"] / 1e3
            steps[e["args"]["step"]].append(
                (tracks[e["pid"], e["tid"]], operation, subject, begin, begin + e["dur"] / 1e3)
            )
    return steps


def least_ahead(spans):
    """Of units with as many reductions as backward scopes that reduce, which are the last ones."""
    closes, reductions = collections.defaultdict(list), collections.defaultdict(list)
    for track, operation, subject, begin, end in spans:
        if operation == "backward":
            closes[subject].append(end)
        elif track == "reduce" and subject and operation in ("reduce", "cast"):
            reductions[subject].append(begin)
    # A unit that is visited twice (tied embeddings) closes twice in a round, in the engine's order.
    fewest = min(map(len, closes.values()), default=0)
    return min(
        (min(begins) - ends[-1] if len(begins) < len(ends) else min(b - e for e, b in zip(ends, begins))
         for unit, ends in closes.items() if len(ends) == fewest and (begins := reductions.get(unit))),
        default=None,
    )


def figures(path, warm=2):
    steps = read(path)
    trained = sorted(s for s, spans in steps.items() if any(span[1] == "backward" for span in spans))
    rows = collections.defaultdict(list)
    for step in trained[warm:]:
        spans, following = steps[step], steps.get(step + 1)
        scopes = [span for span in spans if span[1] in ("wait", "forward", "backward")]
        others = [span for span in spans if span[1] not in ("wait", "forward", "backward")]
        first, last = min(span[3] for span in scopes), max(span[4] for span in scopes)
        rows["issue"].append(last - first)
        rows["ahead"].append(least_ahead(spans))
        for name in ("upload", "download", "host sum", "host update"):
            rows[name.replace(" ", "_")].append(sum(span[4] - span[3] for span in others if span[0] == name))
        verdicts = [span[4] for span in others if span[1] == "conclude"]
        updates = [span[3] for span in others if span[1] == "update"]
        if verdicts and updates:
            after = [begin for begin in updates if begin >= verdicts[-1]]
            rows["verdict"].append(min(after) - verdicts[-1] if after else 0.0)
        if not following or not others:
            continue
        following_scopes = [span for span in following if span[1] in ("forward", "backward")]
        opened = min(span[3] for span in following if span[1] in ("wait", "forward"))
        rows["step"].append(opened - first)
        rows["wait"].append(opened - last)
        rows["start"].append(max(0.0, min(s[4] for s in following_scopes) - max(s[4] for s in others)))
    result = {name: median([v for v in values if v is not None]) for name, values in rows.items()}
    if result.get("step"):
        on_path = (result.get("verdict") or 0) + (result.get("start") or 0)
        result["host_percent"] = 100 * on_path / result["step"]
    result["steps"] = len(trained[warm:])
    return result


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    print(json.dumps(figures(sys.argv[1], *map(int, sys.argv[2:3])), indent=2))

#!/usr/bin/env python3
"""The result of a part of bench/gpu_suite.sh: a line of its table, and an entry of OUT_DIR/suite.json.

    bench/gpu_part.py OUT_DIR NAME STATUS SECONDS [--like OTHER]

STATUS: the exit status of the part, or late, absent or stuck if it has none. Its log is OUT_DIR/NAME.log. --like: the
digest of its parameters in OUT_DIR/NAME.json must be that of OTHER.json. An incomplete JSON file is renamed to
.partial. Exit status: 1 if the part has failed.
"""

import argparse
import json
import pathlib
import re
import signal

WORDS = {"late": ("NOT RUN", "no time is left"), "absent": ("skipped", "no compute-sanitizer on this machine"),
         "stuck": ("STUCK", "could not be killed")}
TIMED_OUT = {"124", "137"}


def first(lines, words):
    return next((line for line in lines if words in line), None)


def tests_of(lines):
    """The numbers of passed, skipped and failed tests, from GoogleTest's output, and whether any test passed."""
    counts = [match.groups() for line in lines
              if (match := re.match(r"\[  (PASSED|SKIPPED|FAILED) *\] (\d+) test", line))]
    passed = any(word == "PASSED" and int(count) > 0 for word, count in counts)
    return ", ".join(f"{count} {word.lower()}" for word, count in counts), passed


def digest_of(path):
    try:
        return json.loads(path.read_text())["parameter_digest"]
    except (OSError, ValueError, LookupError):
        return None


def verdict(args, lines):
    """The verdict in one word, and its reason."""
    if args.status in WORDS:
        return WORDS[args.status]
    tests, passed = tests_of(lines)
    said = tests or next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
    # If gpt finds no GPU, it trains on the CPU and says so.
    if line := first(lines, "training uses the CPU"):
        return "USED THE CPU", line.strip()
    if args.status in TIMED_OUT:
        return "TIME OUT", tests
    if args.status == "77":
        return "SKIPPED", said
    if args.status != "0":
        number = int(args.status) - 128
        name = signal.Signals(number).name if number in set(signal.Signals) else args.status
        return f"FAILED ({name})", said
    # A part without a test that ran has failed.
    if any(re.match(r"\[=+\] \d+ tests? from", line) for line in lines) and not passed:
        return "NOTHING RAN", tests
    # Google Benchmark's exit status is always 0.
    if line := first(lines, "ERROR OCCURRED"):
        return "FAILED", line.strip()
    if args.like:
        own, other = (digest_of(args.output / f"{name}.json") for name in (args.name, args.like))
        if own is None or own != other:
            return "FAILED", f"digest {str(own)[:16]}, that of {args.like} {str(other)[:16]}"
        return "ok", f"digest {own[:16]}, as {args.like}"
    return "ok", tests


def set_aside_broken_json(path):
    try:
        if path.exists():
            json.loads(path.read_text())
    except ValueError:
        path.rename(path.with_suffix(".json.partial"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("output", type=pathlib.Path)
    parser.add_argument("name")
    parser.add_argument("status")
    parser.add_argument("seconds", type=int)
    parser.add_argument("--like")
    args = parser.parse_args()
    set_aside_broken_json(args.output / f"{args.name}.json")
    log = args.output / f"{args.name}.log"
    lines = log.read_text(errors="replace").splitlines() if log.exists() and args.status not in WORDS else []
    word, detail = verdict(args, lines)

    line = f"{args.name:<34} {word:<18} {args.seconds:>4} s  {detail[:160]}".rstrip()
    print(line, flush=True)
    with open(args.output / "summary.txt", "a") as summary:
        summary.write(line + "\n")
    parts = args.output / "suite.json"
    entries = json.loads(parts.read_text()) if parts.exists() else []
    entries.append({"part": args.name, "verdict": word, "status": args.status, "seconds": args.seconds,
                    "detail": detail})
    parts.write_text(json.dumps(entries, indent=1) + "\n")
    raise SystemExit(word not in ("ok", "skipped"))


if __name__ == "__main__":
    main()

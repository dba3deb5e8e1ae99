#!/usr/bin/env python3
"""Runs the batch script of docs/ranks.md without Slurm: programs of this file's own stand for srun and scontrol.

    requeue_test.py SCRIPT
"""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import unittest

# Says "ready", then "signalled" for each SIGUSR1, and ends with the code that it is told.
SRUN = """#!{python}
import os, signal
reports, orders = int(os.environ["REPORTS"]), int(os.environ["ORDERS"])
signal.signal(signal.SIGUSR1, lambda *_: os.write(reports, b"signalled\\n"))
os.write(reports, b"ready\\n")
os._exit(int(os.read(orders, 10)))
"""
SRUN_THAT_SIGUSR1_KILLS = """#!/bin/sh
kill -USR1 $$
"""
SCONTROL = """#!/bin/sh
echo "$@" >>"$REQUEUED"
"""
# Bash reads it before the script. The signal comes as soon as the script catches it.
BEFORE_SRUN = """
trap() {
  unset -f trap
  trap "$@"
  kill -USR1 $$
}
"""


class RequeueTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.requeued = self.folder / "requeued"
        self.program("scontrol", SCONTROL)

    def program(self, name, text):
        path = self.folder / name
        path.write_text(text.format(python=sys.executable))
        path.chmod(0o755)

    def start(self, **environment):
        """Starts the script. Its srun reports to self.reports and is told its end through self.orders."""
        self.program("srun", SRUN)
        reports, self.of_srun = os.pipe()
        for_srun, orders = os.pipe()
        self.reports, self.orders = os.fdopen(reports), os.fdopen(orders, "w")
        self.script = subprocess.Popen(
            ["bash", SCRIPT],
            env=self.environment(REPORTS=str(self.of_srun), ORDERS=str(for_srun), **environment),
            pass_fds=(self.of_srun, for_srun),
        )
        self.addCleanup(self.script.wait)
        self.addCleanup(self.reports.close)
        self.addCleanup(self.orders.close)
        os.close(self.of_srun)
        os.close(for_srun)

    def environment(self, **more):
        path = f"{self.folder}:{os.environ['PATH']}"
        return {**os.environ, "PATH": path, "REQUEUED": str(self.requeued), "SLURM_JOB_ID": "17", **more}

    def signal(self):
        self.script.send_signal(signal.SIGUSR1)
        self.assertEqual(self.reports.readline(), "signalled\n")

    def end(self, code):
        self.orders.write(str(code))
        self.orders.flush()
        self.assertEqual(self.script.wait(), code)

    def expect(self, requeued):
        self.assertEqual(self.requeued.read_text() if self.requeued.exists() else "", "requeue 17\n" if requeued else "")

    def test_a_saved_run_is_requeued_after_any_number_of_signals(self):
        for signals in range(4):
            with self.subTest(signals=signals):
                self.requeued.unlink(missing_ok=True)
                self.start()
                self.assertEqual(self.reports.readline(), "ready\n")
                for _ in range(signals):
                    self.signal()
                self.end(75)
                self.expect(requeued=True)

    def test_a_run_that_is_done_or_has_failed_is_not_requeued(self):
        for signals in range(3):
            for code in (0, 1, 2, 137):
                with self.subTest(signals=signals, code=code):
                    self.start()
                    self.assertEqual(self.reports.readline(), "ready\n")
                    for _ in range(signals):
                        self.signal()
                    self.end(code)
                    self.expect(requeued=False)

    def test_a_step_that_the_signal_has_killed_is_requeued(self):
        self.program("srun", SRUN_THAT_SIGUSR1_KILLS)
        self.assertEqual(subprocess.run(["bash", SCRIPT], env=self.environment()).returncode, 138)
        self.expect(requeued=True)

    def test_a_signal_before_srun_requeues_at_once(self):
        before = self.folder / "before"
        before.write_text(BEFORE_SRUN)
        self.start(BASH_ENV=str(before))
        self.assertEqual(self.script.wait(), 0)
        self.assertEqual(self.reports.readline(), "")
        self.expect(requeued=True)


if __name__ == "__main__":
    SCRIPT = sys.argv.pop(1)
    unittest.main()

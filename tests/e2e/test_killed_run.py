"""Servers of a test run stop when the run is killed."""

import subprocess
import sys
from pathlib import Path

import psutil

from tests.conftest import ROOT
from tests.e2e.driving import survivors, wait_for

PROGRAM = """
from tests import stack
run = stack.Run()
stack.addresses(run.directory)
print(run.directory, flush=True)
input()
"""


def test_servers_stop_when_the_run_that_started_them_is_killed():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", PROGRAM], cwd=ROOT, **pipes) as run:
        directory = Path(run.stdout.readline().strip())
        servers = [process for process in psutil.process_iter() if str(directory) in command_line(process)]
        run.kill()
    assert len(servers) >= 3
    assert survivors(servers) == []
    wait_for(lambda: not directory.exists())


def command_line(process):
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""

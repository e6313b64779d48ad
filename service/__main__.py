"""Serves HTTP: `python -m service [--host H] [--port P]`."""

import argparse
import sys

import uvicorn

from core import log
from core.settings import ServiceSettings, SettingsProblem, load
from service.app import create_app


def main() -> None:
    arguments = argparse.ArgumentParser(prog="python -m service", description=__doc__)
    arguments.add_argument("--host", default="127.0.0.1")
    arguments.add_argument("--port", type=int, default=8000)
    where = arguments.parse_args()
    try:
        settings = load(ServiceSettings)
    except SettingsProblem as problem:
        sys.exit(f"sluice: {problem}")
    log.configure("service")
    uvicorn.run(
        create_app(settings),
        host=where.host,
        port=where.port,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=3,
        server_header=False,
    )


if __name__ == "__main__":
    main()

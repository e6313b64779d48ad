"""Runs the HTTP service: `python -m service [--host H] [--port P]`."""

import argparse
import gc
import ssl
import sys

import uvicorn

from core import log
from core.settings import ServiceSettings, SettingsProblem, load
from service.app import create_app
from service.server import configuration


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m service", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    try:
        settings = load(ServiceSettings)
        _check_certificate(settings)
    except SettingsProblem as problem:
        sys.exit(f"sluice: {problem}")
    log.configure("service")
    # Each time the event loop returns from the kernel, it waits this long for every busy route thread.
    sys.setswitchinterval(0.0005)
    app = create_app(settings)
    # Excludes modules from garbage collection: a full one would block the event loop for 0.25 s.
    gc.collect()
    gc.freeze()
    uvicorn.Server(configuration(app, settings, host=arguments.host, port=arguments.port)).run()


def _check_certificate(settings: ServiceSettings) -> None:
    if settings.tls_cert:
        try:
            # An empty password refuses an encrypted key here instead of asking for one on the terminal.
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(settings.tls_cert, settings.tls_key, password="")
        except (OSError, ValueError):  # ssl.SSLError is an OSError
            raise SettingsProblem(
                "SLUICE_TLS_CERT and SLUICE_TLS_KEY are not a certificate and its private key: "
                "name PEM files that belong together, the key without a password"
            ) from None


if __name__ == "__main__":
    main()

"""Serves HTTP: `python -m service [--host H] [--port P]`."""

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
    arguments = argparse.ArgumentParser(prog="python -m service", description=__doc__)
    arguments.add_argument("--host", default="127.0.0.1")
    arguments.add_argument("--port", type=int, default=8000)
    where = arguments.parse_args()
    try:
        settings = load(ServiceSettings)
        _check_certificate(settings)
    except SettingsProblem as problem:
        sys.exit(f"sluice: {problem}")
    log.configure("service")
    # The event loop waits this long for each busy thread of a route whenever it comes back from the kernel.
    sys.setswitchinterval(0.0005)
    app = create_app(settings)
    # A full collection goes through all modules, for a quarter of a second in which nothing is answered.
    gc.collect()
    gc.freeze()
    uvicorn.Server(configuration(app, settings, host=where.host, port=where.port)).run()


def _check_certificate(settings: ServiceSettings) -> None:
    if settings.tls_cert:
        try:
            # An empty password: a key that has one is refused here, in place of asking a terminal for it.
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(settings.tls_cert, settings.tls_key, password="")
        except (OSError, ValueError):  # ssl.SSLError is an OSError
            raise SettingsProblem(
                "SLUICE_TLS_CERT and SLUICE_TLS_KEY are not a certificate and its private key: "
                "name PEM files that belong together, the key without a password"
            ) from None


if __name__ == "__main__":
    main()

"""Health check of the service on this machine: `python -m core.probe PORT`."""

import os
import ssl
import sys
import urllib.request


def ask_service(port: int, path: str, *, certificate: str | None, timeout: float) -> bytes:
    """GETs a path. Over TLS the service must present this certificate, whatever name it contains."""
    context = None
    if certificate:
        context = ssl.create_default_context(cafile=certificate)
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the file may be without the root
    url = f"{'https' if certificate else 'http'}://127.0.0.1:{port}{path}"
    with urllib.request.urlopen(url, timeout=timeout, context=context) as answer:  # noqa: S310
        body: bytes = answer.read()
    return body


if __name__ == "__main__":
    ask_service(int(sys.argv[1]), "/healthz", certificate=os.environ.get("SLUICE_TLS_CERT"), timeout=3)

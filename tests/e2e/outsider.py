"""Another user of the machine asks sockets of ours: what comes back? Run as a program with a user id.

Standard input: a JSON list of addresses, each a host and port or a path. Standard output: for each, what was
received `plain`, over TLS without a certificate (`tls`) and over TLS with the certificate that was named
(`own`): null if no connection was possible, "" if there was no answer. `peer` is the server's certificate.
"""

import json
import os
import socket
import ssl
import sys
from contextlib import ExitStack, suppress

GET = b"GET /status HTTP/1.0\r\n\r\n"
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\4" + bytes(5)  # and an empty SETTINGS frame


def connect(address):
    found = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
    found.settimeout(60)
    found.connect(address if isinstance(address, str) else tuple(address))
    return found


def talk(address, context=None):
    """What is received, and the peer's certificate as hexadecimal; None for what was not to be had."""
    try:
        found = connect(address)
    except OSError:
        return None, None
    said, peer, request = b"", None, GET
    with ExitStack() as stack, suppress(OSError):  # ssl.SSLError is one
        stack.callback(found.close)
        if context:
            found = stack.enter_context(context.wrap_socket(found))
            peer = found.getpeercert(binary_form=True).hex()
            request = HTTP2 if found.selected_alpn_protocol() == "h2" else GET
        found.sendall(request)
        said = found.recv(65536)
    return said.decode(errors="replace"), peer


def contexts(certificate, key):
    found = []
    for _ in range(2):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2", "http/1.1"])
        found.append(context)
    found[1].load_cert_chain(certificate, key)
    return found


def ask(addresses, certificate, key):
    anonymous, own = contexts(certificate, key)
    answers = []
    for address in addresses:
        plain, _ = talk(address)
        tls, peer = talk(address, anonymous)
        answers.append({"plain": plain, "tls": tls, "own": talk(address, own)[0], "peer": peer})
    return answers


if __name__ == "__main__":
    certificate, key, user = sys.argv[1:]
    if os.geteuid() == 0:  # now, since this interpreter may be in a directory that others cannot read
        os.setgroups([])
        os.setresgid(int(user), int(user), int(user))
        os.setresuid(int(user), int(user), int(user))
    print(json.dumps(ask(json.load(sys.stdin), certificate, key)))  # noqa: T201

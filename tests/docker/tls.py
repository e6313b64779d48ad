"""TLS in front of a server that was built without: the PostgreSQL and Valkey that come as wheels are."""

import select
import socket
import ssl
import threading
from contextlib import contextmanager, suppress

_SSL_REQUEST = bytes.fromhex("0000000804d2162f")  # what a client sends to PostgreSQL before the handshake


@contextmanager
def tls_front(secrets, server, port):
    """Gives a port that shows the server's certificate and passes what it is sent on to 127.0.0.1:port."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(secrets / f"{server}.crt", secrets / f"{server}.key")
    listener = socket.create_server(("127.0.0.1", 0))
    threads, connections = [], [listener]

    def serve(connection):
        # A client that does not like the certificate hangs up, and the end of the test hangs up on all.
        with suppress(OSError), connection:
            if server == "postgres":
                if connection.recv(8) != _SSL_REQUEST:
                    return
                connection.sendall(b"S")
            with context.wrap_socket(connection, server_side=True) as outer:
                connections.append(outer)
                with socket.create_connection(("127.0.0.1", port)) as inner:
                    connections.append(inner)
                    other = {outer: inner, inner: outer}
                    while True:
                        for source in [outer] if outer.pending() else select.select(list(other), [], [])[0]:
                            data = source.recv(1 << 16)
                            if not data:
                                return
                            other[source].sendall(data)

    def accept():
        with suppress(OSError):
            while True:
                connection = listener.accept()[0]
                connections.append(connection)
                threads.append(threading.Thread(target=serve, args=[connection], daemon=True))
                threads[-1].start()

    accepting = threading.Thread(target=accept, daemon=True)
    accepting.start()
    yield listener.getsockname()[1]
    for number in range(2):  # twice: a connection may have been accepted or opened meanwhile
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        accepting.join()
        for thread in threads:
            thread.join(None if number else 1)
    listener.close()

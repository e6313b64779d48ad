"""As much of AWS KMS as is used, over its own protocol: boto3 talks to it as to the real one."""

import base64
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from sluice.envelope import OAEP


class Kms:
    """Keys by id, and the requests that came: (operation, key id, access key of the caller)."""

    def __init__(self, keys):
        self.keys, self.asked = keys, []

    def answer(self, operation, body):
        key = self.keys[body["KeyId"]]
        if operation == "GetPublicKey":
            der = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
            return {"KeyId": body["KeyId"], "PublicKey": base64.b64encode(der).decode()}
        if operation == "Decrypt" and isinstance(key, rsa.RSAPrivateKey):
            assert body["EncryptionAlgorithm"] == "RSAES_OAEP_SHA_256"
            plain = key.decrypt(base64.b64decode(body["CiphertextBlob"]), OAEP)
            return {"Plaintext": base64.b64encode(plain).decode()}
        if operation == "Sign":
            assert (body["SigningAlgorithm"], body["MessageType"]) == ("ED25519_SHA_512", "RAW")
            message = base64.b64decode(body["Message"])
            if len(message) > 4096:
                raise ValueError("ValidationException")
            return {"Signature": base64.b64encode(key.sign(message)).decode()}
        raise ValueError("InvalidKeyUsageException")


@contextmanager
def serving(keys):
    """A server with these keys; gives its address and the record of what was asked."""
    kms = Kms(keys)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            operation = self.headers["X-Amz-Target"].removeprefix("TrentService.")
            caller = self.headers["Authorization"].split("Credential=")[1].split("/")[0]
            kms.asked.append((operation, body["KeyId"], caller))
            try:
                status, said = 200, kms.answer(operation, body)
            except KeyError:
                status, said = 400, {"__type": "NotFoundException"}
            except ValueError as problem:
                # What OAEP says of a ciphertext that is none is not the name of an exception of KMS.
                known = str(problem) if str(problem).endswith("Exception") else "InvalidCiphertextException"
                status, said = 400, {"__type": known}
            answer = json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/x-amz-json-1.1")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", kms
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

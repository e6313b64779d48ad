"""Speed of encrypting and decrypting uploads, in CPU time of one core: `python -m bench.envelope`."""

import hashlib
import io
import os
import time

from sluice.envelope import PLAIN_CHUNK, Stream, new_key

CHUNKS = 64
ROUNDS = 8


def main() -> None:
    chunk, stream = os.urandom(PLAIN_CHUNK), Stream(new_key(), "bench")
    encrypted = io.BytesIO(stream.encrypt(chunk * CHUNKS))

    def encrypt_and_hash() -> None:
        digest = hashlib.sha256()
        for number in range(CHUNKS):
            digest.update(stream.encrypt_chunk(number, chunk, last=number == CHUNKS - 1))

    def decrypt_and_hash_both() -> None:
        encrypted.seek(0)
        outer, inner = hashlib.sha256(encrypted.getbuffer()), hashlib.sha256()
        for piece in stream.decrypted(encrypted):
            inner.update(piece)
        outer.digest(), inner.digest()

    for measured in (encrypt_and_hash, decrypt_and_hash_both):
        began = time.process_time()
        for _ in range(ROUNDS):
            measured()
        speed = ROUNDS * CHUNKS * PLAIN_CHUNK / (time.process_time() - began) / 1e9
        print(f"{measured.__name__:24}{speed:6.2f} GB/s")


if __name__ == "__main__":
    main()

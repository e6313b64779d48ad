"""The publisher's part of the vault: synthesizers to read, bundles to write and read."""

from pathlib import Path
from typing import TYPE_CHECKING

from core.stores.s3 import ENCRYPTED
from core.unwrap import Unwrapper
from sluice.envelope import MOST_HEAD, decrypt_wrapped, encrypted_size

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

_PIECE = 8 << 20


class Bundles:
    """Bundles are stored under their digest, so that repeated writes store the same bytes."""

    def __init__(self, client: "S3Client", bucket: str, keys: Unwrapper) -> None:
        self._client, self._bucket, self._keys = client, bucket, keys

    def trained(self, prefix: str, kind: str, *, most: int) -> dict[str, bytes]:
        """The two files of a "synthesizer" or "classifier"; of each at most `most` + 1 bytes are read."""
        files = {}
        for name in (f"{kind}.json", f"{kind}.safetensors"):
            body = self._client.get_object(Bucket=self._bucket, Key=prefix + name)["Body"]
            if prefix.endswith(ENCRYPTED):
                encrypted = body.read(encrypted_size(most + 1) + MOST_HEAD)
                files[name] = decrypt_wrapped(encrypted, prefix + name, self._keys.unwrap)
            else:
                files[name] = body.read(most + 1)
        return files

    def put(self, release: object, digest: bytes, path: str, file: Path) -> None:
        with file.open("rb") as body:
            self._client.put_object(Bucket=self._bucket, Key=_key(release, digest, path), Body=body)

    def fetch(self, release: object, digest: bytes, path: str, file: Path) -> None:
        body = self._client.get_object(Bucket=self._bucket, Key=_key(release, digest, path))["Body"]
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("wb") as out:
            for piece in body.iter_chunks(_PIECE):
                out.write(piece)


def _key(release: object, digest: bytes, path: str) -> str:
    return f"bundles/{release}/{digest.hex()}/{path}"

"""An upload as a client of somebody else's would encrypt it."""

import base64

from sluice.envelope import Stream, WrappingKey, new_key, upload_context


def encrypted(public, dataset, body):
    """The body to begin an upload with, given the service's answer about its key, and the bytes to send."""
    wrapping, key = WrappingKey(public["public"]), new_key()
    begin = {"key_id": public["id"], "wrapped_key": base64.b64encode(wrapping.wrap(key)).decode()}
    return begin, Stream(key, upload_context(dataset)).encrypt(body)

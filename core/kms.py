"""A client of AWS KMS with an identity of its own, for keys that are named in settings as "kms:ID"."""

from typing import TYPE_CHECKING, Any

import boto3
from botocore.config import Config

if TYPE_CHECKING:
    from core.settings import PublishSettings, TrainSettings


def client_for(settings: "TrainSettings | PublishSettings") -> Any:
    """Uses the credentials in the settings only, never those of the machine."""
    access, secret = settings.kms_access_key, settings.kms_secret_key
    return boto3.client(
        "kms",
        endpoint_url=str(settings.kms_endpoint).rstrip("/") if settings.kms_endpoint else None,
        region_name=settings.kms_region,
        aws_access_key_id=access.get_secret_value() if access else "",
        aws_secret_access_key=secret.get_secret_value() if secret else "",
        config=Config(retries={"max_attempts": 5, "mode": "standard"}, connect_timeout=5, read_timeout=30),
    )

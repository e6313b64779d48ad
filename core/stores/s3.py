"""One S3 client per process, with the identity of its role."""

from typing import TYPE_CHECKING

import boto3
from botocore.config import Config

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

    from core.settings import PublishSettings, ServiceSettings, SweepSettings, TrainSettings, WitnessSettings

    HasIdentity = ServiceSettings | TrainSettings | PublishSettings | SweepSettings | WitnessSettings


def client_for(settings: "HasIdentity") -> "S3Client":
    """The client of a role, from its settings."""
    return client(
        endpoint=str(settings.s3_endpoint).rstrip("/") if settings.s3_endpoint else None,
        region=settings.s3_region,
        access_key=settings.s3_access_key.get_secret_value(),
        secret_key=settings.s3_secret_key.get_secret_value(),
        ca=settings.s3_ca,
    )


def client(
    *,
    endpoint: str | None,
    region: str,
    access_key: str,
    secret_key: str,
    attempts: int = 5,
    ca: str = "system",
) -> "S3Client":
    """A client that never falls back to credentials it finds on the machine."""
    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name=region,
        aws_access_key_id=access_key,
        aws_secret_access_key=secret_key,
        verify=None if ca == "system" else ca,
        config=Config(
            signature_version="s3v4",
            # A bucket name as a sub-domain needs DNS that a server on one machine does not have.
            s3={"addressing_style": "path" if endpoint else "auto"},
            retries={"max_attempts": attempts, "mode": "standard"},
            connect_timeout=5,
            read_timeout=60,
        ),
    )

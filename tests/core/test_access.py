"""Each role's S3 identity can do exactly what the table in the design says, and nothing else."""

import uuid

import boto3
import pytest
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import ClientError

from core.stores import s3

# The promise, written out and not derived from core.stores.access: role → bucket → verbs.
PUT = {"put", "multipart", "abort"}
GET = {"get", "head"}
KEPT = GET | PUT | {"copy", "delete", "delete many", "delete version", "list versions here"}
GONE = {"abort", "delete", "delete many", "delete version"}
ALLOWED = {
    "service": {"sluice-private": PUT, "sluice-public": GET},
    "train": {
        "sluice-private": GET | GONE | {"list uploads"},
        "sluice-private/datasets": GET | GONE | {"list uploads", "list versions here"},
        "sluice-vault/checkpoints": KEPT,
        "sluice-vault/diagnostics": KEPT,
        "sluice-vault/synthesizers": KEPT,
        # What SeaweedFS and AWS call ListBucket; without it a missing key cannot be told from a refused one.
        "sluice-witness": GET | {"list"},
        "sluice-witness/ledger": GET | {"list"},
        "sluice-witness/fingerprints": GET | PUT | {"copy", "list"},
    },
    "publish": {
        "sluice-vault/synthesizers": GET,
        "sluice-vault/bundles": GET | PUT | {"copy"},
        "sluice-public": PUT | {"delete", "delete many"},
    },
    "sweep": {
        "sluice-witness": {"list"},
        "sluice-witness/fingerprints": {"list"},
        "sluice-witness/ledger": GET | PUT | {"copy", "list"},
    },
    "anonymous": {},
}
PLACES = [
    "sluice-private",
    "sluice-private/datasets",
    "sluice-vault",
    "sluice-vault/checkpoints",
    "sluice-vault/diagnostics",
    "sluice-vault/synthesizers",
    "sluice-vault/bundles",
    "sluice-public",
    "sluice-witness",
    "sluice-witness/ledger",
    "sluice-witness/fingerprints",
]
TAGS = {"TagSet": [{"Key": "a", "Value": "b"}]}
RULES = {"Rules": [{"ID": "a", "Status": "Enabled", "Filter": {"Prefix": ""}, "Expiration": {"Days": 1}}]}
CORS = {"CORSRules": [{"AllowedMethods": ["GET"], "AllowedOrigins": ["*"]}]}

VERBS = {
    "get": lambda c, b, k: c.get_object(Bucket=b, Key=k),
    "head": lambda c, b, k: c.head_object(Bucket=b, Key=k),
    "put": lambda c, b, k: c.put_object(Bucket=b, Key=k + uuid.uuid4().hex, Body=b"new"),
    "multipart": lambda c, b, k: c.create_multipart_upload(Bucket=b, Key=k + uuid.uuid4().hex),
    "abort": lambda c, b, k: c.abort_multipart_upload(Bucket=b, Key=k, UploadId=open_upload(b, k)),
    "copy": lambda c, b, k: c.copy_object(Bucket=b, Key=k + "2", CopySource={"Bucket": b, "Key": k}),
    "delete": lambda c, b, k: c.delete_object(Bucket=b, Key=k),
    "delete version": lambda c, b, k: c.delete_object(Bucket=b, Key=k, VersionId="null"),
    "delete many": lambda c, b, k: delete_many(c, b, k),
    "list": lambda c, b, k: c.list_objects_v2(Bucket=b),
    "list versions": lambda c, b, k: c.list_object_versions(Bucket=b),
    "list versions here": lambda c, b, k: c.list_object_versions(Bucket=b, Prefix=k.rpartition("/")[0] + "/"),
    "list uploads": lambda c, b, k: c.list_multipart_uploads(Bucket=b),
    "read tags": lambda c, b, k: c.get_object_tagging(Bucket=b, Key=k),
    "write tags": lambda c, b, k: c.put_object_tagging(Bucket=b, Key=k, Tagging=TAGS),
    "object acl": lambda c, b, k: c.put_object_acl(Bucket=b, Key=k, ACL="public-read"),
    "bucket acl": lambda c, b, k: c.put_bucket_acl(Bucket=b, ACL="public-read"),
    "read policy": lambda c, b, k: c.get_bucket_policy(Bucket=b),
    "write policy": lambda c, b, k: c.put_bucket_policy(Bucket=b, Policy="{}"),
    "lifecycle": lambda c, b, k: c.put_bucket_lifecycle_configuration(Bucket=b, LifecycleConfiguration=RULES),
    "cors": lambda c, b, k: c.put_bucket_cors(Bucket=b, CORSConfiguration=CORS),
    "versioning": lambda c, b, k: c.put_bucket_versioning(
        Bucket=b, VersioningConfiguration={"Status": "Suspended"}
    ),
    "drop bucket": lambda c, b, k: c.delete_bucket(Bucket=b),
}
_admin = {}


def open_upload(bucket, key):
    return _admin["client"].create_multipart_upload(Bucket=bucket, Key=key)["UploadId"]


def delete_many(client, bucket, key):
    """Answers 200 and refuses key by key, so a refusal is made to look like the others."""
    errors = client.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": key}]}).get("Errors", [])
    if errors:
        raise ClientError({"Error": errors[0], "ResponseMetadata": {"HTTPStatusCode": 403}}, "DeleteObjects")


@pytest.fixture(scope="module")
def clients(servers):
    """A client for each role, and one for the admin."""
    return {role: client_of(role, servers) for role in (*ALLOWED, "admin")}


def client_of(role, servers):
    if role == "anonymous":
        plain = Config(signature_version=UNSIGNED, s3={"addressing_style": "path"})
        return boto3.client("s3", endpoint_url=servers.s3_endpoint, region_name="us-east-1", config=plain)
    keys = servers.s3_identities[role]
    return s3.client(endpoint=servers.s3_endpoint, region="us-east-1", attempts=1, **keys)


@pytest.fixture
def admin(clients):
    _admin["client"] = clients["admin"]
    return _admin["client"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("role", ALLOWED)
def test_a_role_does_exactly_what_the_table_says(role, place, clients, admin):
    client = clients[role]
    bucket, _, prefix = place.partition("/")
    done, answers, key = set(), {}, None

    def unchanged():
        return key is None or admin.get_object(Bucket=bucket, Key=key)["Body"].read() == b"there"

    for verb, attempt in VERBS.items():
        if verb.startswith("delete"):  # the object may go now: no refused verb has changed it
            assert unchanged(), answers
        if key is None:
            key = f"{prefix}/{uuid.uuid4().hex}".lstrip("/")
            admin.put_object(Bucket=bucket, Key=key, Body=b"there")
        try:
            attempt(client, bucket, key)
        except ClientError as refusal:
            answers[verb] = refusal.response["ResponseMetadata"]["HTTPStatusCode"]
        else:
            done.add(verb)
            key = None if verb.startswith("delete") else key
    assert unchanged(), answers
    assert done == ALLOWED[role].get(place, ALLOWED[role].get(bucket, set()))
    assert set(answers.values()) == {403}, answers


@pytest.mark.parametrize("role", ALLOWED)
def test_no_role_makes_buckets_or_sees_all_of_them(role, clients):
    client = clients[role]
    with pytest.raises(ClientError, match="AccessDenied"):
        client.create_bucket(Bucket=f"mine-{uuid.uuid4().hex[:8]}")
    if role != "anonymous":  # SeaweedFS shows a bucket to whoever may list it
        listed = {bucket for bucket, verbs in ALLOWED[role].items() if "list" in verbs and "/" not in bucket}
        assert {bucket["Name"] for bucket in client.list_buckets()["Buckets"]} == listed


def test_no_identity_holds_both_ends():
    for role, rights in ALLOWED.items():
        reads_private = "get" in rights.get("sluice-private", set())
        writes_public = "put" in rights.get("sluice-public", set())
        assert not (reads_private and writes_public), role

"""Builds a release: samples from the synthesizer and stores the bundle in the vault, with a review copy."""

import hashlib
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from sqlalchemy import Engine, func
from sqlalchemy.orm import Session

from core.faults import Failure, Fault
from core.schema import ImageSchema, Schema, TableSchema
from core.stores.bundles import Bundles
from core.stores.public import PublicStore
from core.tables import Dataset, Job, ReleaseState
from sluice.envelope import CannotDecrypt
from worker import review_copies
from worker.charges import charges_of
from worker.lease import ReleaseLease

_SCHEMA: TypeAdapter[ImageSchema | TableSchema] = TypeAdapter(Schema)


def snapshot(engine: Engine) -> Session:
    """A session whose reads are all of one moment, so that the ledger that is stated is the verified one."""
    return Session(engine.execution_options(isolation_level="REPEATABLE READ"), expire_on_commit=False)


def timestamp(at: datetime) -> str:
    return at.astimezone(UTC).isoformat(timespec="microseconds")


def build(
    lease: ReleaseLease, bundles: Bundles, public: PublicStore, proceed: Callable[[ReleaseLease], None]
) -> None:
    """Builds the bundle of a release and sends it to review. `proceed` renews the lease or raises."""
    from worker import bundle  # imports torch, which takes seconds, and a worker starts without it
    from worker.bundle.facts import Facts

    row = lease.row
    with snapshot(lease.engine) as session:
        job = session.get_one(Job, row.job_id)
        source = session.get_one(Dataset, job.source_id) if job.source_id else None
        # A classifier has the classes of the public images that it learned labels from.
        schema = _SCHEMA.validate_python((source or session.get_one(Dataset, job.dataset_id)).schema)
        charges = charges_of(session, job)
    if not isinstance(schema, ImageSchema):
        raise Failure(Fault.UNFIT_SYNTHESIZER)
    privacy = charges[0].statement() | {
        "others": [charge.statement() for charge in charges[1:]],
        "sources": [_source_facts(source, schema)] if source else [],
    }
    facts = Facts(
        release=str(row.id), name=row.name, note=row.note, licence=row.licence,
        created_at=timestamp(row.created_at), reviewers=row.reviewers, count=row.count, seed=row.seed,
        formats=tuple(sorted(row.formats)), schema=schema, privacy=privacy,
    )  # fmt: skip
    kind = "synthesizer" if row.formats else "classifier"
    try:
        files = bundles.trained(job.synthesizer_key or "", kind, most=bundle.MAX_SYNTHESIZER_BYTES)
    except CannotDecrypt:
        raise Failure(Fault.UNFIT_SYNTHESIZER) from None
    trained = hashlib.sha256(b"".join(hashlib.sha256(files[name]).digest() for name in sorted(files)))
    if trained.digest() != job.synthesizer_sha256:
        raise Failure(Fault.UNFIT_SYNTHESIZER)

    def on_progress(done: int) -> None:
        lease.done = done
        proceed(lease)

    with tempfile.TemporaryDirectory(prefix="sluice-publish-") as name:
        directory = Path(name)
        built = bundle.build(directory, facts, files, on_progress=on_progress)
        review_copy_key = review_copies.begin(lease.engine, row, built.digest)
        for file in built.files:
            proceed(lease)
            bundles.put(row.id, built.digest, file["path"], directory / file["path"])
            public.put_copy(review_copy_key(file["path"]), directory / file["path"])
    lease.finish(
        ReleaseState.IN_REVIEW, done=row.count, digest=built.digest, files=built.files,
        manifest=built.manifest, privacy=dict(facts.privacy), preview=built.preview, built_at=func.now(),
    )  # fmt: skip


def _source_facts(source: Dataset, schema: ImageSchema) -> dict[str, Any]:
    """The declared or uploaded facts of a public dataset that was learned from without a charge."""
    sha256 = source.content_sha256 or source.sha256 or b""  # the latter if it was never encrypted
    shape = {"kind": schema.kind, "height": schema.height, "width": schema.width, "channels": schema.channels}
    return {
        "name": source.name, "sha256": sha256.hex(), "declared_public": source.public,
        "records": source.nominal_size, "schema": shape,
    }  # fmt: skip

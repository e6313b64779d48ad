"""Checks a sealed dataset: the file is what was declared, or it is rejected with a fault."""

import tempfile
import uuid
from dataclasses import asdict
from pathlib import Path

from pydantic import TypeAdapter
from sqlalchemy import Engine, func, select, update
from sqlalchemy.orm import Session

from core import log
from core.faults import Failure, Fault
from core.schema import ImageSchema, Schema, TableSchema
from core.stores.private import PrivateStore
from core.tables import Dataset
from worker.validate import validate

_log = log.get("checking")
_SCHEMA: TypeAdapter[ImageSchema | TableSchema] = TypeAdapter(Schema)
# Faults of this machine and moment, not of the file: worth another try.
_PASSING = {Fault.OUT_OF_SPACE}


def check(engine: Engine, store: PrivateStore, dataset_id: uuid.UUID) -> None:
    """Decides a dataset that waits for its check; does nothing for any other."""
    with Session(engine, expire_on_commit=False) as session:
        dataset = session.scalars(
            select(Dataset).where(Dataset.id == dataset_id, Dataset.state == "checking")
        ).one_or_none()
    if dataset is None or dataset.sha256 is None or dataset.size is None:
        _log.info("nothing_to_check")
        return
    schema = _SCHEMA.validate_python(dataset.schema)
    with tempfile.TemporaryDirectory(prefix="sluice-check-") as directory:
        path = Path(directory, "upload")
        store.fetch(dataset.object_key, path)
        try:
            report = validate(path, schema, sha256=dataset.sha256.hex(), size=dataset.size)
            values = {"state": "ready", "report": asdict(report)}
        except Failure as failure:
            if failure.fault in _PASSING:
                raise
            values = {"state": "rejected", "fault": failure.fault.value}
    decided = update(Dataset).where(Dataset.id == dataset_id, Dataset.state == "checking")
    with engine.begin() as connection:
        connection.execute(decided.values(checked_at=func.now(), **values))
    _log.info("dataset_checked", dataset_id=str(dataset_id), state=values["state"])

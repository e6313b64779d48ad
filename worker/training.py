"""The life of one job on the private side: claim, witness, open, follow, checkpoint, settle.

Guarantee: no private byte is read before the charge is committed, witnessed outside the database and part of
a ledger that verifies; each end is one transaction under the fence; progress is step counts alone.
docs/guarantees.md#jobs
"""

import hashlib
import json
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from botocore.exceptions import BotoCoreError, ClientError
from pydantic import TypeAdapter
from sqlalchemy import Engine, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from core import log
from core.faults import Failure, Fault
from core.ledger import price
from core.schema import ImageSchema, Schema, TableSchema
from core.stores.private import PrivateStore, Vault
from core.stores.s3 import VersionsNotDeleted
from core.tables import Account, Dataset, Entry, Job
from core.unwrap import Unwrapper
from core.witness import WitnessLog, is_behind
from sluice.envelope import CannotDecrypt
from sluice.methods import Plan, plan_from_dict
from sluice.privacy.problems import Problem as PrivacyProblem
from worker import opening, plot, process
from worker.claims import LEASE, MOST_ATTEMPTS, Claim, Fenced, claim
from worker.paid import require_reserved, verified
from worker.space import require_space
from worker.tidying import tidy

if TYPE_CHECKING:
    from torch import Tensor

    from worker.records import Records
    from worker.trainers import Training

_log = log.get("training")
_SCHEMA: TypeAdapter[ImageSchema | TableSchema] = TypeAdapter(Schema)
_WITNESS_SECONDS = 60.0


class HandBack(Exception):
    """Not now: the worker stops, or a server it needs is away."""


@dataclass(kw_only=True)
class Trainer:
    """What a train worker has: its stores, its hold on the database, and whether it is told to stop."""

    engine: Engine
    private: PrivateStore
    keys: Unwrapper
    vault: Vault
    witness: WitnessLog
    diagnostics: bool = False  # whether losses and norms are kept for the job's owner
    stopping: threading.Event = field(default_factory=threading.Event)
    lease: timedelta = LEASE
    checkpoint_seconds: float = 60.0
    beat_seconds: float = 2.0
    point: Callable[[str], object] = str  # named moments: does nothing here, tests end the process there

    def run(self, job_id: uuid.UUID) -> bool:
        """Works on a job if there is anything to do; True if it should be rung for again."""
        held = claim(self.engine, job_id, lease=self.lease)
        if held is None:
            _log.info("nothing_to_do", job_id=str(job_id))
            return False
        _log.info("job_claimed", job_id=str(job_id), fence=held.fence)
        self.point("claimed")
        try:
            return self._work(held)
        except Fenced:
            _log.warning("job_fenced", job_id=str(job_id), fence=held.fence)
            # Stopped in the middle of a write, it may have written after the job went on or ended elsewhere.
            with suppress(
                SQLAlchemyError, BotoCoreError, ClientError, VersionsNotDeleted
            ):  # or the next round
                tidy(self.engine, self.vault, job_id)
            return False

    def _work(self, held: Claim) -> bool:
        job_id = str(held.job.id)
        try:
            if held.fence > MOST_ATTEMPTS:
                raise Failure(Fault.LOST)
            with _beating(held, self.beat_seconds) as pulse:
                self._train(held, pulse)
        except HandBack:
            self.point("handing back")
            held.hand_back()
            self.point("handed back")
            _log.info("job_handed_back", job_id=job_id, fence=held.fence)
            return True
        except Fenced:
            raise
        except Exception as problem:
            fault = _fault_of(problem)
            # The text of an unexpected error may quote a record: its kind and place are all that is said.
            _log.warning(
                "job_stopped", job_id=job_id, fault=fault and fault.value, kind=type(problem).__name__,
                where=process.where(problem),
            )  # fmt: skip
            if fault is None:
                if held.fence < MOST_ATTEMPTS:
                    self.stopping.wait(min(2.0**held.fence, 30.0))
                    held.hand_back()
                    return True
                fault = problem.fault if isinstance(problem, Failure) else Fault.LOST
            self.point("failing")
            held.failed(fault)
            self.point("failed")
            tidy(self.engine, self.vault, held.job.id)
        return False

    def _train(self, held: Claim, pulse: "Pulse") -> None:
        job = held.job
        if job.cancel_asked_at is not None:
            raise Failure(Fault.CANCELLED)
        plan = self._paid_plan(held)
        self.point("planned")
        self._await_witness(held)
        self.point("witnessed")
        self._verify_ledger(held, plan)
        self._require_uploads(job)
        with Session(self.engine) as session:
            dataset = session.get_one(Dataset, job.dataset_id)
            held = replace(held, data_key=opening.data_key(dataset, self.keys))
        held.open()
        self.point("opened")
        with tempfile.TemporaryDirectory(prefix="sluice-train-") as directory:
            training = self._opened(held, plan, Path(directory))
            self.point("records")
            self._follow(held, training, pulse)
            self.point("followed")
            synthesizer = training.synthesizer()
            handed_on = _saved(training.handed_on()) if job.shared else None
        self.point("synthesizer")
        files = synthesizer.to_files()
        digest = hashlib.sha256(b"".join(hashlib.sha256(files[name]).digest() for name in sorted(files)))
        held.renew()
        key = self.vault.put_synthesizer(job.id, held.fence, files)
        if handed_on is not None:
            self.vault.put_handed_on(key, handed_on)
        self.point("stored")
        held.trained(synthesizer_key=key, synthesizer_sha256=digest.digest(), steps=job.steps)
        self.point("settled")
        tidy(self.engine, self.vault, job.id)
        self.point("wiped")
        _log.info("job_trained", job_id=str(job.id))

    def _paid_plan(self, held: Claim) -> Plan:
        """The plan, if what it will do is still what was paid for."""
        job = held.job
        with Session(self.engine) as session:
            account = session.get_one(Account, job.account_id)
            try:
                plan = plan_from_dict(job.plan)
                event = plan.event()
                paid = event.to_dict() == job.event and price(event, account) <= job.cost
            except PrivacyProblem:
                paid = False
        if not paid or plan.progress_steps != job.steps:
            raise Failure(Fault.ACCOUNTING_MISMATCH)
        return plan

    def _verify_ledger(self, held: Claim, plan: Plan) -> None:
        """The account's whole chain of rows holds, and one of them pays for this plan."""
        mine = select(Entry).where(Entry.account_id == held.job.account_id, Entry.job_id == held.job.id)
        with Session(self.engine) as session:
            account = verified(session, held.job.account_id)
            entry = session.scalars(mine.where(Entry.kind == "reserve")).one_or_none()
            require_reserved(account, entry, plan.event())

    def _require_uploads(self, job: Job) -> None:
        """They are in the store and fit on this disk: asked while the charge can still be given back."""
        with Session(self.engine) as session:
            used = [id for id in (job.dataset_id, job.source_id) if id is not None]
            datasets = [session.get_one(Dataset, id) for id in used]
            sizes = {dataset.object_key: dataset.size or 0 for dataset in datasets}
        for key, size in sizes.items():
            self.private.require(key, size)
        require_space(*sizes.values())

    def _await_witness(self, held: Claim) -> None:
        """Waits until the witness outside the database knows the row that pays for this job.

        A database that is behind the witness has been restored: the job may have run and been published
        already, so its charge pays for no second run.
        """
        number = held.reserved_at()
        until = time.monotonic() + _WITNESS_SECONDS
        while not self._witnessed(held.job.account_id, number):
            if time.monotonic() > until or self.stopping.wait(0.2):
                raise HandBack

    def _witnessed(self, account_id: uuid.UUID, number: int) -> bool:
        self.witness.catch_up()
        seen = self.witness.accounts.get(str(account_id))
        if seen is None or seen["moves"] < number:
            return False
        with Session(self.engine) as session:
            return not is_behind(session, session.get(Account, account_id), seen)

    def _opened(self, held: Claim, plan: Plan, directory: Path) -> "Training":
        """Records from the private bucket, and a trainer on them, gone on from the last checkpoint if any."""
        import torch  # takes seconds to import, and a worker starts without
        from safetensors.torch import load

        from worker.mechanisms.noise import SecureRng
        from worker.trainers import TRAINERS

        if plan.kind not in TRAINERS:
            raise Failure(Fault.SCHEMA_MISMATCH)
        more: dict[str, Any] = {}
        if held.job.source_id is not None:
            more["source"] = self._records(held.job.source_id, directory / "source")
        records = self._records(held.job.dataset_id, directory / "private")
        self.point("read")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        training: Training = TRAINERS[plan.kind](plan, records, rng=SecureRng(), device=device, **more)
        self.point("built")
        if held.job.checkpoint is None and held.job.after_id is not None:
            with Session(self.engine) as session:
                before = session.get_one(Job, held.job.after_id).synthesizer_key or ""
            training.take_over(load(self.vault.get_handed_on(before)))
        if held.job.checkpoint is not None:
            training.restore(load(self._checkpoint(held, held.job.checkpoint)))
            self.point("restored")
        return training

    def _checkpoint(self, held: Claim, fence: int) -> bytes:
        try:
            return self.vault.get_checkpoint(held.job.id, fence, key=held.data_key)
        except CannotDecrypt:
            raise Failure(Fault.CANNOT_DECRYPT) from None

    def _records(self, dataset_id: uuid.UUID, directory: Path) -> "Records":
        from worker.validate import open_records

        with Session(self.engine, expire_on_commit=False) as session:
            dataset = session.get_one(Dataset, dataset_id)
        schema = _SCHEMA.validate_python(dataset.schema)
        directory.mkdir()
        upload = directory / "upload"
        self.point("fetching")
        held = opening.fetch(dataset, self.private, self.keys, upload)
        self.point("fetched")
        records = open_records(upload, schema, directory, sha256=held.sha256, size=held.size)
        upload.unlink()
        return records

    def _follow(self, held: Claim, training: "Training", pulse: "Pulse") -> None:
        """Step by step; stops within one step of being told to."""
        diagnostics = Diagnostics() if self.diagnostics else None
        saved = time.monotonic()
        for progress in training.steps():
            pulse.step = progress.step
            if diagnostics is not None:
                diagnostics.add(progress.step, progress.steps, training)
            self.point("stepped")
            pulse.check()
            if progress.step < progress.steps:  # what is done by then is kept
                held.require_time_left()
            stopping = self.stopping.is_set()
            if stopping or time.monotonic() - saved > self.checkpoint_seconds:
                self._save(held, training, diagnostics)
                saved = time.monotonic()
            if stopping:
                raise HandBack
        self._diagnose(held, diagnostics)
        self.point("diagnostics")

    def _save(self, held: Claim, training: "Training", diagnostics: "Diagnostics | None") -> None:
        self.point("before checkpoint")
        held.renew()  # a worker that was stopped for longer than its lease writes nothing
        body = _saved(training.checkpoint())
        self.vault.put_checkpoint(held.job.id, held.fence, body, key=held.data_key)
        self._diagnose(held, diagnostics)
        self.point("after checkpoint")
        held.checkpointed()
        self.point("checkpointed")

    def _diagnose(self, held: Claim, diagnostics: "Diagnostics | None") -> None:
        """Into the vault, and into a row that the service shows to the job's curator and to nobody else."""
        if diagnostics is None:
            return
        files = diagnostics.files()
        self.vault.put_diagnostics(held.job.id, held.fence, files, key=held.data_key)
        held.diagnosed(lines=files["jsonl"].decode(), picture=files["svg"].decode())


def _saved(tensors: "dict[str, Tensor]") -> bytes:
    from safetensors.torch import save

    return save(tensors)


class Diagnostics:
    """Losses and norms of some steps, for the curator alone; a thousand lines or so for any job."""

    def __init__(self) -> None:
        self._rows: list[dict[str, float]] = []

    def add(self, step: int, steps: int, training: "Training") -> None:
        if step == 1 or step == steps or step % max(1, steps // 1000) == 0:
            self._rows.append({"step": step, **training.diagnostics()})

    def files(self) -> dict[str, bytes]:
        """The numbers as JSON lines, and a picture of them."""
        names = dict.fromkeys(name for row in self._rows for name in row if name != "step")
        drawn = {name: [(row["step"], row[name]) for row in self._rows if name in row] for name in names}
        body = "".join(json.dumps(row) + "\n" for row in self._rows)
        return {"jsonl": body.encode(), "svg": plot.lines(drawn).encode()}


@dataclass
class Pulse:
    """What the heartbeat and the training tell each other."""

    step: int = 0
    cancelled: bool = False
    fenced: bool = False

    def check(self) -> None:
        if self.fenced:
            raise Fenced
        if self.cancelled:
            raise Failure(Fault.CANCELLED)


@contextmanager
def _beating(held: Claim, seconds: float) -> Iterator[Pulse]:
    """Keeps the lease from another thread; a database that is away is waited for."""
    pulse, done = Pulse(step=held.job.step), threading.Event()

    def beat() -> None:
        while not done.wait(seconds):
            try:
                pulse.cancelled = held.beat(pulse.step)
            except Fenced:
                pulse.fenced = True
                return
            except SQLAlchemyError as problem:
                _log.warning("heartbeat_missed", job_id=str(held.job.id), kind=type(problem).__name__)

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield pulse
    finally:
        done.set()
        thread.join()


def _fault_of(problem: Exception) -> Fault | None:
    """The fault a job ends with, or None for what may pass: a server away, a full disk, the unforeseen."""
    if isinstance(problem, Failure):
        if problem.fault in (Fault.OUT_OF_SPACE, Fault.UPLOAD_GONE):
            return None
        return problem.fault if problem.fault in _OF_JOBS else Fault.SCHEMA_MISMATCH
    slug: Any = getattr(problem, "slug", None)
    if isinstance(slug, str) and slug in [*Fault]:
        return Fault(slug)
    if isinstance(problem, MemoryError) or type(problem).__name__ == "OutOfMemoryError":
        return Fault.OUT_OF_MEMORY
    return None


_OF_JOBS = {
    Fault.DIVERGED, Fault.SCHEMA_MISMATCH, Fault.ACCOUNTING_MISMATCH, Fault.LOST, Fault.CANCELLED,
    Fault.OUT_OF_MEMORY, Fault.LEDGER_BROKEN, Fault.EXCEEDS_DISK, Fault.TIME_LIMIT, Fault.CANNOT_DECRYPT,
    Fault.KEY_DESTROYED,
}  # fmt: skip

"""Trains one job on the private side: claim, verify the charge, open records, train, checkpoint, settle.

Guarantee: no private byte is read before the charge is committed, witnessed outside the database and part of
a ledger that verifies; each end is one transaction under the fence; progress is step counts alone.
docs/guarantees.md#jobs
"""

import hashlib
import json
import tempfile
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from botocore.exceptions import BotoCoreError, ClientError
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from core.faults import Failure, Fault
from core.ledger import price
from core.stores.private import PrivateStore, Vault
from core.stores.s3 import VersionsNotDeleted
from core.tables import Account, Dataset, Job
from core.unwrap import Unwrapper
from core.witness import WitnessLog, is_behind
from sluice.envelope import CannotDecrypt
from sluice.methods import Plan, plan_from_dict
from sluice.plot import line_plot
from sluice.privacy.problems import Problem as PrivacyProblem
from worker import uploads
from worker.charges import require_reserved, verified_account
from worker.lease import MAX_ATTEMPTS, HandBack, JobLease, LeaseWorker
from worker.retention import clean_vault

if TYPE_CHECKING:
    from torch import Tensor

    from worker.records import Records
    from worker.trainers import Training

_WITNESS_SECONDS = 60.0
_TRANSIENT = {Fault.OUT_OF_SPACE, Fault.UPLOAD_GONE}
# Every other fault of an upload tells the curator that the file is not what the job was made for.
_JOB_FAULTS = _TRANSIENT | {
    Fault.DIVERGED, Fault.SCHEMA_MISMATCH, Fault.ACCOUNTING_MISMATCH, Fault.LOST, Fault.CANCELLED,
    Fault.OUT_OF_MEMORY, Fault.LEDGER_BROKEN, Fault.EXCEEDS_DISK, Fault.TIME_LIMIT, Fault.CANNOT_DECRYPT,
    Fault.KEY_DESTROYED,
}  # fmt: skip


@dataclass(kw_only=True)
class Trainer(LeaseWorker[JobLease]):
    """Trains jobs; holds the stores and keys of a train worker."""

    LEASE_TYPE = JobLease

    private: PrivateStore
    keys: Unwrapper
    vault: Vault
    witness: WitnessLog
    diagnostics: bool = False  # whether losses and norms are stored for the job's owner
    checkpoint_seconds: float = 60.0

    def _work(self, lease: JobLease) -> None:
        job = lease.row
        if job.cancel_asked_at is not None:
            raise Failure(Fault.CANCELLED)
        plan = self._paid_plan(job)
        self._await_witness(lease)
        self._verify_ledger(lease, plan)
        with Session(self.engine, expire_on_commit=False) as session:
            dataset = session.get_one(Dataset, job.dataset_id)
            source = session.get_one(Dataset, job.source_id) if job.source_id is not None else None
        # Before records count as opened, so that the charge can still be given back.
        uploads.require_available(self.private, *filter(None, (dataset, source)))
        lease.data_key = uploads.data_key(dataset, self.keys)
        lease.open()
        with tempfile.TemporaryDirectory(prefix="sluice-train-") as directory:
            training = self._start(lease, plan, dataset, source, Path(directory))
            self._follow(lease, training)
            files, handed_on = self._results(training, shared=job.shared)
        digest = hashlib.sha256(b"".join(hashlib.sha256(files[name]).digest() for name in sorted(files)))
        lease.renew()
        key = self.vault.put_synthesizer(job.id, lease.fence, files)
        if handed_on is not None:
            self.vault.put_handed_on(key, handed_on)
        lease.trained(synthesizer_key=key, synthesizer_sha256=digest.digest(), steps=job.steps)
        clean_vault(self.engine, self.vault, job.id)

    def _paid_plan(self, job: Job) -> Plan:
        """The job's plan, if its event is the one that was charged and its price is not higher."""
        try:
            plan = plan_from_dict(job.plan)
            event = plan.event()
            with Session(self.engine) as session:
                cost = price(event, session.get_one(Account, job.account_id))
        except PrivacyProblem:
            raise Failure(Fault.ACCOUNTING_MISMATCH) from None
        if event.to_dict() != job.event or cost > job.cost or plan.progress_steps != job.steps:
            raise Failure(Fault.ACCOUNTING_MISMATCH)
        return plan

    def _await_witness(self, lease: JobLease) -> None:
        """Waits until the witness outside the database has the row that reserved this job's charge.

        A database that is behind the witness was restored from a backup: the job may have run and been
        published already, so its charge does not pay for a second run.
        """
        entry = lease.reserve_entry()
        if entry is None:
            raise Failure(Fault.ACCOUNTING_MISMATCH)
        until = time.monotonic() + _WITNESS_SECONDS
        while not self._is_witnessed(entry.account_id, entry.number):
            if time.monotonic() > until or self.stopping.wait(0.2):
                raise HandBack

    def _is_witnessed(self, account_id: uuid.UUID, number: int) -> bool:
        self.witness.catch_up()
        state = self.witness.accounts.get(str(account_id))
        if state is None or state["moves"] < number:
            return False
        with Session(self.engine) as session:
            return not is_behind(session, session.get(Account, account_id), state)

    def _verify_ledger(self, lease: JobLease, plan: Plan) -> None:
        """Verifies the account's whole hash chain, and that one of its rows reserved this plan's charge."""
        with Session(self.engine) as session:
            account = verified_account(session, lease.row.account_id)
            require_reserved(account, lease.reserve_entry(), plan.event())

    def _start(
        self, lease: JobLease, plan: Plan, dataset: Dataset, source: Dataset | None, directory: Path
    ) -> "Training":
        """Opens the records and makes a trainer that continues from the last checkpoint, if there is one."""
        import torch  # imported here, because it takes seconds and a worker starts without it

        from worker.mechanisms.noise import SecureRng
        from worker.trainers import TRAINERS

        if plan.kind not in TRAINERS:
            raise Failure(Fault.SCHEMA_MISMATCH)
        more = {"source": self._records(source, directory / "source")} if source is not None else {}
        records = self._records(dataset, directory / "private")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        training: Training = TRAINERS[plan.kind](plan, records, rng=SecureRng(), device=device, **more)
        self._resume(lease, training)
        return training

    def _records(self, dataset: Dataset, directory: Path) -> "Records":
        return uploads.open_upload(dataset, self.private, self.keys, directory).records

    def _resume(self, lease: JobLease, training: "Training") -> None:
        from safetensors.torch import load

        job = lease.row
        if job.checkpoint is not None:
            try:
                body = self.vault.get_checkpoint(job.id, job.checkpoint, key=lease.data_key)
            except CannotDecrypt:
                raise Failure(Fault.CANNOT_DECRYPT) from None
            training.restore(load(body))
        elif job.after_id is not None:
            with Session(self.engine) as session:
                previous = session.get_one(Job, job.after_id).synthesizer_key or ""
            cast(Any, training).take_over(load(self.vault.get_handed_on(previous)))

    def _follow(self, lease: JobLease, training: "Training") -> None:
        """Runs the steps; stops within one step of a lost lease, a cancellation or a shutdown."""
        diagnostics = Diagnostics() if self.diagnostics else None
        saved = time.monotonic()
        for progress in training.steps():
            lease.step = progress.step
            if diagnostics is not None:
                diagnostics.add(progress.step, progress.steps, training)
            lease.check()
            if progress.step < progress.steps:  # a job that is past its last step is finished
                lease.require_time_left()
            stopping = self.stopping.is_set()
            if stopping or time.monotonic() - saved > self.checkpoint_seconds:
                self._save(lease, training, diagnostics)
                saved = time.monotonic()
            if stopping:
                raise HandBack
        self._store_diagnostics(lease, diagnostics)

    def _save(self, lease: JobLease, training: "Training", diagnostics: "Diagnostics | None") -> None:
        lease.renew()  # a worker that was suspended for longer than its lease writes nothing
        body = _tensor_bytes(training.checkpoint())
        self.vault.put_checkpoint(lease.row.id, lease.fence, body, key=lease.data_key)
        self._store_diagnostics(lease, diagnostics)
        lease.checkpointed()

    def _store_diagnostics(self, lease: JobLease, diagnostics: "Diagnostics | None") -> None:
        """Stores them in the vault, and in a row that the service shows to the job's curator alone."""
        if diagnostics is None:
            return
        files = diagnostics.files()
        self.vault.put_diagnostics(lease.row.id, lease.fence, files, key=lease.data_key)
        lease.diagnosed(lines=files["jsonl"].decode(), picture=files["svg"].decode())

    def _results(self, training: "Training", *, shared: bool) -> tuple[dict[str, bytes], bytes | None]:
        """The files of the synthesizer, and of a shared job what the next owner's training continues from.

        Only trainers of methods that can be shared have `handed_on` and `take_over`.
        """
        synthesizer = training.synthesizer()
        handed_on = _tensor_bytes(cast(Any, training).handed_on()) if shared else None
        return synthesizer.to_files(), handed_on

    def _fault_of(self, problem: Exception) -> Fault | None:
        slug: Any = getattr(problem, "slug", None)
        if isinstance(slug, str) and slug in [*Fault]:
            return Fault(slug)
        fault = super()._fault_of(problem)
        return fault if fault is None or fault in _JOB_FAULTS else Fault.SCHEMA_MISMATCH

    def _stopped(self, lease: JobLease, fault: Fault | None) -> bool:
        """Hands the job back after a transient error, as long as attempts are left; ends it otherwise."""
        if (fault is None or fault in _TRANSIENT) and lease.fence < MAX_ATTEMPTS:
            self.stopping.wait(min(2.0**lease.fence, 30.0))
            lease.hand_back()
            return True
        lease.failed(fault or Fault.LOST)
        clean_vault(self.engine, self.vault, lease.row.id)
        return False

    def _clean_up(self, lease: JobLease) -> None:
        # Suspended in the middle of a write, this worker may have written after the job went on or ended.
        with suppress(SQLAlchemyError, BotoCoreError, ClientError, VersionsNotDeleted):  # or the next round
            clean_vault(self.engine, self.vault, lease.row.id)


def _tensor_bytes(tensors: "dict[str, Tensor]") -> bytes:
    from safetensors.torch import save

    return save(tensors)


class Diagnostics:
    """Losses and norms of at most about a thousand steps, for the curator alone."""

    def __init__(self) -> None:
        self._rows: list[dict[str, float]] = []

    def add(self, step: int, steps: int, training: "Training") -> None:
        if step in (1, steps) or step % max(1, steps // 1000) == 0:
            self._rows.append({"step": step, **training.diagnostics()})

    def files(self) -> dict[str, bytes]:
        """The numbers as JSON lines, and a plot of them."""
        names = dict.fromkeys(name for row in self._rows for name in row if name != "step")
        series = {name: [(row["step"], row[name]) for row in self._rows if name in row] for name in names}
        body = "".join(json.dumps(row) + "\n" for row in self._rows)
        return {"jsonl": body.encode(), "svg": line_plot(series).encode()}

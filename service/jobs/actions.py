"""Reserve, enqueue, cancel. Nothing is trained that was not paid for first."""

import uuid
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import Select, or_, select, update
from sqlalchemy.orm import Session

from core import ledger
from core.errors import Forbidden, NotFound, Problem, WrongState
from core.settings import ServiceSettings
from core.tables import Account, Dataset, Diagnosis, Entry, Job
from core.witness import require_ledger_in_sync
from service import quotas
from service.auth import Principal
from service.datasets.actions import find as find_dataset
from service.datasets.actions import ready
from service.deps import find_row
from service.jobs import pricing
from service.jobs.schemas import NewJob, NewQuote, QuoteView
from sluice.methods import Plan, plan_from_dict
from sluice.methods.base import trainable
from sluice.privacy.events import Event, from_dict

ENDED = ("trained", "failed", "cancelled")


def visible(principal: Principal) -> Select[Job]:
    """The jobs on the datasets that this person works with."""
    return select(Job).where(Job.dataset_id.in_(select(Dataset.id).where(principal.works_with_dataset())))


def find(session: Session, principal: Principal, id: uuid.UUID) -> Job:
    return find_row(session, visible(principal).where(Job.id == id), "job")


def diagnosis(session: Session, principal: Principal, id: uuid.UUID, *, kept: bool) -> Diagnosis:
    """What the job's owner, and nobody else, may know of how it learnt; nothing where the site keeps none."""
    if find(session, principal, id).owner_id != principal.id:
        raise Forbidden("Diagnostics are facts about records, for the person who started the job alone.")
    if not kept:
        raise NotFound(
            "Diagnostics are off at this site: they are facts about records that no budget is charged for. "
            "SLUICE_DIAGNOSTICS=true for service and train workers turns them on for jobs that follow."
        )
    found = session.get(Diagnosis, id)
    if found is None:
        raise NotFound("This job has no diagnostics yet; they are kept with each checkpoint and at its end.")
    return found


def quote(session: Session, principal: Principal, body: NewQuote, settings: ServiceSettings) -> QuoteView:
    """Prices a plan for a dataset's account, and writes nothing."""
    dataset = ready(find_dataset(session, principal, body.dataset))
    account = _account(session, dataset)
    limit = quotas.of_dataset(session, dataset, settings).job_seconds
    paid = paid_events(session, account.id)
    _let_go(session)
    return pricing.quote(account, paid, body).model_copy(update={"limit_seconds": limit})


def _let_go(session: Session) -> None:
    """Gives the connection back, since arithmetic may take seconds; what was read stays as it was read."""
    session.expunge_all()
    session.rollback()


class NoMethod(Problem):
    status, slug, title = 422, "no-method", "No method learns from such records yet"


def _trainable(dataset: Dataset, plan: Plan) -> Dataset:
    """A charge must not buy a training that is bound to fail."""
    schema = dataset.schema
    if schema["kind"] != "image" or not trainable(schema["height"], schema["width"]):
        raise NoMethod("What can be trained are images with sides of 8 to 64 pixels. Nothing was charged.")
    sizes = schema["height"], schema["width"], schema["channels"], len(schema["classes"])
    plan.require_fit(*sizes)
    return dataset


class UnfitSource(Problem):
    status, slug, title = 422, "unfit-source", "This is nothing an adaptation can learn from"


def _source(session: Session, principal: Principal, dataset: Dataset, body: NewJob) -> uuid.UUID | None:
    """The public dataset of an adaptation. What it tells is not charged, so it has to be public for sure."""
    if (body.plan.kind == "adapt") != (body.source is not None):
        raise UnfitSource("A source goes with an adapt plan, and an adapt plan with a source; give both.")
    if body.source is None:
        return None
    source = ready(find_dataset(session, principal, body.source))
    same = or_(
        Dataset.account_id == source.account_id, Dataset.matches.contains([{"dataset": str(source.id)}])
    )
    private = select(Dataset.id).where(same, Dataset.account_id.is_not(None), Dataset.public.is_(False))
    if not source.public or session.scalars(private.limit(1)).one_or_none() is not None:
        raise UnfitSource("A source is registered as public, and shares no records with anything private.")
    if any(
        source.schema.get(name) != dataset.schema[name] for name in ("kind", "height", "width", "channels")
    ):
        raise UnfitSource("The source has images of another shape; both have to have the same.")
    if len(source.schema["classes"]) < 2:
        raise UnfitSource("The source has a single class; a classifier needs at least two to tell apart.")
    return source.id


class UnfitRelay(Problem):
    status, slug, title = 422, "unfit-relay", "This job cannot hand on or go on from a generator"


def _require_same_terms(session: Session, before: Job, account: Account) -> None:
    """Every account of a relay has one relation and one delta, so that a release can state them together."""
    last: Job | None = before
    while last is not None:
        theirs = session.get_one(Account, last.account_id)
        if (theirs.relation, theirs.delta) != (account.relation, account.delta):
            raise UnfitRelay(
                f"A job before it was charged at delta {theirs.delta:g} under {theirs.relation}, and "
                "epsilons at different deltas or relations cannot be compared. Register the dataset with "
                "that delta and relation, or start a relay of its own. Nothing was charged."
            )
        last = session.get_one(Job, last.after_id) if last.after_id else None


def _after(session: Session, dataset: Dataset, plan: Plan, body: NewJob) -> uuid.UUID | None:
    """The job whose generator is gone on from. Its owner agreed and it fits: nothing is charged in vain."""
    if body.after is None and not body.shared:
        return None
    recipe = plan.to_dict().get("recipe")
    if plan.kind != "gswgan" or recipe is None:
        raise UnfitRelay("Generators are handed on between gswgan plans that name their recipe.")
    if body.after is None:
        return None
    before = session.scalars(select(Job).where(Job.id == body.after, Job.shared)).one_or_none()
    if before is None:
        raise NotFound("No shared job has this id; its owner starts it with `shared`.")
    if before.state != "trained":
        raise WrongState("The job to go on from has not ended well; wait for it.", state=before.state)
    require_synthesizer(session, before.id)
    if (
        session.get_one(Dataset, before.dataset_id).schema != dataset.schema
        or before.plan["recipe"] != recipe
    ):
        raise UnfitRelay("It learned from images of another shape, of other classes, or by another recipe.")
    _require_same_terms(session, before, _account(session, dataset))
    return before.id


def require_synthesizer(session: Session, job_id: uuid.UUID) -> None:
    """It is in the vault, and is not removed before this transaction ends."""
    removed = select(Job.synthesizer_removed_at).where(Job.id == job_id).with_for_update(read=True)
    if at := session.scalars(removed).one():
        raise WrongState(
            f"The synthesizer of this job was removed on {at:%Y-%m-%d}, as long as this site keeps one "
            "(SLUICE_SYNTHESIZER_DAYS); train again."
        )


@dataclass(frozen=True, kw_only=True)
class Offer:
    """What a job would do, and what that costs; its records are there, or were a moment ago."""

    dataset: Dataset
    source: uuid.UUID | None
    after: uuid.UUID | None
    shared: bool
    account: Account
    priced: pricing.Priced


def offer(session: Session, principal: Principal, body: NewJob) -> Offer:
    """All that needs no lock: the dataset is there and ready, the plan is calibrated and priced."""
    found = ready(find_dataset(session, principal, body.dataset))
    plan = plan_from_dict(body.plan.model_dump())
    dataset = _trainable(found, plan)
    source, after = _source(session, principal, dataset, body), _after(session, dataset, plan, body)
    account = _account(session, dataset)
    _let_go(session)
    priced = pricing.priced(account, body)
    return Offer(
        dataset=dataset, account=account, priced=priced, shared=body.shared, source=source, after=after
    )


def start(session: Session, principal: Principal, made: Offer, settings: ServiceSettings) -> Job:
    """Reserves the cost and adds the job, in one transaction that the caller commits."""
    require_ledger_in_sync(session)
    dataset, account, offer = made.dataset, made.account, made.priced
    limit = quotas.require_free_job(session, dataset, settings).job_seconds
    # Locked against a deletion; what was read before the arithmetic may be old by now.
    needed = {dataset.id} | ({made.source} if made.source else set())
    still = select(Dataset.id).where(Dataset.id.in_(needed), Dataset.state == "ready").order_by(Dataset.id)
    if set(session.scalars(still.with_for_update(read=True))) != needed:
        raise WrongState("The dataset was deleted just now.")
    if made.after is not None:
        require_synthesizer(session, made.after)
    id = uuid.uuid4()
    readings = offer.readings.model_dump()
    try:
        cost = ledger.reserve(
            session,
            account,
            offer.event,
            job=id,
            readings=readings,
            move=principal.move(f"job {id} on {dataset.id}"),
        )
    except ledger.BudgetExceeded as refused:
        left = refused.fields["left"]["cost"]
        session.rollback()
        refused.fields["left"] = pricing.remaining(account, left).model_dump()
        refused.fields["largest_epsilon"] = pricing.largest_epsilon(account, offer.plan, left)
        raise
    job = Job(
        id=id, dataset_id=dataset.id, source_id=made.source, after_id=made.after, shared=made.shared,
        account_id=account.id, owner_id=principal.id,
        plan=offer.plan.to_dict(), event=offer.event.to_dict(), cost=cost, readings=readings,
        state="queued", step=0, steps=offer.plan.progress_steps, limit_seconds=limit,
        created_at=datetime.now(UTC),
    )  # fmt: skip
    session.add(job)
    session.flush()
    return job


def cancel(session: Session, principal: Principal, id: uuid.UUID) -> Job:
    """Before records are opened the charge is given back; after that the job stops and the charge stays."""
    job = find(session, principal, id)
    if not principal.is_admin and job.owner_id != principal.id:
        raise Forbidden("Only the person who started a job, or an admin, cancels it.")
    untouched = (
        update(Job)
        .where(Job.id == id, Job.state == "queued", Job.opened_at.is_(None))
        .values(state="cancelled", fault="cancelled", finished_at=datetime.now(UTC))
    )
    if session.execute(untouched.returning(Job.id)).one_or_none() is not None:
        # A database behind its witness may have forgotten that the job ran: then nothing is given back.
        require_ledger_in_sync(session)
        ledger.void(
            session, job.account_id, job=id, move=principal.move("cancelled before records were opened")
        )
    else:
        asked = update(Job).where(Job.id == id, Job.state.not_in(ENDED), Job.cancel_asked_at.is_(None))
        session.execute(asked.values(cancel_asked_at=datetime.now(UTC)))
    session.commit()
    session.refresh(job)
    return job


def paid_events(session: Session, account_id: uuid.UUID) -> tuple[Event, ...]:
    """The events an account has paid for or promised to: every reserve that was not voided."""
    voided = select(Entry.job_id).where(Entry.account_id == account_id, Entry.kind == "void")
    events = select(Entry.event).where(
        Entry.account_id == account_id, Entry.kind == "reserve", Entry.job_id.not_in(voided)
    )
    return tuple(from_dict(event) for event in session.scalars(events.order_by(Entry.number)))


def _account(session: Session, dataset: Dataset) -> Account:
    return session.get_one(Account, dataset.account_id)

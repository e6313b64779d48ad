"""Price, start and cancel jobs. The budget is charged before anything is trained."""

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
from sluice.methods import (
    METHODS,
    Method,
    Plan,
    PublicFacts,
    Target,
    default_plan,
    find_method,
    learnable,
    recommended,
)
from sluice.privacy.events import Event, from_dict
from sluice.privacy.relation import Relation

ENDED = ("trained", "failed", "cancelled")


def visible(principal: Principal) -> Select[Job]:
    """The jobs on the datasets that this person works with."""
    return select(Job).where(Job.dataset_id.in_(select(Dataset.id).where(principal.works_with_dataset())))


def find(session: Session, principal: Principal, id: uuid.UUID) -> Job:
    return find_row(session, visible(principal).where(Job.id == id), "job")


def diagnosis(session: Session, principal: Principal, id: uuid.UUID, *, kept: bool) -> Diagnosis:
    """Losses and gradient norms of a job, for its owner only and only if the site keeps them."""
    if find(session, principal, id).owner_id != principal.id:
        raise Forbidden("Diagnostics depend on records and are only for the person who started the job.")
    if not kept:
        raise NotFound(
            "Diagnostics are off at this site, because they depend on records and no budget is charged for "
            "them. SLUICE_DIAGNOSTICS=true for service and train workers turns them on for later jobs."
        )
    diagnosis = session.get(Diagnosis, id)
    if diagnosis is None:
        raise NotFound("This job has no diagnostics yet; they are saved with each checkpoint and at its end.")
    return diagnosis


def quote(session: Session, principal: Principal, body: NewQuote, settings: ServiceSettings) -> QuoteView:
    """Prices a plan for a dataset's account, and writes nothing."""
    dataset = ready(find_dataset(session, principal, body.dataset))
    account = _account(session, dataset)
    limit = quotas.of_dataset(session, dataset, settings).job_seconds
    paid = paid_events(session, account.id)
    _release_connection(session)
    target = _target(body, account)
    plan = body.own_plan() or _default_plan(body, dataset, target)
    return pricing.quote(account, paid, plan, target).model_copy(update={"limit_seconds": limit})


def _release_connection(session: Session) -> None:
    """Returns the connection to the pool before slow arithmetic; rows that were read stay usable."""
    session.expunge_all()
    session.rollback()


def _target(body: NewQuote, account: Account) -> Target | None:
    if body.aim is None:
        return None
    return Target(
        epsilon=body.aim.epsilon, delta=account.delta, relation=Relation(account.relation),
        accountant=body.aim.accountant,
    )  # fmt: skip


def _default_plan(body: NewQuote, dataset: Dataset, target: Target | None) -> Plan:
    """The plan for a request without one, from what the dataset declares; such a request has a target."""
    assert target is not None  # noqa: S101 (NewQuote requires it)
    relay = isinstance(body, NewJob) and body.relay
    return default_plan(_method(body, dataset), _facts(dataset), target, body.options or {}, relay=relay)


class NoMethod(Problem):
    status, slug, title = 422, "no-method", "No method can learn from such records"


def _method(body: NewQuote, dataset: Dataset) -> Method:
    """The method that is asked for, or the recommended one. The budget must not pay for a sure failure."""
    facts, name = _facts(dataset), body.plan.kind if body.plan else body.method
    if name is not None:
        method = find_method(name)
        if not method.can_learn(facts):
            raise NoMethod(f"{method.name} can learn {method.learns}. Nothing was charged.")
        return method
    source, relay = (body.source is not None, body.relay) if isinstance(body, NewJob) else (False, False)
    recommendation = recommended(facts, source=source, relay=relay)
    if recommendation is None:
        raise NoMethod(f"No method fits; methods can learn {learnable()}. Nothing was charged.")
    return recommendation


def _facts(dataset: Dataset) -> PublicFacts:
    return PublicFacts.of(dataset.schema, dataset.nominal_size)


class UnfitSource(Problem):
    status, slug, title = 422, "unfit-source", "This dataset cannot be the public source of the job"


def _source(
    session: Session, principal: Principal, dataset: Dataset, method: Method, body: NewJob
) -> uuid.UUID | None:
    """The public dataset of the job. Learning from it is not charged, so it must be public without doubt."""
    if method.needs_source != (body.source is not None):
        raise UnfitSource(
            f"{method.name} needs a public source; give one."
            if method.needs_source
            else f"{method.name} takes no public source; leave it out."
        )
    if body.source is None:
        return None
    source = ready(find_dataset(session, principal, body.source))
    same = or_(
        Dataset.account_id == source.account_id, Dataset.matches.contains([{"dataset": str(source.id)}])
    )
    private = select(Dataset.id).where(same, Dataset.account_id.is_not(None), Dataset.public.is_(False))
    if not source.public or session.scalars(private.limit(1)).one_or_none() is not None:
        raise UnfitSource("A source must be registered as public and share no records with private datasets.")
    if any(
        source.schema.get(name) != dataset.schema[name] for name in ("kind", "height", "width", "channels")
    ):
        raise UnfitSource("The images of the source have another shape; both datasets need the same shape.")
    if len(source.schema["classes"]) < 2:
        raise UnfitSource("The source has a single class; a classifier needs at least two.")
    return source.id


class UnfitRelay(Problem):
    status, slug, title = 422, "unfit-relay", "This job cannot share its generator or continue from another"


def _require_same_terms(session: Session, before: Job, account: Account) -> None:
    """All accounts of a relay have the same relation and delta, so that their epsilons can be compared."""
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


def _after(session: Session, dataset: Dataset, method: Method, plan: Plan, body: NewJob) -> uuid.UUID | None:
    """The job to continue from: its owner shares it, it is trained, and its generator fits."""
    if not body.relay:
        return None
    recipe = plan.to_dict().get("recipe")
    if not method.can_relay or recipe is None:
        names = ", ".join(name for name, each in METHODS.items() if each.can_relay)
        raise UnfitRelay(f"Generators can be continued by plans of {names} that name their recipe.")
    if body.after is None:
        return None
    before = session.scalars(select(Job).where(Job.id == body.after, Job.shared)).one_or_none()
    if before is None:
        raise NotFound("No shared job has this id; its owner starts it with `shared`.")
    if before.state != "trained":
        raise WrongState("The job to continue from is not trained; wait for it.", state=before.state)
    require_synthesizer(session, before.id)
    if (
        session.get_one(Dataset, before.dataset_id).schema != dataset.schema
        or before.plan["recipe"] != recipe
    ):
        raise UnfitRelay("That job has images of another shape, other classes, or another recipe.")
    _require_same_terms(session, before, _account(session, dataset))
    return before.id


def require_synthesizer(session: Session, job_id: uuid.UUID) -> None:
    """Refuses a job whose synthesizer was removed; it is not removed before this transaction ends."""
    removed = select(Job.synthesizer_removed_at).where(Job.id == job_id).with_for_update(read=True)
    if at := session.scalars(removed).one():
        raise WrongState(
            f"The synthesizer of this job was removed on {at:%Y-%m-%d}, after the site's retention period "
            "(SLUICE_SYNTHESIZER_DAYS); train again."
        )


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A job that was checked and priced, and is not yet charged."""

    dataset: Dataset
    source: uuid.UUID | None
    after: uuid.UUID | None
    shared: bool
    account: Account
    priced: pricing.Priced


def offer(session: Session, principal: Principal, body: NewJob) -> Offer:
    """Everything that needs no lock: checks the dataset and the request, calibrates and prices the plan."""
    dataset = ready(find_dataset(session, principal, body.dataset))
    account = _account(session, dataset)
    target, plan = _target(body, account), body.own_plan()
    method = _method(body, dataset)
    if plan is None:
        _release_connection(session)
        plan = _default_plan(body, dataset, target)
    if dataset.schema["kind"] == "image":
        facts = _facts(dataset)
        plan.require_fit(facts.height, facts.width, facts.channels, facts.classes)
    source = _source(session, principal, dataset, method, body)
    after = _after(session, dataset, method, plan, body)
    _release_connection(session)
    priced = pricing.priced(account, plan, target)
    return Offer(
        dataset=dataset, account=account, priced=priced, shared=body.shared, source=source, after=after
    )


def start(session: Session, principal: Principal, made: Offer, settings: ServiceSettings) -> Job:
    """Reserves the cost and adds the job, in one transaction that the caller commits."""
    require_ledger_in_sync(session)
    dataset, account, offer = made.dataset, made.account, made.priced
    limit = quotas.require_free_job(session, dataset, settings).job_seconds
    # Locked against deletion; the dataset may have changed since it was read, before the arithmetic.
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
    """Stops a job. Before its records are opened the charge is voided; afterwards it stays."""
    job = find(session, principal, id)
    if not principal.is_admin and job.owner_id != principal.id:
        raise Forbidden("Only the person who started a job, or an admin, cancels it.")
    untouched = (
        update(Job)
        .where(Job.id == id, Job.state == "queued", Job.opened_at.is_(None))
        .values(state="cancelled", fault="cancelled", finished_at=datetime.now(UTC))
    )
    if session.execute(untouched.returning(Job.id)).one_or_none() is not None:
        # In a database behind its witness the job may have run after all: then the charge must stay.
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
    """The events charged to an account: every reservation that was not voided."""
    voided = select(Entry.job_id).where(Entry.account_id == account_id, Entry.kind == "void")
    events = select(Entry.event).where(
        Entry.account_id == account_id, Entry.kind == "reserve", Entry.job_id.not_in(voided)
    )
    return tuple(from_dict(event) for event in session.scalars(events.order_by(Entry.number)))


def _account(session: Session, dataset: Dataset) -> Account:
    return session.get_one(Account, dataset.account_id)

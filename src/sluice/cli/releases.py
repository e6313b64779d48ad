"""`sluice releases`: draft, review, publish, withdraw; and for analysts find, download, verify, sample."""

from enum import StrEnum
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sluice.cli import verify as verifying
from sluice.cli.connection import (
    AsJson,
    bar,
    connected,
    output,
    print_fields,
    print_json,
    print_table,
    save_bytes,
    size,
    when,
)
from sluice.cli.jobs import readings
from sluice.cli.keys import Who, id_of
from sluice.client.problems import CannotRun

if TYPE_CHECKING:
    from sluice.client.api import Json, Sluice

app = typer.Typer(no_args_is_help=True, help="Releases: draft, review, publish, withdraw; find, download.")


class AudienceName(StrEnum):
    GRANTED = "granted"
    EVERYONE = "everyone"


class FormatName(StrEnum):
    PARQUET = "parquet"
    NPZ = "npz"
    PNG = "png"


Id = Annotated[str, typer.Argument(metavar="RELEASE", help="Id or name of a release.")]
Detach = Annotated[bool, typer.Option("--detach", help="Do not wait until it is done.")]
Directory = Annotated[Path, typer.Argument(metavar="DIR", help="Where a release was downloaded to.")]


def show_one(release: "Json") -> None:
    at = release["progress"]
    rows = [
        ("release", release["id"]),
        ("name", release["name"]),
        ("state", _state(release)),
        ("samples", f"{at['done']:,} of {at['count']:,}, seed {release['seed']}")
        if release["kind"] == "images"
        else ("classifier", "without samples"),
        ("licence", release["licence"]),
        ("for", "everyone" if release["audience"] == "everyone" else "those it is granted to"),
    ]
    rows += verifying.protection(release["owners"], release["together"])
    if release["digest"]:
        held = sum(file["size"] for file in release["files"])
        rows.append(("files", f"{len(release['files'])}, {size(held)}"))
        rows.append(("digest", release["digest"]))
        yes = sum(each["digest"] == release["digest"] for each in release["approvals"])
        rows.append(("approved by", f"{yes} of {release['reviewers'] - 1 or 1}" if yes else "nobody yet"))
    if release["state"] == "in_review":
        rows.append(("where it comes from", f"sluice releases review {release['id']}"))
        rows.append(("its files", f"sluice releases download {release['id']} DIR --review"))
        rows.append(
            ("to approve it", f"sluice releases approve {release['id']} --digest {release['digest']}")
        )
    print_fields(*rows)


def _state(release: "Json") -> str:
    why = release["fault"] or release["reason"]
    return str(release["state"]).replace("_", " ") + (f": {why}" if why else "")


def show_many(releases: "list[Json]") -> None:
    def epsilon(owners: "list[Json]") -> str:
        if len(owners) > 1:
            return "\n".join(
                f"owner {i}: {readings(each['epsilon'])} at {each['delta']:g}"
                for i, each in enumerate(owners, 1)
            )
        known = [each["epsilon"]["renyi"] for each in owners]
        return f"{known[0]:.4f}" if known and known[0] is not None else ""

    def row(one: "Json") -> tuple[str, ...]:
        shown = epsilon(one["owners"])
        return one["id"], one["name"], _state(one), f"{one['count']:,}", shown, when(one["created_at"])

    print_table("release", "name", "state", "samples", "epsilon", "made", rows=map(row, releases))
    if any(one["together"] for one in releases):
        output().print(
            "A person whose records are with several owners is covered by the sum of their epsilons."
        )


def _not_failed(release: "Json") -> bool:
    return bool(release["state"] != "failed")


def _found(service: "Sluice", release: str) -> str:
    return str(service.release(release).view["id"])


def _built(service: "Sluice", id: str) -> "Json":
    with bar("samples") as update:
        return service.wait_built(
            id, lambda one: update(_state(one), one["progress"]["done"], one["progress"]["count"])
        )


@app.command()
@connected(show_one, ok=_not_failed)
def create(
    service: "Sluice",
    job: Annotated[str, typer.Argument(metavar="JOB", help="Id of a trained job of yours.")],
    name: Annotated[str, typer.Option(help="What to call it; public.")],
    note: Annotated[str, typer.Option(help="What it is good for; public.")] = "",
    licence: Annotated[str, typer.Option(help="Under which terms.")] = "CC-BY-4.0",
    count: Annotated[
        int | None, typer.Option(help="How many samples, 10,000 if not given. They cost nothing more.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the sample; public. Drawn if not given.")] = None,
    format: Annotated[
        list[FormatName] | None,
        typer.Option(help="Of the samples; may be repeated. parquet and npz if not given."),
    ] = None,
    audience: Annotated[AudienceName, typer.Option(help="Who may have it.")] = AudienceName.GRANTED,
    supersedes: Annotated[str | None, typer.Option(help="A release that this one replaces.")] = None,
    detach: Detach = False,
) -> "Json":
    """Have a bundle built of a trained job: samples, synthesizer and what it cost, for review."""
    body = {
        "job": job, "name": name, "note": note, "licence": licence, "audience": audience.value,
        "supersedes": _found(service, supersedes) if supersedes else None,
    }  # fmt: skip
    # A classifier has no samples: what was not asked for is left to the service.
    sample = {"count": count, "seed": seed, "formats": [each.value for each in format or ()] or None}
    made = service.create_release(body | {name: each for name, each in sample.items() if each is not None})
    return made if detach else _built(service, made["id"])


@app.command("list")
@connected(show_many)
def list_releases(
    service: "Sluice",
    search: Annotated[str | None, typer.Option(help="Words of name or note.")] = None,
    state: Annotated[str | None, typer.Option(help="Only those in this state, as published.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many at most, newest first.")] = 50,
) -> "list[Json]":
    """What you may see, newest first."""
    return list(islice(service.releases(search=search, state=state), limit))


@app.command()
@connected(show_one)
def show(
    service: "Sluice",
    release: Id,
    preview: Annotated[Path | None, typer.Option(help="Also write a picture of some samples here.")] = None,
) -> "Json":
    """One release: state, what it cost, the digest to approve."""
    view = service.release(release).view
    if preview:
        save_bytes(service.preview(view["id"]), preview)
    return view


def show_review(review: "Json") -> None:
    rows = [
        ("release", f"{review['name']}, {review['release']}"),
        ("state, author", f"{review['state'].replace('_', ' ')}, {review['author']}"),
    ]
    for number, job in enumerate([review["job"], *review["earlier"]]):
        before = f"{number} before: " if number else ""
        rows += [
            (f"{before}job", f"{job['id']}, {job['plan']['kind']}, made {when(job['created_at'])}"),
            (f"{before}plan", ", ".join(f"{name} {value}" for name, value in job["plan"].items())),
            (f"{before}epsilon", f"{readings(job['epsilon'])}, cost {job['cost'] / 1e9:.9f}"),
            (f"{before}dataset", _card(job["dataset"])),
        ]
        if job["source"]:
            rows.append((f"{before}public source", _card(job["source"])))
    rows.append(("digest", review["digest"] or "not built yet"))
    if review["state"] == "in_review":
        approve = f"sluice releases approve {review['release']} --digest {review['digest']}"
        rows.append(("to approve it", approve))
    print_fields(*rows)


def _card(dataset: "Json") -> str:
    schema, budget = dataset["schema"], dataset["budget"]
    size = f"{schema['height']} x {schema['width']} x {schema['channels']}"
    shape = f"images of {size} in {len(schema['classes'])} classes"
    public = "declared public, " if dataset["public"] else ""
    return (
        f"{dataset['name']} of {dataset['owner']}: {public}about {dataset['nominal_size']:,} records, "
        f"{shape}; budget epsilon {budget['epsilon']:g} at delta {budget['delta']:g}, "
        f"{dataset['relation'].replace('_', '-')}"
    )


@app.command()
@connected(show_review)
def review(service: "Sluice", release: Id) -> "Json":
    """Where a release comes from: its job, dataset and source, and the digest to approve."""
    return service.review(_found(service, release))


@app.command()
@connected(show_one)
def approve(
    service: "Sluice",
    release: Id,
    digest: Annotated[str, typer.Option(help="Of the bundle you looked at, as `show` prints it.")],
    note: Annotated[str, typer.Option(help="A word to the others.")] = "",
) -> "Json":
    """Say yes to the bundle of this digest; its author cannot."""
    return service.approve(_found(service, release), digest, note)


@app.command()
@connected(show_one, ok=_not_failed)
def rebuild(service: "Sluice", release: Id, detach: Detach = False) -> "Json":
    """Build the bundle anew; approvals of the old one no longer count."""
    made = service.rebuild(_found(service, release))
    return made if detach else _built(service, made["id"])


@app.command()
@connected(show_one)
def discard(service: "Sluice", release: Id) -> "Json":
    """Give up a release that was never published."""
    return service.discard(_found(service, release))


@app.command()
@connected(show_one, ok=_not_failed)
def publish(service: "Sluice", release: Id, detach: Detach = False) -> "Json":
    """Sign an approved bundle and put it where analysts can download it."""
    view = service.publish(_found(service, release))
    return view if detach else service.wait_published(view["id"])


@app.command()
@connected(show_one)
def withdraw(
    service: "Sluice",
    release: Id,
    reason: Annotated[str, typer.Option(help="Why; public, and for ever.")],
    detach: Detach = False,
) -> "Json":
    """Take a release back: links die, the signed list names it. What it cost stays spent."""
    view = service.withdraw(_found(service, release), reason)
    return view if detach else service.wait_published(view["id"])


@app.command()
@connected(
    lambda done: print_fields((("no longer for " if done["removed"] else "now also for ") + done["person"],))
)
def grant(
    service: "Sluice",
    release: Id,
    person: Who,
    remove: Annotated[bool, typer.Option("--remove", help="Take it back instead.")] = False,
) -> "Json":
    """Let somebody have a release that is not for everyone. By name if you are an admin, else by id."""
    id, who = _found(service, release), id_of(service, person)
    (service.remove_reader if remove else service.add_reader)(id, who)
    return {"release": id, "person": who, "removed": remove}


@app.command()
@connected(lambda result: verifying.show_reviewed(result) if "signed" in result else verifying.show(result))
def download(
    service: "Sluice",
    release: Id,
    to: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="By default called as the release is.")
    ] = None,
    review: Annotated[
        bool, typer.Option("--review", help="The bundle under review, for whoever may approve it.")
    ] = False,
) -> "Json":
    """Fetch a published release and verify it. A cut download goes on where it ended.

    With --review: the bundle under review, compared with the digest to approve. It is not signed yet.
    """
    found = service.release(release)
    name = found.view["name"]
    if to is None and ("/" in name or name.startswith(".")):
        raise CannotRun(f"a directory cannot be called {name}: name one")
    with bar("bytes") as update:
        found.download(to or Path(name), review=review, on_progress=partial(update, name))
    from sluice.client.verify import verify_reviewed

    return verify_reviewed(found.directory, found.view["digest"]) if review else found.verify()


@app.command()
def sample(
    directory: Directory,
    to: Annotated[Path, typer.Option("--out", help="File to write: x and y as .npz.")] = Path("samples.npz"),
    count: Annotated[int, typer.Option(min=1, max=10_000_000, help="How many.")] = 1000,
    label: Annotated[str | None, typer.Option(help="Only this class, by name or number.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same samples.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Draw more samples from a downloaded release, on this machine. They cost nothing more."""
    from sluice.client.release import Release

    release = Release(directory)
    made = synthesized(release, count, label, seed)
    try:
        import numpy as np

        with to.open("wb") as file:
            np.savez_compressed(file, x=made.images, y=made.labels)
    except OSError:
        raise CannotRun(f"{to} cannot be written: name another file with --out") from None
    result = {"to": str(to), "count": count, "label": label, "seed": seed}
    (print_json if as_json else lambda one: print_fields((f"{one['count']:,} samples in {one['to']}",)))(
        result
    )


@app.command()
def classify(
    directory: Directory,
    images: Annotated[Path, typer.Argument(metavar="FILE", help="An .npz file with images as x.")],
    to: Annotated[Path, typer.Option("--out", help="File to write, a line for each image.")] = Path(
        "labels.csv"
    ),
    as_json: AsJson = False,
) -> None:
    """Have a downloaded classifier name the class of images, on this machine."""
    from sluice.client.release import Release

    release = Release(directory)
    try:
        import numpy as np

        classifier = release.classifier()
        with np.load(images, allow_pickle=False) as held:
            x = held["x"]
        found = classifier.predict(x if x.ndim == 4 else x[..., None])
        rows = "".join(f"{i},{label},{release.classes[label]}\n" for i, label in enumerate(found))
        to.write_text("image,label_index,label\n" + rows, encoding="utf-8")
    except ImportError as lacking:
        raise CannotRun(f"{lacking.name} is not installed: pip install 'sluice[client]' brings it") from None
    except (OSError, KeyError, ValueError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else problem
        raise CannotRun(f"{images} cannot be classified into {to}: {reason}") from None
    result = {"to": str(to), "images": len(found)}
    (print_json if as_json else lambda one: print_fields((f"{one['images']:,} labels in {one['to']}",)))(
        result
    )


def synthesized(release: Any, count: int, label: str | None, seed: int) -> Any:
    try:
        synthesizer = release.synthesizer()
    except ImportError as lacking:
        raise CannotRun(f"{lacking.name} is not installed: pip install 'sluice[client]' brings it") from None
    except ValueError as problem:
        raise CannotRun(f"this is no synthesizer: {problem}") from None
    classes = release.classes
    if label is not None and label not in classes and not (label.isdigit() and int(label) < len(classes)):
        raise CannotRun(f"there is no class {label}: there are {', '.join(classes)}")
    wanted = None if label is None else classes.index(label) if label in classes else int(label)
    return synthesizer.sample(count, label=wanted, seed=seed)


app.command("verify")(verifying.command)

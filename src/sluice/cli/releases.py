"""`sluice releases`: create, review, publish, withdraw; for analysts find, download, verify, sample."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from sluice.cli import verify as verifying
from sluice.cli.connection import (
    AsJson,
    Limit,
    bar,
    connected,
    output,
    print_fields,
    print_result,
    save_bytes,
    size,
    table_of,
    when,
)
from sluice.cli.jobs import readings
from sluice.cli.keys import Who, id_of
from sluice.client.problems import CannotRun

if TYPE_CHECKING:
    from sluice.client.api import Json, Sluice

app = typer.Typer(
    no_args_is_help=True, help="Releases: create, review, publish, withdraw; find, download, sample."
)


class AudienceName(StrEnum):
    GRANTED = "granted"
    EVERYONE = "everyone"


class FormatName(StrEnum):
    PARQUET = "parquet"
    NPZ = "npz"
    PNG = "png"


Id = Annotated[str, Argument(metavar="RELEASE", help="Id or name of a release.")]
Detach = Annotated[bool, Option("--detach", help="Do not wait until it is done.")]
Directory = Annotated[Path, Argument(metavar="DIR", help="Directory a release was downloaded to.")]


def show_one(release: "Json") -> None:
    at = release["progress"]
    rows = [
        ("release", release["id"]),
        ("name", release["name"]),
        ("state", _state(release)),
        ("samples", f"{at['done']:,} of {at['count']:,}, seed {release['seed']}")
        if release["kind"] == "images"
        else ("classifier", "no samples"),
        ("licence", release["licence"]),
        ("for", "everyone" if release["audience"] == "everyone" else "people it is granted to"),
    ]
    rows += verifying.protection(release["owners"], release["together"])
    if release["digest"]:
        total = sum(file["size"] for file in release["files"])
        rows.append(("files", f"{len(release['files'])}, {size(total)}"))
        rows.append(("digest", release["digest"]))
        count = sum(approval["digest"] == release["digest"] for approval in release["approvals"])
        rows.append(("approved by", f"{count} of {release['reviewers'] - 1 or 1}" if count else "nobody yet"))
    if release["state"] == "in_review":
        rows.append(("to review it", f"sluice releases review {release['id']}"))
        rows.append(("to get its files", f"sluice releases download {release['id']} DIR --review"))
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
                f"owner {i}: {readings(owner['epsilon'])} at {owner['delta']:g}"
                for i, owner in enumerate(owners, 1)
            )
        by_renyi = owners[0]["epsilon"]["renyi"] if owners else None
        return "" if by_renyi is None else f"{by_renyi:.4f}"

    table_of({
        "release": "id", "name": "name", "state": _state,
        "samples": lambda release: f"{release['count']:,}",
        "epsilon": lambda release: epsilon(release["owners"]),
        "created": lambda release: when(release["created_at"]),
    })(releases)  # fmt: skip
    if any(release["together"] for release in releases):
        output().print(
            "A person whose records are with several owners is covered by the sum of their epsilons."
        )


def _not_failed(release: "Json") -> bool:
    return bool(release["state"] != "failed")


def _release_id(service: "Sluice", release: str) -> str:
    return str(service.release(release).view["id"])


def _built(service: "Sluice", id: str) -> "Json":
    with bar("samples") as update:
        return service.wait_built(
            id, lambda view: update(_state(view), view["progress"]["done"], view["progress"]["count"])
        )


@app.command()
@connected(show_one, ok=_not_failed)
def create(
    service: "Sluice",
    job: Annotated[str, Argument(metavar="JOB", help="Id of a trained job of yours.")],
    name: Annotated[str, Option(help="Name of the release; public.")],
    note: Annotated[str, Option(help="Description; public.")] = "",
    licence: Annotated[str, Option(help="Licence.")] = "CC-BY-4.0",
    count: Annotated[int | None, Option(help="Number of samples, 10,000 by default; no extra cost.")] = None,
    seed: Annotated[int | None, Option(help="Seed of the samples; public. Random by default.")] = None,
    format: Annotated[
        list[FormatName] | None, Option(help="May be repeated; parquet and npz by default.")
    ] = None,
    audience: Annotated[AudienceName, Option(help="Who may download it.")] = AudienceName.GRANTED,
    supersedes: Annotated[str | None, Option(help="Id or name of the release it replaces.")] = None,
    detach: Detach = False,
) -> "Json":
    """Build a bundle from a trained job for review: samples, synthesizer and privacy statement."""
    body = {
        "job": job, "name": name, "note": note, "licence": licence, "audience": audience.value,
        "supersedes": _release_id(service, supersedes) if supersedes else None,
    }  # fmt: skip
    # A classifier has no samples: options that are not given are left to the service.
    sample = {"count": count, "seed": seed, "formats": [name.value for name in format or ()] or None}
    made = service.create_release(body | {name: value for name, value in sample.items() if value is not None})
    return made if detach else _built(service, made["id"])


@app.command("list")
@connected(show_many)
def list_releases(
    service: "Sluice",
    search: Annotated[str | None, Option(help="Words in name or note.")] = None,
    state: Annotated[str | None, Option(help="Only releases in this state, such as published.")] = None,
    limit: Limit = 50,
) -> "list[Json]":
    """List the releases you may see, newest first."""
    return list(islice(service.releases(search=search, state=state), limit))


@app.command()
@connected(show_one)
def show(
    service: "Sluice",
    release: Id,
    preview: Annotated[Path | None, Option(help="File for a picture of some samples.")] = None,
) -> "Json":
    """Show one release: state, cost, the digest to approve."""
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
        before = f"earlier job {number}: " if number else ""
        rows += [
            (f"{before}job", f"{job['id']}, {job['plan']['kind']}, created {when(job['created_at'])}"),
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
    """Show what a release was made from: job, dataset and source, and the digest to approve."""
    return service.review(_release_id(service, release))


@app.command()
@connected(show_one)
def approve(
    service: "Sluice",
    release: Id,
    digest: Annotated[str, Option(help="Digest of the bundle you reviewed, as `show` prints it.")],
    note: Annotated[str, Option(help="Comment shown to other reviewers.")] = "",
) -> "Json":
    """Approve the bundle with this digest; its author cannot."""
    return service.approve(_release_id(service, release), digest, note)


@app.command()
@connected(show_one, ok=_not_failed)
def rebuild(service: "Sluice", release: Id, detach: Detach = False) -> "Json":
    """Build the bundle again; approvals of the old one no longer count."""
    made = service.rebuild(_release_id(service, release))
    return made if detach else _built(service, made["id"])


@app.command()
@connected(show_one)
def discard(service: "Sluice", release: Id) -> "Json":
    """Discard a release that was never published."""
    return service.discard(_release_id(service, release))


@app.command()
@connected(show_one, ok=_not_failed)
def publish(service: "Sluice", release: Id, detach: Detach = False) -> "Json":
    """Sign an approved bundle and publish it for download."""
    view = service.publish(_release_id(service, release))
    return view if detach else service.wait_published(view["id"])


@app.command()
@connected(show_one)
def withdraw(
    service: "Sluice",
    release: Id,
    reason: Annotated[str, Option(help="Reason; public and permanent.")],
    detach: Detach = False,
) -> "Json":
    """Withdraw a release: its files are removed and the signed list names it. Its cost stays charged."""
    view = service.withdraw(_release_id(service, release), reason)
    return view if detach else service.wait_published(view["id"])


@app.command()
@connected(
    lambda done: print_fields((("revoked from " if done["removed"] else "granted to ") + done["person"],))
)
def grant(
    service: "Sluice",
    release: Id,
    person: Who,
    remove: Annotated[bool, Option("--remove", help="Revoke the grant instead.")] = False,
) -> "Json":
    """Grant a person access to a release that is not for everyone. Names work for admins, ids for all."""
    id, who = _release_id(service, release), id_of(service, person)
    (service.remove_reader if remove else service.add_reader)(id, who)
    return {"release": id, "person": who, "removed": remove}


@app.command()
@connected(lambda result: verifying.show_reviewed(result) if "signed" in result else verifying.show(result))
def download(
    service: "Sluice",
    release: Id,
    to: Annotated[Path | None, Argument(metavar="DIR", help="Default: the name of the release.")] = None,
    review: Annotated[bool, Option("--review", help="Download the bundle under review.")] = False,
) -> "Json":
    """Download a published release and verify it. An interrupted download is resumed.

    With --review: download the bundle under review, which is not signed yet, and compare it with the digest
    to approve.
    """
    remote = service.release(release)
    name = remote.view["name"]
    if to is None and ("/" in name or name.startswith(".")):
        raise CannotRun(f"a directory cannot be called {name}: name another one")
    with bar("bytes") as update:
        remote.download(to or Path(name), review=review, on_progress=partial(update, name))
    from sluice.client.verify import verify_reviewed

    return verify_reviewed(remote.directory, remote.view["digest"]) if review else remote.verify()


@contextmanager
def needs_client_extra() -> Iterator[None]:
    try:
        yield
    except ImportError as missing:
        raise CannotRun(f"{missing.name} is not installed: run pip install 'sluice[client]'") from None


@app.command()
def sample(
    directory: Directory,
    to: Annotated[Path, Option("--out", help="File to write: x and y as .npz.")] = Path("samples.npz"),
    count: Annotated[int, Option(min=1, max=10_000_000, help="Number of samples.")] = 1000,
    label: Annotated[str | None, Option(help="Sample only this class, by name or number.")] = None,
    seed: Annotated[int, Option(min=0, help="The same seed gives the same samples.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Generate more samples from a downloaded release, on this machine. They cost no epsilon."""
    from sluice.client.release import Release

    release = Release(directory)
    with needs_client_extra():
        import numpy as np

        try:
            synthesizer = release.synthesizer()
        except ValueError as problem:
            raise CannotRun(f"this is not a synthesizer: {problem}") from None
    classes = release.classes
    if label is not None and label not in classes and not (label.isdigit() and int(label) < len(classes)):
        raise CannotRun(f"there is no class {label}: there are {', '.join(classes)}")
    index = None if label is None else classes.index(label) if label in classes else int(label)
    samples = synthesizer.sample(count, label=index, seed=seed)
    try:
        with to.open("wb") as file:
            np.savez_compressed(file, x=samples.images, y=samples.labels)
    except OSError:
        raise CannotRun(f"{to} cannot be written: name another file with --out") from None
    result = {"to": str(to), "count": count, "label": label, "seed": seed}
    print_result(result, as_json, lambda _: print_fields((f"{count:,} samples in {to}",)))


@app.command()
def classify(
    directory: Directory,
    images: Annotated[Path, Argument(metavar="FILE", help="An .npz file with images as x.")],
    to: Annotated[Path, Option("--out", help="File to write, one line per image.")] = Path("labels.csv"),
    as_json: AsJson = False,
) -> None:
    """Classify images with a downloaded classifier, on this machine."""
    from sluice.client.release import Release

    release = Release(directory)
    try:
        with needs_client_extra():
            import numpy as np

            classifier = release.classifier()
        with np.load(images, allow_pickle=False) as arrays:
            x = arrays["x"]
        labels = classifier.predict(x if x.ndim == 4 else x[..., None])
        rows = "".join(f"{i},{label},{release.classes[label]}\n" for i, label in enumerate(labels))
        to.write_text("image,label_index,label\n" + rows, encoding="utf-8")
    except (OSError, KeyError, ValueError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else problem
        raise CannotRun(f"{images} cannot be classified into {to}: {reason}") from None
    result = {"to": str(to), "images": len(labels)}
    print_result(result, as_json, lambda _: print_fields((f"{len(labels):,} labels in {to}",)))


app.command("verify")(verifying.command)

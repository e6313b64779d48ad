"""`sluice datasets`: declare private data, upload it, see what became of it."""

import json
import sys
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sluice.cli.connection import bar, connected, output, print_fields, print_table
from sluice.cli.quote import RelationName, image_size
from sluice.client.problems import CannotRun
from sluice.client.terminal import inert

if TYPE_CHECKING:
    from sluice.client.api import Json, Sluice

app = typer.Typer(no_args_is_help=True, help="Private datasets: declare, upload, look at.")

Id = Annotated[str, typer.Argument(metavar="DATASET", help="Id of a dataset.")]
File = Annotated[Path, typer.Argument(help="The file with the records: npz, zip, IDX gz, CSV or Parquet.")]
Most = Annotated[int, typer.Option("--limit", min=1, help="How many at most, newest first.")]
Detach = Annotated[bool, typer.Option("--detach", help="Do not wait until the file is checked.")]


def show_one(dataset: "Json") -> None:
    budget = dataset["budget"]
    rows = [
        ("dataset", dataset["id"]),
        ("name", dataset["name"]),
        ("state", _state(dataset)),
        ("records", f"about {dataset['nominal_size']:,}"),
        ("schema", _in_words(dataset["schema"])),
        ("budget", _terms(budget)),
        *([("declared", f"{_terms(dataset['declared'])}: not in force")] if dataset["declared"] else []),
        *([("shared", "other datasets draw on the same budget")] if dataset["shared"] else []),
        ("relation", dataset["relation"].replace("_", "-")),
        *([("public", "can be a public source of jobs")] if dataset["public"] else []),
        ("account", dataset["account"] or "known once its records were read"),
        *(
            [("held because of", ", ".join(map(_CAUSES.__getitem__, dataset["causes"])))]
            if dataset["causes"]
            else []
        ),
        *([("deleted because", dataset["deletion_reason"])] if dataset["deletion_reason"] else []),
        *(("shares records with", _match(match)) for match in dataset["matches"]),
        *(
            [("review", f"{dataset['review']['decision']}: {dataset['review']['reason']}")]
            if dataset["review"]
            else []
        ),
    ]
    print_fields(*rows, *([("for you alone", json.dumps(dataset["report"]))] if dataset["report"] else []))


_CAUSES = {
    "budget": "its budget is above the site's caps",
    "public": "it is declared public",
    "few": "it has very few records",
    "overlap": "it shares records with other datasets",
}


def _terms(budget: "Json") -> str:
    return f"epsilon {budget['epsilon']:g}, delta {budget['delta']:g}, order {budget['order']}"


def _match(match: "Json") -> str:
    where = f"account {match['account']}" if match["account"] else f"dataset {match['dataset']}"
    return f"{where} ({match['share']} of the smaller one)"


def _state(dataset: "Json") -> str:
    if dataset["state"] == "held":
        return "held for review: an admin decides about it"
    if dataset["state"] == "deleted":
        removed = dataset["removed_at"]
        return "deleted, " + (f"bytes removed {removed}" if removed else "bytes about to be removed")
    return str(dataset["state"]) + (f": {dataset['fault']}" if dataset["fault"] else "")


def show_many(datasets: "list[Json]") -> None:
    def row(one: "Json") -> tuple[str, ...]:
        budget = one["budget"]
        numbers = f"{one['nominal_size']:,}", f"{budget['epsilon']:g}", f"{budget['delta']:g}"
        return one["id"], one["name"], _state(one), *numbers

    print_table("dataset", "name", "state", "records", "epsilon", "delta", rows=map(row, datasets))


def _in_words(schema: "Json") -> str:
    if schema["kind"] == "image":
        shape = "×".join(str(schema[name]) for name in ("height", "width", "channels"))
        return f"images {shape}, {len(schema['classes'])} classes"
    return f"table of {len(schema['columns'])} columns"


def _not_rejected(dataset: "Json") -> bool:
    return bool(dataset["state"] != "rejected")


@app.command()
@connected(show_one, ok=_not_rejected)
def add(
    service: "Sluice",
    file: File,
    name: Annotated[str, typer.Option(help="What to call it.")],
    records: Annotated[int, typer.Option(help="Roughly how many records. Public: do not count them.")],
    epsilon: Annotated[float, typer.Option(help="Budget of the people in the data.")],
    delta: Annotated[float, typer.Option(help="Delta of the budget, e.g. 1e-5.")],
    schema: Annotated[
        Path | None,
        typer.Option(help="JSON file that declares columns with bounds and categories, or images."),
    ] = None,
    image: Annotated[
        str | None, typer.Option(help="Instead of --schema: HEIGHTxWIDTH or HEIGHTxWIDTHx3.")
    ] = None,
    classes: Annotated[
        str | None, typer.Option(help="With --image: names of the classes, by commas.")
    ] = None,
    relation: Annotated[RelationName, typer.Option(help="Neighbouring relation.")] = RelationName.ADD_REMOVE,
    order: Annotated[
        int | None, typer.Option(help="Rényi order of the account; chosen if not given.")
    ] = None,
    parent: Annotated[
        str | None, typer.Option(help="A dataset with the same people in it; they share its budget.")
    ] = None,
    public: Annotated[
        bool,
        typer.Option("--public", help="These records are public, and can be the source of jobs."),
    ] = False,
    detach: Detach = False,
) -> "Json":
    """Declare a dataset, upload its file, seal it, and wait for the check."""
    body = {
        "name": name,
        "schema": _schema(schema, image, classes),
        "nominal_size": records,
        "relation": relation.replace("-", "_"),
        "budget": {"epsilon": epsilon, "delta": delta, "order": order},
        "parent": parent,
        "public": public,
    }
    if not file.is_file():
        raise CannotRun(f"{file} is not a file: name the one with the records")
    id = service.register(body)["id"]
    more = f"a cut upload goes on with: sluice datasets upload {id} {file}"
    print(inert(f"dataset {id}; {more}", lines=False), file=sys.stderr)
    return _send(service, id, file, detach)


@app.command()
@connected(show_one, ok=_not_rejected)
def upload(service: "Sluice", id: Id, file: File, detach: Detach = False) -> "Json":
    """Go on with an upload that was cut: only the parts that did not arrive are sent."""
    return _send(service, id, file, detach)


@app.command("list")
@connected(show_many)
def list_datasets(
    service: "Sluice",
    state: Annotated[str | None, typer.Option(help="Only those in this state, as held.")] = None,
    limit: Most = 50,
) -> "list[Json]":
    """Your datasets, newest first; an admin sees all."""
    return list(islice(service.datasets(state=state), limit))


@app.command()
@connected(show_one, ok=_not_rejected)
def review(
    service: "Sluice",
    id: Id,
    reason: Annotated[str, typer.Option(help="Why; kept for ever, and shown to the owner.")],
    accept: Annotated[bool, typer.Option("--accept", help="Other people: a budget of its own.")] = False,
    join: Annotated[str | None, typer.Option(help="The same people: the account to draw on.")] = None,
    reject: Annotated[bool, typer.Option("--reject", help="It cannot be used.")] = False,
) -> "Json":
    """Decide about a dataset that is held (admins). `datasets list --state held` shows those that wait."""
    if accept + reject + (join is not None) != 1:
        raise CannotRun("say what you decide: one of --accept, --join ACCOUNT and --reject")
    decision = "accept" if accept else "reject" if reject else "join"
    service.review_dataset(id, decision, reason=reason, account=join)
    return service.dataset(id) if reject else service.wait_checked(id)


@app.command()
@connected(show_one)
def show(service: "Sluice", id: Id) -> "Json":
    """One dataset: what was declared, its state, its account."""
    return service.dataset(id)


def show_deleted(dataset: "Json") -> None:
    id, at = dataset["id"], dataset["removed_at"]
    if at:
        said = f"{id} is deleted; the store has had no byte of it since {at}"
    else:
        said = (
            f"{id} is deleted; its bytes are removed by a train worker: sluice datasets show {id} says when"
        )
    output().print(f"{said}. What was spent on it stays spent.", soft_wrap=True)


@app.command()
@connected(show_deleted)
def delete(
    service: "Sluice",
    id: Id,
    reason: Annotated[
        str | None, typer.Option(help="Why. Admins have to say it; the owner is shown it.")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Do not wait until its bytes are gone.")] = False,
) -> "Json":
    """Delete a dataset and its file, and wait a minute until the store has no byte of it.

    The budget of the people in it stays as it is.
    """
    deleted = service.delete_dataset(id, reason=reason)
    return deleted if detach or deleted["removed_at"] else service.wait_removed(id)


def _send(service: "Sluice", id: str, file: Path, detach: bool) -> "Json":
    from sluice.client.upload import upload

    total = file.stat().st_size if file.is_file() else 0
    with bar("bytes") as update:
        sealed = upload(service, id, file, on_progress=lambda done: update(file.name, done, total))
    if detach:
        return sealed
    with output(stderr=True).status("the private side checks the file"):
        return service.wait_checked(id)


def _schema(file: Path | None, image: str | None, classes: str | None) -> Any:
    if file is not None and image is None and classes is None:
        return read_json(file)
    size = image_size(image or "")
    if file is not None or size is None or classes is None:
        raise CannotRun("declare the data either by --schema FILE, or by --image 28x28 and --classes cat,dog")
    return {
        "kind": "image",
        "height": size[0],
        "width": size[1],
        "channels": size[2],
        "classes": [each.strip() for each in classes.split(",")],
    }


def read_json(file: Path) -> Any:
    """The JSON in a file, or of standard input for -."""
    try:
        return json.loads(sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8"))
    except OSError:
        raise CannotRun(f"{file} cannot be read: name a JSON file") from None
    except ValueError:
        raise CannotRun(f"{file} is not JSON: docs/api.md shows how it should look") from None

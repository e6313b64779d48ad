"""`sluice datasets`: declare private data, upload it, show its state."""

import json
import sys
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from sluice.cli.connection import Limit, bar, connected, output, print_fields, table_of
from sluice.cli.quote import RelationName, image_size
from sluice.client.problems import CannotRun
from sluice.client.terminal import inert

if TYPE_CHECKING:
    from sluice.client.api import Json, Sluice

app = typer.Typer(no_args_is_help=True, help="Private datasets: declare, upload, show, delete.")

Id = Annotated[str, Argument(metavar="DATASET", help="Id of a dataset.")]
File = Annotated[Path, Argument(help="File with the records: npz, zip, IDX gz, CSV or Parquet.")]
Detach = Annotated[bool, Option("--detach", help="Do not wait until the file is checked.")]


def show_one(dataset: "Json") -> None:
    fields: list[tuple[str, str | None]] = [
        ("dataset", dataset["id"]),
        ("name", dataset["name"]),
        ("state", _state(dataset)),
        ("records", f"about {dataset['nominal_size']:,}"),
        ("schema", _in_words(dataset["schema"])),
        ("budget", _terms(dataset["budget"])),
        ("declared", dataset["declared"] and f"{_terms(dataset['declared'])}: not in force"),
        ("shared", dataset["shared"] and "other datasets are charged to the same account"),
        ("relation", dataset["relation"].replace("_", "-")),
        ("public", dataset["public"] and "can be the public source of jobs"),
        ("account", dataset["account"] or "assigned once its records were read"),
        ("held because", ", ".join(_CAUSES[cause] for cause in dataset["causes"])),
        ("deleted because", dataset["deletion_reason"]),
        *(("shares records with", _match(match)) for match in dataset["matches"]),
        ("review", dataset["review"] and f"{dataset['review']['decision']}: {dataset['review']['reason']}"),
        ("for the owner only", dataset["report"] and json.dumps(dataset["report"])),
    ]
    print_fields(*((name, value) for name, value in fields if value))


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


show_many = table_of({
    "dataset": "id", "name": "name", "state": _state,
    "records": lambda dataset: f"{dataset['nominal_size']:,}",
    "epsilon": lambda dataset: f"{dataset['budget']['epsilon']:g}",
    "delta": lambda dataset: f"{dataset['budget']['delta']:g}",
})  # fmt: skip


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
    name: Annotated[str, Option(help="Name of the dataset.")],
    records: Annotated[
        int,
        Option(help="Approximate record count. It is published: give a round figure, not the exact count."),
    ],
    epsilon: Annotated[float, Option(help="Epsilon of the budget.")],
    delta: Annotated[float, Option(help="Delta of the budget, e.g. 1e-5.")],
    schema: Annotated[Path | None, Option(help="JSON file that declares columns or images.")] = None,
    image: Annotated[str | None, Option(help="Instead of --schema: HEIGHTxWIDTH or HEIGHTxWIDTHx3.")] = None,
    classes: Annotated[str | None, Option(help="With --image: class names, separated by commas.")] = None,
    relation: Annotated[RelationName, Option(help="Neighbouring relation.")] = RelationName.ADD_REMOVE,
    order: Annotated[int | None, Option(help="Rényi order of the account; automatic by default.")] = None,
    parent: Annotated[str | None, Option(help="Dataset with the same people, to share its budget.")] = None,
    public: Annotated[
        bool, Option("--public", help="The records are public: jobs may use them as source.")
    ] = False,
    detach: Detach = False,
) -> "Json":
    """Declare a dataset, upload its file, seal it, and wait until it is checked."""
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
    advice = f"resume an interrupted upload with: sluice datasets upload {id} {file}"
    print(inert(f"dataset {id}; {advice}", lines=False), file=sys.stderr)
    return _send(service, id, file, detach)


@app.command()
@connected(show_one, ok=_not_rejected)
def upload(service: "Sluice", id: Id, file: File, detach: Detach = False) -> "Json":
    """Resume an interrupted upload: only the parts that did not arrive are sent."""
    return _send(service, id, file, detach)


@app.command("list")
@connected(show_many)
def list_datasets(
    service: "Sluice",
    state: Annotated[str | None, Option(help="Only datasets in this state, such as held.")] = None,
    limit: Limit = 50,
) -> "list[Json]":
    """List your datasets, newest first; an admin sees all."""
    return list(islice(service.datasets(state=state), limit))


@app.command()
@connected(show_one, ok=_not_rejected)
def review(
    service: "Sluice",
    id: Id,
    reason: Annotated[str, Option(help="Reason; stored permanently and shown to the owner.")],
    accept: Annotated[bool, Option("--accept", help="Other people: a budget of its own.")] = False,
    join: Annotated[
        str | None, Option(metavar="ACCOUNT", help="The same people: the account to charge.")
    ] = None,
    reject: Annotated[bool, Option("--reject", help="Refuse the dataset.")] = False,
) -> "Json":
    """Decide about a held dataset (admins). `sluice datasets list --state held` lists them."""
    if accept + reject + (join is not None) != 1:
        raise CannotRun("give one of --accept, --join ACCOUNT and --reject")
    decision = "accept" if accept else "reject" if reject else "join"
    service.review_dataset(id, decision, reason=reason, account=join)
    return service.dataset(id) if reject else service.wait_checked(id)


@app.command()
@connected(show_one)
def show(service: "Sluice", id: Id) -> "Json":
    """Show one dataset: what was declared, its state, its account."""
    return service.dataset(id)


def show_deleted(dataset: "Json") -> None:
    id, at = dataset["id"], dataset["removed_at"]
    if at:
        text = f"{id} is deleted; its bytes were removed from the store at {at}"
    else:
        text = f"{id} is deleted; a train worker removes its bytes: sluice datasets show {id} says when"
    output().print(f"{text}. Its budget stays charged.", soft_wrap=True)


@app.command()
@connected(show_deleted)
def delete(
    service: "Sluice",
    id: Id,
    reason: Annotated[str | None, Option(help="Reason; required from admins, shown to the owner.")] = None,
    detach: Annotated[bool, Option("--detach", help="Do not wait for the removal.")] = False,
) -> "Json":
    """Delete a dataset and its file, and wait up to a minute until its bytes are removed.

    Its budget does not change.
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
    with output(stderr=True).status("a train worker checks the file"):
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
        "classes": [name.strip() for name in classes.split(",")],
    }


def read_json(file: Path) -> Any:
    """Reads JSON from a file, or from standard input for -."""
    try:
        return json.loads(sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8"))
    except OSError:
        raise CannotRun(f"{file} cannot be read: name a JSON file") from None
    except ValueError:
        raise CannotRun(f"{file} is not JSON: docs/api.md shows the format") from None

"""The baseline revision makes the schema that the ten revisions before it made.

`schema.json` was written by commit 3f98980, from a database that revisions 0001 to 0010 had migrated.
"""

import json
import uuid
from pathlib import Path

import psycopg
from alembic import command
from alembic.config import Config

import migrations
from core.database import connect
from tests.golden.schema import snapshot


def test_the_baseline_equals_the_revisions_it_replaces(servers):
    name, server = f"t_{uuid.uuid4().hex}", servers.owner_url.rsplit("/", 1)[0]
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    with psycopg.connect(f"{server}/postgres", autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name}")
        try:
            engine = connect(f"{server}/{name}")
            with engine.begin() as connection:
                config.attributes["connection"] = connection
                command.upgrade(config, migrations.BASELINE)
            engine.dispose()
            with psycopg.connect(f"{server}/{name}") as owner:
                made = snapshot(owner)
        finally:
            admin.execute(f"DROP DATABASE {name} WITH (FORCE)")
    for kind, before in json.loads((Path(__file__).parent / "schema.json").read_text()).items():
        assert made[kind] == before, kind

"""Alembic's entry: runs migrations on the connection that migrations.migrate hands over."""

from alembic import context

from core.tables import Base

context.configure(connection=context.config.attributes["connection"], target_metadata=Base.metadata)
with context.begin_transaction():
    context.run_migrations()

"""What service and worker share: settings per role, tables, stores, queue, errors, logs."""

"""Structured logs: constant event names, ids as fields, one JSON object per line."""

import logging
import sys

import structlog


def configure(role: str) -> None:
    """Writes our lines and those of libraries to standard error, in the same format."""

    def add_role(_logger: object, _name: str, line: structlog.typing.EventDict) -> structlog.typing.EventDict:
        return {"role": role, **line}

    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        add_role,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        cache_logger_on_first_use=True,
    )
    # No ExceptionRenderer with locals: a local may hold a record.
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("sluice").setLevel(logging.INFO)


def get(name: str) -> structlog.typing.FilteringBoundLogger:
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(f"sluice.{name}")
    return logger

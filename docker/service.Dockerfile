# The HTTP service, and the migrations: no torch, no worker code, no compiler, not root.
#   docker build -f docker/service.Dockerfile -t sluice-service .
FROM python:3.12-slim@sha256:78387bc3881b8273120a12ebe6c1ab22b018ccc2c9adf565ae1ac9b536e184ea AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/sluice
WORKDIR /src
# Only files with a locked hash are installed, without resolving; only our own code is built.
COPY locks/service.txt ./
RUN /opt/sluice/bin/pip install --require-hashes --no-deps --only-binary :all: -r service.txt
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN /opt/sluice/bin/pip install --no-deps --no-build-isolation . \
    && /opt/sluice/bin/pip check \
    && /opt/sluice/bin/pip uninstall --yes pip setuptools

FROM python:3.12-slim@sha256:78387bc3881b8273120a12ebe6c1ab22b018ccc2c9adf565ae1ac9b536e184ea
RUN groupadd --gid 10001 sluice \
    && useradd --uid 10001 --gid sluice --no-create-home --shell /usr/sbin/nologin sluice
COPY --from=build /opt/sluice /opt/sluice
COPY core /opt/sluice/server/core
COPY migrations /opt/sluice/server/migrations
COPY service /opt/sluice/server/service
# PYTHONSAFEPATH: modules are never imported from the working directory. The server packages have their own directory.
ENV PATH=/opt/sluice/bin:$PATH PYTHONPATH=/opt/sluice/server PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
WORKDIR /opt/sluice
USER 10001:10001
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s \
    CMD ["python", "-m", "core.probe", "8000"]
CMD ["python", "-m", "service", "--host", "0.0.0.0", "--port", "8000"]

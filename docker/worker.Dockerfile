# The train and publish workers and the sweeper: one image, three commands, not root.
#   docker build -f docker/worker.Dockerfile -t sluice-worker:cuda .
#   docker build -f docker/worker.Dockerfile -t sluice-worker:cpu --build-arg TORCH=cpu .
#
# A plain Python base for both: torch's CUDA wheels bring the CUDA libraries they were built with, and the
# driver comes from the host, so an nvidia/cuda base would only add a second, unused copy of those libraries.
FROM python:3.12-slim AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/sluice
WORKDIR /src
COPY constraints.txt ./
ARG TORCH=cuda
# torch first and alone, so that what follows keeps this build and a change of our code does not fetch it again.
RUN case "$TORCH" in \
        cuda) /opt/sluice/bin/pip install -c constraints.txt torch ;; \
        cpu) /opt/sluice/bin/pip install -c constraints.txt --no-deps \
            --index-url https://download.pytorch.org/whl/cpu torch ;; \
        *) echo "TORCH is cuda or cpu, not $TORCH" >&2; exit 1 ;; \
    esac
COPY pyproject.toml README.md LICENSE ./
COPY privacy privacy
COPY core core
COPY worker worker
RUN /opt/sluice/bin/pip install -c constraints.txt ".[worker]" \
    && /opt/sluice/bin/pip uninstall --yes pip

FROM python:3.12-slim
RUN groupadd --gid 10001 sluice \
    && useradd --uid 10001 --gid sluice --no-create-home --shell /usr/sbin/nologin sluice
COPY --from=build /opt/sluice /opt/sluice
COPY docker/alive.py /opt/sluice/alive.py
# Safe path: a module is never taken from the working directory. USER: torch asks for a name, and the container
# may run under a uid that has none. NVIDIA_…: what the container toolkit mounts from the host's driver.
ENV PATH=/opt/sluice/bin:$PATH PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp \
    USER=sluice NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /opt/sluice
USER 10001:10001
# No default that would fit every role: name one of worker.train, worker.publish, worker.sweep.
CMD ["python", "-c", "raise SystemExit('say which: python -m worker.train, worker.publish or worker.sweep')"]

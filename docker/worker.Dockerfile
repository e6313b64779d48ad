# The train and publish workers and the sweeper: one image, three commands, not root.
#   docker build -f docker/worker.Dockerfile -t sluice-worker:cuda .
#   docker build -f docker/worker.Dockerfile -t sluice-worker:cpu --build-arg TORCH=cpu .
#
# A plain Python base for both: torch's CUDA wheels bring the CUDA libraries they were built with, and the
# driver comes from the host, so an nvidia/cuda base would only add a second, unused copy of those libraries.
FROM python:3.12-slim@sha256:78387bc3881b8273120a12ebe6c1ab22b018ccc2c9adf565ae1ac9b536e184ea AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/sluice
WORKDIR /src
# Only files with a locked hash are installed, without resolving; only our own code is built. torch is installed
# first and alone, so that a change of the other lock does not download it again.
COPY locks/torch.txt locks/torch-cpu.txt ./
ARG TORCH=cuda
RUN case "$TORCH" in \
        cuda) /opt/sluice/bin/pip install --require-hashes --no-deps --only-binary :all: -r torch.txt ;; \
        cpu) /opt/sluice/bin/pip install --require-hashes --no-deps --only-binary :all: \
            --index-url https://download.pytorch.org/whl/cpu -r torch-cpu.txt ;; \
        *) echo "TORCH is cuda or cpu, not $TORCH" >&2; exit 1 ;; \
    esac
COPY locks/worker.txt ./
RUN /opt/sluice/bin/pip install --require-hashes --no-deps --only-binary :all: -r worker.txt
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN /opt/sluice/bin/pip install --no-deps --no-build-isolation . \
    && /opt/sluice/bin/pip check \
    && /opt/sluice/bin/pip uninstall --yes pip

FROM python:3.12-slim@sha256:78387bc3881b8273120a12ebe6c1ab22b018ccc2c9adf565ae1ac9b536e184ea
RUN groupadd --gid 10001 sluice \
    && useradd --uid 10001 --gid sluice --no-create-home --shell /usr/sbin/nologin sluice
COPY --from=build /opt/sluice /opt/sluice
COPY core /opt/sluice/server/core
COPY worker /opt/sluice/server/worker
COPY docker/alive.py /opt/sluice/alive.py
# PYTHONSAFEPATH: modules are never imported from the working directory. The server packages have their own directory.
# USER: torch asks for a user name, and the container may run under a uid without one. NVIDIA_…: which parts of the
# host's driver the container toolkit mounts.
ENV PATH=/opt/sluice/bin:$PATH PYTHONPATH=/opt/sluice/server PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp \
    USER=sluice NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /opt/sluice
USER 10001:10001
# There is no default role.
CMD ["python", "-c", "raise SystemExit('choose a command: python -m worker.train, worker.publish or worker.sweep')"]

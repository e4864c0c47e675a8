# Training with gradtap: torch, Accelerate and DeepSpeed; records the demo's training unless told otherwise.
#
#   docker build -f docker/train.Dockerfile -t gradtap-train .
#   docker run --rm -v gradtap-runs:/data gradtap-train
#
# BASE_IMAGE is a python image, a plain Debian, or one with torch (such as pytorch/pytorch, its torch is then used), with
# Python 3.11 or newer. Settings of pip come from outside, as in server.Dockerfile: --secret id=pip, --secret id=ca.
ARG BASE_IMAGE=python:3.12-slim-bookworm

FROM ${BASE_IMAGE} AS python
USER root
RUN set -eu; \
    if ! command -v python3 >/dev/null; then \
        apt-get update; \
        apt-get install -y --no-install-recommends python3; \
        rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/cache/debconf/*-old /var/log/apt /var/log/dpkg.log; \
    fi; \
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 11) and "gradtap needs Python 3.11 or newer: give another BASE_IMAGE")'; \
    useradd --uid 10001 --user-group --create-home gradtap; \
    mkdir -p /data; \
    chown gradtap:gradtap /data

FROM python AS build
RUN set -eu; \
    if ! python3 -c 'import ensurepip' 2>/dev/null; then \
        apt-get update; \
        apt-get install -y --no-install-recommends python3-venv; \
    fi; \
    python3 -m venv --system-site-packages /opt/gradtap
WORKDIR /src
COPY pyproject.toml README.md ./
COPY tests/constraints.txt tests/
COPY gradtap gradtap
COPY server server
# The versions the tests are run with; what the base image brings of torch is not replaced.
RUN --mount=type=secret,id=pip --mount=type=secret,id=ca \
    set -eu; \
    export PIP_CONFIG_FILE=/run/secrets/pip PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1; \
    if python3 -c 'import torch' 2>/dev/null; then set -- sed '/^torch==/d'; else set -- cat; fi; \
    "$@" tests/constraints.txt >constraints.txt; \
    /opt/gradtap/bin/pip install --constraint constraints.txt '.[demo]'

FROM python
COPY --from=build /opt/gradtap /opt/gradtap
ENV PATH=/opt/gradtap/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 HOME=/home/gradtap
RUN gradtap --version && python -c 'import gradtap.tap, torch, accelerate'
LABEL org.opencontainers.image.title="gradtap training" \
      org.opencontainers.image.description="Trains with torch, Accelerate and DeepSpeed, and records gradients."
USER 10001:10001
WORKDIR /home/gradtap
STOPSIGNAL SIGINT
# A short-lived job: it has no service whose health could be asked.
HEALTHCHECK NONE
CMD ["gradtap", "demo", "--store", "/data/demo.gradtap"]

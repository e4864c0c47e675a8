# The HTTP service of gradtap: without torch, without root, nothing written outside the memory.
#
#   docker build -f docker/server.Dockerfile -t gradtap-server .
#   docker run --rm --read-only -e GRADTAP_SERVER_TOKEN -v "$PWD/runs:/data:ro" -p 127.0.0.1:8000:8000 gradtap-server
#
# BASE_IMAGE is a python image, or a plain Debian whose Python (3.11 or newer) is then installed. Settings of pip come
# from outside and stay there: --secret id=pip,src=pip.conf, and --secret id=ca,src=ca.pem for a certificate that it
# names as /run/secrets/ca.
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
    mkdir -p /data; \
    chown 10001:10001 /data

FROM python AS build
RUN set -eu; \
    if ! python3 -c 'import ensurepip' 2>/dev/null; then \
        apt-get update; \
        apt-get install -y --no-install-recommends python3-venv; \
    fi; \
    python3 -m venv /opt/pip; \
    python3 -m venv --without-pip /opt/gradtap
WORKDIR /src
COPY pyproject.toml README.md ./
COPY tests/constraints.txt tests/
COPY gradtap gradtap
COPY server server
RUN --mount=type=secret,id=pip --mount=type=secret,id=ca \
    set -eu; \
    export PIP_CONFIG_FILE=/run/secrets/pip PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1; \
    /opt/pip/bin/pip wheel --no-deps --wheel-dir /dist .; \
    wheel="$(echo /dist/*.whl)"; \
    /opt/pip/bin/pip --python /opt/gradtap/bin/python install --constraint tests/constraints.txt "$wheel[server]"
# Smaller by a third: without the tests that packages bring along, and without the debug symbols of numcodecs, nine
# tenths of it. (numpy's libraries do not outlive a strip.) Where no strip is to be had, the image is larger.
RUN set -eu; \
    find /opt/gradtap -type d -name tests -prune -exec rm -r {} +; \
    command -v strip >/dev/null || { apt-get update && apt-get install -y --no-install-recommends binutils; } || true; \
    if command -v strip >/dev/null; then find /opt/gradtap -path '*/numcodecs/*.so' -exec strip --strip-debug {} +; fi

FROM python
COPY --from=build /opt/gradtap /opt/gradtap
# Nothing is compiled at run time: the virtual environment belongs to root.
ENV PATH=/opt/gradtap/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
RUN gradtap --version && python -c 'from importlib.util import find_spec as found; \
    import gradtap_server.app; assert not found("torch"), "torch is in the image of the service"'
LABEL org.opencontainers.image.title="gradtap server" \
      org.opencontainers.image.description="Serves recorded gradients over HTTP, read-only."
USER 10001:10001
EXPOSE 8000
# Python heeds it from its first moment on; as process 1, SIGTERM only once a handler is set.
STOPSIGNAL SIGINT
HEALTHCHECK --interval=15s --timeout=5s --start-period=30s --retries=3 CMD ["python", "-c", "import http.client, sys; c = http.client.HTTPConnection('127.0.0.1', 8000, timeout=4); c.request('GET', '/readyz'); sys.exit(c.getresponse().status != 200)"]
# Refuses to start without a token: GRADTAP_SERVER_TOKEN, or GRADTAP_SERVER_TOKEN_FILE, the path of a mounted secret.
CMD ["gradtap", "serve", "/data", "--host", "0.0.0.0", "--port", "8000"]

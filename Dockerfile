# Two images: `server` (also what schedulers and `kvpool health` need; no torch) and `worker` (a rank, with torch).
#   docker build --target server -t kvpool-server .
#   docker build --target worker -t kvpool-worker .
# What changes least comes first: a change of the code alone rebuilds no layer that installs anything else.
ARG PYTHON_IMAGE=python:3.11-slim

FROM ${PYTHON_IMAGE} AS wheel
WORKDIR /src
COPY deploy/requirements/build.lock build.lock
RUN pip install --no-cache-dir --require-hashes -r build.lock
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY proto proto
COPY server server
COPY client client
COPY gpu_worker gpu_worker
RUN pip install --no-cache-dir --no-deps --no-build-isolation --prefix /opt/kvpool .

FROM ${PYTHON_IMAGE} AS base
ENV PYTHONUNBUFFERED=1
RUN useradd --system --uid 10001 --user-group --no-create-home --home-dir /tmp --shell /usr/sbin/nologin kvpool
STOPSIGNAL SIGTERM
ENTRYPOINT ["kvpool"]

FROM base AS server
COPY deploy/requirements/server.lock /usr/local/share/kvpool/server.lock
RUN pip install --no-cache-dir --require-hashes -r /usr/local/share/kvpool/server.lock
COPY --from=wheel /opt/kvpool /usr/local
RUN install -d -o 10001 -g 10001 -m 0700 /var/lib/kvpool
VOLUME /var/lib/kvpool
USER 10001:10001
# It starts with TLS (KVPOOL_SERVE_TLS_CERT, KVPOOL_SERVE_TLS_KEY), or if told which of grpc and metrics may be plaintext:
# KVPOOL_SERVE_ALLOW_PLAINTEXT. Its own health is asked for on a unix socket, which needs neither. Steps of schedulers come
# to the port after that of gRPC.
ENV KVPOOL_SERVE_LISTEN="0.0.0.0:50051 unix:/tmp/kvpool.sock" KVPOOL_SERVE_METRICS_LISTEN=0.0.0.0:9464 \
    KVPOOL_SERVE_JOURNAL=/var/lib/kvpool
EXPOSE 50051 50052 9464
HEALTHCHECK --interval=5s --timeout=5s --start-period=30s --retries=3 CMD ["kvpool", "health", "unix:/tmp/kvpool.sock"]
CMD ["serve"]

FROM base AS worker
COPY deploy/requirements/beside-torch.lock /usr/local/share/kvpool/beside-torch.lock
RUN pip install --no-cache-dir --require-hashes -r /usr/local/share/kvpool/beside-torch.lock
# torch comes for many kinds of device: TORCH_PIP_OPTIONS says where from, as `--index-url ...` does.
ARG TORCH_VERSION=2.13.0
ARG TORCH_PIP_OPTIONS=
RUN pip install --no-cache-dir ${TORCH_PIP_OPTIONS} torch==${TORCH_VERSION}
COPY deploy/requirements/server.lock /usr/local/share/kvpool/server.lock
RUN pip install --no-cache-dir --require-hashes -r /usr/local/share/kvpool/server.lock
COPY --from=wheel /opt/kvpool /usr/local
RUN install -d -o 10001 -g 10001 -m 0700 /run/kvpool /var/lib/kvpool
USER 10001:10001
# It starts if told that metrics and health may be plaintext: KVPOOL_WORKER_ALLOW_PLAINTEXT.
ENV KVPOOL_WORKER_HEALTH_LISTEN=0.0.0.0:50053 KVPOOL_WORKER_METRICS_LISTEN=0.0.0.0:9465
EXPOSE 50053 9465
# Healthy once its pool is ready, which may take as long as the slowest rank does.
HEALTHCHECK --interval=5s --timeout=5s --start-period=120s --retries=3 CMD ["kvpool", "health", "127.0.0.1:50053"]
CMD ["worker"]

# syntax=docker/dockerfile:1
# docker build -t truedraft . ; with Ray: docker build --build-arg EXTRAS=ray -t truedraft .
FROM python:3.11-slim-bookworm AS build
ARG EXTRAS=serve
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/truedraft
ENV PATH=/opt/truedraft/bin:$PATH
WORKDIR /src
COPY constraints.txt ./
# the build of torch for CPUs, which is a tenth of the one for GPUs; its version is that of the constraints
RUN pip install --extra-index-url https://download.pytorch.org/whl/cpu --constraint constraints.txt torch \
 && python -c "import torch; assert '+cpu' in torch.__version__, torch.__version__"
COPY pyproject.toml setup.py README.md LICENSE NOTICE ./
COPY src src
RUN pip install --constraint constraints.txt ".[${EXTRAS}]"
# the compiled parts are optional elsewhere; in an image they are not to be missing without notice
RUN truedraft --version && test "$(truedraft --version | wc -l)" = 1

FROM python:3.11-slim-bookworm
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends libgomp1 \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --system --uid 10001 --home-dir /data --shell /usr/sbin/nologin truedraft \
 && install --directory --owner=truedraft --mode=0750 /data
COPY --from=build /opt/truedraft /opt/truedraft
ENV PATH=/opt/truedraft/bin:$PATH PYTHONUNBUFFERED=1 HF_HOME=/data/huggingface XDG_CACHE_HOME=/data/cache
USER 10001
WORKDIR /data
VOLUME /data
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["truedraft", "serve"]
CMD ["nano", "--host", "0.0.0.0"]

# Planning and simulation in a container: docker build -t capplan . && docker run --rm -v "$PWD:/data" capplan plan workload.yaml -o plan.json
FROM python:3.13-slim AS build
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY capplan capplan
COPY cli cli
COPY datasets datasets
COPY models models
COPY profiling profiling
COPY twin twin
RUN python -m venv /opt/capplan \
    && /opt/capplan/bin/pip install --no-cache-dir --constraint constraints.txt .

FROM python:3.13-slim
RUN useradd --create-home --uid 1000 capplan
COPY --from=build /opt/capplan /opt/capplan
ENV PATH=/opt/capplan/bin:$PATH
USER 1000
WORKDIR /data
ENTRYPOINT ["capplan"]
CMD ["--help"]

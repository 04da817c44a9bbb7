# The command `topt` and the package, for CPU ranks.
#
#   docker build -t lightning-topt .
#   docker run --rm --shm-size=2g -v "$PWD:/work" lightning-topt plan experiment=byte_lm
#
# --shm-size: ranks of a machine exchange gradients and samples in shared memory.
# torch's usual wheels bring CUDA's libraries. For a small image give the index of PyTorch's CPU
# builds (pytorch.org, "Get started"): --build-arg PIP_EXTRA_INDEX_URL=...
FROM python:3.11-slim

ARG PIP_EXTRA_INDEX_URL
ENV OMP_NUM_THREADS=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_ROOT_USER_ACTION=ignore

WORKDIR /src
COPY . .
RUN pip install -c constraints.txt ".[examples]" && rm -rf /src

WORKDIR /work
ENTRYPOINT ["topt"]

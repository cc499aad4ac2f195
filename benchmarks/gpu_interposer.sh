#!/bin/sh
# Builds what benchmarks/gpu_interposer.py needs on a GPU machine and runs it: gpu_interposer.sh [OUT]
# Needs python3 with torch and numpy, a C compiler, a CUDA toolkit. Optional: .deb/ with libdw1, libelf1 (.deb files
# that Nsight Systems' importer wants and a bare machine lacks), .site/ with Python packages that are not installed.
set -e
cd "$(dirname "$0")/.."
out=${1:-${OUT:-gpu-interposer}}
cuda=${CUDA_HOME:-}
if [ ! -f "$cuda/include/cuda_runtime_api.h" ]; then
    header=$(ls -d /usr/local/cuda/include/cuda_runtime_api.h /usr/local/cuda-*/include/cuda_runtime_api.h 2>/dev/null | head -1)
    cuda=$(dirname "$(dirname "$header")")
fi
export PYTHONPATH="$PWD/.site:$PWD${PYTHONPATH:+:$PYTHONPATH}"
if ls .deb/*.deb >/dev/null 2>&1; then
    debs=$(mktemp -d)
    for deb in .deb/*.deb; do dpkg -x "$deb" "$debs"; done
    export LD_LIBRARY_PATH="$debs/usr/lib/x86_64-linux-gnu:$debs/lib/x86_64-linux-gnu${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
fi
python3 -m kvprobe.native.build
mkdir -p build
lib=$(dirname "$(ls "$cuda"/lib64/libcudart.so "$cuda"/targets/*/lib/libcudart.so 2>/dev/null | head -1)")
cupti=$(dirname "$(ls "$cuda"/extras/CUPTI/lib64/libcupti.so "$cuda"/lib64/libcupti.so "$cuda"/targets/*/lib/libcupti.so 2>/dev/null | head -1)")
cuptih=$(dirname "$(ls "$cuda"/extras/CUPTI/include/cupti.h "$cuda"/include/cupti.h "$cuda"/targets/*/include/cupti.h 2>/dev/null | head -1)")
cc -O2 -Wall -o build/gpu_copies benchmarks/gpu_copies.c -DWITH_CUPTI -I"$cuda/include" -I"$cuptih" -L"$lib" -lcudart \
    -L"$cupti" -lcupti -Wl,-rpath,"$lib" -Wl,-rpath,"$cupti"
driver=$(ls "$lib/stubs/libcuda.so" /usr/lib/*-linux-gnu/libcuda.so.1 /usr/lib64/libcuda.so.1 2>/dev/null | head -1)
cc -O2 -pthread -o build/copies_gpu tests/native/programs/copies.c -Ikvprobe/native/src -L"$lib" -lcudart \
    "$driver" -ldl -Wl,-rpath,"$lib"
export RUNTIME="$lib/libcudart.so"
exec python3 benchmarks/gpu_interposer.py "$out"

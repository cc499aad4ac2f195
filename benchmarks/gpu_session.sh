#!/bin/sh
# Remakes the reports that want an NVIDIA GPU: sh benchmarks/gpu_session.sh OUT PART...
# Each part ends within nine minutes and writes OUT/<gpu>-<part>.*; without a part the parts are listed.
# PYTHON: one with torch for the GPU and what pyproject.toml names (python3). TREES: vLLM's trees, for `handlers`
# (benchmarks/vllm_handlers.py says which). DEVICE=host tries the commands without a GPU; its figures mean nothing.
set -u
usage() {
    echo "usage: sh benchmarks/gpu_session.sh OUT PART...; parts: calibrate demo bench fast-path sizes handlers pageable"
    echo "pageable-healthy cures weights small-blocks soak faults corpus interposer tests sanitizer races"
    exit 2
}
[ $# -ge 2 ] || usage
cd "$(dirname "$0")/.." || exit 1
case $1 in /*) out=$1 ;; *) out=$OLDPWD/$1 ;; esac
shift
mkdir -p "$out" || exit 1
python=${PYTHON:-python3}
device=${DEVICE:-cuda}
gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | awk 'NR == 1 { print tolower($2) }')
[ "$device" = cuda ] || gpu=$device
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
"$python" -m kvprobe.native.build >/dev/null || exit 1

failed=0
# run PART COMMAND...: what it prints goes to the terminal and to OUT/<gpu>-PART.txt
run() {
    name=$1
    shift
    echo "== $name: $*"
    { timeout 540 "$@"; echo $? >"$out/.code"; } 2>&1 | tee "$out/$gpu-$name.txt"
    code=$(cat "$out/.code")
    rm -f "$out/.code"
    [ "$code" = 0 ] || { echo "== $name ended with $code"; failed=1; }
}
# json PART COMMAND...: the same where standard output is one JSON object
json() {
    name=$1
    shift
    echo "== $name: $*"
    timeout 540 "$@" >"$out/$gpu-$name.json" || { echo "== $name ended with $?"; failed=1; }
}

for part in "$@"; do
    to=$out/$gpu-$part
    case $part in
    calibrate) json $part "$python" -m kvprobe calibrate --device "$device" --json --report "$to.html" ;;
    demo) json $part "$python" -m kvprobe demo --device "$device" --json --report "$to.html" ;;
    bench) json $part "$python" -m kvprobe bench --device "$device" --seconds 25 --json ;;
    fast-path)
        run fast-path-parts "$python" benchmarks/fast_path.py --device "$device" --only parts --json "$to-parts.json"
        run $part "$python" benchmarks/fast_path.py --device "$device" --only work --repeat 3 --json "$to.json"
        ;;
    sizes) run $part "$python" benchmarks/fast_path.py --device "$device" --only sizes --repeat 3 --json "$to.json" ;;
    handlers)
        run $part "$python" benchmarks/vllm_handlers.py --trees "${TREES:?}" --device "$device" --reps 2 --json "$to.json"
        ;;
    pageable) # what --fix auto makes of programs with pageable weights
        only="to mapped accelerate"
        [ "$device" = cuda ] || only=host
        "$python" -c "import accelerate" 2>/dev/null || only=${only% accelerate}
        run $part "$python" benchmarks/pageable_cures.py --device "$device" --rounds 3 --only $only --json "$to.json"
        ;;
    pageable-healthy)
        only="stores pinned"
        [ "$device" = cuda ] || only=host
        run $part "$python" benchmarks/pageable_cures.py --device "$device" --rounds 5 --only $only --json "$to.json"
        ;;
    cures) run $part "$python" benchmarks/cures_tried.py --out "$out" --device "$device" --rounds 4 ;;
    weights)
        run $part "$python" benchmarks/weights_gpu.py --device "$device" --seconds 480 --json "$to.json" --report "$to.html"
        ;;
    small-blocks) run $part "$python" benchmarks/detector_truth.py --device "$device" --healthy 0 --saturations 0 ;;
    soak) run $part "$python" benchmarks/soak.py --device "$device" --seconds "${SECONDS_OF_SOAK:-500}" ;;
    faults) run $part "$python" benchmarks/soak.py --device "$device" --faults "${EPISODES:-20}" ;;
    corpus)
        run corpus-recorded "$python" benchmarks/record_corpus.py "$out/corpus"
        run $part "$python" benchmarks/diagnosis_truth.py --corpus "$out/corpus" --json "$to.json"
        ;;
    interposer) run $part sh benchmarks/gpu_interposer.sh "$out" ;;
    tests) run $part "$python" -m pytest -q -m gpu tests/gpu tests/commands/test_stats.py ;;
    sanitizer) # the copy kernels under compute-sanitizer, which comes with CUDA
        for tool in memcheck racecheck synccheck; do
            run $part-$tool compute-sanitizer --tool $tool --error-exitcode 9 "$python" -m pytest -q -m gpu -x \
                tests/gpu/test_copy_methods.py -k every_byte
        done
        ;;
    races)
        KVPROBE_TEST_DEVICE=$device CUDA_DEVICE_MAX_CONNECTIONS=32 run $part "$python" -m pytest -q \
            tests/patches/test_store_race.py tests/patches/test_sglang.py -k "race or no_order_is_lost"
        ;;
    *) usage ;;
    esac
done
exit $failed

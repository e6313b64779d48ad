#!/bin/sh
# Writes the locks anew from pyproject.toml and constraints.txt: every package with the hashes of its files for all
# platforms. Needs uv (`pip install uv`) and the two indexes:   sh locks/renew.sh
#   service.txt worker.txt dev.txt   what the images and ./sluice install, without PyTorch
#   torch.txt                        PyTorch from PyPI, on Linux with the CUDA libraries it needs
#   torch-cpu.txt                    PyTorch's own build for CPUs, for Linux
set -eu
cd "$(dirname "$0")"
cpu_index=https://download.pytorch.org/whl/cpu
torch=$(grep '^torch==' ../constraints.txt)

compile() { # output, sources
    output=$1 && shift
    # What the file holds already is kept, unless constraints.txt says otherwise.
    uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
        --constraint ../constraints.txt --output-file "$output" "$@" >/dev/null
}

for extra in service worker dev; do
    cat torch.txt >>$extra.txt 2>/dev/null || true
    # What builds our own package, and for dev the pip that everything was tested with.
    printf 'setuptools\n%s\n' "$(if [ $extra = dev ]; then echo pip; fi)" |
        compile $extra.txt ../pyproject.toml - --extra $extra --no-emit-package sluice
    awk -v torch="$extra.torch" '
        /^[^ ]/ { file = /^(torch|triton|nvidia-[^ ]*|cuda-[^ ]*)==/ ? torch : FILENAME ".new" }
        { print >file }' $extra.txt
    mv $extra.txt.new $extra.txt
done
mv worker.torch torch.txt
rm dev.torch

echo "$torch+cpu" >torch-cpu.in
if ! compile torch-cpu.new torch-cpu.in --no-deps --no-config --default-index $cpu_index; then
    if ! grep -q "^$torch+cpu " torch-cpu.txt; then
        echo "$cpu_index cannot be reached, so torch-cpu.txt is still that of another version" >&2
        exit 1
    fi
    echo "$cpu_index cannot be reached; torch-cpu.txt, of the right version, is kept" >&2
else
    mv torch-cpu.new torch-cpu.txt
fi
rm torch-cpu.in

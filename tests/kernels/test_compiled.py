"""The GPU kernels, compiled without a GPU: the interpreter accepts code that the compiler rejects."""

import re
import subprocess
from pathlib import Path

import pytest

from triton_interpreter import needs_triton

LEAST_SHARED = 101_376  # bytes a block may have on the smallest GPUs from compute capability 8 on
HALF_OF_HOPPER = 115_712  # bytes: of 228 KiB a multiprocessor, less 1 KiB a block
SINGLE = {
    f"{name}_ptr": "*fp32"
    for name in (
        "stats",
        "gamma1",
        "gamma2",
        "gain",
        "query",
        "key",
        "dquery",
        "dkey",
        "dgamma1",
        "dgamma2",
        "dgain",
        "lam",
        "gamma",
        "slope",
        "lam_terms",
        "gamma_terms",
        "slope_terms",
        "terms",
        "sums",
        "cos",
        "sin",
    )
}
QK_GAINS = ("query_ptr", "key_ptr", "dquery_ptr", "dkey_ptr")
NUMBERS = dict.fromkeys(("scale", "qk_eps", "weight1", "weight2"), "fp32") | dict.fromkeys(
    ("heads", "m", "size", "stride", "count1", "count2", "count3", "count4", "end1", "end2", "end3"), "i32"
)


@needs_triton
@pytest.mark.parametrize("capability", [80, 90, 100, 120])
def test_kernels_of_training(capability):
    from shaped.kernels import residual, short_attention
    from shaped.kernels.gpu import relu_matmul as relu_kernels
    from shaped.kernels.gpu import residual as residual_kernels
    from shaped.kernels.gpu import short_attention as short_kernels

    sizes = {"D": 96, "M": 128, "C": 32, "S": short_attention.STAGES, "BLOCK": residual.BLOCK, "ACTIVATED": True, "qk_eps": None}
    for kernel in (short_kernels.short_attention_kernel, short_kernels.short_attention_backward_kernel):
        assert measure_shared_memory(kernel, sizes, capability, short_attention.choose_launch_options(128)) <= LEAST_SHARED
    for kernel in (
        residual_kernels.residual_kernel,
        residual_kernels.residual_backward_kernel,
        residual_kernels.sum_rows_kernel,
        relu_kernels.relu_kernel,
        relu_kernels.relu_backward_kernel,
    ):
        assert measure_shared_memory(kernel, sizes, capability, {"num_warps": 8}) <= LEAST_SHARED


@needs_triton
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("D", [64, 256])
def test_rows_of_queries_and_keys_fit_into_registers(D, capability, tmp_path):
    """With 4 warps a program, rows of 256 features took 14 kB of memory each on sm_80."""
    from shaped.kernels import long_attention
    from shaped.kernels.gpu import queries_keys as kernels

    for kernel in (kernels.prepare_kernel, kernels.prepare_backward_kernel):
        compiled = compile_kernel(kernel, {"D": D, "T": long_attention.TOKENS}, capability, {"num_warps": long_attention.count_warps(D)})
        assert count_spilled_bytes(compiled.asm["ptx"], capability, tmp_path / "kernel.ptx") <= 64


@needs_triton
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("absent", [(), QK_GAINS, (*QK_GAINS, "qk_eps")], ids=["QK-norm with gains", "QK-norm", "raw queries and keys"])
def test_attention_of_long_sequences(capability, absent):
    from shaped.kernels import attention_correction, long_attention
    from shaped.kernels.gpu import attention_correction as correction
    from shaped.kernels.gpu import queries_keys as kernels

    sizes = {"D": 64, "T": long_attention.TOKENS, "BLOCK": attention_correction.BLOCK, "GROUP": 1, "CAUSAL": True} | dict.fromkeys(absent)
    for kernel in (kernels.prepare_kernel, kernels.prepare_backward_kernel):
        assert measure_shared_memory(kernel, sizes, capability, {"num_warps": 4}) <= LEAST_SHARED
    recover = dict.fromkeys(("dgamma1_ptr", "dgamma2_ptr"))  # its backward pass has only the gradient of the gain of all
    for others in ({"TRANSPOSED": False, "dgain_ptr": None, **recover}, {"TRANSPOSED": True}, {"TRANSPOSED": True, **recover}):
        how = sizes | others
        assert measure_shared_memory(correction.correct_kernel, how, capability, {"num_warps": 4}) <= LEAST_SHARED


@needs_triton
@pytest.mark.parametrize("capability", [80, 90])
def test_attention_with_qk_norm(capability):
    from shaped.kernels import short_attention
    from shaped.kernels.gpu import short_attention as kernels

    sizes = {"D": 96, "M": 128, "C": 32, "S": short_attention.STAGES, "dgamma1_ptr": None, "dgamma2_ptr": None}
    for kernel in (kernels.short_attention_kernel, kernels.short_attention_backward_kernel):
        assert measure_shared_memory(kernel, sizes, capability, short_attention.choose_launch_options(128)) <= LEAST_SHARED


@needs_triton
@pytest.mark.parametrize("keep", [False, True])
def test_products_of_hopper(keep):
    """Two programs fit on a multiprocessor, except for the product that also keeps the ReLU's input."""
    from shaped.kernels import relu_matmul_hopper as hopper
    from shaped.kernels.gpu import relu_matmul_hopper as kernels

    sizes = {"N": 3072, "K": 768, "TILE": hopper.TILE, "DEPTH": hopper.DEPTH, "GROUP": hopper.GROUP, "PROGRAMS": 264, "ACTIVATED": not keep}
    absent = {"hidden": None, "slope_terms_ptr": None} if not keep else {}
    deep, half, whole = (f"tensordesc<bf16[{rows}, {columns}]>" for rows, columns in ((128, 64), (128, 64), (128, 128)))
    forward = {"x": deep, "weight": deep, "hidden": half, "out": half, "M": "i32"}
    backward = {"g": deep, "weight": "tensordesc<bf16[64, 128]>", "x": whole, "dx": whole, "M": "i32"}
    options, backward_options = {"num_warps": 4, "num_stages": 3}, {"num_warps": 8, "num_stages": 3, "maxnreg": 128}
    used = measure_shared_memory(kernels.relu_matmul_kernel, sizes | absent, 90, options, forward)
    assert used <= (1 + keep) * HALF_OF_HOPPER
    used = measure_shared_memory(kernels.relu_matmul_backward_kernel, sizes | absent, 90, backward_options, backward)
    assert used <= HALF_OF_HOPPER


def count_spilled_bytes(ptx, capability, path) -> int:
    """Those that a thread stores because its registers are full, by Triton's own assembler."""
    import triton

    assembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    path.write_text(ptx)
    architecture = f"sm_{capability}{'a' if capability == 90 else ''}"
    said = subprocess.run(
        [assembler, "-v", f"--gpu-name={architecture}", path, "-o", path.with_suffix(".cubin")], capture_output=True, text=True
    )
    return int(re.findall(r"(\d+) bytes spill stores", said.stderr)[0])


def measure_shared_memory(kernel, sizes, capability, options, others=None) -> int:
    return compile_kernel(kernel, sizes, capability, options, others).metadata.shared


def compile_kernel(kernel, sizes, capability, options, others=None):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    strides = {name: "i64" for name in kernel.arg_names if name.startswith("stride_")}
    known = SINGLE | NUMBERS | strides | (others or {})
    kinds = {name: "constexpr" if name in sizes else known.get(name, "*bf16") for name in kernel.arg_names}
    # Torch's tensors, and the distances between their rows, are multiples of 16 bytes and entries.
    even = [i for i, name in enumerate(kernel.arg_names) if kinds[name].startswith("*") or (name in strides and name not in sizes)]
    attributes = {(i,): [["tt.divisibility", 16]] for i in even}
    source = ASTSource(kernel, kinds, {name: sizes[name] for name in kernel.arg_names if name in sizes}, attributes)
    return compile(source, target=GPUTarget("cuda", capability, 32), options=options)

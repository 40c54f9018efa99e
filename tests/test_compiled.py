"""The GPU kernels compiled for GPUs that need not be here: the interpreter takes what the compiler does not."""

import pytest

from triton_interpreter import needs_triton

LEAST_SHARED = 101_376  # bytes a block may have on the smallest GPUs from compute capability 8 on
HALF_OF_HOPPER = 115_712  # bytes: of 228 KiB a multiprocessor, less 1 KiB a block
SINGLE = {
    f"{name}_ptr": "*fp32"
    for name in (
        "lse",
        "gamma1",
        "gamma2",
        "gain",
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
    )
}
NUMBERS = {"scale": "fp32", "heads": "i32", "m": "i32"} | dict.fromkeys(("size", "apart", "of_tokens", "of_hidden", "of_queries"), "i32")


@needs_triton
@pytest.mark.parametrize("capability", [80, 90, 100, 120])
def test_kernels_of_training(capability):
    from shaped.kernels.gpu import residual as block
    from shaped.kernels.gpu import short_attention as short

    sizes = {"D": 96, "M": 128, "C": 32, "S": short.STAGES, "BLOCK": block.BLOCK, "BENT": True}
    for kernel in (short.forward_kernel, short.backward_kernel):
        assert shared_memory(kernel, sizes, capability, short.how(128)) <= LEAST_SHARED
    for kernel in (block.add_kernel, block.add_backward_kernel, block.relu_kernel, block.relu_backward_kernel, block.sums_kernel):
        assert shared_memory(kernel, sizes, capability, {"num_warps": 8}) <= LEAST_SHARED


@needs_triton
@pytest.mark.parametrize("keep", [False, True])
def test_products_of_hopper(keep):
    """Two programs have room on a multiprocessor, but for the product that also keeps what goes into the ReLU."""
    from shaped.kernels.gpu import relu_matmul_hopper as bent

    sizes = {"N": 3072, "K": 768, "TILE": bent.TILE, "DEEP": bent.DEEP, "GROUP": bent.GROUP, "PROGRAMS": 264, "BENT": not keep}
    absent = {"hidden": None, "slope_terms_ptr": None} if not keep else {}
    deep, half, whole = (f"tensordesc<bf16[{rows}, {columns}]>" for rows, columns in ((128, 64), (128, 64), (128, 128)))
    forward = {"x": deep, "weight": deep, "hidden": half, "out": half, "M": "i32"}
    backward = {"g": deep, "weight": "tensordesc<bf16[64, 128]>", "x": whole, "dx": whole, "M": "i32"}
    assert shared_memory(bent.feed_kernel, sizes | absent, 90, {"num_warps": 4, "num_stages": 3}, forward) <= (1 + keep) * HALF_OF_HOPPER
    assert (
        shared_memory(bent.feed_backward_kernel, sizes | absent, 90, {"num_warps": 8, "num_stages": 3, "maxnreg": 128}, backward)
        <= HALF_OF_HOPPER
    )


def shared_memory(kernel, sizes, capability, how, others=None) -> int:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    kinds = {name: "constexpr" if name in sizes else (SINGLE | NUMBERS | (others or {})).get(name, "*bf16") for name in kernel.arg_names}
    source = ASTSource(kernel, kinds, {name: sizes[name] for name in kernel.arg_names if name in sizes})
    return compile(source, target=GPUTarget("cuda", capability, 32), options=how).metadata.shared

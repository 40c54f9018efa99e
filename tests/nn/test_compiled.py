"""The GPU kernels compiled for GPUs that need not be here: the interpreter takes what the compiler does not."""

from importlib.util import find_spec

import pytest

LEAST_SHARED = 101_376  # bytes a block may have on the smallest GPUs from compute capability 8 on
POINTERS = {"lse_ptr": "*fp32", "gamma1_ptr": "*fp32", "gamma2_ptr": "*fp32", "dgamma_ptr": "*fp32"}
NUMBERS = {"scale": "fp32", "heads": "i32", "m": "i32"}


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton, which is made for Linux alone")
@pytest.mark.parametrize("capability", [80, 90, 100, 120])
@pytest.mark.parametrize("name", ["forward_kernel", "backward_kernel"])
def test_short_attention(name, capability):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from shaped.nn import short_kernels

    kernel = getattr(short_kernels, name)
    constants = {"D": 96, "M": 128, "C": 32, "S": short_kernels.STAGES, "GAINS": True}
    kinds = {
        argument: "constexpr" if argument in constants else (POINTERS | NUMBERS).get(argument, "*bf16") for argument in kernel.arg_names
    }
    source = ASTSource(kernel, kinds, {argument: constants[argument] for argument in kernel.arg_names if argument in constants})
    made = compile(source, target=GPUTarget("cuda", capability, 32), options=short_kernels.how(128))
    assert made.metadata.shared <= LEAST_SHARED

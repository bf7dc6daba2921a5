"""Numbers in 8 bits, inside Triton kernels: int8, and float8_e4m3fn on GPUs that do not know it.

Codes of float8_e4m3fn are handled as bytes. Its bits are sign, four of exponent (bias 7), three of mantissa; the bits of
float16 are sign, five (bias 15), ten. So a code shifted to float16's place is the number divided by 2^8, subnormal or not.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def round_to_even(x):
    """Float32 below 2^22 in size to the nearest whole number: that many bits are left beside 1.5 * 2^23."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def to_fp8(x):
    """Float32, at most 448 in size, to the byte of the nearest float8_e4m3fn, ties to even."""
    bits = x.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960  # 120 less in the exponent's bias, above 3 bits
    tiny = round_to_even(tl.abs(x) * 512.0).to(tl.uint32)  # below 2^-6 they lie 2^-9 apart
    code = tl.where(size < 0x3C800000, tiny, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def from_fp8(codes):
    """Bytes of float8_e4m3fn, none of them NaN, to float16, exactly."""
    wide = codes.to(tl.uint16)
    return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0


@triton.jit
def widen(codes, FORM: tl.constexpr, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """What an 8-bit cache keeps, as numbers of a dtype. FORM: "int8", "fp8" (bytes), "fp8_native"."""
    if FORM == "fp8_native":
        return codes.to(tl.float8e4nv, bitcast=True).to(dtype)
    elif FORM == "fp8":
        return from_fp8(codes).to(dtype)
    elif INTERPRETED:
        return codes.to(tl.float32).to(dtype)
    else:
        return codes.to(dtype)


@triton.jit
def narrow(x, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """Float32 to a float dtype, ties to even; the interpreter cuts bits off where it makes bfloat16."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)

// Vectors of floats as wide as the machine this is compiled for, and what all kernels do with them.
//
// The kernels have a plain C interface over data pointers: tied neither to torch's ABI nor to Python's. Threads are
// OpenMP's, from the runtime torch has loaded already, so that there is one pool.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AVX512F__)
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
typedef float vec __attribute__((vector_size(LANES * 4)));
typedef float loose __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));

static inline vec load(const float* p) { return *reinterpret_cast<const loose*>(p); }
static inline void store(float* p, vec v) { *reinterpret_cast<loose*>(p) = v; }
static inline vec all(float x) { return x - (vec){}; }

static inline float sum(vec v) {
    float total = 0;
    for (int i = 0; i < LANES; i++) total += v[i];
    return total;
}

// e^x for x <= 0, relative error below 2e-7: 2^n times a polynomial on [-ln2/2, ln2/2] (coefficients of Cephes' expf)
static inline vec exp_below_zero(vec x) {
    x = x < -87.0f ? all(-87.0f) : x;
    vec shifted = x * 1.44269504f + 12582912.0f;  // rounds to an integer in the low bits
    vec n = shifted - 12582912.0f;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    ivec bits = ((ivec)shifted << 23) + 0x3f800000;
    return p * (vec)bits;
}

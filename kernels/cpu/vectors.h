// Vectors of floats as wide as the machine this is compiled for, and what all kernels do with them.
//
// The kernels have a plain C interface over data pointers: tied neither to torch's ABI nor to Python's. Threads are
// OpenMP's, from the runtime torch has loaded already, so that there is one pool.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define TURNOUT_AVX512
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define TURNOUT_AVX2
#endif
#if defined(TURNOUT_AVX512) || defined(TURNOUT_AVX2)
#include <immintrin.h>
#endif

#if defined(TURNOUT_AVX512)
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
typedef float vec __attribute__((vector_size(LANES * 4)));
typedef float loose __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));
typedef uint16_t hvec __attribute__((vector_size(LANES * 2)));

// Memory that begins at a cache line: vectors that cross lines take twice the time to load.
template <class T>
struct Aligned {
    typedef T value_type;
    Aligned() = default;
    template <class U>
    Aligned(const Aligned<U>&) {}
    T* allocate(size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), std::align_val_t(64))); }
    void deallocate(T* p, size_t) { ::operator delete(p, std::align_val_t(64)); }
    template <class U>
    bool operator==(const Aligned<U>&) const { return true; }
    template <class U>
    bool operator!=(const Aligned<U>&) const { return false; }
};
typedef std::vector<float, Aligned<float>> floats;

static inline vec load(const float* p) { return *reinterpret_cast<const loose*>(p); }
static inline void store(float* p, vec v) { *reinterpret_cast<loose*>(p) = v; }
static inline vec all(float x) { return x - (vec){}; }

// The larger of the two, lane by lane; NaN in a stays, NaN in b does not come in.
static inline vec larger(vec a, vec b) {
#if defined(TURNOUT_AVX512)
    return _mm512_max_ps(b, a);
#elif defined(TURNOUT_AVX2)
    return _mm256_max_ps(b, a);
#else
    return a < b ? b : a;
#endif
}

// a * b + c, rounded once where the machine can: the same in every kernel, whatever the compiler makes of the loop
static inline vec madd(vec a, vec b, vec c) {
#if defined(TURNOUT_AVX512)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(TURNOUT_AVX2)
    return _mm256_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}

static inline float sum(vec v) {
#if defined(TURNOUT_AVX512)
    return _mm512_reduce_add_ps(v);
#elif defined(TURNOUT_AVX2)
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
#else
    float total = 0;
    for (int i = 0; i < LANES; i++) total += v[i];
    return total;
#endif
}

static inline float largest(vec v) {
#if defined(TURNOUT_AVX512)
    return _mm512_reduce_max_ps(v);
#elif defined(TURNOUT_AVX2)
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
#else
    float top = v[0];
    for (int i = 1; i < LANES; i++) top = std::max(top, v[i]);
    return top;
#endif
}

// 0, 1, 2, ...
static inline ivec counting() {
    ivec count;
    for (int i = 0; i < LANES; i++) count[i] = i;
    return count;
}

// 2^x for x <= 0, relative error below 3e-7; exactly 0 from -127 down, for -infinity too. The polynomial is the best of
// its degree on [-1/2, 1/2] (by Remez' algorithm).
static inline vec exp2_below_zero(vec x) {
    x = larger(x, all(-127.0f));
    vec shifted = x + 12582912.0f;  // rounds to an integer in the low bits
    vec r = x - (shifted - 12582912.0f);
    vec p = all(1.327647198e-3f);
    p = madd(p, r, all(9.675541334e-3f));
    p = madd(p, r, all(5.550713274e-2f));
    p = madd(p, r, all(2.402211972e-1f));
    p = madd(p, r, all(6.931469671e-1f));
    p = madd(p, r, all(1.000000072f));
    ivec bits = ((ivec)shifted << 23) + 0x3f800000;
    return p * (vec)bits;
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

// tanh: x times a polynomial in x^2 near zero (coefficients of Cephes' tanhf), else from e^-2|x|
static inline vec tanh_of(vec x) {
    vec size = x < 0.0f ? -x : x;
    vec square = x * x;
    vec p = all(-5.70498872745e-3f);
    p = madd(p, square, all(2.06390887954e-2f));
    p = madd(p, square, all(-5.37397155531e-2f));
    p = madd(p, square, all(1.33314422036e-1f));
    p = madd(p, square, all(-3.33332819422e-1f));
    vec near = madd(p * square, x, x);
    vec e = exp_below_zero(size * -2.0f);
    vec far = (1.0f - e) / (1.0f + e);
    return size < 0.625f ? near : x < 0.0f ? -far : far;
}

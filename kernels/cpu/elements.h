// The types numbers are stored in, and their way to and from vectors of floats, in which everything is computed.
//
// Floats of 16 bits stand for themselves. The 8-bit forms of the cache have one float32 scale for each token and key
// head, the token's largest magnitude divided by the largest code: value = code * scale.
#pragma once

#include "vectors.h"

#if !defined(TURNOUT_AVX512) && !defined(TURNOUT_AVX2)
typedef _Float16 native_half __attribute__((vector_size(LANES * 2)));
#endif

// IEEE half precision, as bits
static inline vec from_half(hvec bits) {
#if defined(TURNOUT_AVX512)
    return _mm512_cvtph_ps((__m256i)bits);
#elif defined(TURNOUT_AVX2)
    return _mm256_cvtph_ps((__m128i)bits);
#else
    return __builtin_convertvector((native_half)bits, vec);
#endif
}

static inline hvec to_half(vec x) {
#if defined(TURNOUT_AVX512)
    return (hvec)_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(TURNOUT_AVX2)
    return (hvec)_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    return (hvec)__builtin_convertvector(x, native_half);
#endif
}

template <class V, class T>
static inline V bits_at(const T* p) {
    V found;
    std::memcpy(&found, p, sizeof found);
    return found;
}

template <class T, class V>
static inline void put_bits(T* p, V bits) {
    std::memcpy(p, &bits, sizeof bits);
}

// Whole numbers widened, and narrowed by dropping the upper bits. (What GCC 12 makes of __builtin_convertvector goes lane by
// lane.)
typedef int8_t bvec __attribute__((vector_size(LANES)));
typedef int16_t svec __attribute__((vector_size(LANES * 2)));
static inline ivec wider(hvec x) {
#if defined(TURNOUT_AVX512)
    return (ivec)_mm512_cvtepu16_epi32((__m256i)x);
#elif defined(TURNOUT_AVX2)
    return (ivec)_mm256_cvtepu16_epi32((__m128i)x);
#else
    return __builtin_convertvector(x, ivec);
#endif
}

static inline ivec wide_codes(const void* p) {  // LANES signed bytes
#if defined(TURNOUT_AVX512)
    return (ivec)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(TURNOUT_AVX2)
    return (ivec)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
    return __builtin_convertvector(bits_at<bvec>(p), ivec);
#endif
}

static inline svec short_codes(const void* p) {
#if defined(TURNOUT_AVX512)
    return (svec)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
#elif defined(TURNOUT_AVX2)
    return (svec)_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)p));
#else
    return __builtin_convertvector(bits_at<bvec>(p), svec);
#endif
}

static inline hvec low_halves(ivec x) {
#if defined(TURNOUT_AVX512)
    return (hvec)_mm512_cvtepi32_epi16((__m512i)x);
#else
    return __builtin_convertvector(x, hvec);
#endif
}

struct Float32 {
    typedef float stored;
    static constexpr bool SCALED = false;
    static vec load(const float* p) { return ::load(p); }
    static void store(float* p, vec x) { ::store(p, x); }
};

struct BFloat16 {  // the upper half of a float32
    typedef uint16_t stored;
    static constexpr bool SCALED = false;
    typedef uint32_t words __attribute__((vector_size(LANES * 4)));
    static vec load(const uint16_t* p) { return (vec)(wider(bits_at<hvec>(p)) << 16); }
    static void store(uint16_t* p, vec x) {  // to the nearest, ties to even
        words bits = (words)x;
        words rounded = bits + 0x7fff + ((bits >> 16) & 1);
        words nan = (bits >> 16) | 0x40;
        rounded = x == x ? rounded >> 16 : nan;
        put_bits(p, low_halves((ivec)rounded));
    }
};

struct Float16 {
    typedef uint16_t stored;
    static constexpr bool SCALED = false;
    static vec load(const uint16_t* p) { return from_half(bits_at<hvec>(p)); }
    static void store(uint16_t* p, vec x) { put_bits(p, to_half(x)); }
};

struct Int8 {
    typedef int8_t stored;
    static constexpr bool SCALED = true;
    static constexpr float LARGEST = 127, UNIT = 1;  // what `load` gives is value / scale / UNIT
    static vec load(const int8_t* p) { return __builtin_convertvector(wide_codes(p), vec); }
    static void store(int8_t* p, vec x) {  // x: value / scale
        x = larger(-larger(-x, all(-LARGEST)), all(-LARGEST));
        ivec rounded = (ivec)(x + 12582912.0f) - 0x4b400000;  // to the nearest, ties to even
        put_bits(p, __builtin_convertvector(rounded, bvec));
    }
};

struct Float8 {  // e4m3fn (arXiv 2209.05433): sign, 4 bits of exponent with bias 7, 3 of mantissa; no infinity
    typedef uint8_t stored;
    static constexpr bool SCALED = true;
    static constexpr float LARGEST = 448, UNIT = 256;
    static vec load(const uint8_t* p) {  // the same bits moved into a half are the value / 2^8, denormals too
        return from_half((hvec)((short_codes(p) << 7) & (int16_t)0xbfff));
    }
    static void store(uint8_t* p, vec x) {  // x: value / scale, at most LARGEST but for rounding
        ivec sign = ((ivec)x >> 24) & 0x80;
        ivec bits = (ivec)x & 0x7fffffff;
        vec size = (vec)bits;
        ivec few = (ivec)(size + 16384.0f) - 0x46800000;  // below 2^-6: multiples of 2^-9, which the sum rounds to
        ivec many = ((bits + 0x7ffff + ((bits >> 20) & 1)) >> 20) - (120 << 3);
        ivec code = size < 0.015625f ? few : many;
        code = code > 0x7e ? (ivec){} + 0x7e : code;
        put_bits(p, __builtin_convertvector(code | sign, bvec));
    }
};

// n elements as floats
template <class E>
static inline void widen(const typename E::stored* p, float* to, int64_t n) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store(to + i, E::load(p + i));
    if (i == n) return;
    typename E::stored rest[LANES] = {};
    std::memcpy(rest, p + i, (n - i) * sizeof rest[0]);
    float wide[LANES];
    store(wide, E::load(rest));
    std::memcpy(to + i, wide, (n - i) * sizeof(float));
}

// n floats as elements
template <class E>
static inline void narrow(const float* from, typename E::stored* p, int64_t n) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) E::store(p + i, load(from + i));
    if (i == n) return;
    float wide[LANES] = {};
    std::memcpy(wide, from + i, (n - i) * sizeof(float));
    typename E::stored rest[LANES];
    E::store(rest, load(wide));
    std::memcpy(p + i, rest, (n - i) * sizeof rest[0]);
}

// What the tensors that kernels are given and fill are made of; they compute in float32.
struct Outside {
    int64_t size;  // bytes
    void (*widen)(const void*, float*, int64_t);
    void (*narrow)(const float*, void*, int64_t);
};

template <class E>
static constexpr Outside outside_of() {
    typedef typename E::stored stored;
    return {
        sizeof(stored),
        [](const void* from, float* to, int64_t n) { widen<E>(static_cast<const stored*>(from), to, n); },
        [](const float* from, void* to, int64_t n) { narrow<E>(from, static_cast<stored*>(to), n); },
    };
}

// By the number that stands for a float type: 0 float32, 1 bfloat16, 2 float16
static inline const Outside& outside_numbered(int64_t dtype) {
    static constexpr Outside known[] = {outside_of<Float32>(), outside_of<BFloat16>(), outside_of<Float16>()};
    return known[dtype];
}

// The scale of n floats kept as E; 0 when all are 0; NaN and infinity stay visible in it.
template <class E>
static inline float scale_of(const float* from, int64_t n) {
    float top = 0;
    for (int64_t i = 0; i < n; i++) {
        float size = std::fabs(from[i]);
        top = size > top || size != size ? size : top;
    }
    return top / E::LARGEST;
}

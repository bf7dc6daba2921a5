// 8-bit floats (e4m3fn) into float32, for machines that cannot multiply them as they are.

#include <cmath>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

// One code: shifted into a half's place its exponent is 8 too small; 0x7f is NaN, there is no infinity.
float value(uint8_t code) {
    int exponent = code >> 3 & 15, mantissa = code & 7;
    float size = exponent ? std::ldexp(8.0f + mantissa, exponent - 10) : std::ldexp((float)mantissa, -9);
    if ((code & 0x7f) == 0x7f) size = NAN;
    return code & 0x80 ? -size : size;
}

struct Table {
    float values[256];
    Table() {
        for (int code = 0; code < 256; code++) values[code] = value(code);
    }
};

const Table TABLE;

// codes [count] times one scale -> out
void widen(const uint8_t* codes, float scale, float* out, int64_t count) {
    int64_t i = 0;
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    const __m512 nan = _mm512_set1_ps(NAN), by = _mm512_set1_ps(scale);
    for (; i + 16 <= count; i += 16) {
        __m256i c = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)(codes + i)));
        __m256i size = _mm256_and_si256(c, _mm256_set1_epi16(0x7f));
        __m256i sign = _mm256_slli_epi16(_mm256_and_si256(c, _mm256_set1_epi16(0x80)), 8);
        __m512 half = _mm512_cvtph_ps(_mm256_or_si256(_mm256_slli_epi16(size, 7), sign));
        __mmask16 none = _mm256_cmpeq_epi16_mask(size, _mm256_set1_epi16(0x7f));
        __m512 exact = _mm512_mask_mov_ps(_mm512_mul_ps(half, _mm512_set1_ps(256.0f)), none, nan);
        _mm512_storeu_ps(out + i, _mm512_mul_ps(exact, by));
    }
#elif defined(__AVX2__) && defined(__F16C__)
    const __m256 by = _mm256_set1_ps(scale);
    for (; i + 8 <= count; i += 8) {
        __m128i c = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)(codes + i)));
        __m128i size = _mm_and_si128(c, _mm_set1_epi16(0x7f));
        __m128i sign = _mm_slli_epi16(_mm_and_si128(c, _mm_set1_epi16(0x80)), 8);
        __m256 half = _mm256_cvtph_ps(_mm_or_si128(_mm_slli_epi16(size, 7), sign));
        __m256 none = _mm256_castsi256_ps(_mm256_cvtepi16_epi32(_mm_cmpeq_epi16(size, _mm_set1_epi16(0x7f))));
        __m256 exact = _mm256_or_ps(_mm256_mul_ps(half, _mm256_set1_ps(256.0f)), none);  // all bits set: NaN
        _mm256_storeu_ps(out + i, _mm256_mul_ps(exact, by));
    }
#endif
    for (; i < count; i++) out[i] = TABLE.values[codes[i]] * scale;
}

}  // namespace

extern "C" {

// codes [rows, ins], scales [rows, ceil(ins / block)] -> out [rows, ins]
void turnout_fp8_widen(const uint8_t* codes, const float* scales, float* out, int64_t rows, int64_t ins, int64_t block, int64_t threads) {
    const int64_t blocks = (ins + block - 1) / block;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows * ins > 16384)
    for (int64_t r = 0; r < rows; r++)
        for (int64_t b = 0; b < blocks; b++) {
            int64_t first = b * block, count = first + block < ins ? block : ins - first;
            widen(codes + r * ins + first, scales[r * blocks + b], out + r * ins + first, count);
        }
}

}

// Products with weights that are small integers, with a scale and an offset for each group of inputs:
//
//     W[o, i] = scale[o, g] * code[o, i] + offset[o, g],  g = i / group         offset = -zero * scale where none is kept
//
// Sixteen neighbouring outputs are one panel, four inputs of each lie side by side, so that one vector is a step of an
// integer dot product for all of them:
//
//     step s: 64 bytes, inputs 4s..4s+3 of output o at 4 * o
//     low [panels, .., 64]: steps of 8 bits as they are, of 4 bits two in one (the first in the low nibbles), of 2 four
//     high [panels, .., 64]: codes of 3, 5, 6 bits have their bits above the lowest 2, 4, 4 there, packed likewise
//     scales, offsets [panels, groups, 16]
//
// Activations are
// rounded to int8 in blocks of 32 inputs (16 where the groups ask for it), each with a step of its own, as the Q8 blocks
// of llama.cpp are; or they stay float32. The sums of a row never depend on other rows.

#include "linear.h"
#include "vectors.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int PANEL = 16;                  // outputs
constexpr int PARTS = PANEL / LANES;       // vectors that make up a panel: each is computed by itself
constexpr int MOST = LANES == 16 ? 8 : 4;  // rows of a tile

typedef int32_t loose_int __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

struct Grouped {
    const uint8_t *low, *high;
    const void *scales, *offsets;  // offsets null: -zero * scale
    const float* bias;             // [outs]; null: none
    const int64_t* order;          // [ins], x[order[i]] is input i; null: x[i]
    int64_t ins, outs, group, bits, zero;
    int64_t half_scales, half_offsets;  // float16, else float32
    int64_t exact;                      // activations stay float32
};

// The inputs of all rows as a tile reads them.
struct Rows {
    const int8_t* codes;   // [rows, ins]; not where they stay float32
    const float* values;   // [rows, ins]; only there
    const float* steps;    // [rows, blocks]
    const int32_t* totals; // [rows, blocks], of the codes
    const float* sums;     // [rows, groups], of what the codes stand for
    int64_t block, blocks, groups;
};

inline ivec bytes(const uint8_t* p) { return *reinterpret_cast<const loose_int*>(p); }
inline ivec every(int32_t x) { return x - (ivec){}; }

inline vec numbers(const void* from, int64_t at, bool half) {
    if (!half) return load(static_cast<const float*>(from) + at);
    const uint16_t* p = static_cast<const uint16_t*>(from) + at;
#if defined(__AVX512F__)
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
    vec out;
    for (int i = 0; i < LANES; i++) {
        _Float16 x;
        std::memcpy(&x, p + i, sizeof x);
        out[i] = x;
    }
    return out;
#endif
}

// Bytes of one panel's plane of so many bits a code
template <int BITS>
inline int64_t stride(int64_t ins) {
    return (ins * BITS + 31) / 32 * 64;
}

// Part of the codes of step q of a block, a byte each: inputs 4q..4q+3. at: the vector the block begins in; odd: it begins
// in the middle of that
template <int BITS>
inline ivec plane(const uint8_t* at, int q, int odd) {
    constexpr int PER = 8 / BITS;  // steps that share a vector
    ivec v = bytes(at + q / PER * 64);
    if (BITS == 8) return v;
    return (v >> (BITS * (q % PER + (PER == 8 ? 4 * odd : 0)))) & (int)(((1u << BITS) - 1) * 0x01010101u);
}

template <int LOW, int HIGH>
inline ivec step_of(const uint8_t* low, const uint8_t* high, int q, int odd) {
    if constexpr (HIGH > 0) return plane<LOW>(low, q, odd) | plane<HIGH>(high, q, odd) << LOW;
    return plane<LOW>(low, q, odd);
}

// total + the four products of each lane: unsigned codes, signed x
template <int BITS>
inline ivec dot(ivec total, ivec code, const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, 4);
#if defined(__AVX512VNNI__)
    return (ivec)_mm512_dpbusd_epi32((__m512i)total, (__m512i)code, _mm512_set1_epi32(four));
#elif defined(__AVX512BW__)
    __m512i by = _mm512_set1_epi32(four), one = _mm512_set1_epi16(1), c = (__m512i)code;
    if (BITS < 8) return total + (ivec)_mm512_madd_epi16(_mm512_maddubs_epi16(c, by), one);
    __m512i few = _mm512_set1_epi8(15);  // two nibbles: pairs of whole bytes would not fit 16 bits
    __m512i low = _mm512_maddubs_epi16(_mm512_and_si512(c, few), by);
    __m512i high = _mm512_maddubs_epi16(_mm512_and_si512(_mm512_srli_epi16(c, 4), few), by);
    return total + (ivec)_mm512_madd_epi16(low, one) + (ivec)_mm512_madd_epi16(high, _mm512_set1_epi16(16));
#elif defined(__AVXVNNI__)
    return (ivec)_mm256_dpbusd_avx_epi32((__m256i)total, (__m256i)code, _mm256_set1_epi32(four));
#elif defined(__AVX2__)
    __m256i by = _mm256_set1_epi32(four), one = _mm256_set1_epi16(1), c = (__m256i)code;
    if (BITS < 8) return total + (ivec)_mm256_madd_epi16(_mm256_maddubs_epi16(c, by), one);
    __m256i few = _mm256_set1_epi8(15);  // two nibbles: pairs of whole bytes would not fit 16 bits
    __m256i low = _mm256_maddubs_epi16(_mm256_and_si256(c, few), by);
    __m256i high = _mm256_maddubs_epi16(_mm256_and_si256(_mm256_srli_epi16(c, 4), few), by);
    return total + (ivec)_mm256_madd_epi16(low, one) + (ivec)_mm256_madd_epi16(high, _mm256_set1_epi16(16));
#else
    for (int j = 0; j < 4; j++) total += ((code >> (8 * j)) & 255) * (int32_t)x[j];
    return total;
#endif
}

// What follows is compiled for each kind of weights: LOW and HIGH bits of a code, STEPS (of 4 inputs) in a block of the
// inputs, and whether these are EXACT, float32.

// One block: the products of N rows with the codes of one vector of outputs
template <int LOW, int HIGH, int STEPS, int N>
inline void block_of(const uint8_t* low, const uint8_t* high, int odd, const int8_t* x, int64_t ins, ivec (&sum)[N]) {
#pragma GCC unroll 8
    for (int q = 0; q < STEPS; q++) {
        ivec code = step_of<LOW, HIGH>(low, high, q, odd);
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) sum[n] = dot<LOW + HIGH>(sum[n], code, x + n * ins + 4 * q);
    }
}

template <int LOW, int HIGH, int STEPS, int N>
inline void block_of(const uint8_t* low, const uint8_t* high, int odd, const float* x, int64_t ins, vec (&sum)[N]) {
#pragma GCC unroll 8
    for (int q = 0; q < STEPS; q++) {
        ivec code = step_of<LOW, HIGH>(low, high, q, odd);
        for (int j = 0; j < 4; j++) {
            vec value = __builtin_convertvector((code >> (8 * j)) & 255, vec);
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) sum[n] += value * x[n * ins + 4 * q + j];
        }
    }
}

// N rows of x times one vector of outputs
template <int LOW, int HIGH, int STEPS, bool EXACT, int N>
void tile(const Grouped& w, int64_t panel, int part, const Rows& x, int64_t row, float* out) {
    const int64_t groups = x.groups, each = x.blocks / groups, ins = w.ins, lane = part * LANES;
    const uint8_t* low = w.low + panel * stride<LOW>(ins) + lane * 4;
    const uint8_t* high = HIGH ? w.high + panel * stride<HIGH>(ins) + lane * 4 : nullptr;
    const int8_t* codes = x.codes + row * ins;
    const float *values = x.values + row * ins, *steps = x.steps + row * x.blocks, *sums = x.sums + row * groups;
    const int32_t* totals = x.totals + row * x.blocks;
    const bool half_scales = w.half_scales, half_offsets = w.half_offsets;
    const int32_t zero = (int32_t)w.zero;
    vec total[N] = {};
    constexpr int AHEAD = N <= 2 ? 4096 : 0;  // bytes to fetch ahead: few rows wait for memory, more compute
    for (int64_t g = 0; g < groups; g++) {
        vec within[N] = {};
        for (int64_t b = g * each; b < (g + 1) * each; b++) {
            const uint8_t *at = low + b * (STEPS * LOW * 8), *above = high;
            const int odd = HIGH == 1 && STEPS == 4 ? b & 1 : 0;
            if (AHEAD > 0)
                for (int i = 0; i < STEPS * LOW * 8; i += 64) __builtin_prefetch(at + AHEAD + i);
            if (HIGH > 0) above += (b - odd) * (STEPS * HIGH * 8);
            if constexpr (EXACT) {
                block_of<LOW, HIGH, STEPS, N>(at, above, odd, values + b * STEPS * 4, ins, within);
            } else {
                ivec sum[N];
                for (int n = 0; n < N; n++) sum[n] = every(-zero * totals[n * x.blocks + b]);  // zero 0: nothing
                block_of<LOW, HIGH, STEPS, N>(at, above, odd, codes + b * STEPS * 4, ins, sum);
                for (int n = 0; n < N; n++)
                    within[n] += __builtin_convertvector(sum[n], vec) * steps[n * x.blocks + b];
            }
        }
        const int64_t at = (panel * groups + g) * PANEL + lane;
        vec scale = numbers(w.scales, at, half_scales);
        if (w.offsets) {
            vec offset = numbers(w.offsets, at, half_offsets);
            for (int n = 0; n < N; n++) total[n] += offset * sums[n * groups + g];
        } else if (EXACT) {
            for (int n = 0; n < N; n++) within[n] -= all((float)zero * sums[n * groups + g]);
        }
        for (int n = 0; n < N; n++) total[n] += within[n] * scale;
    }
    const int64_t begin = panel * PANEL + lane, width = std::min<int64_t>(LANES, w.outs - begin);
    for (int n = 0; n < N; n++) {
        float* to = out + (row + n) * w.outs + begin;
        if (width == LANES) {
            store(to, w.bias ? total[n] + load(w.bias + begin) : total[n]);
        } else {
            for (int64_t o = 0; o < width; o++) to[o] = w.bias ? total[n][o] + w.bias[begin + o] : total[n][o];
        }
    }
}

template <int LOW, int HIGH, int STEPS, bool EXACT>
void tiles(const Grouped& w, const Rows& x, float* out, int64_t rows, int64_t threads) {
    const int64_t panels = (w.outs + PANEL - 1) / PANEL;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && w.outs * w.ins * rows > 65536)
    for (int64_t panel = 0; panel < panels; panel++)
        for (int part = 0; part < PARTS && panel * PANEL + part * LANES < w.outs; part++) {
            int64_t r = 0;
            for (; r + MOST <= rows; r += MOST) tile<LOW, HIGH, STEPS, EXACT, MOST>(w, panel, part, x, r, out);
            if (MOST > 4 && r + 4 <= rows) {
                tile<LOW, HIGH, STEPS, EXACT, 4>(w, panel, part, x, r, out);
                r += 4;
            }
            if (r + 2 <= rows) {
                tile<LOW, HIGH, STEPS, EXACT, 2>(w, panel, part, x, r, out);
                r += 2;
            }
            if (r < rows) tile<LOW, HIGH, STEPS, EXACT, 1>(w, panel, part, x, r, out);
        }
}

template <int LOW, int HIGH>
void product(const Grouped& w, const Rows& x, float* out, int64_t rows, int64_t threads) {
    if (w.exact) return tiles<LOW, HIGH, 4, true>(w, x, out, rows, threads);
    if (x.block == 16) return tiles<LOW, HIGH, 4, false>(w, x, out, rows, threads);
    return tiles<LOW, HIGH, 8, false>(w, x, out, rows, threads);
}

inline vec magnitude(vec x) { return x < 0 ? -x : x; }

inline float largest(vec v) {
    float most = 0;
    for (int i = 0; i < LANES; i++) most = v[i] > most ? v[i] : most;
    return most;
}

// One block of a row as int8, the nearest of 255 even steps. Anything not finite makes the step NaN, so it is not lost.
template <int SIZE>
inline void round_block(const float* x, int8_t* codes, float& step, int32_t& total) {
    constexpr int WIDE = SIZE / LANES;
    vec values[WIDE], most = {}, sizes = {};
    for (int i = 0; i < WIDE; i++) {
        values[i] = load(x + i * LANES);
        vec size = magnitude(values[i]);
        most = size > most ? size : most;
        sizes += size;
    }
    const float top = largest(most), by = top > 1e-30f ? 127.0f / top : 0.0f;
    const bool finite = std::isfinite(sum(sizes));
    step = finite ? top / 127.0f : NAN;
    ivec count = {};
    for (int i = 0; i < WIDE; i++) {
        vec near = values[i] * by + 12582912.0f;  // rounds to an integer in the low bits
        ivec code = (ivec)near - 0x4b400000;
        code = finite ? code : (ivec){};
        count += code;
        typedef int8_t few __attribute__((vector_size(LANES)));
        few narrow = __builtin_convertvector(code, few);
        std::memcpy(codes + i * LANES, &narrow, LANES);
    }
    total = 0;
    for (int i = 0; i < LANES; i++) total += count[i];
}

void compute(const Grouped& w, const float* x, float* out, int64_t rows, int64_t threads) {
    const int64_t block = w.group % 32 || w.exact ? 16 : 32, blocks = w.ins / block, groups = w.ins / w.group;
    thread_local std::vector<float> floats;
    thread_local std::vector<int8_t> small;
    thread_local std::vector<int32_t> counts;
    float *values = at_least(floats, rows * (w.ins + blocks + groups)), *steps = values + rows * w.ins, *sums = steps + rows * blocks;
    int8_t* rounded = at_least(small, rows * w.ins);
    int32_t* totals = at_least(counts, rows * blocks);
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * w.ins > 16384)
    for (int64_t r = 0; r < rows; r++) {
        const float* from = x + r * w.ins;
        if (w.order) {
            for (int64_t i = 0; i < w.ins; i++) values[r * w.ins + i] = from[w.order[i]];
            from = values + r * w.ins;
        } else if (w.exact) {
            std::memcpy(values + r * w.ins, from, w.ins * sizeof(float));
        }
        for (int64_t g = 0; g < groups; g++) sums[r * groups + g] = 0;
        if (w.exact) {
            for (int64_t i = 0; i < w.ins; i++) sums[r * groups + i / w.group] += from[i];
            continue;
        }
        for (int64_t b = 0; b < blocks; b++) {
            int64_t i = b * block, at = r * blocks + b;
            auto round = block == 32 ? round_block<32> : round_block<16>;
            round(from + i, rounded + r * w.ins + i, steps[at], totals[at]);
            sums[r * groups + i / w.group] += steps[at] * totals[at];
        }
    }
    const Rows inputs = {rounded, values, steps, totals, sums, block, blocks, groups};
    switch (w.bits) {
        case 2: return product<2, 0>(w, inputs, out, rows, threads);
        case 3: return product<2, 1>(w, inputs, out, rows, threads);
        case 4: return product<4, 0>(w, inputs, out, rows, threads);
        case 5: return product<4, 1>(w, inputs, out, rows, threads);
        case 6: return product<4, 2>(w, inputs, out, rows, threads);
        case 8: return product<8, 0>(w, inputs, out, rows, threads);
    }
}

}  // namespace

extern "C" {

// x [rows, ins] -> out [rows, outs]. A `Product` of linear.h.
int turnout_grouped(const void* data, const float* x, float* out, int64_t rows, int64_t threads) {
    return guarded([&] { compute(*static_cast<const Grouped*>(data), x, out, rows, threads); });
}

}

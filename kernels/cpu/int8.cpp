// Products of 8-bit integers: weights with one scale an output, activations with one scale a token, sums in int32.
//
// Weights are stored as code + 128, unsigned, in panels of 16 outputs: [outs / 16][ins / 4][16][4], inputs filled up to
// whole 64s and outputs to whole 16s. That is at once the operand of VPDPBUSD and the tile of TDPBSUD (64 inputs are one
// tile of 1 KiB), so every path reads one copy of the weights from front to back. Since
//     sum (w + 128) * x = sum w * x + 128 * sum x
// one sum over the activations takes the offset out again. All paths sum the same integers exactly, so a row's result is
// the same bit for bit, whatever the batch and the path.

#include "linear.h"
#include "vectors.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__AMX_INT8__) && defined(__linux__)
#include "amx.h"
#define TILES 1
#endif

namespace {

constexpr int64_t PANEL = 16;  // outputs
constexpr int64_t STEP = 64;   // inputs of one tile
constexpr int OFFSET = 128;    // of a stored weight
constexpr float LEAST = 1e-30f;  // a row whose largest entry is below this counts as zeros

struct Int8 {
    const uint8_t* weight;  // the panels
    const float* scales;    // [outs]
    const float* bias;      // [outs], or null
    const float* fixed;     // one scale for all activations, or null: each row has its own
    int64_t ins, outs;
};

constexpr int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Weights of 16 outputs and 4 inputs, activations of 4 inputs, and 16 sums: one type for each set of instructions.
#if defined(__AVX512VNNI__)
typedef int8_t Code;
constexpr int ROWS = 8, PANELS = 2;  // what one pass keeps in registers
struct Weights {
    __m512i v;
    explicit Weights(const uint8_t* at) : v(_mm512_loadu_si512(at)) {}
};
struct Sums {
    __m512i v = _mm512_setzero_si512();
    void add(const Weights& w, const Code* x) {
        int32_t four;
        std::memcpy(&four, x, 4);
        v = _mm512_dpbusd_epi32(v, w.v, _mm512_set1_epi32(four));
    }
    void put(int32_t* to) const { _mm512_storeu_si512(to, v); }
};
#elif defined(__AVXVNNI__)
typedef int8_t Code;
constexpr int ROWS = 4, PANELS = 1;
struct Weights {
    __m256i a, b;
    explicit Weights(const uint8_t* at)
        : a(_mm256_loadu_si256((const __m256i*)at)), b(_mm256_loadu_si256((const __m256i*)(at + 32))) {}
};
struct Sums {
    __m256i a = _mm256_setzero_si256(), b = _mm256_setzero_si256();
    void add(const Weights& w, const Code* x) {
        int32_t four;
        std::memcpy(&four, x, 4);
        __m256i all = _mm256_set1_epi32(four);
        a = _mm256_dpbusd_avx_epi32(a, w.a, all);
        b = _mm256_dpbusd_avx_epi32(b, w.b, all);
    }
    void put(int32_t* to) const {
        _mm256_storeu_si256((__m256i*)to, a);
        _mm256_storeu_si256((__m256i*)(to + 8), b);
    }
};
#elif defined(__AVX2__)
typedef int16_t Code;  // widened once: VPMADDUBSW would saturate, VPMADDWD can't
constexpr int ROWS = 2, PANELS = 1;
struct Weights {
    __m256i v[4];
    explicit Weights(const uint8_t* at) {
        for (int i = 0; i < 4; i++) v[i] = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)(at + 16 * i)));
    }
};
struct Sums {
    __m256i v[4] = {};  // two sums an output
    void add(const Weights& w, const Code* x) {
        int64_t four;
        std::memcpy(&four, x, 8);
        __m256i all = _mm256_set1_epi64x(four);
        for (int i = 0; i < 4; i++) v[i] = _mm256_add_epi32(v[i], _mm256_madd_epi16(w.v[i], all));
    }
    void put(int32_t* to) const {
        int32_t pairs[8];
        for (int i = 0; i < 4; i++) {
            _mm256_storeu_si256((__m256i*)pairs, v[i]);
            for (int o = 0; o < 4; o++) to[4 * i + o] = pairs[2 * o] + pairs[2 * o + 1];
        }
    }
};
#else
typedef int8_t Code;
constexpr int ROWS = 1, PANELS = 1;
struct Weights {
    const uint8_t* at;
    explicit Weights(const uint8_t* at) : at(at) {}
};
struct Sums {
    int32_t v[PANEL] = {};
    void add(const Weights& w, const Code* x) {
        for (int o = 0; o < PANEL; o++)
            for (int i = 0; i < 4; i++) v[o] += int32_t(w.at[4 * o + i]) * x[i];
    }
    void put(int32_t* to) const { std::memcpy(to, v, sizeof v); }
};
#endif

// The activations of one call, quantized: codes [rows, padded], zeros beyond the last input.
struct Quantized {
    Code* codes;
    float* scales;    // what a code is worth
    int32_t* totals;  // of a row's codes
    int64_t padded;
};

static inline ivec rounded(vec v) {  // to nearest, ties to even, as torch.round
#if defined(__AVX512F__)
    return (ivec)_mm512_cvtps_epi32((__m512)v);
#elif defined(__AVX__)
    return (ivec)_mm256_cvtps_epi32((__m256)v);
#else
    ivec made;
    for (int i = 0; i < LANES; i++) made[i] = (int32_t)std::nearbyint(v[i]);
    return made;
#endif
}

// One row: scale = max|x| / 127, code = round(x * (127 / max|x|)); of a fixed scale code = round(x * (1 / scale)), held
// within 8 bits. A row with NaN or infinity gets NaN for its scale, which makes its whole result NaN; no other row sees
// any of it.
void quantize(const float* x, int64_t ins, int64_t row, const float* fixed, const Quantized& to) {
    typedef Code codes __attribute__((vector_size(LANES * sizeof(Code)), aligned(1), may_alias));
    ivec most = {};  // the bits of |x| order as |x| does, NaN above infinity
    int64_t i = 0;
    for (; i + LANES <= ins; i += LANES) {
        ivec bits = (ivec)load(x + i) & 0x7fffffff;
        most = bits > most ? bits : most;
    }
    int32_t largest = 0;
    for (int lane = 0; lane < LANES; lane++) largest = std::max(largest, most[lane]);
    for (int64_t rest = i; rest < ins; rest++) {
        int32_t bits;
        std::memcpy(&bits, x + rest, 4);
        largest = std::max(largest, bits & 0x7fffffff);
    }
    float top;
    std::memcpy(&top, &largest, 4);
    bool finite = largest < 0x7f800000;
    float by = !finite || top < LEAST ? 0.0f : fixed ? 1.0f / *fixed : 127.0f / top;
    to.scales[row] = !finite ? NAN : fixed ? *fixed : top / 127.0f;
    Code* out = to.codes + row * to.padded;
    if (by == 0.0f) {
        std::memset(out, 0, to.padded * sizeof(Code));
        to.totals[row] = 0;
        return;
    }
    ivec total = {};
    for (i = 0; i + LANES <= ins; i += LANES) {
        vec near = load(x + i) * by;
        near = near > 127.0f ? all(127.0f) : near < -128.0f ? all(-128.0f) : near;
        ivec made = rounded(near);
        total += made;
        *reinterpret_cast<codes*>(out + i) = __builtin_convertvector(made, codes);
    }
    int32_t sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += total[lane];
    for (; i < ins; i++) sum += out[i] = (Code)std::nearbyint(std::min(127.0f, std::max(-128.0f, x[i] * by)));
    for (; i < to.padded; i++) out[i] = 0;
    to.totals[row] = sum;
}

// sums [16] of one panel and row -> out: the offset out, both scales and the bias in. A last panel is filled up, so that
// an output's arithmetic does not depend on where its panel ends.
static inline void finish(const Int8& p, const int32_t* sums, const Quantized& q, int64_t row, int64_t first, float* out) {
    typedef int32_t loose_ints __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
    const float *scales = p.scales + first, *bias = p.bias ? p.bias + first : nullptr;
    float *to = out + row * p.outs + first, last[3][PANEL] = {};
    const int64_t num = std::min(PANEL, p.outs - first);
    if (num < PANEL) {
        std::memcpy(last[0], scales, num * sizeof(float));
        if (bias) std::memcpy(last[1], bias, num * sizeof(float));
        scales = last[0], bias = bias ? last[1] : nullptr, to = last[2];
    }
    const int32_t offset = OFFSET * q.totals[row];
    const float scale = q.scales[row];
    for (int64_t o = 0; o < PANEL; o += LANES) {
        ivec exact = *reinterpret_cast<const loose_ints*>(sums + o) - offset;
        vec made = __builtin_convertvector(exact, vec) * (load(scales + o) * scale);
        store(to + o, bias ? made + load(bias + o) : made);
    }
    if (num < PANEL) std::memcpy(out + row * p.outs + first, last[2], num * sizeof(float));
}

// R rows of activations times P panels
template <int R, int P>
void some_rows(const Int8& p, const Quantized& q, int64_t row, int64_t panel, float* out) {
    const uint8_t* w = p.weight + panel * q.padded * PANEL;
    const Code* x = q.codes + row * q.padded;
    constexpr int SPLIT = R * P >= 4 ? 1 : 4;  // one sum in several, so that each need not wait for the one before
    Sums sums[SPLIT][R][P];
    for (int64_t i = 0; i < q.padded; i += 4 * SPLIT)
        for (int s = 0; s < SPLIT; s++)
            for (int n = 0; n < P; n++) {
                Weights four(w + n * q.padded * PANEL + (i + 4 * s) * PANEL);
                for (int r = 0; r < R; r++) sums[s][r][n].add(four, x + r * q.padded + i + 4 * s);
            }
    for (int r = 0; r < R; r++)
        for (int n = 0; n < P; n++) {
            int32_t all[PANEL], part[PANEL];
            sums[0][r][n].put(all);
            for (int s = 1; s < SPLIT; s++) {
                sums[s][r][n].put(part);
                for (int o = 0; o < PANEL; o++) all[o] += part[o];
            }
            finish(p, all, q, row + r, (panel + n) * PANEL, out);
        }
}

template <int R, int P>
void rest_rows(const Int8& p, const Quantized& q, int64_t row, int64_t num, int64_t panel, float* out) {
    if (num == R)
        some_rows<R, P>(p, q, row, panel, out);
    else if constexpr (R > 1)
        rest_rows<R - 1, P>(p, q, row, num, panel, out);
}

template <int P>
void all_rows(const Int8& p, const Quantized& q, int64_t rows, int64_t panel, float* out) {
    int64_t row = 0;
    for (; row + ROWS <= rows; row += ROWS) some_rows<ROWS, P>(p, q, row, panel, out);
    if (row < rows) rest_rows<ROWS, P>(p, q, row, rows - row, panel, out);
}

#ifdef TILES
constexpr int64_t FEW = 4;  // up to so many rows, a tile is mostly air

// A blocks of up to 16 rows times P panels
template <int A, int P>
void tile_rows(const Int8& p, const Quantized& q, int64_t row, int64_t rows, int64_t panel, float* out) {
    const uint8_t* w = p.weight + panel * q.padded * PANEL;
    const Code* x = q.codes + row * q.padded;
    alignas(64) int32_t sums[A * P][16][16];
    _tile_zero(0);
    if (P > 1) _tile_zero(1);
    if (A > 1) _tile_zero(2);
    if (A > 1 && P > 1) _tile_zero(3);
    for (int64_t i = 0; i < q.padded; i += STEP) {
        _tile_loadd(4, x + i, q.padded);
        _tile_loadd(6, w + i * PANEL, 64);
        _tile_dpbsud(0, 4, 6);
        if (P > 1) {
            _tile_loadd(7, w + (q.padded + i) * PANEL, 64);
            _tile_dpbsud(1, 4, 7);
        }
        if (A > 1) {
            _tile_loadd(5, x + 16 * q.padded + i, q.padded);
            _tile_dpbsud(2, 5, 6);
        }
        if (A > 1 && P > 1) _tile_dpbsud(3, 5, 7);
    }
    _tile_stored(0, sums[0], 64);
    if (P > 1) _tile_stored(1, sums[1], 64);
    if (A > 1) _tile_stored(2, sums[P], 64);
    if (A > 1 && P > 1) _tile_stored(3, sums[P + 1], 64);
    for (int64_t r = 0; r < std::min<int64_t>(16 * A, rows - row); r++)
        for (int n = 0; n < P; n++) finish(p, sums[r / 16 * P + n][r % 16], q, row + r, (panel + n) * PANEL, out);
}

template <int P>
void all_tiles(const Int8& p, const Quantized& q, int64_t rows, int64_t panel, float* out) {
    int64_t row = 0;
    for (; row + 16 < rows; row += 32) tile_rows<2, P>(p, q, row, rows, panel, out);
    if (row < rows) tile_rows<1, P>(p, q, row, rows, panel, out);
}
#endif

void product(const Int8& p, const float* x, float* out, int64_t rows, int64_t threads) {
    const int64_t padded = up(p.ins, STEP), held = up(rows, 32), panels = up(p.outs, PANEL) / PANEL;
    thread_local std::vector<Code, Aligned<Code>> codes;
    thread_local std::vector<float> scales;
    thread_local std::vector<int32_t> totals;
    const Quantized q = {at_least(codes, held * padded), at_least(scales, rows), at_least(totals, rows), padded};
    const bool alone = threads <= 1 || rows * p.ins * p.outs < 65536;
#pragma omp parallel num_threads(threads) if (!alone)
    {
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; r++) quantize(x + r * p.ins, p.ins, r, p.fixed, q);
#ifdef TILES
        if (rows > FEW && may_use_tiles()) {
            Tiles tiles(std::min<int64_t>(rows, 16));
#pragma omp for schedule(static)
            for (int64_t n = 0; n < panels; n += 2)
                if (n + 2 <= panels)
                    all_tiles<2>(p, q, rows, n, out);
                else
                    all_tiles<1>(p, q, rows, n, out);
        } else
#endif
        {
#pragma omp for schedule(static)
            for (int64_t n = 0; n < panels; n += 2)
                if (PANELS == 2 && n + 2 <= panels)
                    all_rows<PANELS>(p, q, rows, n, out);
                else
                    for (int64_t one = n; one < std::min(n + 2, panels); one++) all_rows<1>(p, q, rows, one, out);
        }
    }
}

}  // namespace

extern "C" {

// x [rows, ins] float32 -> out [rows, outs]: quantized, multiplied, scaled back, in one go.
// A `Product` of linear.h.
int turnout_int8(const void* data, const float* x, float* out, int64_t rows, int64_t threads) {
    return guarded([&] { product(*static_cast<const Int8*>(data), x, out, rows, threads); });
}

// Which instructions the products use here, for a message.
const char* turnout_int8_path() {
#ifdef TILES
    if (may_use_tiles()) return "AMX tiles, AVX512-VNNI for few rows";
#endif
#if defined(__AVX512VNNI__)
    return "AVX512-VNNI";
#elif defined(__AVXVNNI__)
    return "AVX-VNNI";
#elif defined(__AVX2__)
    return "AVX2";
#else
    return "plain C++";
#endif
}

}

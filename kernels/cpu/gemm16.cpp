// Products with 16-bit weights, summed in float32. They lie in panels of 16 outputs, filled up with zeros to whole 32s of
// outputs and of inputs:
//
//     bfloat16  [outs / 16, ins / 2, 16, 2]    the operand of VDPBF16PS and the tile of TDPBF16PS (32 inputs: 1 KiB); and
//                                              a 32-bit word is two floats by a shift and a mask
//     float16   [outs / 16, ins, 16]           a row is widened by VCVTPH2PS
//
// so each level of instructions reads one copy of the weights from front to back, at half float32's bytes:
//
//     WIDEN  weights become float32 in registers; inputs stay float32 (float16 always; any machine)
//     DOT    inputs are rounded to bfloat16, pairs multiplied by AVX512-BF16
//     TILES  inputs are rounded to bfloat16, 16 x 32 of them multiplied by AMX, for few rows too: memory is the floor there
//
// A process uses one level for any number of rows, the fastest in a short trial: AVX512-BF16 doubles the rate of float32 on
// some processors and halves it on others. In a level a row's sums run over `ins` in one order, so its bits never depend on
// its neighbours. (On DOT and TILES a bfloat16 below 2^-126 counts as zero.)

#include <chrono>

#include "amx.h"
#include "elements.h"
#include "linear.h"

namespace {

constexpr int64_t PANEL = 16, STEP = 32;  // outputs of a panel; inputs of a tile
constexpr int64_t BLOCK = 2 * PANEL;      // outputs computed together
constexpr int WIDE = BLOCK / LANES > 2 ? 2 : BLOCK / LANES;  // vectors in registers beside each other
constexpr int MOST = LANES == 16 ? 14 : 6;                   // rows that fill the registers then
constexpr int DOT_ROWS = 14;
constexpr int64_t AHEAD = 1024;  // 16-bit numbers to fetch ahead of a panel's reading
constexpr int64_t DEEP = 8;      // rows' tiles of one piece of work

enum Level : int { WIDEN, DOT, TILES };

struct Packed16 {
    const uint16_t* weight;
    const float* bias;  // or null
    int64_t ins, outs;
    int64_t half;  // 1: float16, 0: bfloat16
};

constexpr int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// sums of 16 outputs -> out, the bias in. Not inlined into functions for other instructions: those pass vectors otherwise.
__attribute__((noinline)) void put(const Packed16& p, const float* sums, int64_t first, float* to) {
    const int64_t num = p.outs - first;
    if (num >= PANEL)
        for (int64_t o = 0; o < PANEL; o += LANES) store(to + o, p.bias ? load(sums + o) + load(p.bias + first + o) : load(sums + o));
    else
        for (int64_t o = 0; o < num; o++) to[o] = p.bias ? sums[o] + p.bias[first + o] : sums[o];
}

// N rows times WIDE vectors of outputs, from vector `first` of the block on
template <int N, bool HALF>
void widened(const Packed16& p, int64_t block, int first, const float* x, float* out) {
    const int64_t padded = up(p.ins, STEP), size = padded * PANEL;
    constexpr int PER = PANEL / LANES;              // vectors of a panel
    constexpr int64_t ROW = HALF ? PANEL : 2 * PANEL;  // numbers of a panel read together
    const uint16_t* from[WIDE];
    for (int v = 0; v < WIDE; v++)
        from[v] = p.weight + (2 * block + (first + v) / PER) * size + (first + v) % PER * LANES * (HALF ? 1 : 2);
    vec acc[N][WIDE] = {};
    auto take = [&](int64_t i, const vec* weight) {
        for (int r = 0; r < N; r++) {
            vec value = all(x[r * p.ins + i]);
            for (int v = 0; v < WIDE; v++) acc[r][v] = madd(value, weight[v], acc[r][v]);
        }
    };
    for (int64_t i = 0; i < p.ins; i += HALF ? 1 : 2) {
        vec weight[WIDE], odd[WIDE];
        for (int v = 0; v < WIDE; v++) {
            __builtin_prefetch(from[v] + AHEAD);
            if constexpr (HALF) {
                weight[v] = Float16::load(from[v]);
            } else {
                ivec words = bits_at<ivec>(from[v]);
                weight[v] = (vec)(words << 16);
                odd[v] = (vec)(words & (int32_t)0xffff0000);
            }
            from[v] += ROW;
        }
        take(i, weight);
        if (!HALF && i + 1 < p.ins) take(i + 1, odd);
    }
    for (int r = 0; r < N; r++) {
        float sums[WIDE * LANES];
        for (int v = 0; v < WIDE; v++) store(sums + v * LANES, acc[r][v]);
        for (int o = 0; o < WIDE * LANES; o += PANEL) {
            int64_t output = block * BLOCK + first * LANES + o;
            if (output < p.outs) put(p, sums + o, output, out + r * p.outs + output);
        }
    }
}

template <int N, bool HALF>
void widened_rows(const Packed16& p, int64_t rows, int64_t block, int first, const float* x, float* out) {
    if (rows == N) return widened<N, HALF>(p, block, first, x, out);
    if constexpr (N > 1) widened_rows<N - 1, HALF>(p, rows, block, first, x, out);
}

void all_widened(const Packed16& p, int64_t block, const float* x, float* out, int64_t begin, int64_t end) {
    int64_t tiles = up(end - begin, MOST) / MOST;
    for (int first = 0; first * LANES < BLOCK; first += WIDE)
        for (int64_t t = 0; t < tiles; t++) {
            int64_t row = begin + (end - begin) * t / tiles, rows = begin + (end - begin) * (t + 1) / tiles - row;
            const float* at = x + row * p.ins;
            float* to = out + row * p.outs;
            if (p.half)
                widened_rows<MOST, true>(p, rows, block, first, at, to);
            else
                widened_rows<MOST, false>(p, rows, block, first, at, to);
        }
}

#if defined(__x86_64__) && defined(__linux__)
#define WITH_DOT __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))
#define WITH_TILES __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,amx-tile,amx-bf16")))

// N rows of bfloat16 [.., padded] times a block
template <int N>
WITH_DOT void dots(const Packed16& p, int64_t block, const uint16_t* x, float* out) {
    const int64_t padded = up(p.ins, STEP);
    const uint16_t *one = p.weight + 2 * block * padded * PANEL, *two = one + padded * PANEL;
    __m512 acc[N][2];
    for (int r = 0; r < N; r++) acc[r][0] = acc[r][1] = _mm512_setzero_ps();
    for (int64_t i = 0; i < padded; i += 2) {
        __builtin_prefetch(one + AHEAD);
        __builtin_prefetch(two + AHEAD);
        const __m512bh a = (__m512bh)_mm512_loadu_si512(one), b = (__m512bh)_mm512_loadu_si512(two);
        one += 2 * PANEL, two += 2 * PANEL;
        for (int r = 0; r < N; r++) {
            int32_t pair;
            std::memcpy(&pair, x + r * padded + i, 4);
            const __m512bh value = (__m512bh)_mm512_set1_epi32(pair);
            acc[r][0] = _mm512_dpbf16_ps(acc[r][0], a, value);
            acc[r][1] = _mm512_dpbf16_ps(acc[r][1], b, value);
        }
    }
    for (int r = 0; r < N; r++)
        for (int n = 0; n < 2; n++) {
            alignas(64) float sums[PANEL];
            _mm512_store_ps(sums, acc[r][n]);
            int64_t output = block * BLOCK + n * PANEL;
            if (output < p.outs) put(p, sums, output, out + r * p.outs + output);
        }
}

template <int N>
void some_dots(const Packed16& p, int64_t rows, int64_t block, const uint16_t* x, float* out) {
    if (rows == N) return dots<N>(p, block, x, out);
    if constexpr (N > 1) some_dots<N - 1>(p, rows, block, x, out);
}

void all_dots(const Packed16& p, int64_t block, const uint16_t* x, float* out, int64_t begin, int64_t end) {
    int64_t tiles = up(end - begin, DOT_ROWS) / DOT_ROWS, padded = up(p.ins, STEP);
    for (int64_t t = 0; t < tiles; t++) {
        int64_t row = begin + (end - begin) * t / tiles, rows = begin + (end - begin) * (t + 1) / tiles - row;
        some_dots<DOT_ROWS>(p, rows, block, x + row * padded, out + row * p.outs);
    }
}

// A times 16 rows of bfloat16 [.., padded] times a block; `rows` of them are wanted
template <int A>
WITH_TILES void tile_rows(const Packed16& p, int64_t block, const uint16_t* x, int64_t rows, float* out) {
    const int64_t padded = up(p.ins, STEP), stride = padded * 2;
    const uint16_t *one = p.weight + 2 * block * padded * PANEL, *two = one + padded * PANEL;
    alignas(64) float sums[A * 2][16][16];
    _tile_zero(0);
    _tile_zero(1);
    if (A > 1) _tile_zero(2);
    if (A > 1) _tile_zero(3);
    for (int64_t i = 0; i < padded; i += STEP) {
        _tile_loadd(6, one + i * PANEL, 64);
        _tile_loadd(4, x + i, stride);
        _tile_loadd(7, two + i * PANEL, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (A > 1) {
            _tile_loadd(5, x + 16 * padded + i, stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    if (A > 1) _tile_stored(2, sums[2 % (A * 2)], 64);
    if (A > 1) _tile_stored(3, sums[3 % (A * 2)], 64);
    for (int64_t r = 0; r < std::min<int64_t>(16 * A, rows); r++)
        for (int n = 0; n < 2; n++) {
            int64_t output = block * BLOCK + n * PANEL;
            if (output < p.outs) put(p, sums[r / 16 * 2 + n][r % 16], output, out + r * p.outs + output);
        }
}

void all_tiles(const Packed16& p, int64_t block, const uint16_t* x, float* out, int64_t begin, int64_t end) {
    int64_t padded = up(p.ins, STEP), row = begin;
    for (; row + 16 < end; row += 32) tile_rows<2>(p, block, x + row * padded, end - row, out + row * p.outs);
    if (row < end) tile_rows<1>(p, block, x + row * padded, end - row, out + row * p.outs);
}

// n floats to the nearest bfloat16, ties to even
WITH_DOT void rounded_row(const float* from, uint16_t* to, int64_t n) {
    for (int64_t i = 0; i < n; i += 16) {
        const __mmask16 there = (__mmask16)(n - i >= 16 ? 0xffff : (1 << (n - i)) - 1);
        const __m256i made = (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(there, from + i));
        _mm256_mask_storeu_epi16(to + i, there, made);
    }
}

// What the processor has and the system lets us use, by level
bool usable(Level wanted) {
    unsigned a, b, c, d, low = 0, high = 0;
    if (wanted == WIDEN) return true;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 27 & 1)) return false;  // the system keeps no wide registers
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    constexpr unsigned WANTED = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // avx512f, dq, bw, vl
    if ((low & 0xe6) != 0xe6 || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || (b & WANTED) != WANTED) return false;
    const bool tiles = (d >> 22 & 1) && (d >> 24 & 1) && (low & 0x60000) == 0x60000;  // amx_bf16, amx_tile, their state
    if (wanted == TILES && !(tiles && may_use_tiles())) return false;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);  // avx512_bf16
}
#else
bool usable(Level wanted) { return wanted == WIDEN; }
#endif

void round_row(const float* from, uint16_t* to, int64_t n) {
#if defined(__x86_64__) && defined(__linux__)
    rounded_row(from, to, n);
#else
    narrow<BFloat16>(from, to, n);
#endif
}

// Rows begin..end of a block of outputs
void compute(const Packed16& p, Level chosen, int64_t block, const float* x, const uint16_t* rounded, float* out, int64_t begin, int64_t end) {
#if defined(__x86_64__) && defined(__linux__)
    if (chosen == TILES) return all_tiles(p, block, rounded, out, begin, end);
    if (chosen == DOT) return all_dots(p, block, rounded, out, begin, end);
#endif
    all_widened(p, block, x, out, begin, end);
}

void product(const Packed16& p, Level chosen, const float* x, float* out, int64_t rows, int64_t threads) {
    if (rows == 0) return;  // a step that samples nothing asks for no logits, and tiles of no rows are no tiles
    const int64_t padded = up(p.ins, STEP), blocks = up(p.outs, BLOCK) / BLOCK;
    const int64_t parts = std::max<int64_t>(1, rows / (32 * DEEP));  // of the rows, each a whole number of tiles
    const int64_t step = up(up(rows, parts) / parts, 32);
    thread_local std::vector<uint16_t, Aligned<uint16_t>> scratch;
    uint16_t* rounded = chosen == WIDEN ? nullptr : at_least(scratch, up(rows, 32) * padded);
#pragma omp parallel num_threads(threads) if (threads > 1 && rows * p.ins * p.outs >= 65536)
    {
        if (rounded) {
#pragma omp for schedule(static)
            for (int64_t r = 0; r < rows; r++) {
                round_row(x + r * p.ins, rounded + r * padded, p.ins);
                std::fill(rounded + r * padded + p.ins, rounded + (r + 1) * padded, 0);
            }
        }
        {
#if defined(__x86_64__) && defined(__linux__)
            alignas(64) char settings[sizeof(Tiles)];
            Tiles* tiles = chosen == TILES ? new (settings) Tiles(std::min<int64_t>(rows, 16)) : nullptr;
#endif
#pragma omp for schedule(static)
            for (int64_t item = 0; item < parts * blocks; item++) {
                int64_t begin = item / blocks * step;
                compute(p, chosen, item % blocks, x, rounded, out, begin, std::min(rows, begin + step));
            }
#if defined(__x86_64__) && defined(__linux__)
            if (tiles) tiles->~Tiles();
#endif
        }
    }
}

// Of the levels up to `most`, the one that computes a product of 16 rows soonest
Level fastest(int most) {
    constexpr int64_t INS = 512, OUTS = 128, ROWS = 16;
    std::vector<uint16_t> weight(INS * OUTS);
    floats x(ROWS * INS), out(ROWS * OUTS);
    const Packed16 p = {weight.data(), nullptr, INS, OUTS, 0};
    Level found = WIDEN;
    auto best = std::chrono::nanoseconds::max();
    for (Level tried : {WIDEN, DOT, TILES}) {
        if (tried > most || !usable(tried)) continue;
        for (int times = 0; times < 20; times++) {
            const auto start = std::chrono::steady_clock::now();
            product(p, tried, x.data(), out.data(), ROWS, 1);
            const auto took = std::chrono::nanoseconds(std::chrono::steady_clock::now() - start);
            if (took < best) best = took, found = tried;
        }
    }
    return found;
}

int chosen = -1;  // the level of bfloat16 products; -1: not chosen yet

}  // namespace

extern "C" {

// Choose the level of bfloat16 products for this process, `most` or below, and say which: 0 WIDEN, 1 DOT, 2 TILES. Not to
// be called while another thread computes.
int turnout_bf16_level(int most) { return chosen = fastest(most); }

// For tests: compute on this very level; 0: the processor has it not, and nothing changes.
int turnout_bf16_force(int level) {
    if (!usable((Level)level)) return 0;
    chosen = level;
    return 1;
}

int turnout_bf16_chosen() { return chosen; }

// A `Product` of linear.h. `turnout_bf16_level` was called before.
int turnout_gemm16(const void* data, const float* x, float* out, int64_t rows, int64_t threads) {
    const Packed16& p = *static_cast<const Packed16*>(data);
    return guarded([&] { product(p, p.half || chosen < 0 ? WIDEN : (Level)chosen, x, out, rows, threads); });
}

}

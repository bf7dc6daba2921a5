// What paged attention is made of: products of small tiles in registers, and a softmax kept up to date tile by tile as
// in FlashAttention (arXiv 2205.14135).
//
// Every row is computed alike whatever rows stand beside it: a sum runs over head size or keys in order, tiles and parts
// of a range of keys begin at fixed multiples. So a token's output is the same, bit for bit, alone or among others, in a
// whole prompt, a chunk of it, or a decode step.
#pragma once

#include "elements.h"

constexpr int TILE = 64;                    // keys attended to together
constexpr int VECS = TILE / LANES;
constexpr int WIDE = LANES == 16 ? 4 : 2;   // vectors of a tile held in registers, for TALL rows
constexpr int TALL = 6;
constexpr int FEW = 8;                      // up to so many rows, keys and values are used where they lie
constexpr int DEPTH = 64;                   // of a head's size summed at once
constexpr int PART = 512;                   // keys whose softmax is computed apart and merged (Flash-Decoding)
constexpr float NEVER = -INFINITY;
constexpr float LOG2E = 1.44269504f;        // weights are powers of two

// What is known of some rows while they attend to keys.
struct State {
    float *best, *total, *out;  // [rows]: largest logit; [rows, LANES]: sums of weights; [rows, width]: of weighted values
};

// How logits become weights, and which keys a row sees.
struct Softmax {
    float by;       // logit = product * by, or softcap * tanh(product * by), in powers of two
    float softcap;  // times log2(e); 0: none
    int64_t width;  // of a row of State::out: the value size, up to full vectors
};

// c[N, vectors] (+)= a[N, depth] . b[depth, vectors]. What is added is summed apart first: short sums round less.
template <int N, int V>
static inline void product_part(const float* a, int64_t a_step, const float* b, int64_t b_step, int64_t depth, float* c, int64_t c_step, bool add) {
    vec acc[N][V];
    for (int r = 0; r < N; r++)
        for (int i = 0; i < V; i++) acc[r][i] = (vec){};
    for (int64_t d = 0; d < depth; d++) {
        vec row[V];
        for (int i = 0; i < V; i++) row[i] = load(b + d * b_step + i * LANES);
        for (int r = 0; r < N; r++) {
            vec x = all(a[r * a_step + d]);
            for (int i = 0; i < V; i++) acc[r][i] = madd(x, row[i], acc[r][i]);
        }
    }
    for (int r = 0; r < N; r++)
        for (int i = 0; i < V; i++) {
            float* to = c + r * c_step + i * LANES;
            store(to, add ? load(to) + acc[r][i] : acc[r][i]);
        }
}

template <int N>
__attribute__((noinline)) void product(const float* a, int64_t a_step, const float* b, int64_t b_step, int64_t depth, int64_t vectors, float* c, int64_t c_step, bool add) {
    int64_t i = 0;
    for (; i + WIDE <= vectors; i += WIDE)
        product_part<N, WIDE>(a, a_step, b + i * LANES, b_step, depth, c + i * LANES, c_step, add);
    if (WIDE == 4 && vectors - i == 3)
        product_part<N, 3>(a, a_step, b + i * LANES, b_step, depth, c + i * LANES, c_step, add);
    else if (WIDE == 4 && vectors - i == 2)
        product_part<N, 2>(a, a_step, b + i * LANES, b_step, depth, c + i * LANES, c_step, add);
    else if (vectors > i)
        product_part<N, 1>(a, a_step, b + i * LANES, b_step, depth, c + i * LANES, c_step, add);
}

static inline float power_of_two(float below_zero) { return exp2_below_zero(all(below_zero))[0]; }

// One row's products with a tile of keys become weights; what was summed before is rescaled. It sees keys lo..hi of the
// tile. Scales of an 8-bit cache: k_scale multiplies the products, v_scale the weights after they were summed.
template <class C>
__attribute__((noinline)) void online_softmax(float* row, int lo, int hi, const Softmax& s, const float* k_scale, const float* v_scale, float* best, float* total, float* out) {
    vec x[VECS], top = all(NEVER);
    for (int i = 0; i < VECS; i++) {
        x[i] = load(row + i * LANES) * s.by;
        if constexpr (C::SCALED) x[i] *= load(k_scale + i * LANES) * C::UNIT;
        if (s.softcap != 0) x[i] = tanh_of(x[i]) * s.softcap;
    }
    if (lo > 0 || hi < TILE) {
        for (int i = 0; i < VECS; i++) {
            ivec at = counting() + i * LANES;
            x[i] = (at >= lo) & (at < hi) ? x[i] : all(NEVER);
        }
    }
    for (int i = 0; i < VECS; i++) top = larger(top, x[i]);
    float now = std::max(*best, largest(top));
    if (now == NEVER) now = 0;  // nothing seen yet: every weight is 2^-infinity, 0
    else if (*best != now) {
        float factor = power_of_two(*best - now);
        store(total, load(total) * factor);
        for (int64_t d = 0; d < s.width; d += LANES) store(out + d, load(out + d) * factor);
        *best = now;
    }
    vec added = {};
    for (int i = 0; i < VECS; i++) {
        vec w = exp2_below_zero(x[i] - now);
        added += w;
        if constexpr (C::SCALED) w *= load(v_scale + i * LANES) * C::UNIT;
        store(row + i * LANES, w);
    }
    store(total, load(total) + added);
}

static inline void clear(const State& state, int64_t rows, int64_t width) {
    std::fill_n(state.best, rows, NEVER);
    std::fill_n(state.total, rows * LANES, 0.0f);
    std::fill_n(state.out, rows * width, 0.0f);
}

// `part`, of later keys, joins `into`.
static __attribute__((noinline)) void merge(const State& into, const State& part, int64_t rows, int64_t width) {
    for (int64_t r = 0; r < rows; r++) {
        float top = std::max(into.best[r], part.best[r]);
        if (top == NEVER) continue;
        vec a = exp2_below_zero(all(into.best[r] - top)), b = exp2_below_zero(all(part.best[r] - top));
        float *to = into.total + r * LANES, *from = part.total + r * LANES;
        store(to, madd(load(from), b, load(to) * a));
        to = into.out + r * width, from = part.out + r * width;
        for (int64_t d = 0; d < width; d += LANES) store(to + d, madd(load(from + d), b, load(to + d) * a));
        into.best[r] = top;
    }
}

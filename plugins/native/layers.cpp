// The small operations between matrix products, products of few rows, and a decoder layer around its attention.

#include "vectors.h"

extern "C" {

// out = x / sqrt(mean(x^2) + eps) * (weight + plus), row by row (RMSNorm, arXiv 1910.07467)
void turnout_rms_norm(const float* x, const float* weight, float* out, int64_t rows, int64_t dim, float eps, float plus, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * dim > 65536)
    for (int64_t r = 0; r < rows; r++) {
        const float* from = x + r * dim;
        vec squares = {};
        int64_t d = 0;
        for (; d + LANES <= dim; d += LANES) squares += load(from + d) * load(from + d);
        float total = sum(squares);
        for (; d < dim; d++) total += from[d] * from[d];
        float by = 1.0f / std::sqrt(total / dim + eps);
        for (d = 0; d < dim; d++) out[r * dim + d] = from[d] * by * (weight[d] + plus);
    }
}

// out[m] = weight . x[m] (+ bias) for the few rows of a decode step: weight [outs, ins] is read once, at memory speed
void turnout_linear(const float* x, const float* weight, const float* bias, float* out, int64_t rows, int64_t ins, int64_t outs, int64_t threads) {
    constexpr int64_t PART = 32;  // outputs of one piece of work
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t first = 0; first < outs; first += PART) {
        int64_t end = std::min(outs, first + PART);
        for (int64_t m = 0; m < rows; m++) {
            const float* from = x + m * ins;
            float* to = out + m * outs;
            int64_t o = first;
            for (; o + 4 <= end; o += 4) {
                const float* w = weight + o * ins;
                vec a = {}, b = {}, c = {}, d = {};
                int64_t i = 0;
                for (; i + LANES <= ins; i += LANES) {
                    __builtin_prefetch(w + i + 4 * ins);
                    __builtin_prefetch(w + i + 5 * ins);
                    __builtin_prefetch(w + i + 6 * ins);
                    __builtin_prefetch(w + i + 7 * ins);
                    vec v = load(from + i);
                    a += v * load(w + i);
                    b += v * load(w + ins + i);
                    c += v * load(w + 2 * ins + i);
                    d += v * load(w + 3 * ins + i);
                }
                float total[4] = {sum(a), sum(b), sum(c), sum(d)};
                for (; i < ins; i++)
                    for (int n = 0; n < 4; n++) total[n] += from[i] * w[n * ins + i];
                for (int n = 0; n < 4; n++) to[o + n] = total[n] + (bias ? bias[o + n] : 0.0f);
            }
            for (; o < end; o++) {
                float total = bias ? bias[o] : 0.0f;
                for (int64_t i = 0; i < ins; i++) total += from[i] * weight[o * ins + i];
                to[o] = total;
            }
        }
    }
}

// Rotary embedding (RoFormer, arXiv 2104.09864) of q and k, halves apart: out = x * cos + (-x[half:], x[:half]) * sin
// q: token t at q + t * q_step, heads end to end; cos, sin: [tokens, dim]; out: [tokens, heads, dim]
static void rotate(const float* x, int64_t step, const float* cos, const float* sin, float* out, int64_t t, int64_t heads, int64_t dim) {
    int64_t half = dim / 2;
    const float *c = cos + t * dim, *s = sin + t * dim;
    for (int64_t h = 0; h < heads; h++) {
        const float *from = x + t * step + h * dim;
        float* to = out + (t * heads + h) * dim;
        for (int64_t d = 0; d < half; d++) {
            to[d] = from[d] * c[d] - from[d + half] * s[d];
            to[d + half] = from[d + half] * c[d + half] + from[d] * s[d + half];
        }
    }
}

void turnout_rotate(const float* q, const float* k, float* q_out, float* k_out, const float* cos, const float* sin, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t dim, int64_t q_step, int64_t k_step, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && tokens * heads * dim > 65536)
    for (int64_t t = 0; t < tokens; t++) {
        rotate(q, q_step, cos, sin, q_out, t, heads, dim);
        rotate(k, k_step, cos, sin, k_out, t, kv_heads, dim);
    }
}

// out = silu(gate) * up, for x [rows, 2 * dim] that holds gate and up side by side
void turnout_silu_mul(const float* x, float* out, int64_t rows, int64_t dim, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * dim > 65536)
    for (int64_t r = 0; r < rows; r++) {
        const float *gate = x + r * 2 * dim, *up = gate + dim;
        int64_t d = 0;
        for (; d + LANES <= dim; d += LANES) {
            vec g = load(gate + d), positive = g > 0 ? g : -g;
            vec e = exp_below_zero(-positive);  // sigmoid(g) from e^-|g|, which can't overflow
            store(out + r * dim + d, g * load(up + d) * (g > 0 ? all(1.0f) : e) / (1.0f + e));
        }
        for (; d < dim; d++) out[r * dim + d] = gate[d] / (1.0f + std::exp(-gate[d])) * up[d];
    }
}

// A decoder layer of the usual form (norm, q/k/v, rotation; attention; output, norm, gated MLP), for few rows
struct Layer {
    const float *norm1, *qkv, *qkv_bias, *o, *o_bias, *norm2, *gate_up, *down;
    int64_t dim, heads, kv_heads, head_dim, hidden, threads;
    float eps1, plus1, eps2, plus2;
};

// x [rows, dim] -> q [rows, heads, head_dim], k, v [rows, kv_heads, head_dim]
void turnout_before_attention(const Layer* layer, const float* x, const float* cos, const float* sin, float* q, float* k, float* v, int64_t rows) {
    const Layer& l = *layer;
    int64_t q_size = l.heads * l.head_dim, kv_size = l.kv_heads * l.head_dim, all_size = q_size + 2 * kv_size;
    thread_local std::vector<float> scratch;
    scratch.resize(rows * (l.dim + all_size));
    float *normed = scratch.data(), *qkv = normed + rows * l.dim;
    turnout_rms_norm(x, l.norm1, normed, rows, l.dim, l.eps1, l.plus1, 1);
    turnout_linear(normed, l.qkv, l.qkv_bias, qkv, rows, l.dim, all_size, l.threads);
    for (int64_t t = 0; t < rows; t++) {
        rotate(qkv, all_size, cos, sin, q, t, l.heads, l.head_dim);
        rotate(qkv + q_size, all_size, cos, sin, k, t, l.kv_heads, l.head_dim);
        std::memcpy(v + t * kv_size, qkv + t * all_size + q_size + kv_size, kv_size * sizeof(float));
    }
}

// x [rows, dim] and what attention made of it [rows, heads, head_dim] -> out [rows, dim]
void turnout_after_attention(const Layer* layer, const float* x, const float* attended, float* out, int64_t rows) {
    const Layer& l = *layer;
    thread_local std::vector<float> scratch;
    scratch.resize(rows * (2 * l.dim + 3 * l.hidden));
    float *middle = scratch.data(), *normed = middle + rows * l.dim, *both = normed + rows * l.dim;
    float* inner = both + rows * 2 * l.hidden;
    turnout_linear(attended, l.o, l.o_bias, middle, rows, l.heads * l.head_dim, l.dim, l.threads);
    for (int64_t i = 0; i < rows * l.dim; i++) middle[i] += x[i];
    turnout_rms_norm(middle, l.norm2, normed, rows, l.dim, l.eps2, l.plus2, 1);
    turnout_linear(normed, l.gate_up, nullptr, both, rows, l.dim, 2 * l.hidden, l.threads);
    turnout_silu_mul(both, inner, rows, l.hidden, 1);
    turnout_linear(inner, l.down, nullptr, out, rows, l.hidden, l.dim, l.threads);
    for (int64_t i = 0; i < rows * l.dim; i++) out[i] += middle[i];
}

}

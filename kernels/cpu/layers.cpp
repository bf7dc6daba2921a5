// The small operations between matrix products, and a decoder layer around its attention.

#include "linear.h"
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

// out = a + b
static void add(const float* a, const float* b, float* out, int64_t count, int64_t threads) {
#pragma omp parallel for simd schedule(static) num_threads(threads) if (threads > 1 && count > 65536)
    for (int64_t i = 0; i < count; i++) out[i] = a[i] + b[i];
}

// A decoder layer of the usual form: norm, q/k/v, rotation; attention; output, norm, gated MLP
struct Layer {
    Linear qkv, o, gate_up, down;
    const float *norm1, *norm2;
    int64_t dim, heads, kv_heads, head_dim, hidden, threads;
    float eps1, plus1, eps2, plus2;
};

// x [rows, dim] -> q [rows, heads, head_dim], k, v [rows, kv_heads, head_dim]
void turnout_before_attention(const Layer* layer, const float* x, const float* cos, const float* sin, float* q, float* k, float* v, int64_t rows) {
    const Layer& l = *layer;
    int64_t q_size = l.heads * l.head_dim, kv_size = l.kv_heads * l.head_dim, all_size = q_size + 2 * kv_size;
    thread_local std::vector<float> scratch;
    if ((int64_t)scratch.size() < rows * (l.dim + all_size)) scratch.resize(rows * (l.dim + all_size));
    float *normed = scratch.data(), *qkv = normed + rows * l.dim;
    turnout_rms_norm(x, l.norm1, normed, rows, l.dim, l.eps1, l.plus1, l.threads);
    apply(l.qkv, normed, qkv, rows, l.threads);
#pragma omp parallel for num_threads(l.threads) if (l.threads > 1 && rows * all_size > 65536)
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
    int64_t needed = rows * (2 * l.dim + 3 * l.hidden);
    if ((int64_t)scratch.size() < needed) scratch.resize(needed);
    float *middle = scratch.data(), *normed = middle + rows * l.dim, *both = normed + rows * l.dim;
    float* inner = both + rows * 2 * l.hidden;
    apply(l.o, attended, normed, rows, l.threads);
    add(normed, x, middle, rows * l.dim, l.threads);
    turnout_rms_norm(middle, l.norm2, normed, rows, l.dim, l.eps2, l.plus2, l.threads);
    apply(l.gate_up, normed, both, rows, l.threads);
    turnout_silu_mul(both, inner, rows, l.hidden, l.threads);
    apply(l.down, inner, normed, rows, l.threads);
    add(normed, middle, out, rows * l.dim, l.threads);
}

}

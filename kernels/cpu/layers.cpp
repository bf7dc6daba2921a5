// The small operations between matrix products, and a decoder layer around its attention. Tensors that come and go are
// float32, bfloat16 or float16; everything between them is float32 and rounded once, at the end.

#include "elements.h"
#include "linear.h"

namespace {

constexpr int64_t SCRATCH = 64 << 20;  // bytes that a layer's two halves take together: more rows are computed in pieces
constexpr int64_t TOGETHER = 256;      // rows in a piece: their activations stay near, the weights are read not too often
constexpr int64_t LITTLE = 65536;      // numbers that one thread is done with before others have woken

struct Norm {
    const float* weight;  // null: there is no norm here
    float eps, plus;      // `plus` is added to the weight (Gemma stores it less one)
};

enum Activation : int64_t { SILU = 0, GELU_TANH = 1 };

// A decoder layer: norm, q/k/v, norms of heads, rotation; attention; output, norm; norm, gated MLP, norm. Most models
// have some of these norms only.
struct Layer {
    Linear qkv, o, gate_up, down;
    Norm before_attention, q, k, after_attention, before_mlp, after_mlp;
    int64_t dim, heads, kv_heads, head_dim, hidden, threads, dtype, activation;
    float multiplier;  // of what attention and MLP add to the hidden state (Granite)
};

// out = x / sqrt(mean(x^2) + eps) * (weight + plus) (RMSNorm, arXiv 1910.07467); out may be x
void norm_row(const float* x, const Norm& norm, float* out, int64_t dim) {
    vec squares = {};
    int64_t d = 0;
    for (; d + LANES <= dim; d += LANES) squares += load(x + d) * load(x + d);
    float total = sum(squares);
    for (; d < dim; d++) total += x[d] * x[d];
    const float by = 1.0f / std::sqrt(total / dim + norm.eps);
    for (d = 0; d + LANES <= dim; d += LANES) store(out + d, load(x + d) * by * (load(norm.weight + d) + norm.plus));
    for (; d < dim; d++) out[d] = x[d] * by * (norm.weight[d] + norm.plus);
}

// Rotary embedding (RoFormer, arXiv 2104.09864), halves apart: to = x * cos + (-x[half:], x[:half]) * sin
void rotate(const float* x, const float* cos, const float* sin, float* to, int64_t dim) {
    const int64_t half = dim / 2;
    for (int64_t d = 0; d < half; d++) {
        to[d] = x[d] * cos[d] - x[d + half] * sin[d];
        to[d + half] = x[d + half] * cos[d + half] + x[d] * sin[d + half];
    }
}

// x * sigmoid(x), from e^-|x|, which can't overflow
vec silu(vec x) {
    vec e = exp_below_zero(x > 0 ? -x : x);
    return x * (x > 0 ? all(1.0f) : e) / (1.0f + e);
}

vec gelu_tanh(vec x) { return 0.5f * x * (1.0f + tanh_of(0.7978845608f * (x + 0.044715f * x * x * x))); }

// out = activation(gate) * up, of one row; out may be gate
void activate(const float* gate, const float* up, float* out, int64_t dim, int64_t activation) {
    for (int64_t d = 0; d < dim; d += LANES) {
        const int64_t num = std::min<int64_t>(LANES, dim - d);
        float rest[2][LANES] = {};
        if (num < LANES) {
            std::memcpy(rest[0], gate + d, num * sizeof(float));
            std::memcpy(rest[1], up + d, num * sizeof(float));
        }
        const vec g = load(num < LANES ? rest[0] : gate + d), u = load(num < LANES ? rest[1] : up + d);
        const vec made = (activation == SILU ? silu(g) : gelu_tanh(g)) * u;
        store(num < LANES ? rest[0] : out + d, made);
        if (num < LANES) std::memcpy(out + d, rest[0], num * sizeof(float));
    }
}

// Row r of a tensor as floats: where it lies, or widened into `room`
const float* row_of(const void* x, int64_t r, int64_t dim, const Outside& outside, float* room) {
    const void* from = static_cast<const char*>(x) + r * dim * outside.size;
    if (outside.size == sizeof(float)) return static_cast<const float*>(from);
    outside.widen(from, room, dim);
    return room;
}

void put_row(const float* from, void* x, int64_t r, int64_t dim, const Outside& outside) {
    outside.narrow(from, static_cast<char*>(x) + r * dim * outside.size, dim);
}

// Rows computed together, so that their scratch of so many numbers each stays bounded
int64_t rows_at_once(int64_t rows, int64_t numbers) {
    const int64_t fit = SCRATCH / 2 / sizeof(float) / numbers / 32 * 32;
    return std::min({rows, TOGETHER, std::max<int64_t>(32, fit)});
}

// x [rows, dim] -> q [rows, heads, head_dim], k, v [rows, kv_heads, head_dim]
void before_attention(const Layer& l, const void* x, const void* cos, const void* sin, void* q, void* k, void* v, int64_t rows) {
    const Outside& outside = outside_numbered(l.dtype);
    const int64_t q_size = l.heads * l.head_dim, kv_size = l.kv_heads * l.head_dim, all_size = q_size + 2 * kv_size;
    const int64_t numbers = l.dim + all_size + 3 * l.head_dim, most = rows_at_once(rows, numbers);
    thread_local floats scratch;
    float *normed = at_least(scratch, most * numbers), *qkv = normed + most * l.dim, *extra = qkv + most * all_size;
    for (int64_t begin = 0; begin < rows; begin += most) {
        const int64_t num = std::min(most, rows - begin);
#pragma omp parallel for num_threads(l.threads) if (l.threads > 1 && num * l.dim > LITTLE)
        for (int64_t r = 0; r < num; r++) {
            float* to = normed + r * l.dim;
            norm_row(row_of(x, begin + r, l.dim, outside, to), l.before_attention, to, l.dim);
        }
        apply(l.qkv, normed, qkv, num, l.threads);
#pragma omp parallel for num_threads(l.threads) if (l.threads > 1 && num * all_size > LITTLE)
        for (int64_t r = 0; r < num; r++) {
            const int64_t row = begin + r;
            float *from = qkv + r * all_size, *turned = extra + 3 * r * l.head_dim;
            const float* c = row_of(cos, row, l.head_dim, outside, turned + l.head_dim);
            const float* s = row_of(sin, row, l.head_dim, outside, turned + 2 * l.head_dim);
            for (int64_t h = 0; h < l.heads + l.kv_heads; h++) {
                float* head = from + h * l.head_dim;
                const Norm& norm = h < l.heads ? l.q : l.k;
                if (norm.weight) norm_row(head, norm, head, l.head_dim);
                rotate(head, c, s, turned, l.head_dim);
                if (h < l.heads)
                    put_row(turned, q, row * l.heads + h, l.head_dim, outside);
                else
                    put_row(turned, k, row * l.kv_heads + h - l.heads, l.head_dim, outside);
            }
            put_row(from + q_size + kv_size, v, row, kv_size, outside);
        }
    }
}

// x [rows, dim] and what attention made of it [rows, heads, head_dim] -> out [rows, dim]
void after_attention(const Layer& l, const void* x, const void* attended, void* out, int64_t rows) {
    const Outside& outside = outside_numbered(l.dtype);
    const bool same = outside.size == sizeof(float);
    const int64_t q_size = l.heads * l.head_dim, wide = same ? 0 : q_size;
    const int64_t numbers = 2 * l.dim + 3 * l.hidden + wide, most = rows_at_once(rows, numbers);
    thread_local floats scratch;
    float *middle = at_least(scratch, most * numbers), *normed = middle + most * l.dim, *both = normed + most * l.dim;
    float *inner = both + most * 2 * l.hidden, *widened = inner + most * l.hidden;
    for (int64_t begin = 0; begin < rows; begin += most) {
        const int64_t num = std::min(most, rows - begin);
        if (!same) {
#pragma omp parallel for num_threads(l.threads) if (l.threads > 1 && num * q_size > LITTLE)
            for (int64_t r = 0; r < num; r++) row_of(attended, begin + r, q_size, outside, widened + r * q_size);
        }
        apply(l.o, same ? row_of(attended, begin, q_size, outside, nullptr) : widened, normed, num, l.threads);
#pragma omp parallel for num_threads(l.threads) if (l.threads > 1 && num * l.dim > LITTLE)
        for (int64_t r = 0; r < num; r++) {
            float *added = normed + r * l.dim, *to = middle + r * l.dim;
            if (l.after_attention.weight) norm_row(added, l.after_attention, added, l.dim);
            const float* from = row_of(x, begin + r, l.dim, outside, to);
            for (int64_t d = 0; d < l.dim; d++) to[d] = added[d] * l.multiplier + from[d];
            norm_row(to, l.before_mlp, added, l.dim);
        }
        apply(l.gate_up, normed, both, num, l.threads);
#pragma omp parallel for num_threads(l.threads) if (l.threads > 1 && num * l.hidden > LITTLE)
        for (int64_t r = 0; r < num; r++) {
            const float* gate = both + 2 * r * l.hidden;
            activate(gate, gate + l.hidden, inner + r * l.hidden, l.hidden, l.activation);
        }
        apply(l.down, inner, normed, num, l.threads);
#pragma omp parallel for num_threads(l.threads) if (l.threads > 1 && num * l.dim > LITTLE)
        for (int64_t r = 0; r < num; r++) {
            float *added = normed + r * l.dim, *to = middle + r * l.dim;
            if (l.after_mlp.weight) norm_row(added, l.after_mlp, added, l.dim);
            for (int64_t d = 0; d < l.dim; d++) to[d] = added[d] * l.multiplier + to[d];
            put_row(to, out, begin + r, l.dim, outside);
        }
    }
}

void activate_rows(const void* x, void* out, int64_t rows, int64_t dim, int64_t dtype, int64_t activation, int64_t threads) {
    const Outside& outside = outside_numbered(dtype);
    thread_local floats scratch;
    float* room = at_least(scratch, threads * 3 * dim);
#pragma omp parallel for schedule(static, 1) num_threads(threads) if (threads > 1 && rows * dim > LITTLE)
    for (int64_t part = 0; part < threads; part++) {
        float *mine = room + part * 3 * dim, *made = mine + 2 * dim;
        for (int64_t r = rows * part / threads; r < rows * (part + 1) / threads; r++) {
            const float* gate = row_of(x, r, 2 * dim, outside, mine);
            activate(gate, gate + dim, made, dim, activation);
            put_row(made, out, r, dim, outside);
        }
    }
}

void norm_rows(const void* x, const Norm& norm, void* out, int64_t rows, int64_t dim, int64_t dtype, int64_t threads) {
    const Outside& outside = outside_numbered(dtype);
    thread_local floats scratch;
    float* room = at_least(scratch, threads * dim);
#pragma omp parallel for schedule(static, 1) num_threads(threads) if (threads > 1 && rows * dim > LITTLE)
    for (int64_t part = 0; part < threads; part++) {
        float* made = room + part * dim;
        for (int64_t r = rows * part / threads; r < rows * (part + 1) / threads; r++) {
            norm_row(row_of(x, r, dim, outside, made), norm, made, dim);
            put_row(made, out, r, dim, outside);
        }
    }
}

}  // namespace

extern "C" {

int turnout_before_attention(const Layer* layer, const void* x, const void* cos, const void* sin, void* q, void* k, void* v, int64_t rows) {
    return guarded([&] { before_attention(*layer, x, cos, sin, q, k, v, rows); });
}

int turnout_after_attention(const Layer* layer, const void* x, const void* attended, void* out, int64_t rows) {
    return guarded([&] { after_attention(*layer, x, attended, out, rows); });
}

// x [rows, dim] -> out [rows, dim]; dtype: as `outside_numbered` counts
int turnout_rms_norm(const void* x, const float* weight, void* out, int64_t rows, int64_t dim, float eps, float plus, int64_t dtype, int64_t threads) {
    return guarded([&] { norm_rows(x, {weight, eps, plus}, out, rows, dim, dtype, threads); });
}

// x [rows, 2 * dim], gate and up side by side -> out [rows, dim] = activation(gate) * up
int turnout_activate(const void* x, void* out, int64_t rows, int64_t dim, int64_t dtype, int64_t activation, int64_t threads) {
    return guarded([&] { activate_rows(x, out, rows, dim, dtype, activation, threads); });
}

}

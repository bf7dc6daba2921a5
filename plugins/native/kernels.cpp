// Paged attention and the small operations between matrix products, for CPUs, in float32.
//
// A plain C interface over data pointers: tied neither to torch's ABI nor to Python's. Threads are OpenMP's, from the
// runtime torch has loaded already, so that there is one pool. Vectors are as wide as the machine it is compiled for.
//
// Attention reads the cache once: keys are visited in tiles, with the softmax kept up to date as in FlashAttention
// (arXiv 2205.14135); heads that share keys are computed together; when there are fewer requests than threads, long key
// ranges are split and the parts merged as in Flash-Decoding (pytorch.org/blog/flash-decoding).

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AVX512F__)
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
typedef float vec __attribute__((vector_size(LANES * 4)));
typedef float loose __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));

constexpr int TILE = 64;           // keys visited together
constexpr int ROWS = 48;           // query rows (queries x heads sharing a key head) of one work item, or one query's
constexpr int FEW = 8;             // up to so many rows, keys are not worth transposing
constexpr int SPLIT = 512;         // keys of one part of a split range
constexpr float NEVER = -INFINITY;

static inline vec load(const float* p) { return *reinterpret_cast<const loose*>(p); }
static inline void store(float* p, vec v) { *reinterpret_cast<loose*>(p) = v; }
static inline vec all(float x) { return x - (vec){}; }

static inline float sum(vec v) {
    float total = 0;
    for (int i = 0; i < LANES; i++) total += v[i];
    return total;
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

extern "C" {

struct Plan {
    const int32_t* table;        // [B, width]
    const int32_t* query_start;  // [B + 1]
    const int32_t* kv_lens;      // [B]
    const int64_t* slots;        // [T]
    int64_t num_requests, width, num_tokens;
    int64_t heads, kv_heads, dim, v_dim, block_size;
    int64_t window;              // 0: none
    int64_t threads;
    float scale, softcap;        // softcap 0: none
};
}

namespace {

struct Item {  // query rows of one request and key head, over a range of keys
    int request, kv_head, first_query, num_queries;
    int first_key, end_key;
    int part;  // -1: the whole range, else its place in the buffer of parts
};

// What is known of each row while keys are visited.
struct State {
    float *best, *total;  // [rows]
    float* out;           // [rows, v_dim]
};

// The numbers behind states of so many rows each.
struct Sums {
    std::vector<float> numbers;
    int64_t rows, v_dim;
    Sums(int64_t count, int64_t rows, int64_t v_dim) : numbers(count * rows * (v_dim + 2)), rows(rows), v_dim(v_dim) {}
    State state(int64_t i) {
        float* at = numbers.data() + i * rows * (v_dim + 2);
        return {at, at + rows, at + 2 * rows};
    }
};

struct Scratch {
    std::vector<float> keys, logits;
    std::vector<const float*> rows;
    Scratch(int64_t num_rows, int64_t dim) : keys(dim * TILE), logits(num_rows * TILE), rows(num_rows) {}
};

inline const float* row(const float* cache, const Plan& p, int request, int key, int kv_head, int64_t dim) {
    int64_t block = p.table[request * p.width + key / p.block_size];
    return cache + ((block * p.block_size + key % p.block_size) * p.kv_heads + kv_head) * dim;
}

// logits[r][k] = q[r] . key[k], one key at a time: for few rows
void dots(const float* const* q, int rows, const float* const* keys, int num_keys, int64_t dim, float* logits) {
    for (int k = 0; k < num_keys; k++) {
        const float* key = keys[k];
        for (int r = 0; r < rows; r++) {
            vec acc = {};
            int64_t d = 0;
            for (; d + LANES <= dim; d += LANES) acc += load(q[r] + d) * load(key + d);
            float total = sum(acc);
            for (; d < dim; d++) total += q[r][d] * key[d];
            logits[r * TILE + k] = total;
        }
    }
}

// The same over keys laid side by side, [dim, TILE]: for many rows
template <int N>
void product_rows(const float* const* q, const float* turned, int64_t dim, float* logits) {
    constexpr int WIDE = TILE / LANES;
    for (int half = 0; half < WIDE; half += 4) {
        vec acc[N][4] = {};
        for (int64_t d = 0; d < dim; d++) {
            const float* keys = turned + d * TILE + half * LANES;
            for (int r = 0; r < N; r++) {
                vec x = all(q[r][d]);
                for (int i = 0; i < 4; i++) acc[r][i] += x * load(keys + i * LANES);
            }
        }
        for (int r = 0; r < N; r++)
            for (int i = 0; i < 4; i++) store(logits + r * TILE + (half + i) * LANES, acc[r][i]);
    }
}

void products(const float* const* q, int rows, const float* turned, int64_t dim, float* logits) {
    int r = 0;
    for (; r + 4 <= rows; r += 4) product_rows<4>(q + r, turned, dim, logits + r * TILE);
    for (; r < rows; r++) product_rows<1>(q + r, turned, dim, logits + r * TILE);
}

// out[r] += weights[r] . values
template <int N>
void gather_rows(const float* weights, const float* const* values, int num_keys, int64_t dim, float* out) {
    int64_t d = 0;
    for (; d + 4 * LANES <= dim; d += 4 * LANES) {
        vec acc[N][4];
        for (int r = 0; r < N; r++)
            for (int i = 0; i < 4; i++) acc[r][i] = load(out + r * dim + d + i * LANES);
        for (int k = 0; k < num_keys; k++)
            for (int r = 0; r < N; r++) {
                vec w = all(weights[r * TILE + k]);
                for (int i = 0; i < 4; i++) acc[r][i] += w * load(values[k] + d + i * LANES);
            }
        for (int r = 0; r < N; r++)
            for (int i = 0; i < 4; i++) store(out + r * dim + d + i * LANES, acc[r][i]);
    }
    for (; d + LANES <= dim; d += LANES) {
        vec acc[N];
        for (int r = 0; r < N; r++) acc[r] = load(out + r * dim + d);
        for (int k = 0; k < num_keys; k++)
            for (int r = 0; r < N; r++) acc[r] += all(weights[r * TILE + k]) * load(values[k] + d);
        for (int r = 0; r < N; r++) store(out + r * dim + d, acc[r]);
    }
    for (; d < dim; d++)
        for (int r = 0; r < N; r++)
            for (int k = 0; k < num_keys; k++) out[r * dim + d] += weights[r * TILE + k] * values[k][d];
}

void gather(const float* weights, int rows, const float* const* values, int num_keys, int64_t dim, float* out) {
    int r = 0;
    for (; r + 4 <= rows; r += 4) gather_rows<4>(weights + r * TILE, values, num_keys, dim, out + r * dim);
    if (rows - r == 3) gather_rows<3>(weights + r * TILE, values, num_keys, dim, out + r * dim);
    if (rows - r == 2) gather_rows<2>(weights + r * TILE, values, num_keys, dim, out + r * dim);
    if (rows - r == 1) gather_rows<1>(weights + r * TILE, values, num_keys, dim, out + r * dim);
}

// Row r's logits over keys first..first+num become weights; what was summed before is rescaled.
void soften(float* logits, int num, int lo, int hi, const Plan& p, float& best, float& total, float* out) {
    for (int k = 0; k < TILE; k++) {  // lo..hi: the keys this row sees
        float x = logits[k] * p.scale;
        if (p.softcap > 0) x = p.softcap * std::tanh(x / p.softcap);
        logits[k] = (k >= lo && k < hi && k < num) ? x : NEVER;
    }
    float top = best;
    for (int k = 0; k < TILE; k++) top = std::max(top, logits[k]);
    if (top == NEVER) {
        std::memset(logits, 0, TILE * sizeof(float));
        return;
    }
    if (best != top) {
        float factor = best == NEVER ? 0.0f : std::exp(best - top);
        total *= factor;
        for (int64_t d = 0; d < p.v_dim; d++) out[d] *= factor;
        best = top;
    }
    vec added = {};
    for (int k = 0; k < TILE; k += LANES) {
        vec x = load(logits + k);
        vec w = x == NEVER ? (vec){} : exp_below_zero(x - top);
        store(logits + k, w);
        added += w;
    }
    total += sum(added);
}

void visit(const Plan& p, const Item& item, const float* q, const float* kc, const float* vc, State& state, Scratch& s) {
    int group = p.heads / p.kv_heads, rows = item.num_queries * group;
    int query0 = p.query_start[item.request];
    int num_queries = p.query_start[item.request + 1] - query0;
    int offset = p.kv_lens[item.request] - num_queries;  // position of the request's first query
    const float** rows_of = s.rows.data();
    for (int r = 0; r < rows; r++) {
        int query = item.first_query + r / group, head = item.kv_head * group + r % group;
        rows_of[r] = q + ((int64_t)(query0 + query) * p.heads + head) * p.dim;
        state.best[r] = NEVER;
        state.total[r] = 0;
    }
    std::memset(state.out, 0, rows * p.v_dim * sizeof(float));
    const float *keys[TILE], *values[TILE];
    for (int first = item.first_key; first < item.end_key; first += TILE) {
        int num = std::min(TILE, item.end_key - first);
        for (int k = 0; k < num; k++) {
            keys[k] = row(kc, p, item.request, first + k, item.kv_head, p.dim);
            values[k] = row(vc, p, item.request, first + k, item.kv_head, p.v_dim);
        }
        if (rows <= FEW) {
            dots(rows_of, rows, keys, num, p.dim, s.logits.data());
        } else {
            for (int k = 0; k < num; k++)
                for (int64_t d = 0; d < p.dim; d++) s.keys[d * TILE + k] = keys[k][d];
            products(rows_of, rows, s.keys.data(), p.dim, s.logits.data());
        }
        for (int r = 0; r < rows; r++) {
            int position = offset + item.first_query + r / group;
            int hi = position + 1 - first, lo = p.window ? position + 1 - (int)p.window - first : 0;
            soften(s.logits.data() + r * TILE, num, lo, hi, p, state.best[r], state.total[r], state.out + r * p.v_dim);
        }
        gather(s.logits.data(), rows, values, num, p.v_dim, state.out);
    }
}

void finish(const Plan& p, const Item& item, State& state, const float* sinks, float* out) {
    int group = p.heads / p.kv_heads, rows = item.num_queries * group;
    for (int r = 0; r < rows; r++) {
        int query = item.first_query + r / group, head = item.kv_head * group + r % group;
        float total = state.total[r], factor = 1.0f;
        if (sinks) {  // one more logit joins the sum, with no value
            float top = std::max(state.best[r], sinks[head]);
            factor = state.best[r] == NEVER ? 0.0f : std::exp(state.best[r] - top);
            total = total * factor + std::exp(sinks[head] - top);
        }
        float* target = out + ((int64_t)(p.query_start[item.request] + query) * p.heads + head) * p.v_dim;
        float by = total > 0 ? factor / total : 0.0f;  // a row that sees nothing is zero
        for (int64_t d = 0; d < p.v_dim; d++) target[d] = state.out[r * p.v_dim + d] * by;
    }
}

std::vector<Item> work(const Plan& p, int64_t& num_parts) {
    std::vector<Item> items;
    int group = p.heads / p.kv_heads, step = std::max(1, ROWS / group);
    int64_t few = 2 * p.threads;  // with fewer whole items than that, ranges are split
    bool split = p.threads > 1 && p.num_requests * p.kv_heads < few;
    num_parts = 0;
    for (int b = 0; b < p.num_requests; b++) {
        int num_queries = p.query_start[b + 1] - p.query_start[b], keys = p.kv_lens[b];
        for (int g = 0; g < p.kv_heads; g++)
            for (int first = 0; first < num_queries; first += step) {
                int num = std::min(step, num_queries - first), offset = keys - num_queries;
                int end = std::max(0, std::min(keys, offset + first + num));
                int begin = p.window ? std::max(0, offset + first + 1 - (int)p.window) : 0;
                if (split && num_queries == 1 && end - begin >= 2 * SPLIT) {
                    int parts = (end - begin + SPLIT - 1) / SPLIT;
                    for (int i = 0; i < parts; i++) {
                        int from = begin + i * SPLIT;
                        items.push_back({b, g, first, num, from, std::min(end, from + SPLIT), (int)num_parts++});
                    }
                } else {
                    items.push_back({b, g, first, num, begin, end, -1});
                }
            }
    }
    return items;
}

void merge(const Plan& p, const std::vector<Item>& items, std::vector<State>& parts, const float* sinks, float* out) {
    int group = p.heads / p.kv_heads;
    for (size_t i = 0; i < items.size();) {
        if (items[i].part < 0) {
            i++;
            continue;
        }
        State& into = parts[items[i].part];
        size_t j = i + 1;
        for (; j < items.size() && items[j].part >= 0 && items[j].request == items[i].request && items[j].kv_head == items[i].kv_head; j++) {
            State& other = parts[items[j].part];
            for (int r = 0; r < group; r++) {
                float top = std::max(into.best[r], other.best[r]);
                if (top == NEVER) continue;
                float a = into.best[r] == NEVER ? 0 : std::exp(into.best[r] - top);
                float b = other.best[r] == NEVER ? 0 : std::exp(other.best[r] - top);
                for (int64_t d = 0; d < p.v_dim; d++)
                    into.out[r * p.v_dim + d] = into.out[r * p.v_dim + d] * a + other.out[r * p.v_dim + d] * b;
                into.total[r] = into.total[r] * a + other.total[r] * b;
                into.best[r] = top;
            }
        }
        finish(p, items[i], into, sinks, out);
        i = j;
    }
}

}  // namespace

extern "C" {

// Store k, v [T, kv_heads, dim] at the plan's slots, then attend: q [T, heads, dim] -> out [T, heads, v_dim].
void turnout_attend(const Plan* plan, const float* q, const float* k, const float* v, float* kc, float* vc, const float* sinks, float* out) {
    const Plan& p = *plan;
    int64_t k_row = p.kv_heads * p.dim, v_row = p.kv_heads * p.v_dim;
    for (int64_t t = 0; t < p.num_tokens; t++) {
        std::memcpy(kc + p.slots[t] * k_row, k + t * k_row, k_row * sizeof(float));
        std::memcpy(vc + p.slots[t] * v_row, v + t * v_row, v_row * sizeof(float));
    }
    int64_t num_parts, group = p.heads / p.kv_heads;
    std::vector<Item> items = work(p, num_parts);
    std::vector<State> parts;
    Sums sums(num_parts, group, p.v_dim);  // a part has one query
    for (int64_t i = 0; i < num_parts; i++) parts.push_back(sums.state(i));
    int64_t size = 0;
    for (const Item& item : items) size += (int64_t)item.num_queries * group * (item.end_key - item.first_key);
    int threads = size * p.dim < 32768 ? 1 : (int)p.threads;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        int64_t rows = std::max<int64_t>(ROWS, group);
        Scratch scratch(rows, p.dim);
        Sums own(1, rows, p.v_dim);
#pragma omp for schedule(dynamic)
        for (size_t i = 0; i < items.size(); i++) {
            if (items[i].part >= 0) {
                visit(p, items[i], q, kc, vc, parts[items[i].part], scratch);
            } else {
                State state = own.state(0);
                visit(p, items[i], q, kc, vc, state, scratch);
                finish(p, items[i], state, sinks, out);
            }
        }
    }
    merge(p, items, parts, sinks, out);
}

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

// Paged attention for CPUs, in float32.
//
// It reads the cache once: keys are visited in tiles, with the softmax kept up to date as in FlashAttention
// (arXiv 2205.14135); heads that share keys are computed together; when there are fewer requests than threads, long key
// ranges are split and the parts merged as in Flash-Decoding (pytorch.org/blog/flash-decoding).

#include "vectors.h"

constexpr int TILE = 64;           // keys visited together
constexpr int ROWS = 48;           // query rows (queries x heads sharing a key head) of one work item, or one query's
constexpr int FEW = 8;             // up to so many rows, keys are not worth transposing
constexpr int SPLIT = 512;         // keys of one part of a split range
constexpr float NEVER = -INFINITY;

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

}

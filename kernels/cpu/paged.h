// A layer's paged cache: how it lies, how new keys and values get in, and how rows of queries attend to it.
//
// It holds for each block and key head first the keys turned, then, apart, the values:
//
//     keys   [num_blocks, kv_heads, dim, block_size]     a vector register spans keys: no sums across lanes
//     values [num_blocks, kv_heads, block_size, v_dim]   a vector register spans the value
//     scales [num_blocks, kv_heads, block_size]          of an 8-bit cache, float32, for keys and for values
//
// so that a decode step reads a head's block from end to end, once. Heads that share keys are computed together. Few rows
// use the cache where it lies, and fetch ahead what they read next; many rows unpack each tile of it first and share that.
#pragma once

#include "tiles.h"

extern "C" {

struct Plan {
    const int32_t* table;        // [B, table_width]
    const int32_t* query_start;  // [B + 1]
    const int32_t* kv_lens;      // [B]
    const int64_t* slots;        // [T]
    int64_t num_requests, table_width, num_tokens;
    int64_t heads, kv_heads, dim, v_dim, block_size;
    int64_t window;              // 0: none
    int64_t threads;
    float scale, softcap;        // softcap 0: none
};

struct Tensors {
    const void *q, *k, *v;       // [T, heads, dim], [T, kv_heads, dim], [T, kv_heads, v_dim]
    void *keys, *values;         // the cache
    float *k_scales, *v_scales;  // of an 8-bit cache
    const float* sinks;          // [heads], may be null
    void* out;                   // [T, heads, v_dim]
};
}

namespace {

struct Work {  // query rows of one request and key head, over a range of keys
    int request, kv_head, first_query, num_queries;
    int first_key, end_key;
    int64_t cost;
    int state;  // where this part's outcome is kept until the others are there; -1: the whole range is computed here
};

int64_t full(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

// The numbers behind states of so many rows each.
struct States {
    floats numbers;
    int64_t rows, width;
    States(int64_t count, int64_t rows, int64_t width) : numbers(count * size(rows, width)), rows(rows), width(width) {}
    State at(int64_t i) {
        float* total = numbers.data() + i * size(rows, width);
        float* out = total + rows * LANES;
        return {out + rows * width, total, out};
    }
    static int64_t size(int64_t rows, int64_t width) { return rows * (LANES + width) + full(rows); }
};

struct Scratch {  // of a thread
    floats q, logits, keys, values, k_scale, v_scale, scaled;
    States states;
    Scratch(int64_t rows, int64_t dim, int64_t width)
        : q(rows * dim), logits(FEW * TILE), keys(dim * TILE), values(TILE * width), k_scale(TILE), v_scale(TILE), scaled(width), states(2, rows, width) {}
};

// Storing into a layer's cache of C, and attention of some rows to its keys and values.
template <class C>
struct Paged {
    typedef typename C::stored Inside;
    const Plan& p;
    const Tensors& t;
    const Outside& outside;
    const Inside* const keys = static_cast<const Inside*>(t.keys);
    const Inside* const values = static_cast<const Inside*>(t.values);
    const int64_t group = p.heads / p.kv_heads;
    const Softmax softmax{p.softcap > 0 ? p.scale / p.softcap : p.scale * LOG2E, p.softcap * LOG2E, full(p.v_dim)};

    // Where `key` of a request lies: the block and head's place, and the offset in it
    struct Place {
        int64_t head, offset;
    };
    Place place(int request, int key, int kv_head) const {
        int64_t block = p.table[request * p.table_width + key / p.block_size];
        return {block * p.kv_heads + kv_head, key % p.block_size};
    }

    // Write new keys and values to their slots.
    void store_new() const {
        const int64_t longest = std::max(p.dim, p.v_dim);
        int threads = p.num_tokens * p.kv_heads * p.dim < 65536 ? 1 : (int)p.threads;
        floats room(C::SCALED ? 2 * threads * full(longest) : 0);  // of each thread: a key or value widened, and its codes
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static, 1)
        for (int64_t part = 0; part < threads; part++) {
            float* wide = room.data() + (C::SCALED ? 2 * part * full(longest) : 0);
            const int64_t all = p.num_tokens * p.kv_heads;
            for (int64_t i = all * part / threads; i < all * (part + 1) / threads; i++) store_one(i, wide, full(longest));
        }
    }

    // Token i / kv_heads, key head i % kv_heads
    void store_one(int64_t i, float* wide, int64_t longest) const {
        int64_t slot = p.slots[i / p.kv_heads];
        int64_t head = slot / p.block_size * p.kv_heads + i % p.kv_heads, offset = slot % p.block_size;
        Inside* key = static_cast<Inside*>(t.keys) + head * p.dim * p.block_size + offset;
        Inside* value = static_cast<Inside*>(t.values) + (head * p.block_size + offset) * p.v_dim;
        const char* k = static_cast<const char*>(t.k) + i * p.dim * outside.size;
        const char* v = static_cast<const char*>(t.v) + i * p.v_dim * outside.size;
        if constexpr (C::SCALED) {
            Inside* codes = reinterpret_cast<Inside*>(wide + longest);
            t.k_scales[head * p.block_size + offset] = quantize(k, wide, codes, p.dim);
            t.v_scales[head * p.block_size + offset] = quantize(v, wide, value, p.v_dim);
            for (int64_t d = 0; d < p.dim; d++) key[d * p.block_size] = codes[d];
        } else {
            const Inside* same = reinterpret_cast<const Inside*>(k);
            for (int64_t d = 0; d < p.dim; d++) key[d * p.block_size] = same[d];
            std::memcpy(value, v, p.v_dim * sizeof(Inside));
        }
    }

    float quantize(const void* from, float* wide, Inside* to, int64_t n) const {
        outside.widen(from, wide, n);
        float scale = scale_of<C>(wide, n);
        for (int64_t d = 0; d < n; d++) wide[d] = scale > 0 ? wide[d] / scale : 0.0f;
        narrow<C>(wide, to, n);
        return scale;
    }

    // logits[N, keys of V vectors] from keys where they lie, `at[i]` the first of each vector. `next` is read after that.
    template <int N, int V>
    void score_keys(const float* q, const Inside* const* at, const Inside* const* next, float* logits) const {
        const Inside* from[V];
        for (int i = 0; i < V; i++) from[i] = at[i];
        for (int64_t first = 0; first < p.dim; first += DEPTH) {
            vec acc[N][V];
            for (int r = 0; r < N; r++)
                for (int i = 0; i < V; i++) acc[r][i] = (vec){};
            for (int64_t d = first, end = std::min<int64_t>(p.dim, first + DEPTH); d < end; d++) {
                vec key[V];
                for (int i = 0; i < V; i++) {
                    key[i] = C::load(from[i]);
                    from[i] += p.block_size;
                    __builtin_prefetch(next[i] + d * LANES);
                }
                for (int r = 0; r < N; r++) {
                    vec x = all(q[r * p.dim + d]);
                    for (int i = 0; i < V; i++) acc[r][i] = madd(x, key[i], acc[r][i]);
                }
            }
            for (int r = 0; r < N; r++)
                for (int i = 0; i < V; i++) {
                    float* to = logits + r * TILE + i * LANES;
                    store(to, first > 0 ? load(to) + acc[r][i] : acc[r][i]);
                }
        }
    }

    // out[N, v_dim] += weights . values where they lie: V vectors from `d` on. `next` is read after that.
    template <int N, int V>
    void accumulate_values(const float* weights, const Inside* const* at, const Inside* const* next, int lo, int hi, int64_t d, float* out) const {
        vec acc[N][V];
        for (int r = 0; r < N; r++)
            for (int i = 0; i < V; i++) acc[r][i] = (vec){};
        for (int first = lo / LANES * LANES; first < hi; first += LANES) {
            const Inside *from = at[first / LANES] + d, *ahead = next[first / LANES] + d * p.block_size;
            for (int k = std::max(lo - first, 0); k < std::min(hi - first, LANES); k++) {
                vec value[V];
                for (int i = 0; i < V; i++) {
                    value[i] = C::load(from + k * p.v_dim + i * LANES);
                    __builtin_prefetch(ahead + (k * V + i) * p.block_size);
                }
                for (int r = 0; r < N; r++) {
                    vec w = all(weights[r * TILE + first + k]);
                    for (int i = 0; i < V; i++) acc[r][i] = madd(w, value[i], acc[r][i]);
                }
            }
        }
        for (int r = 0; r < N; r++)
            for (int i = 0; i < V; i++) {
                float* to = out + r * softmax.width + d + i * LANES;
                store(to, load(to) + acc[r][i]);
            }
    }

    // The last values, fewer than a vector: the row is not read past its end
    template <int N>
    void accumulate_rest(const float* weights, const Inside* const* at, int lo, int hi, int64_t d, float* out) const {
        vec acc[N];
        for (int r = 0; r < N; r++) acc[r] = (vec){};
        for (int k = lo; k < hi; k++) {
            Inside rest[LANES] = {};
            std::memcpy(rest, at[k / LANES] + k % LANES * p.v_dim + d, (p.v_dim - d) * sizeof(Inside));
            for (int r = 0; r < N; r++) acc[r] = madd(all(weights[r * TILE + k]), C::load(rest), acc[r]);
        }
        for (int r = 0; r < N; r++) {
            float* to = out + r * softmax.width + d;
            store(to, load(to) + acc[r]);
        }
    }

    // N rows attend to one tile, keys first..first + num of the request, in place. Each row sees lo[r]..hi[r] of it.
    template <int N>
    void attend_tile_in_place(const Work& w, int first, int num, const int* lo, const int* hi, Scratch& s, const State& state) const {
        constexpr int V = N <= TALL ? WIDE : WIDE / 2;
        const Inside *key[VECS], *value[VECS], *next[VECS];
        int vectors = (num + LANES - 1) / LANES;
        for (int i = 0; i < vectors; i++) {
            Place at = place(w.request, first + i * LANES, w.kv_head);
            key[i] = keys + at.head * p.dim * p.block_size + at.offset;
            value[i] = values + (at.head * p.block_size + at.offset) * p.v_dim;
            if constexpr (C::SCALED) take_scales(at, i * LANES, LANES, s);
            next[i] = key[i];
            if (first + TILE + i * LANES < w.end_key) {
                Place ahead = place(w.request, first + TILE + i * LANES, w.kv_head);
                next[i] = keys + ahead.head * p.dim * p.block_size + ahead.offset;
            }
        }
        int i = 0;
        for (; i + V <= vectors; i += V) score_keys<N, V>(s.q.data(), key + i, value + i, s.logits.data() + i * LANES);
        for (; i < vectors; i++) score_keys<N, 1>(s.q.data(), key + i, value + i, s.logits.data() + i * LANES);
        softmax_rows(N, 0, lo, hi, s, state);
        int from = lo[0], to = hi[N - 1];
        int64_t d = 0;
        for (; d + V * LANES <= p.v_dim; d += V * LANES) accumulate_values<N, V>(s.logits.data(), value, next, from, to, d, state.out);
        for (; d + LANES <= p.v_dim; d += LANES) accumulate_values<N, 1>(s.logits.data(), value, next, from, to, d, state.out);
        if (d < p.v_dim) accumulate_rest<N>(s.logits.data(), value, from, to, d, state.out);
    }

    void take_scales(Place at, int k, int num, Scratch& s) const {
        int64_t first = at.head * p.block_size + at.offset;
        std::memcpy(s.k_scale.data() + k, t.k_scales + first, num * sizeof(float));
        std::memcpy(s.v_scale.data() + k, t.v_scales + first, num * sizeof(float));
    }

    void softmax_rows(int rows, int64_t row, const int* lo, const int* hi, Scratch& s, const State& state) const {
        for (int r = 0; r < rows; r++)
            online_softmax<C>(
                s.logits.data() + r * TILE, lo[r], hi[r], softmax, s.k_scale.data(), s.v_scale.data(), state.best + row + r,
                state.total + (row + r) * LANES, state.out + (row + r) * softmax.width);
    }

    // A tile as floats: keys [dim, TILE], values [TILE, width]
    void unpack(const Work& w, int first, int num, Scratch& s) const {
        for (int k = 0; k < num;) {
            Place at = place(w.request, first + k, w.kv_head);
            int run = (int)std::min<int64_t>(p.block_size - at.offset, num - k);
            const Inside* key = keys + at.head * p.dim * p.block_size + at.offset;
            const Inside* value = values + (at.head * p.block_size + at.offset) * p.v_dim;
            float* turned = s.keys.data() + k;
            if (p.block_size % LANES == 0)  // whole vectors, of which the last may hold what nobody sees
                for (int64_t d = 0; d < p.dim; d++)
                    for (int i = 0; i < run; i += LANES) ::store(turned + d * TILE + i, C::load(key + d * p.block_size + i));
            else
                for (int64_t d = 0; d < p.dim; d++) widen<C>(key + d * p.block_size, turned + d * TILE, run);
            for (int i = 0; i < run; i++) widen<C>(value + i * p.v_dim, s.values.data() + (k + i) * softmax.width, p.v_dim);
            if constexpr (C::SCALED) take_scales(at, k, run, s);
            k += run;
        }
    }

    // N rows from `row` on attend to the unpacked tile.
    template <int N>
    void attend_unpacked_tile(int64_t row, const int* lo, const int* hi, Scratch& s, const State& state) const {
        int from = TILE, to = 0;
        for (int r = 0; r < N; r++)
            if (lo[r] < hi[r]) from = std::min(from, lo[r]), to = std::max(to, hi[r]);
        if (from >= to) return;
        float* logits = s.logits.data();
        for (int64_t d = 0; d < p.dim; d += DEPTH)
            product<N>(
                s.q.data() + row * p.dim + d, p.dim, s.keys.data() + d * TILE, TILE, std::min<int64_t>(DEPTH, p.dim - d),
                (to + LANES - 1) / LANES, logits, TILE, d > 0);
        softmax_rows(N, row, lo, hi, s, state);
        product<N>(
            logits + from, TILE, s.values.data() + from * softmax.width, softmax.width, to - from, softmax.width / LANES,
            state.out + row * softmax.width, softmax.width, true);
    }

    // All rows attend to the keys of one part.
    void attend_keys(const Work& w, int first_key, int end_key, Scratch& s, const State& state) const {
        int rows = w.num_queries * group, queries = p.query_start[w.request + 1] - p.query_start[w.request];
        int position = p.kv_lens[w.request] - queries + w.first_query;  // of the first row
        bool in_place = rows <= FEW && p.block_size % LANES == 0;
        clear(state, rows, softmax.width);
        for (int first = first_key; first < end_key; first += TILE) {
            int num = std::min(TILE, end_key - first);
            if (!in_place) unpack(w, first, num, s);
            for (int row = 0; row < rows;) {
                int n = in_place ? rows : std::min(TALL, rows - row), lo[FEW], hi[FEW];
                for (int r = 0; r < n; r++) {
                    int sees = position + (int)((row + r) / group) + 1 - first;
                    hi[r] = std::max(0, std::min(num, sees));
                    lo[r] = p.window ? std::max<int64_t>(0, std::min<int64_t>(hi[r], sees - p.window)) : 0;
                }
                switch (in_place ? n : -n) {
                    case 1: attend_tile_in_place<1>(w, first, num, lo, hi, s, state); break;
                    case 2: attend_tile_in_place<2>(w, first, num, lo, hi, s, state); break;
                    case 3: attend_tile_in_place<3>(w, first, num, lo, hi, s, state); break;
                    case 4: attend_tile_in_place<4>(w, first, num, lo, hi, s, state); break;
                    case 5: attend_tile_in_place<5>(w, first, num, lo, hi, s, state); break;
                    case 6: attend_tile_in_place<6>(w, first, num, lo, hi, s, state); break;
                    case 7: attend_tile_in_place<7>(w, first, num, lo, hi, s, state); break;
                    case 8: attend_tile_in_place<8>(w, first, num, lo, hi, s, state); break;
                    case -1: attend_unpacked_tile<1>(row, lo, hi, s, state); break;
                    case -2: attend_unpacked_tile<2>(row, lo, hi, s, state); break;
                    case -3: attend_unpacked_tile<3>(row, lo, hi, s, state); break;
                    case -4: attend_unpacked_tile<4>(row, lo, hi, s, state); break;
                    case -5: attend_unpacked_tile<5>(row, lo, hi, s, state); break;
                    case -6: attend_unpacked_tile<6>(row, lo, hi, s, state); break;
                }
                row += n;
            }
        }
    }
};

}  // namespace

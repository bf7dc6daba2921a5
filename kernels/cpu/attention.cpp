// Paged attention for CPUs, computed in float32 over a cache of any element type: who computes what.
//
// Query rows are cut into pieces that give every thread some; a long range of keys with too few rows is split over the
// threads and its parts are merged, as in Flash-Decoding (pytorch.org/blog/flash-decoding).

#include <atomic>
#include <memory>

#include "linear.h"
#include "paged.h"

namespace {

constexpr int64_t ROWS = 192;  // query rows of one piece of work, or one query's

template <class C>
struct Attention : Paged<C> {
    using Paged<C>::p, Paged<C>::t, Paged<C>::outside, Paged<C>::group, Paged<C>::softmax, Paged<C>::attend_keys, Paged<C>::store_new;

    void take_queries(const Work& w, float* q) const {
        for (int64_t r = 0; r < w.num_queries * group; r++)
            outside.widen(static_cast<const char*>(t.q) + outer_row(w, r) * p.dim * outside.size, q + r * p.dim, p.dim);
    }

    // The row of q and out that is the work's row r
    int64_t outer_row(const Work& w, int64_t r) const {
        return (p.query_start[w.request] + w.first_query + r / group) * p.heads + w.kv_head * group + r % group;
    }

    void finish(const Work& w, const State& state, floats& scaled) const {
        for (int64_t r = 0; r < w.num_queries * group; r++) {
            float total = sum(load(state.total + r * LANES)), factor = 1;
            if (t.sinks) {  // one more logit joins the sum, with no value
                float sink = t.sinks[w.kv_head * group + r % group] * LOG2E, top = std::max(state.best[r], sink);
                factor = power_of_two(state.best[r] - top);
                total = total * factor + power_of_two(sink - top);
            }
            float by = total == 0 ? 0.0f : factor / total;  // a row that sees nothing is zero
            for (int64_t d = 0; d < softmax.width; d += LANES)
                ::store(scaled.data() + d, load(state.out + r * softmax.width + d) * by);
            outside.narrow(scaled.data(), static_cast<char*>(t.out) + outer_row(w, r) * p.v_dim * outside.size, p.v_dim);
        }
    }

    // Compute a piece of work: into its state, or the whole of it part by part.
    void compute(const Work& w, Scratch& s, States& kept) const {
        take_queries(w, s.q.data());
        if (w.state >= 0) return attend_keys(w, w.first_key, w.end_key, s, kept.at(w.state));
        State into = s.states.at(0), part = s.states.at(1);
        int64_t rows = w.num_queries * group;
        for (int first = w.first_key; first == w.first_key || first < w.end_key;) {
            int end = std::min(w.end_key, (first / PART + 1) * PART);
            attend_keys(w, first, end, s, first == w.first_key ? into : part);
            if (first != w.first_key) merge(into, part, rows, softmax.width);
            if (end <= first) break;  // no keys at all
            first = end;
        }
        finish(w, into, s.scaled);
    }

    // The work there is: rows in pieces that give every thread some, keys in parts where rows alone don't.
    std::vector<Work> divide(int64_t& num_states) const {
        std::vector<Work> found;
        int64_t total = 0;
        for (int b = 0; b < p.num_requests; b++)
            total += (int64_t)(p.query_start[b + 1] - p.query_start[b]) * p.kv_lens[b] * p.heads;
        int64_t fair = std::max<int64_t>(total / (4 * p.threads), 1);
        num_states = 0;
        for (int b = 0; b < p.num_requests; b++) {
            int queries = p.query_start[b + 1] - p.query_start[b], len = p.kv_lens[b];
            int64_t most = std::max<int64_t>(1, ROWS / group);
            int step = (int)std::min(most, std::max<int64_t>(1, fair / (std::max(len, 1) * group)));
            for (int first = 0; first < queries; first += step) {
                int num = std::min(step, queries - first), offset = len - queries + first;
                int end = std::max(0, std::min(len, offset + num));
                int begin = p.window ? std::max<int64_t>(0, offset + 1 - p.window) / TILE * TILE : 0;
                int64_t cost = (int64_t)num * group * (end - begin);
                bool apart = p.threads > 1 && num == 1 && cost > fair && (end - 1) / PART > begin / PART;
                for (int g = 0; g < p.kv_heads; g++) {
                    if (!apart) found.push_back({b, g, first, num, begin, end, cost, -1});
                    for (int from = begin; apart && from < end; from = (from / PART + 1) * PART) {
                        int to = std::min(end, (from / PART + 1) * PART);
                        found.push_back({b, g, first, num, from, to, (int64_t)num * group * (to - from), (int)num_states++});
                    }
                }
            }
        }
        return found;
    }

    // Parts that were computed apart are merged, in order.
    void join(const std::vector<Work>& work, States& kept) const {
        floats scaled(softmax.width);
        for (size_t i = 0, j; i < work.size(); i = j) {
            const Work& w = work[i];
            j = i + 1;
            if (w.state < 0) continue;
            State into = kept.at(w.state);
            auto same = [&](const Work& o) {
                return o.state >= 0 && o.request == w.request && o.kv_head == w.kv_head && o.first_query == w.first_query;
            };
            for (; j < work.size() && same(work[j]); j++) merge(into, kept.at(work[j].state), group, softmax.width);
            finish(w, into, scaled);
        }
    }

    void run() const {
        store_new();
        int64_t num_states, rows = std::max(ROWS, group), total = 0;
        std::vector<Work> work = divide(num_states);
        std::vector<int> order(work.size());
        for (size_t i = 0; i < work.size(); i++) order[i] = (int)i, total += work[i].cost;
        std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return work[a].cost > work[b].cost; });
        States kept(num_states, group, softmax.width);
        int threads = total * p.dim < 65536 ? 1 : (int)p.threads;
        std::atomic<bool> short_of_memory{false};
#pragma omp parallel num_threads(threads) if (threads > 1)
        {
            std::unique_ptr<Scratch> scratch;
            if (guarded([&] { scratch.reset(new Scratch(rows, p.dim, softmax.width)); }) != DONE) short_of_memory = true;
#pragma omp barrier
            if (!short_of_memory) {  // all threads see the same, and share the loop or none does
#pragma omp for schedule(dynamic)
                for (size_t i = 0; i < order.size(); i++) compute(work[order[i]], *scratch, kept);
            }
        }
        if (short_of_memory) throw std::bad_alloc();
        join(work, kept);
    }
};

template <class Q>
int run_with(const Plan& p, const Tensors& t, int cache) {
    static const Outside outside = outside_of<Q>();
    if (cache == 0) return guarded([&] { Attention<Q>{p, t, outside}.run(); });
    if (cache == 1) return guarded([&] { Attention<Int8>{p, t, outside}.run(); });
    if (cache == 2) return guarded([&] { Attention<Float8>{p, t, outside}.run(); });
    return UNKNOWN;
}

}  // namespace

extern "C" {

// Store k and v at the plan's slots, then attend. dtype of q, k, v and out: 0 float32, 1 bfloat16, 2 float16; cache: 0 as
// dtype, 1 int8, 2 float8 (e4m3fn). A Status: UNKNOWN for other numbers.
int turnout_attend(const Plan* plan, const Tensors* tensors, int dtype, int cache) {
    if (dtype == 0) return run_with<Float32>(*plan, *tensors, cache);
    if (dtype == 1) return run_with<BFloat16>(*plan, *tensors, cache);
    if (dtype == 2) return run_with<Float16>(*plan, *tensors, cache);
    return UNKNOWN;
}

}

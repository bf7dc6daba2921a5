// Products with float32 weights, which are laid out once in panels of neighbouring outputs:
//
//     weight [outs, ins]  ->  [outs / PANEL, ins, PANEL]          (the last panel filled up with zeros)
//
// One panel is read from front to back while a tile of a few rows times PANEL outputs stays in registers, so a decode
// step reads the weights once, at memory speed, and a prefill computes at the machine's own rate. The sums of a row run
// over `ins` in order, whatever the other rows: a row never depends on its neighbours.

#include "linear.h"
#include "vectors.h"

namespace {

constexpr int WIDE = 2;               // vectors of one panel
constexpr int PANEL = WIDE * LANES;   // outputs
constexpr int MOST = LANES == 16 ? 14 : 6;  // rows of a tile: with their panel they fill the registers
constexpr int AHEAD = 16;             // panel rows to fetch ahead
constexpr int DEEP = 8;               // tiles of one piece of work

struct Packed {
    const float *weight, *bias;
    int64_t ins, outs;
};

template <int N>
void tile(const Packed& p, int64_t panel, const float* x, float* out) {
    const float* weight = p.weight + panel * p.ins * PANEL;
    vec acc[N][WIDE] = {};
    for (int64_t i = 0; i < p.ins; i++) {
        const float* at = weight + i * PANEL;
        __builtin_prefetch(at + AHEAD * PANEL);
        __builtin_prefetch(at + AHEAD * PANEL + LANES);
        vec first = load(at), second = load(at + LANES);
        for (int r = 0; r < N; r++) {
            acc[r][0] += x[r * p.ins + i] * first;
            acc[r][1] += x[r * p.ins + i] * second;
        }
    }
    int64_t begin = panel * PANEL, width = std::min<int64_t>(PANEL, p.outs - begin);
    for (int r = 0; r < N; r++) {
        float sums[PANEL], *to = out + r * p.outs + begin;
        store(sums, acc[r][0]);
        store(sums + LANES, acc[r][1]);
        for (int64_t o = 0; o < width; o++) to[o] = p.bias ? sums[o] + p.bias[begin + o] : sums[o];
    }
}

template <int N>
void tile_of(int64_t rows, const Packed& p, int64_t panel, const float* x, float* out) {
    if (rows == N) return tile<N>(p, panel, x, out);
    if constexpr (N > 1) tile_of<N - 1>(rows, p, panel, x, out);
}

}  // namespace

extern "C" {

int64_t turnout_panel() { return PANEL; }

// weight [outs, ins] -> to [ceil(outs / PANEL), ins, PANEL]
void turnout_pack(const float* weight, float* to, int64_t outs, int64_t ins) {
    for (int64_t panel = 0; panel * PANEL < outs; panel++)
        for (int64_t i = 0; i < ins; i++)
            for (int64_t o = panel * PANEL, j = 0; j < PANEL; j++, o++)
                to[(panel * ins + i) * PANEL + j] = o < outs ? weight[o * ins + i] : 0.0f;
}

int turnout_gemm(const void* data, const float* x, float* out, int64_t rows, int64_t threads) {
    const Packed& p = *static_cast<const Packed*>(data);
    int64_t panels = (p.outs + PANEL - 1) / PANEL, tiles = (rows + MOST - 1) / MOST;
    int64_t pieces = std::max<int64_t>(1, tiles / DEEP);  // of the rows
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t item = 0; item < pieces * panels; item++) {
        int64_t piece = item / panels, panel = item % panels;
        for (int64_t t = tiles * piece / pieces; t < tiles * (piece + 1) / pieces; t++) {
            int64_t begin = rows * t / tiles, end = rows * (t + 1) / tiles;
            tile_of<MOST>(end - begin, p, panel, x + begin * p.ins, out + begin * p.outs);
        }
    }
    return DONE;
}
}

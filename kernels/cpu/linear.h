// A linear layer as data: the kernel that computes it, and what that reads. Every kind of weights comes as one of these.
#pragma once

#include <cstdint>
#include <new>

// What a function of the C interface returns: an exception must not leave it.
enum Status : int { DONE = 0, UNKNOWN = 1, NO_MEMORY = 2 };

template <class F>
static inline int guarded(F&& compute) {
    try {
        compute();
        return DONE;
    } catch (const std::bad_alloc&) {
        return NO_MEMORY;
    }
}

// Scratch memory of a thread that calls kernels: it grows to what was needed, and is kept.
template <class V>
static inline auto* at_least(V& scratch, int64_t count) {
    if ((int64_t)scratch.size() < count) {
        scratch.clear();  // nothing in it is worth moving
        scratch.resize(count);
    }
    return scratch.data();
}

// x [rows, in] -> out [rows, out], the bias added; a Status
typedef int (*Product)(const void* data, const float* x, float* out, int64_t rows, int64_t threads);

struct Linear {
    Product run;
    const void* data;
};

static inline void apply(const Linear& linear, const float* x, float* out, int64_t rows, int64_t threads) {
    if (linear.run(linear.data, x, out, rows, threads) != DONE) throw std::bad_alloc();
}

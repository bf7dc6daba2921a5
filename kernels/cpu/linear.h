// A linear layer as data: the kernel that computes it, and what that reads. Every kind of weights comes as one of these.
#pragma once

#include <cstdint>

// x [rows, in] -> out [rows, out], the bias added
typedef void (*Product)(const void* data, const float* x, float* out, int64_t rows, int64_t threads);

struct Linear {
    Product run;
    const void* data;
};

static inline void apply(const Linear& linear, const float* x, float* out, int64_t rows, int64_t threads) {
    linear.run(linear.data, x, out, rows, threads);
}

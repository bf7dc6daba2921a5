// Tiles of Intel's AMX: whether this process may use them, and their settings while it does.
#pragma once

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace {

struct alignas(64) TileConfig {  // as LDTILECFG reads it
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
};

// Not GCC's intrinsics: they tell it of the first 8 bytes only, and it leaves out writing the others
inline void load_tile_config(const TileConfig& config) { __asm__ volatile("ldtilecfg %0" ::"m"(config)); }
inline void store_tile_config(TileConfig& config) { __asm__ volatile("sttilecfg %0" : "=m"(config)); }

// Linux grants tiles to a process that asks (Documentation/arch/x86/xstate.rst)
inline bool may_use_tiles() {
    static const bool granted = [] {
        constexpr int REQUEST = 0x1023, DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA
        return syscall(SYS_arch_prctl, REQUEST, DATA) == 0;
    }();
    return granted;
}

// Tiles 0-3: sums, 4-5: activations of `rows` rows, 6-7: weights. Others in this process (oneDNN) have settings of their
// own: kept.
struct Tiles {
    TileConfig before;
    __attribute__((target("amx-tile"))) explicit Tiles(int64_t rows) {
        store_tile_config(before);
        TileConfig mine;
        for (int t = 0; t < 8; t++) mine.bytes[t] = 64, mine.rows[t] = t < 6 ? rows : 16;
        load_tile_config(mine);
    }
    __attribute__((target("amx-tile"))) ~Tiles() {
        if (before.palette)
            load_tile_config(before);
        else
            _tile_release();
    }
};

}  // namespace
#endif

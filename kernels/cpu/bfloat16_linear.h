// Linear layers in bf16 on processors with AVX512_BF16; kernels/bfloat16_linear_cpu.py packs their weights.
//
// Sums are kept in fp32, and a result is rounded once.
#pragma once

#include "lane_products.h"

#if defined(__AVX512BF16__)

#include <memory>

struct BFloatLanes {
    typedef float Sum;
    typedef __m512 Sums;
    // The rows that are multiplied together: one instruction a row and panel needs many sums in flight, and a panel is
    // read once for as many.
    static constexpr long TILE = 24;

    static Sums add_products(Sums sums, __m512i weights, __m512i inputs) {
        return _mm512_dpbf16_ps(sums, reinterpret_cast<__m512bh>(weights), reinterpret_cast<__m512bh>(inputs));
    }
};

// y [num_rows, out] = x [num_rows, in] @ weight.T + bias [out]; the bias may be null.
// weight [ceil(out / PANEL), ceil(in / 2), PANEL, 2], with zeros where it has no values.
template <typename Y>
void linear_half(const bf16 *x, const bf16 *weight, const float *bias, Y *y, long num_rows, long in_features,
                 long out_features, long num_threads) {
    const long num_lanes = (in_features + 1) / 2;
    const Lane *inputs = reinterpret_cast<const Lane *>(x), *panels = reinterpret_cast<const Lane *>(weight);
    std::unique_ptr<uint32_t[]> packed;
    if (num_rows > 1 || in_features % 2) {  // otherwise x is a tile already
        packed.reset(new uint32_t[num_rows * num_lanes]);
        auto lanes = [&](long row) { return reinterpret_cast<const Lane *>(x + row * in_features); };
        pack_lanes<BFloatLanes>(num_rows, num_lanes, packed.get(), num_threads, lanes, [&](long row) -> uint32_t {
            // The last of an odd number is paired with a zero.
            return in_features % 2 ? x[(row + 1) * in_features - 1].bits : lanes(row)[num_lanes - 1];
        });
        inputs = packed.get();
    }
    each_panel(bias, y, num_rows, out_features, num_threads, [&](long row, long panel, float *totals, long count) {
        multiply_lane_panel<BFloatLanes>(inputs + row * num_lanes, panels + panel * num_lanes * PANEL, totals, count, num_lanes);
    });
}

#define LINEAR_HALF(Y, NAME)                                                                                           \
    extern "C" void NAME(const bf16 *x, const bf16 *weight, const float *bias, Y *y, long num_rows, long in_features,  \
                         long out_features, long num_threads) {                                                        \
        linear_half(x, weight, bias, y, num_rows, in_features, out_features, num_threads);                             \
    }
LINEAR_HALF(float, linear_half_float32)
LINEAR_HALF(bf16, linear_half_bfloat16)

#endif

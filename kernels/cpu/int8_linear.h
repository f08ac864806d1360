// Linear layers of int8 codes whose inputs become int8 codes, too (W8A8), on processors with AVX512_VNNI;
// kernels/int8_linear_cpu.py packs their weights.
//
// A row of inputs has one scale, and an output another. Products of codes are summed in int32, without rounding.
#pragma once

#include "lane_products.h"

#if defined(__AVX512VNNI__)

#include <cfloat>
#include <memory>

struct ByteLanes {
    typedef int32_t Sum;
    typedef __m512i Sums;
    // With more rows, GCC keeps some of their sums in memory.
    static constexpr long TILE = 16;

    // The weights are unsigned.
    static Sums add_products(Sums sums, __m512i weights, __m512i inputs) { return _mm512_dpbusd_epi32(sums, weights, inputs); }
};

constexpr float LARGEST_CODE = 127;

// What is added to the codes of weights, which an instruction takes unsigned.
constexpr int32_t RAISED = 128;

// The codes of a row [size]: the row divided by its scale, to the nearest. Zeros follow them, up to a whole vector. Gives their sum.
template <typename T> inline int32_t code_row(const T *x, float scale, long size, int8_t *codes) {
    typedef int8_t Narrow __attribute__((vector_size(WIDTH)));
    Integers sums = {};
    each_vector(size, [&](long i, auto some) {
        const Narrow narrow = __builtin_convertvector(rounded_integers(some.load(x + i) / scale), Narrow);
        memcpy(codes + i, &narrow, sizeof narrow);
        sums += __builtin_convertvector(narrow, Integers);
    });
    return sum(sums);
}

// The scale of a row. That of an infinity or a NaN is one, and so are the row's results.
template <typename T> inline float scale_of(const T *x, long size, const float *largest) {
    const int32_t bits = largest ? 0 : largest_bits(x, size);
    float most;
    memcpy(&most, &bits, sizeof most);
    const float scale = (largest ? *largest : most) / LARGEST_CODE;
    return scale < FLT_MIN ? FLT_MIN : scale;
}

// y [num_rows, out] = x [num_rows, in] @ weight.T * scales + bias [out]; the bias may be null.
// scales: [ceil(out / PANEL) * PANEL]. weight: bytes [ceil(out / PANEL), ceil(in / 4), PANEL, 4] of raised codes; those without a weight may be any.
// largest [num_rows]: the largest absolute values that the codes of a row stand for; null: the row's own.
template <typename T>
void int8_linear(const T *x, const float *largest, const uint8_t *weight, const float *scales, const float *bias, T *y,
                 long num_rows, long in_features, long out_features, long num_threads) {
    const long num_lanes = (in_features + 3) / 4, row_lanes = (in_features + WIDTH - 1) / WIDTH * (WIDTH / 4);
    const std::unique_ptr<uint32_t[]> codes(new uint32_t[num_rows * row_lanes]);
    const std::unique_ptr<float[]> row_scales(new float[num_rows]);
    const std::unique_ptr<int32_t[]> raised(new int32_t[num_rows]);  // what raising adds to a row's sums
    share_rows(num_rows, in_features, num_threads, [&](long row) {
        const T *inputs = x + row * in_features;
        row_scales[row] = scale_of(inputs, in_features, largest ? largest + row : nullptr);
        int8_t *own = reinterpret_cast<int8_t *>(&codes[row * row_lanes]);
        raised[row] = RAISED * code_row(inputs, row_scales[row], in_features, own);
    });
    const Lane *inputs = codes.get(), *panels = reinterpret_cast<const Lane *>(weight);
    std::unique_ptr<uint32_t[]> packed;
    if (num_rows > 1) {  // one row is a tile already
        packed.reset(new uint32_t[num_rows * num_lanes]);
        auto lanes = [&](long row) { return &codes[row * row_lanes]; };
        pack_lanes<ByteLanes>(num_rows, num_lanes, packed.get(), num_threads, lanes, [&](long row) { return lanes(row)[num_lanes - 1]; });
        inputs = packed.get();
    }
    each_panel(bias, y, num_rows, out_features, num_threads, [&](long row, long panel, float *totals, long count) {
        alignas(64) int32_t sums[BLOCK_ROWS * PANEL];
        for (long i = 0; i < count; i++) {
            const Integers start = Integers{} - raised[row + i];
            memcpy(sums + i * PANEL, &start, sizeof start);
        }
        multiply_lane_panel<ByteLanes>(inputs + row * num_lanes, panels + panel * num_lanes * PANEL, sums, count, num_lanes);
        const Vector panel_scales = load(scales + panel * PANEL);
        for (long i = 0; i < count; i++) {
            Integers products;
            memcpy(&products, sums + i * PANEL, sizeof products);
            float *total = totals + i * PANEL;
            store(total, load(total) + __builtin_convertvector(products, Vector) * panel_scales * filled(row_scales[row + i]));
        }
    });
}

#define INT8_LINEAR(T, NAME)                                                                                           \
    extern "C" void NAME(const T *x, const float *largest, const uint8_t *weight, const float *scales, const float *bias, T *y, \
                         long num_rows, long in_features, long out_features, long num_threads) {                       \
        int8_linear(x, largest, weight, scales, bias, y, num_rows, in_features, out_features, num_threads);            \
    }
INT8_LINEAR(float, int8_linear_float32)
INT8_LINEAR(bf16, int8_linear_bfloat16)

#endif

// Noise and penalties of sampled rows; engine/execution/sampler.py defines both.
#pragma once

#include "threads.h"
#include "vector.h"

// SplitMix64's finalizer (Steele, Lea, Flood 2014).
inline uint64_t mixed(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

constexpr uint64_t GOLDEN_GAMMA = 0x9e3779b97f4a7c15u;
constexpr long NUM_NOISE_BITS = 23;

// The tokens whose numbers are drawn at a time, and those that a thread takes.
constexpr long DRAWN_TOKENS = 256, TOKEN_PIECE = 16 * DRAWN_TOKENS;

// Standard Gumbel noise of the tokens first + 1 to first + count of a row with this key.
inline void gumbel_piece(uint64_t key, long first, float *noise, long count) {
    int32_t drawn[DRAWN_TOKENS];
    for (long i = 0; i < count; i++)
        drawn[i] = mixed(key + (first + 1 + i) * GOLDEN_GAMMA) >> (64 - NUM_NOISE_BITS);
    each_vector(count, [&](long i, auto some) {
        Integers numbers;
        memcpy(&numbers, drawn + i, sizeof numbers);
        const Vector uniform = (__builtin_convertvector(numbers, Vector) + 0.5f) * (1.0f / (1 << NUM_NOISE_BITS));
        some.store(noise + i, -log(-log(uniform)));
    });
}

// noise [num_rows, vocab_size] of seeds, positions [num_rows] for the purpose `stream`.
extern "C" void gumbel_noise_float32(const int64_t *seeds, const int64_t *positions, long stream, float *noise,
                                     long num_rows, long vocab_size, long num_threads) {
    const long num_pieces = (vocab_size + TOKEN_PIECE - 1) / TOKEN_PIECE;
    share(num_rows * num_pieces, num_threads, [&](long index) {
        const long row = index / num_pieces, begin = index % num_pieces * TOKEN_PIECE;
        const uint64_t position = positions[row] + 1 + (static_cast<uint64_t>(stream) << 48);
        const uint64_t key = mixed(mixed(seeds[row]) ^ mixed(position));
        const long end = begin + TOKEN_PIECE < vocab_size ? begin + TOKEN_PIECE : vocab_size;
        for (long token = begin; token < end; token += DRAWN_TOKENS)
            gumbel_piece(key, token, noise + row * vocab_size + token, end - token < DRAWN_TOKENS ? end - token : DRAWN_TOKENS);
    });
}

// Of one row's logits: those of token_ids get the repetition penalty, those of output_ids the two others.
extern "C" void penalize_float32(float *logits, const int64_t *token_ids, long num_tokens, const int64_t *output_ids,
                                 const float *num_in_output, long num_outputs, float repetition, float presence,
                                 float frequency) {
    // What is positive is divided by the penalty, and what is negative multiplied with it. No processor
    // predicts which it is, so both are computed.
    for (long i = 0; i < num_tokens && repetition != 1.0f; i++) {
        const float logit = logits[token_ids[i]], divided = logit / repetition, multiplied = logit * repetition;
        const float lower = divided < multiplied ? divided : multiplied, higher = divided < multiplied ? multiplied : divided;
        logits[token_ids[i]] = repetition > 1.0f ? lower : higher;
    }
    for (long i = 0; i < num_outputs; i++) {
        float &logit = logits[output_ids[i]];
        logit = logit - presence - frequency * num_in_output[i];
    }
}

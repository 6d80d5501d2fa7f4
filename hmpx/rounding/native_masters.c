/* Masters beside BF16 weights: numbers in two halves as stochastic.py specifies them, and FP32 copies. */

#include "native.h"

/* An FP32 number as the BF16 nearest to it, ties away from zero, and an int16: its bits, those of a NaN made quiet
   where rounding would make another number of it. */
static inline uint32_t kept_bits(uint32_t bits) {
  uint32_t magnitude = bits & 0x7FFFFFFFu;
  int lost = (magnitude > 0x7F800000u && magnitude < 0x7F808000u) || magnitude >= 0x7FFF8000u;
  return lost ? (bits & 0x80000000u) | 0x7FC00000u : bits;
}

static inline void split_block(const float *restrict x, uint16_t *restrict upper, uint16_t *restrict lower, int64_t n) {
  uint32_t largest = 0;
  for (int64_t j = 0; j < n; j++) {
    uint32_t bits = bits_of(x[j]), magnitude = bits & 0x7FFFFFFFu;
    largest = magnitude > largest ? magnitude : largest;
    lower[j] = (uint16_t)bits;
    upper[j] = (uint16_t)((bits + 0x8000u) >> 16);
  }
  if (largest > 0x7F800000u) /* a NaN, which nearly no block has */
    for (int64_t j = 0; j < n; j++) {
      uint32_t bits = kept_bits(bits_of(x[j]));
      lower[j] = (uint16_t)bits;
      upper[j] = (uint16_t)((bits + 0x8000u) >> 16);
    }
}

/* The lower half; 0 where somebody has written 0 or inf over the upper half, so that the sum would be a NaN. */
static inline int32_t rest_of(uint16_t upper, int32_t lower) {
  uint32_t magnitude = upper & 0x7FFFu;
  return (magnitude == 0 && lower < 0) || (magnitude == 0x7F80u && lower > 0) ? 0 : lower;
}

static inline void join_block(const uint16_t *restrict upper, const int16_t *restrict lower, float *restrict out,
                              int64_t n) {
  for (int64_t j = 0; j < n; j++)
    out[j] = float_of(((uint32_t)upper[j] << 16) + (uint32_t)rest_of(upper[j], lower[j]));
}

#define LARGEST_24 0x7F7FFF00u /* the bits of the largest number of 24 bits */

/* A number of 24 bits as a BF16 one and an int8. */
static inline void split_block_24(const float *restrict x, uint16_t *restrict upper, uint8_t *restrict lower, int64_t n,
                                  uint64_t key, uint64_t offset) {
  Numbers numbers;
  const uint16_t *restrict r = draw(&numbers, n, key, offset);
  uint32_t largest = 0;
  for (int64_t j = 0; j < n; j++) {
    uint32_t bits = bits_of(x[j]), magnitude = bits & 0x7FFFFFFFu;
    largest = magnitude > largest ? magnitude : largest;
    bits += r[j] >> 8;
    lower[j] = (uint8_t)(bits >> 8);
    upper[j] = (uint16_t)((bits + 0x8000u) >> 16);
  }
  if (largest > LARGEST_24) /* it stays itself, or what is kept in its stead */
    for (int64_t j = 0; j < n; j++) {
      uint32_t bits = kept_bits(bits_of(x[j]));
      bits += (bits & 0x7FFFFFFFu) <= LARGEST_24 ? r[j] >> 8 : 0;
      lower[j] = (uint8_t)(bits >> 8);
      upper[j] = (uint16_t)((bits + 0x8000u) >> 16);
    }
}

static inline void join_block_24(const uint16_t *restrict upper, const int8_t *restrict lower, float *restrict out,
                                 int64_t n) {
  for (int64_t j = 0; j < n; j++)
    out[j] = float_of(((uint32_t)upper[j] << 16) + (uint32_t)rest_of(upper[j], lower[j] * 256));
}

/* Whether two BF16 numbers are one: 0 and -0 are. */
static inline int are_one(uint16_t a, uint16_t b) { return a == b || !((a | b) & 0x7FFFu); }

/* Masters, or the weight where that is not what the master rounds to; `out` may be `masters`. A pass that rounds ties
   away from zero alone does for nearly every block. */
static inline void read_block(const float *masters, const uint16_t *restrict weights, float *out, int64_t n) {
  uint32_t other = 0, largest = 0;
  for (int64_t j = 0; j < n; j++) {
    uint32_t magnitude = bits_of(masters[j]) & 0x7FFFFFFFu;
    other |= (bits_of(masters[j]) + 0x8000u) >> 16 ^ weights[j];
    largest = magnitude > largest ? magnitude : largest;
  }
  if (!other && largest <= 0x7F800000u) {
    if (out != masters) memcpy(out, masters, (size_t)n * sizeof *out);
    return;
  }
  for (int64_t j = 0; j < n; j++) {
    uint32_t bits = bits_of(masters[j]);
    uint16_t even = nearest(bits);
    uint16_t away = (uint16_t)((kept_bits(bits) + 0x8000u) >> 16);
    out[j] = are_one(weights[j], even) || are_one(weights[j], away) ? masters[j] : from_bf16(weights[j]);
  }
}

/* state_codes.py: optimizer state in codes of a few bits. */

#include "native.h"

#define CODES 128 /* elements at most that share a scale: a block of codes */

/* Of a block: the largest magnitude, inf and NaN included, and the largest bits, which are past those of -0 where a
   number is negative. */
typedef struct { uint32_t magnitude, bits; } Largest;

static inline Largest largest_of(const float *restrict x, int64_t count) {
  int32_t positive = 0;
  uint32_t bits = 0;
  for (int64_t j = 0; j < count; j++) {
    int32_t one = (int32_t)bits_of(x[j]);
    positive = one > positive ? one : positive;
    bits = (uint32_t)one > bits ? (uint32_t)one : bits;
  }
  uint32_t negative = bits & 0x7FFFFFFFu; /* or the largest positive one again */
  return (Largest){(uint32_t)positive > negative ? (uint32_t)positive : negative, bits};
}

/* The same without NaN, and without the magnitude of inf. */
static Largest largest_finite(const float *restrict x, int64_t count) {
  Largest found = {0, 0};
  for (int64_t j = 0; j < count; j++) {
    uint32_t one = bits_of(x[j]), its = one & 0x7FFFFFFFu;
    if (its > found.magnitude && its < 0x7F800000u) found.magnitude = its;
    if (one > found.bits && one <= 0xFF800000u) found.bits = one;
  }
  return found;
}

/* A code of `FLOATS` of shared.py. missing: bits of an FP32 mantissa that it has not; inf and nan: like last. */
typedef struct { int missing, of_unsigned, of_signed, last, inf, nan; } FloatCode;

#define ONE(CODE, IS_SIGNED) ((IS_SIGNED) ? (CODE).of_signed : (CODE).of_unsigned)
#define STEPS(CODE) (1 << (23 - (CODE).missing)) /* codes of one exponent */
#define LOOP static inline __attribute__((always_inline)) /* of which the compiler makes one for each code, and leaves
                                                             out what its blocks do not have */

/* The bits of the largest number, for a scale of these bits. */
LOOP uint64_t last_of(uint32_t scale, const FloatCode code) {
  return scale + ((uint64_t)(code.last / STEPS(code)) << 23) + ((uint64_t)(code.last % STEPS(code)) << code.missing);
}

/* The scale of a block, as BF16: a power of two, negative where a number is. */
LOOP uint16_t scale_of(const float *restrict x, int64_t count, Largest largest, const FloatCode code) {
  if (largest.magnitude >= 0x7F800000u) largest = largest_finite(x, count);
  int32_t up = ((STEPS(code) - code.last % STEPS(code)) << code.missing) - 1; /* where the last mantissa is passed */
  int32_t exponent = (int32_t)((largest.magnitude + (uint32_t)up) >> 23) - code.last / STEPS(code);
  int32_t most = code.last < STEPS(code) ? 253 : 254 - code.last / STEPS(code); /* the largest number is finite */
  exponent = exponent < 1 ? 1 : exponent > most ? most : exponent;
  return (uint16_t)(exponent << 7 | (largest.bits > 0x80000000u) << 15);
}

/* A number has two candidates for its code: one as if it were below the least exponent, one as if it were not. The
   larger code is right. All arithmetic is in 32 bits and narrowed at the end: compilers would do some of it in 8 bits,
   and narrow each part. */
LOOP void encode_as(const float *restrict x, uint8_t *restrict codes, int64_t count, uint16_t scale,
                    const uint16_t *restrict r, const int is_signed, const int is_within, const FloatCode c) {
  int32_t one = ONE(c, is_signed), least = (128 - one) << 23; /* the bits of the least number with an exponent */
  int32_t last = one * STEPS(c) + c.last, half = 1 << (c.missing - 17);
  float inverse = float_of((254u - (scale >> 7 & 0xFFu)) << 23);
  for (int64_t j = 0; j < count; j++) {
    uint32_t magnitude = bits_of(x[j]) & 0x7FFFFFFFu;
    float y = (is_within || magnitude < 0x7F800000u ? float_of(magnitude) : 0.0f) * inverse;
    int32_t below = (int32_t)bits_of(y + float_of((uint32_t)least)), normal = (int32_t)bits_of(y) + 0x800000;
    int32_t code = (below > normal ? below : normal) + (int32_t)((uint32_t)r[j] << (c.missing - 16)) + (half - least);
    if (!is_signed) { /* no positive number becomes 0 */
      int32_t lowest = magnitude > 0 ? 1 << c.missing : 0;
      code = code > lowest ? code : lowest;
    }
    if (!is_within) {
      int32_t inf = (one * STEPS(c) + c.inf) << c.missing, nan = (one * STEPS(c) + c.nan) << c.missing;
      code = code < (last + 1) << c.missing ? code : last << c.missing;
      code = magnitude == 0x7F800000u ? inf : magnitude > 0x7F800000u ? nan : code;
    }
    if (is_signed) code += x[j] < 0.0f ? 0x80 << c.missing : 0;
    codes[j] = (uint8_t)(code >> c.missing);
  }
}

LOOP void encode_float(const float *restrict x, uint8_t *restrict codes, int64_t count, uint16_t scale,
                       const uint16_t *restrict r, uint32_t largest, const FloatCode c) {
  if (largest <= last_of((scale & 0x7F80u) << 16, c))
    scale >> 15 ? encode_as(x, codes, count, scale, r, 1, 1, c) : encode_as(x, codes, count, scale, r, 0, 1, c);
  else
    scale >> 15 ? encode_as(x, codes, count, scale, r, 1, 0, c) : encode_as(x, codes, count, scale, r, 0, 0, c);
}

/* Of the same two ways, the smaller number is right; both have no sign, so that integers compare as they do. */
LOOP void decode_as(const uint8_t *restrict codes, float *restrict x, int64_t count, uint16_t scale,
                    const int is_signed, const int is_finite, const FloatCode c) {
  uint32_t one = ONE(c, is_signed), zero = (127 - one) << 23, mask = (is_signed ? 0x7Fu : 0xFFu) << c.missing;
  uint32_t inf = (one * STEPS(c) + c.inf) << c.missing, nan = (one * STEPS(c) + c.nan) << c.missing;
  float factor = float_of((uint32_t)(scale & 0x7FFFu) << 16), least = float_of(zero + 0x800000u);
  for (int64_t j = 0; j < count; j++) {
    uint32_t code = (uint32_t)(is_signed ? (int8_t)codes[j] : codes[j]) << c.missing, magnitude = code & mask;
    int32_t normal = (int32_t)(magnitude + zero);
    int32_t below = (int32_t)bits_of(float_of((uint32_t)normal + 0x800000u) - least);
    float y = float_of((uint32_t)(below < normal ? below : normal)) * factor;
    if (!is_finite) y = magnitude == nan ? NAN : magnitude == inf ? INFINITY : y;
    x[j] = is_signed ? float_of(bits_of(y) | (code & 0x80000000u)) : y;
  }
}

LOOP void decode_float(const uint8_t *restrict codes, float *restrict x, int64_t count, uint16_t scale,
                       const FloatCode c) {
  int is_signed = scale >> 15;
  uint8_t mask = is_signed ? 0x7F : 0xFF, largest = 0;
  for (int64_t j = 0; j < count; j++) {
    uint8_t magnitude = codes[j] & mask;
    largest = magnitude > largest ? magnitude : largest;
  }
  if (largest < ONE(c, is_signed) * STEPS(c) + c.inf)
    is_signed ? decode_as(codes, x, count, scale, 1, 1, c) : decode_as(codes, x, count, scale, 0, 1, c);
  else
    is_signed ? decode_as(codes, x, count, scale, 1, 0, c) : decode_as(codes, x, count, scale, 0, 0, c);
}

/* 4 bits */

static const float SIXTEEN[] = {NUMBERS_OF_FOUR};

static uint16_t scale_of_four(const float *restrict x, int64_t count) {
  int32_t magnitude = 0, below = -1; /* the bits of the largest magnitude, and of a number that is not positive */
  for (int64_t j = 0; j < count; j++) {
    int32_t signed_bits = (int32_t)bits_of(x[j]), bits = signed_bits & 0x7FFFFFFF, its = signed_bits <= 0 ? bits : -1;
    magnitude = bits > magnitude ? bits : magnitude;
    below = its > below ? its : below;
  }
  uint32_t needed = (uint32_t)magnitude, not_positive = (uint32_t)below + 1;
  if (needed >= 0x7F800000u) return 0x7FC0; /* NaN */
  uint32_t stretched = bits_of(float_of(not_positive ? not_positive - 1 : 0) * (float)(1 / 0.8875));
  needed = stretched > needed ? stretched : needed;
  uint32_t odd = not_positive == 1, of = not_positive ? (needed + (2 - odd) * 0x10000u - 1) >> 17 : (needed + 0xFFFFu) >> 16;
  uint32_t least = not_positive ? 0x0040 : 0x0080, most = not_positive ? 0x3FBF : 0x7F7F;
  of = of < least ? least : of > most ? most : of;
  return (uint16_t)(not_positive ? 0x8000u | of << 1 | odd : of);
}

LOOP void encode_four_as(const float *restrict x, uint8_t *restrict codes, int64_t count, float scale,
                         const uint16_t *restrict r, const int is_signed, uint8_t lowest) {
  for (int64_t j = 0; j < count; j++) {
    float y = x[j] / scale, low = SIXTEEN[0], gap = SIXTEEN[1] - SIXTEEN[0];
    int32_t code = 0;
    if (is_signed) {
      for (int k = 1; k < 15; k++) {
        low = y >= SIXTEEN[k] ? SIXTEEN[k] : low;
        gap = y >= SIXTEEN[k] ? SIXTEEN[k + 1] - SIXTEEN[k] : gap;
        code += y >= SIXTEEN[k];
      }
    } else {
      code = (int32_t)(y * 16.0f) - 1;
      code = code < 0 ? 0 : code > 14 ? 14 : code;
      low = (float)(code + 1) * 0.0625f, gap = 0.0625f;
    }
    code += (y - low) * 65536.0f > ((float)r[j] + 0.5f) * gap;
    codes[j] = (uint8_t)(x[j] > 0.0f && code < lowest ? lowest : code);
  }
}

static __attribute__((noinline)) void encode_four(const float *restrict x, uint8_t *restrict to, int64_t count,
                                                  uint16_t scale, const uint16_t *restrict r) {
  uint8_t codes[CODES];
  float magnitude = from_bf16(scale & 0x7FFF);
  if (magnitude != magnitude) memset(codes, 0, sizeof codes);
  else if (scale >> 15) encode_four_as(x, codes, count, magnitude, r, 1, scale & 1 ? 8 : 0); /* 8: above 0 */
  else encode_four_as(x, codes, count, magnitude, r, 0, 0);
  for (int64_t j = 0; j < count / 2; j++) to[j] = (uint8_t)(codes[2 * j] << 4 | codes[2 * j + 1]);
}

static __attribute__((noinline)) void decode_four(const uint8_t *restrict from, float *restrict x, int64_t count,
                                                  uint16_t scale) {
  float numbers[16], magnitude = from_bf16(scale & 0x7FFF);
  for (int k = 0; k < 16; k++) numbers[k] = (scale >> 15 ? SIXTEEN[k] : (float)(k + 1) * 0.0625f) * magnitude;
  for (int64_t j = 0; j < count / 2; j++) x[2 * j] = numbers[from[j] >> 4], x[2 * j + 1] = numbers[from[j] & 15];
}

/* eight_bits.py: optimizer state in 8 bits. */

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

/* The scale of a block, as BF16: a power of two, negative where a number is. */
static inline uint16_t scale_of(const float *restrict x, int64_t count, Largest largest) {
  if (largest.magnitude >= 0x7F800000u) largest = largest_finite(x, count);
  uint32_t exponent = (largest.magnitude + 0x17FFFFu) >> 23; /* the next one where 1.8125 is passed */
  exponent = exponent < 1 ? 1 : exponent > 253 ? 253 : exponent;
  return (uint16_t)(exponent << 7 | (largest.bits > 0x80000000u) << 15);
}

#define MISSING 19 /* bits of an FP32 mantissa that a code has not */
#define CODE(N) ((N) << MISSING)
#define LOOP static inline __attribute__((always_inline)) void /* of which the compiler makes four: each leaves out what
                                                                  its blocks do not have */

/* Of two ways to read a number, as one that is below the least exponent and as another one, the larger code is right.
   All is done in 32 bits and narrowed at the end: compilers would do some of it in 8, and narrow each part. */
LOOP encode_as(const float *restrict x, uint8_t *restrict codes, int64_t count, uint16_t scale,
               const uint16_t *restrict r, const int is_signed, const int is_within) {
  int32_t top = is_signed ? 7 : 15, least = (128 - top) << 23; /* the bits of the least number with an exponent */
  float inverse = float_of((254u - (scale >> 7 & 0xFFu)) << 23);
  for (int64_t j = 0; j < count; j++) {
    uint32_t magnitude = bits_of(x[j]) & 0x7FFFFFFFu;
    float y = (is_within || magnitude < 0x7F800000u ? float_of(magnitude) : 0.0f) * inverse;
    int32_t below = (int32_t)bits_of(y + float_of((uint32_t)least)), normal = (int32_t)bits_of(y) + 0x800000;
    int32_t code = (below > normal ? below : normal) + (int32_t)((uint32_t)r[j] << 3) + (4 - least);
    if (!is_signed) { /* no positive number becomes 0 */
      int32_t lowest = magnitude > 0 ? CODE(1) : 0;
      code = code > lowest ? code : lowest;
    }
    if (!is_within) {
      code = code < CODE(top * 16 + 14) ? code : CODE(top * 16 + 13);
      code = magnitude == 0x7F800000u ? CODE(top * 16 + 14) : magnitude > 0x7F800000u ? CODE(top * 16 + 15) : code;
    }
    if (is_signed) code += x[j] < 0.0f ? CODE(0x80) : 0;
    codes[j] = (uint8_t)(code >> MISSING);
  }
}

/* r: the random numbers of the elements. largest: of the block. */
static __attribute__((noinline)) void encode_block(const float *restrict x, uint8_t *restrict codes, int64_t count,
                                                   uint16_t scale, const uint16_t *restrict r, uint32_t largest) {
  int is_signed = scale >> 15, is_within = largest <= ((scale & 0x7F80u) << 16) + 0x680000u; /* 1.8125 of the scale */
  if (is_within)
    is_signed ? encode_as(x, codes, count, scale, r, 1, 1) : encode_as(x, codes, count, scale, r, 0, 1);
  else
    is_signed ? encode_as(x, codes, count, scale, r, 1, 0) : encode_as(x, codes, count, scale, r, 0, 0);
}

/* Of the same two ways, the smaller number is right; both have no sign, so that integers compare as they do. */
LOOP decode_as(const uint8_t *restrict codes, float *restrict x, int64_t count, uint16_t scale, const int is_signed,
               const int is_finite) {
  uint32_t top = is_signed ? 7 : 15, zero = (127 - top) << 23, mask = CODE(is_signed ? 0x7Fu : 0xFFu);
  float factor = float_of((uint32_t)(scale & 0x7FFFu) << 16), least = float_of(zero + 0x800000u);
  for (int64_t j = 0; j < count; j++) {
    uint32_t code = CODE((uint32_t)(is_signed ? (int8_t)codes[j] : codes[j])), magnitude = code & mask;
    int32_t normal = (int32_t)(magnitude | zero);
    int32_t below = (int32_t)bits_of(float_of((uint32_t)normal + 0x800000u) - least);
    float y = float_of((uint32_t)(below < normal ? below : normal)) * factor;
    if (!is_finite) y = magnitude == CODE(top * 16 + 14) ? INFINITY : magnitude == CODE(top * 16 + 15) ? NAN : y;
    x[j] = is_signed ? float_of(bits_of(y) | (code & 0x80000000u)) : y;
  }
}

static __attribute__((noinline)) void decode_block(const uint8_t *restrict codes, float *restrict x, int64_t count, uint16_t scale) {
  int is_signed = scale >> 15;
  uint8_t mask = is_signed ? 0x7F : 0xFF, largest = 0;
  for (int64_t j = 0; j < count; j++) {
    uint8_t magnitude = codes[j] & mask;
    largest = magnitude > largest ? magnitude : largest;
  }
  if (largest < (is_signed ? 7 : 15) * 16 + 14)
    is_signed ? decode_as(codes, x, count, scale, 1, 1) : decode_as(codes, x, count, scale, 0, 1);
  else
    is_signed ? decode_as(codes, x, count, scale, 1, 0) : decode_as(codes, x, count, scale, 0, 0);
}

/* Goes through the blocks, or the held parts of them, of elements `start` ... `start + n - 1` of rows of `row`
   elements, which begin at column `first` of whole rows of `blocks` blocks. */
#define FOR_EACH_CODED(BODY)                                                                             \
  int64_t left = first / CODES, parts = (first + row - 1) / CODES - left + 1;                            \
  int64_t from = start / row * parts + (first + start % row) / CODES - left, last = start + n - 1;       \
  int64_t to = last / row * parts + (first + last % row) / CODES - left;                                 \
  _Pragma("omp parallel for schedule(static) num_threads(threads) if (n > PARALLEL_FROM)")               \
  for (int64_t part = from; part <= to; part++) {                                                        \
    int64_t r = part / parts, b = part % parts + left;                                                   \
    int64_t begin = b * CODES > first ? b * CODES - first : 0;                                           \
    int64_t end = (b + 1) * CODES - first < row ? (b + 1) * CODES - first : row;                         \
    int64_t at = r * row + begin - start, count = end - begin, scale = r * blocks + b;                   \
    BODY                                                                                                 \
  }

/* Element i of the n is element `offset + i / width * stride + i % width` of the parameter; no block goes over the end
   of such a row. `given`: whether the scales are there, else they are written. */
void encode_8bit(const float *x, uint8_t *codes, uint16_t *scales, int64_t n, uint64_t key, uint64_t offset,
                 int64_t width, int64_t stride, int64_t start, int64_t row, int64_t first, int64_t blocks, int given,
                 int threads) {
  FOR_EACH_CODED({
    Numbers numbers;
    const uint16_t *r = draw(&numbers, count, key, offset + at / width * stride + at % width);
    Largest largest = largest_of(x + at, count);
    if (!given) scales[scale] = scale_of(x + at, count, largest);
    encode_block(x + at, codes + at, count, scales[scale], r, largest.magnitude);
  })
}

void decode_8bit(const uint8_t *codes, const uint16_t *scales, float *out, int64_t n, int64_t start, int64_t row,
                 int64_t first, int64_t blocks, int threads) {
  FOR_EACH_CODED({ decode_block(codes + at, out + at, count, scales[scale]); })
}

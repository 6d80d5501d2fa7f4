/* Tensors as they are stored between two steps, read to FP32 and written back: for fused steps, a block at a time, and
   for steps in slices, all of a slice in one call. */

#include "native.h"

/* How a tensor is stored; native.py has the same.

   FP32     the steps work on it
   BF16     by stochastic rounding; `name` is the hash of its name
   CODED    codes of 8 bits, by stochastic rounding; `beside` has the scales, whose blocks lie in rows
   NEAREST  BF16, by rounding to nearest, ties to even
   MASTER   as NEAREST; `beside` has FP32 numbers
   SPLIT    BF16, `beside` has the lower halves of 16 bits
   SPLIT8   the same with 8 bits, by stochastic rounding
   FP8      as CODED, numbers of e4m3
   FOUR     as CODED, in 4 bits: two elements in a byte */
enum { ABSENT, FP32, BF16, CODED, NEAREST, MASTER, SPLIT, SPLIT8, FP8, FOUR };
typedef struct { uint64_t at, kind, name, beside; } Stored;

#define AS(TYPE, ADDRESS) ((TYPE *)(uintptr_t)(ADDRESS))

/* Goes through the blocks of codes of `count` elements from `at` on, which begins a block: BODY sees elements j ...
   j + n - 1 and their scale. row: 0 where a block begins every CODES elements, which saves divisions. */
#define FOR_EACH_SCALE(BODY)                                                                             \
  {                                                                                                      \
    int64_t first = row ? at / row * ((row + CODES - 1) / CODES) + at % row / CODES : at / CODES;        \
    int64_t column = row ? at % row : 0;                                                                 \
    uint16_t *scale = AS(uint16_t, stored->beside) + first;                                              \
    for (int64_t j = 0, n; j < count; j += n, scale++) {                                                 \
      n = count - j < CODES ? count - j : CODES;                                                         \
      if (row) {                                                                                         \
        n = row - column < n ? row - column : n;                                                         \
        column = column + n < row ? column + n : 0;                                                      \
      }                                                                                                  \
      BODY                                                                                               \
    }                                                                                                    \
  }

/* The n elements from `at` on of a tensor in another code than that of 8 bits, which share a scale. */
static void decode_other(int kind, const uint8_t *codes, int64_t at, float *x, int64_t n, uint16_t scale) {
  if (kind == FP8) decode_float(codes + at, x, n, scale, E4M3);
  else decode_four(codes + at / 2, x, n, scale);
}

/* r: the random numbers of the elements. is_given: whether the scale is there. */
static void encode_other(int kind, const float *x, uint8_t *codes, int64_t at, int64_t n, uint16_t *scale,
                         const uint16_t *r, int is_given) {
  if (kind == FP8) {
    Largest largest = largest_of(x, n);
    if (!is_given) *scale = scale_of(x, n, largest, E4M3);
    encode_float(x, codes + at, n, *scale, r, largest.magnitude, E4M3);
  } else {
    if (!is_given) *scale = scale_of_four(x, n);
    encode_four(x, codes + at / 2, n, *scale, r);
  }
}

/* `count` elements from element `at` on, in FP32: in their place, or copied into `room`. At most a block of them, but
   for BF16. */
static inline float *opened(const Stored *stored, int64_t at, int64_t count, int64_t row, float *room) {
  if (stored->kind == FP32) return AS(float, stored->at) + at;
  const uint16_t *from = AS(uint16_t, stored->at) + at;
  if (stored->kind == BF16 || stored->kind == NEAREST)
    for (int64_t j = 0; j < count; j++) room[j] = from_bf16(from[j]);
  if (stored->kind == CODED) {
    const uint8_t *codes = AS(uint8_t, stored->at) + at;
    FOR_EACH_SCALE(decode_block(codes + j, room + j, n, *scale);)
  }
  if (stored->kind >= FP8)
    FOR_EACH_SCALE(decode_other(stored->kind, AS(uint8_t, stored->at), at + j, room + j, n, *scale);)
  if (stored->kind == MASTER) read_block(AS(float, stored->beside) + at, from, room, count);
  if (stored->kind == SPLIT) join_block(from, AS(int16_t, stored->beside) + at, room, count);
  if (stored->kind == SPLIT8) join_block_24(from, AS(int8_t, stored->beside) + at, room, count);
  return room;
}

/* first: of the tensor's elements, in the whole parameter. */
static inline void closed(const Stored *stored, int64_t at, int64_t count, int64_t row, const float *room,
                          uint64_t key, int64_t first) {
  uint64_t element = (uint64_t)(first + at);
  uint16_t *to = AS(uint16_t, stored->at) + at;
  if (stored->kind == BF16) round_block(room, to, count, key, element);
  if (stored->kind == CODED || stored->kind >= FP8) {
    uint8_t *codes = AS(uint8_t, stored->at) + at;
    Numbers numbers;
    const uint16_t *r = draw(&numbers, count, key, element);
    if (stored->kind != CODED) {
      FOR_EACH_SCALE(encode_other(stored->kind, room + j, AS(uint8_t, stored->at), at + j, n, scale, r + j, 0);)
      return;
    }
    Largest found[BLOCK], *largest = found; /* of every block before the first is written: nothing waits for anything */
    FOR_EACH_SCALE(*largest++ = largest_of(room + j, n);)
    largest = found;
    FOR_EACH_SCALE({
      *scale = scale_of(room + j, n, *largest, EIGHT_BITS);
      encode_block(room + j, codes + j, n, *scale, r + j, largest++->magnitude);
    })
  }
  if (stored->kind == NEAREST || stored->kind == MASTER) nearest_block(room, to, count);
  if (stored->kind == MASTER && AS(float, stored->beside) + at != room)
    memcpy(AS(float, stored->beside) + at, room, (size_t)count * sizeof *room);
  if (stored->kind == SPLIT) split_block(room, to, AS(uint16_t, stored->beside) + at, count);
  if (stored->kind == SPLIT8) split_block_24(room, to, AS(uint8_t, stored->beside) + at, count, key, element);
}

/* Rows as FOR_EACH_SCALE wants them, of a tensor of `n` elements. */
static inline int64_t uneven_rows(int64_t row, int64_t n) { return row % CODES == 0 || row == n ? 0 : row; }

/* Where the row of an element begins, or the next one if it is in the midst of a row; not past `end`. */
static inline int64_t row_start(int64_t element, int64_t row, int64_t end) {
  int64_t start = row ? (element + row - 1) / row * row : element;
  return start < end ? start : end;
}

/* How many elements from `at` to `end` are opened or closed at once: whole rows, or as much of one as fits. */
static inline int64_t opened_at_once(int64_t at, int64_t end, int64_t row) {
  int64_t n = end - at < BLOCK ? end - at : BLOCK, rest = row ? row - at % row : n;
  return n <= rest ? n : rest == row ? n - n % row : rest;
}

/* What a step sees of a tensor of `size` elements: `n` of them from element `start` on, in FP32 at `x`. No tensor has
   2^32 elements or more. native.py has the same. */
typedef struct { int64_t n; uint64_t x; int64_t start, size, row; Stored stored; } Shown;

#define FOR_EACH_SHOWN(FIRST, BODY)                                                                      \
  FOR_EACH_SHARE(Shown, {                                                                                \
    if (share.from == share.to) continue;                                                                \
    int64_t row = uneven_rows(one->row, one->size), stop = one->start + one->n;                          \
    int64_t at = one->start + share.from, end = row_start(one->start + share.to, row, stop);             \
    if (share.from) at = row_start(at, row, stop); /* a part may begin within a row */                   \
    FIRST                                                                                                \
    for (int64_t n; at < end; at += n) {                                                                 \
      n = at_once ? end - at : opened_at_once(at, end, row);                                             \
      float *x = AS(float, one->x) + at - one->start;                                                    \
      BODY                                                                                               \
    }                                                                                                    \
  })

void read_list(const Shown *list, int64_t count, int threads) {
  FOR_EACH_SHOWN(int at_once = one->stored.kind == BF16 || one->stored.kind == NEAREST;
                 , opened(&one->stored, at, n, row, x);)
}

/* step_key: of the seed and the step. */
void write_list(const Shown *list, int64_t count, uint64_t step_key, int threads) {
  FOR_EACH_SHOWN(const int at_once = 0; uint64_t key = derive_key(step_key, one->stored.name, 0);
                 , closed(&one->stored, at, n, row, x, key, 0);)
}

/* Goes through the blocks, or the stored parts of them, of elements `start` ... `start + n - 1` of rows of `row`
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

/* Moves codes whose rows other ranks may hold parts of. Element i of the n is element `offset + i / width * stride +
   i % width` of the parameter; no block goes over the end of such a row. `given`: whether the scales are there, else
   they are written. */
void encode_codes(int kind, const float *x, uint8_t *codes, uint16_t *scales, int64_t n, uint64_t key, uint64_t offset,
                  int64_t width, int64_t stride, int64_t start, int64_t row, int64_t first, int64_t blocks, int given,
                  int threads) {
  FOR_EACH_CODED({
    Numbers numbers;
    const uint16_t *r = draw(&numbers, count, key, offset + at / width * stride + at % width);
    if (kind != CODED) {
      encode_other(kind, x + at, codes, at, count, scales + scale, r, given);
      continue;
    }
    Largest largest = largest_of(x + at, count);
    if (!given) scales[scale] = scale_of(x + at, count, largest, EIGHT_BITS);
    encode_block(x + at, codes + at, count, scales[scale], r, largest.magnitude);
  })
}

void decode_codes(int kind, const uint8_t *codes, const uint16_t *scales, float *out, int64_t n, int64_t start,
                  int64_t row, int64_t first, int64_t blocks, int threads) {
  FOR_EACH_CODED({
    if (kind == CODED) decode_block(codes + at, out + at, count, scales[scale]);
    else decode_other(kind, codes, at, out + at, count, scales[scale]);
  })
}

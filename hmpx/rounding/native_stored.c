/* Tensors as they are stored between two steps, read to FP32 and written back, a block at a time. */

#include "native.h"

/* How a tensor is stored, of shared.py.

   FP32     the steps work on it
   BF16     by stochastic rounding; `key` is that of its random numbers
   NEAREST  BF16, by rounding to nearest, ties to even
   MASTER   as NEAREST; `beside` has FP32 numbers
   SPLIT    BF16, `beside` has the lower halves of 16 bits
   SPLIT8   the same with 8 bits, by stochastic rounding
   FOUR     codes of 4 bits, two elements in a byte, by stochastic rounding; `beside` has the scales, whose blocks lie
            in rows

   Those behind FOUR are codes of 8 bits, held in the same way: FOR_EACH_FLOAT has the numbers of each. */
enum { KINDS };
typedef struct { uint64_t at, key, beside; int64_t kind; } Stored;

#define AS(TYPE, ADDRESS) ((TYPE *)(uintptr_t)(ADDRESS))

/* How blocks of codes lie: in rows of so many elements and blocks. row: 0 where a block begins every CODES elements,
   which saves divisions. */
typedef struct { int64_t row, whole; } Blocks;

static inline int is_coded(int64_t kind) { return kind >= FOUR; }

static Blocks blocks_of(const RowLayout *layout, int has_codes) {
  int is_even = !has_codes || layout->n <= layout->row || layout->row % CODES == 0;
  return (Blocks){is_even ? 0 : layout->row, (layout->row + CODES - 1) / CODES};
}

/* Where the block of an element begins. */
static inline int64_t block_start(const Blocks *blocks, int64_t at) {
  return blocks->row ? at - at % blocks->row % CODES : at;
}

/* Goes through the blocks of codes of `count` elements from `at` on, which begins a block: BODY sees elements j ...
   j + n - 1 and their scale. */
#define FOR_EACH_SCALE(BODY)                                                                             \
  {                                                                                                      \
    int64_t row = blocks->row, column = row ? at % row : 0;                                              \
    uint16_t *scale = AS(uint16_t, stored->beside) + (row ? at / row * blocks->whole + column / CODES : at / CODES); \
    for (int64_t j = 0, n; j < count; j += n, scale++) {                                                 \
      n = count - j < CODES ? count - j : CODES;                                                         \
      if (row) {                                                                                         \
        n = n < row - column ? n : row - column;                                                         \
        column = column + n < row ? column + n : 0;                                                      \
      }                                                                                                  \
      BODY                                                                                               \
    }                                                                                                    \
  }

/* The n elements from `at` on, which share a scale. */
static __attribute__((noinline)) void decode(int64_t kind, const uint8_t *codes, int64_t at, float *x, int64_t n,
                                             uint16_t scale) {
#define DECODE(KIND, ...) \
  if (kind == KIND) decode_float(codes + at, x, n, scale, (FloatCode){__VA_ARGS__}); else
  FOR_EACH_FLOAT(DECODE) decode_four(codes + at / 2, x, n, scale);
}

/* r: the random numbers of the elements. */
static __attribute__((noinline)) void encode(int64_t kind, const float *x, uint8_t *codes, int64_t at, int64_t n,
                                             uint16_t *scale, const uint16_t *r, const Largest *largest) {
#define ENCODE(KIND, ...)                                                                    \
  if (kind == KIND) {                                                                        \
    *scale = scale_of(x, n, *largest, (FloatCode){__VA_ARGS__});                             \
    encode_float(x, codes + at, n, *scale, r, largest->magnitude, (FloatCode){__VA_ARGS__}); \
  } else
  FOR_EACH_FLOAT(ENCODE) {
    *scale = scale_of_four(x, n);
    encode_four(x, codes + at / 2, n, *scale, r);
  }
}

/* `count` elements from element `at` on, in FP32: in their place, or copied into `room`. At most a block of them, but
   for BF16. */
static inline float *opened(const Stored *stored, int64_t at, int64_t count, const Blocks *blocks, float *room) {
  if (stored->kind == FP32) return AS(float, stored->at) + at;
  const uint16_t *from = AS(uint16_t, stored->at) + at;
  if (stored->kind == BF16 || stored->kind == NEAREST)
    for (int64_t j = 0; j < count; j++) room[j] = from_bf16(from[j]);
  if (is_coded(stored->kind))
    FOR_EACH_SCALE(decode(stored->kind, AS(uint8_t, stored->at), at + j, room + j, n, *scale);)
  if (stored->kind == MASTER) read_block(AS(float, stored->beside) + at, from, room, count);
  if (stored->kind == SPLIT) join_block(from, AS(int16_t, stored->beside) + at, room, count);
  if (stored->kind == SPLIT8) join_block_24(from, AS(int8_t, stored->beside) + at, room, count);
  return room;
}

/* element: that of the first one, in the parameter. */
static inline void closed(const Stored *stored, int64_t at, int64_t count, const Blocks *blocks, const float *room,
                          uint64_t element) {
  uint64_t key = stored->key;
  uint16_t *to = AS(uint16_t, stored->at) + at;
  int64_t kind = stored->kind;
  if (kind == BF16) round_block(room, to, count, key, element);
  if (is_coded(kind)) {
    Numbers numbers;
    const uint16_t *r = draw(&numbers, count, key, element);
    Largest found[BLOCK], *largest = found; /* of every block before the first is written: nothing waits for anything */
    if (kind != FOUR) FOR_EACH_SCALE(*largest++ = largest_of(room + j, n);)
    largest = found;
    FOR_EACH_SCALE(encode(kind, room + j, AS(uint8_t, stored->at), at + j, n, scale, r + j, largest++);)
  }
  if (kind == NEAREST || kind == MASTER) nearest_block(room, to, count);
  if (kind == MASTER && AS(float, stored->beside) + at != room)
    memcpy(AS(float, stored->beside) + at, room, (size_t)count * sizeof *room);
  if (kind == SPLIT) split_block(room, to, AS(uint16_t, stored->beside) + at, count);
  if (kind == SPLIT8) split_block_24(room, to, AS(uint8_t, stored->beside) + at, count, key, element);
}

/* How many elements from `at` to `end` are opened or closed at once: whole blocks of codes, of one row in the
   parameter. */
static inline int64_t opened_at_once(const RowLayout *layout, const Blocks *blocks, int64_t at, int64_t end) {
  int64_t n = end - at;
  if (n > BLOCK) n = block_start(blocks, at + BLOCK) - at;
  if (layout->width < layout->n && layout->width - at % layout->width < n) n = layout->width - at % layout->width;
  return n;
}

static inline Share in_blocks(Share share, const Blocks *blocks, int64_t n) {
  return (Share){block_start(blocks, share.from), share.to == n ? n : block_start(blocks, share.to)};
}

/* Tensors that are read to FP32, or written from there. */
typedef struct { RowLayout layout; Stored from, to; } Moved;

void move_list(const Moved *list, int64_t count, int threads) {
  FOR_EACH_SHARE(Moved, {
    const RowLayout *layout = &one->layout;
    const Stored *from = &one->from, *to = &one->to;
    if (share.from == share.to) continue;
    Blocks blocks = blocks_of(layout, is_coded(from->kind) || is_coded(to->kind));
    share = in_blocks(share, &blocks, layout->n);
    int at_once = from->kind == BF16 || from->kind == NEAREST;
    for (int64_t at = share.from, n; at < share.to; at += n) {
      n = at_once ? share.to - at : opened_at_once(layout, &blocks, at, share.to);
      if (to->kind == FP32) opened(from, at, n, &blocks, AS(float, to->at) + at);
      else closed(to, at, n, &blocks, AS(float, from->at) + at, element_of(layout, at));
    }
  })
}

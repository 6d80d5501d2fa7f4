/* What a step that hmpx knows nothing of must leave as it was. Each function looks at `count` pairs: bytes at `base`
   plus an offset, and at an address. */

#define ALL_PAIRS                                                                                    \
  _Pragma("omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)")                         \
  for (int64_t i = 0; i < count; i++)

static int threads_for(const uint64_t *sizes, int64_t count, int threads) {
  uint64_t all = 0;
  for (int64_t i = 0; i < count; i++) all += sizes[i];
  return all > PARALLEL_FROM * sizeof(uint16_t) && count > 1 ? threads : 1;
}

/* sizes: in bytes. */
void copy_bytes(uint64_t base, const uint64_t *offsets, const uint64_t *list, const uint64_t *sizes, int64_t count,
                int threads) {
  threads = threads_for(sizes, count, threads);
  ALL_PAIRS memcpy(AS(uint8_t, base + offsets[i]), AS(uint8_t, list[i]), sizes[i]);
}

/* differ: 1 for each pair whose bytes are not the same. */
void compare_bytes(uint64_t base, const uint64_t *offsets, const uint64_t *list, const uint64_t *sizes, int64_t count,
                   int threads, uint8_t *differ) {
  threads = threads_for(sizes, count, threads);
  ALL_PAIRS differ[i] = memcmp(AS(uint8_t, base + offsets[i]), AS(uint8_t, list[i]), sizes[i]) != 0;
}

static inline uint8_t differs_from(const float *x, const uint16_t *halves, int64_t count) {
  uint32_t different = 0;
  for (int64_t at = 0, n; at < count && !different; at += n) {
    n = count - at < BLOCK ? count - at : BLOCK;
    for (int64_t i = at; i < at + n; i++) different |= bits_of(x[i]) ^ (uint32_t)halves[i] << 16;
  }
  return different != 0;
}

/* differ: 1 for each pair whose FP32 numbers are not the BF16 ones at the address. sizes: in bytes, of the latter. */
void compare_widened(uint64_t base, const uint64_t *offsets, const uint64_t *list, const uint64_t *sizes, int64_t count,
                     int threads, uint8_t *differ) {
  threads = threads_for(sizes, count, threads);
  ALL_PAIRS
  differ[i] = differs_from(AS(float, base + offsets[i]), AS(uint16_t, list[i]), (int64_t)(sizes[i] / sizeof(uint16_t)));
}

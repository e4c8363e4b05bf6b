// Products of stored weights with a few float32 rows, on the lanes of the simd header included before this file.
// Weights are decoded in registers, once per row of x pass; sums are float32. One weight row at a time keeps the read
// a single sequential stream, which is what memory serves fastest.

constexpr int kVectors = kBlock / W;  // registers per decoded block
constexpr int kPrefetch = 2048;       // bytes ahead of the read

// How a block of 32 float weights decodes.
struct RowF32 {
  using Stored = float;
  static void decode(const float* p, V* out) { for (int j = 0; j < kVectors; ++j) out[j] = load(p + W * j); }
};
struct RowBF16 {
  using Stored = uint16_t;
  static void decode(const uint16_t* p, V* out) { decode_bf16(p, out); }
};
struct RowF16 {
  using Stored = uint16_t;
  static void decode(const uint16_t* p, V* out) { for (int j = 0; j < kVectors; ++j) out[j] = load_f16(p + W * j); }
};

// Cursors read one row of weights: start(job, n), then per segment prepare(first block, count), then decode(block).
template <typename Row>
struct FloatCursor {
  using Stored = typename Row::Stored;
  const Stored* p;
  void start(const MatJob& job, int64_t n) { p = static_cast<const Stored*>(job.w) + n * job.K; }
  void prepare(int64_t, int) {}
  void decode(int64_t i, V* out) const {
    const Stored* block = p + i * kBlock;
    for (size_t line = 0; line < sizeof(Stored) * kBlock; line += 64)
      prefetch(reinterpret_cast<const char*>(block) + kPrefetch + line);
    Row::decode(block, out);
  }
  void decode_tail(int64_t i, int64_t rest, V* out) const {
    Stored block[kBlock] = {};
    std::memcpy(block, p + i * kBlock, rest * sizeof(Stored));
    Row::decode(block, out);
  }
};

struct ScaleCursor {
  const MatJob* job;
  int64_t row, first;
  float scale[kSegment + W], min[kSegment + W];
  void start(const MatJob& j, int64_t n) { job = &j, row = n * (j.K / kBlock >> j.group_shift); }
  void prepare(int64_t i, int count) {
    first = i;
    expand_numbers(*job, job->scale, row + (i >> job->group_shift), count, scale);
    if (job->format != Format::kQ4) return;
    if (job->min) expand_numbers(*job, job->min, row + (i >> job->group_shift), count, min);
    else for (int j = 0; j < count; j += W) store(min + j, mul(load(scale + j), broadcast(-8.0f)));
  }
  void decode_tail(int64_t, int64_t, V*) const {}  // K is a multiple of 32
};

struct CursorQ8 : ScaleCursor {
  const int8_t* p;
  void start(const MatJob& j, int64_t n) { ScaleCursor::start(j, n), p = static_cast<const int8_t*>(j.w) + n * j.K; }
  void decode(int64_t i, V* out) const {
    prefetch(p + i * kBlock + kPrefetch);
    decode_q8(p + i * kBlock, scale[i - first], out);
  }
};

struct CursorQ4 : ScaleCursor {
  const uint8_t* p;
  void start(const MatJob& j, int64_t n) { ScaleCursor::start(j, n), p = static_cast<const uint8_t*>(j.w) + n * (j.K / 2); }
  void decode(int64_t i, V* out) const {
    prefetch(p + i * (kBlock / 2) + kPrefetch);
    decode_q4(p + i * (kBlock / 2), scale[i - first], min[i - first], out);
  }
};

constexpr int sums_per_row(int NB, int NR) {
  return kAccumulators / (NB * NR) >= kVectors ? kVectors : (kAccumulators / (NB * NR) > 1 ? 2 : 1);
}

// NR rows of weights times the NB rows of x of one pass, x lying [block, NB, 32].
template <typename Cursor, int NB, int NR>
void few_rows(const MatJob& job, int64_t b0, int64_t n) {
  constexpr int A = sums_per_row(NB, NR);
  const int64_t blocks = job.K / kBlock, rest = job.K % kBlock;
  const float* x = job.x + b0 * (blocks + (rest > 0)) * kBlock;
  Cursor cursor[NR];
  for (int r = 0; r < NR; ++r) cursor[r].start(job, n + r);
  V acc[NR][NB][A], w[NR][kVectors];
  for (auto& row : acc) for (auto& sums : row) for (V& a : sums) a = zero();
  auto accumulate = [&] {
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j)
#pragma GCC unroll 8
      for (int b = 0; b < NB; ++b)
#pragma GCC unroll 2
        for (int r = 0; r < NR; ++r) acc[r][b][j % A] = fma(w[r][j], load(x + b * kBlock + W * j), acc[r][b][j % A]);
    x += NB * kBlock;
  };
  for (int64_t i0 = 0; i0 < blocks; i0 += kSegment) {
    const int64_t i1 = i0 + kSegment < blocks ? i0 + kSegment : blocks;
    for (Cursor& c : cursor) c.prepare(i0, static_cast<int>(i1 - i0));
    for (int64_t i = i0; i < i1; ++i) {
      for (int r = 0; r < NR; ++r) cursor[r].decode(i, w[r]);
      accumulate();
    }
  }
  if (rest) {
    for (int r = 0; r < NR; ++r) cursor[r].decode_tail(blocks, rest, w[r]);
    accumulate();
  }
  for (int r = 0; r < NR; ++r)
    for (int b = 0; b < NB; ++b) {
      for (int a = 1; a < A; ++a) acc[r][b][0] = add(acc[r][b][0], acc[r][b][a]);
      job.y[(b0 + b) * job.N + n + r] = sum(acc[r][b][0]);
    }
}

template <typename Cursor>
struct FloatRows {
  template <int NB>
  static void run(const MatJob& job, int64_t b0, int64_t n, int64_t n1) {
    if constexpr (NB > 1) for (; n + 1 < n1; n += 2) few_rows<Cursor, NB, 2>(job, b0, n);
    for (; n < n1; ++n) few_rows<Cursor, NB, 1>(job, b0, n);
  }
};

// Rows of x are taken at most kMaxBatch at a time, in passes of about equal size: body(first row, rows).
template <typename F>
void for_passes(int64_t B, F&& body) {
  const int64_t passes = (B + kMaxBatch - 1) / kMaxBatch;
  for (int64_t i = 0; i < passes; ++i) body(B * i / passes, B * (i + 1) / passes - B * i / passes);
}

template <typename Rows>
void pass_rows(const MatJob& job, int64_t b, int64_t count, int64_t n0, int64_t n1) {
  switch (count) {
    case 1: return Rows::template run<1>(job, b, n0, n1);
    case 2: return Rows::template run<2>(job, b, n0, n1);
    case 3: return Rows::template run<3>(job, b, n0, n1);
    case 4: return Rows::template run<4>(job, b, n0, n1);
  }
  if constexpr (kMaxBatch > 4) {
    switch (count) {
      case 5: return Rows::template run<5>(job, b, n0, n1);
      case 6: return Rows::template run<6>(job, b, n0, n1);
      case 7: return Rows::template run<7>(job, b, n0, n1);
      case 8: return Rows::template run<8>(job, b, n0, n1);
    }
  }
}

// With several passes, each over a few weight rows: these come from memory once and then from cache.
template <typename Rows>
void all_rows(const MatJob& job, int64_t n0, int64_t n1) {
  const int64_t step = job.B > kMaxBatch ? 4 : n1 - n0;
  for (int64_t n = n0; n < n1; n += step) {
    const int64_t end = n + step < n1 ? n + step : n1;
    for_passes(job.B, [&](int64_t b, int64_t count) { pass_rows<Rows>(job, b, count, n, end); });
  }
}

void matvec(const MatJob& job, int64_t n0, int64_t n1) {
  switch (job.format) {
    case Format::kF32: return all_rows<FloatRows<FloatCursor<RowF32>>>(job, n0, n1);
    case Format::kBF16: return all_rows<FloatRows<FloatCursor<RowBF16>>>(job, n0, n1);
    case Format::kF16: return all_rows<FloatRows<FloatCursor<RowF16>>>(job, n0, n1);
    case Format::kQ8: return all_rows<FloatRows<CursorQ8>>(job, n0, n1);
    case Format::kQ4: return all_rows<FloatRows<CursorQ4>>(job, n0, n1);
  }
}

// One block of x, zero-padded, in the order in which the format's weights decode.
inline void pack_block(Format format, const float* x, int64_t count, float* out) {
  float block[kBlock] = {};
  std::memcpy(block, x, (count < kBlock ? count : kBlock) * sizeof(float));
  const bool pairs = kPairs && format == Format::kBF16;
  for (int j = 0; j < kBlock; ++j) out[pairs ? j / (2 * W) * 2 * W + j % 2 * W + j % (2 * W) / 2 : j] = block[j];
}

void pack_x(Format format, const float* x, int64_t B, int64_t K, float* out) {
  for_passes(B, [&](int64_t b0, int64_t rows) {
    for (int64_t k = 0; k < K; k += kBlock)
      for (int64_t b = b0; b < b0 + rows; ++b, out += kBlock) pack_block(format, x + b * K + k, K - k, out);
  });
}

float read(const float* p, int64_t count) {
  V acc[8];
  for (V& a : acc) a = zero();
  int64_t i = 0;
  for (; i + 8 * W <= count; i += 8 * W)
    for (int j = 0; j < 8; ++j) {
      prefetch(reinterpret_cast<const char*>(p + i + W * j) + kPrefetch);
      acc[j] = add(acc[j], load(p + i + W * j));
    }
  for (int j = 1; j < 8; ++j) acc[0] = add(acc[0], acc[j]);
  float total = sum(acc[0]);
  for (; i < count; ++i) total += p[i];
  return total;
}

// Products of stored weights with a few float32 rows, on the lanes of the simd header included before this file.
// Weights are decoded in registers, once per row of x pass; sums are float32. One weight row at a time keeps the read
// a single sequential stream, which is what memory serves fastest.

constexpr int kVectors = kBlock / W;  // registers per decoded block
constexpr int kPrefetch = 1024;       // bytes ahead of the read
constexpr int kSegment = 64;          // scales converted at a time

// count <= kSegment stored numbers -> float32. out has room for count rounded up to W. Never reads past count.
inline void load_numbers(Type type, const void* data, int64_t first, int count, float* out) {
  if (type == Type::kF32) {
    std::memcpy(out, static_cast<const float*>(data) + first, count * sizeof(float));
    return;
  }
  const uint16_t* p = static_cast<const uint16_t*>(data) + first;
  int i = 0;
  for (; i + W <= count; i += W) store(out + i, type == Type::kF16 ? load_f16(p + i) : load_bf16(p + i));
  if (i == count) return;
  uint16_t tail[W] = {};
  std::memcpy(tail, p + i, (count - i) * sizeof(uint16_t));
  store(out + i, type == Type::kF16 ? load_f16(tail) : load_bf16(tail));
}

void to_float(Type type, const void* data, int64_t count, float* out) {
  for (int64_t i = 0; i < count; i += kSegment) {
    float block[kSegment];
    int n = static_cast<int>(count - i < kSegment ? count - i : kSegment);
    load_numbers(type, data, i, n, block);
    std::memcpy(out + i, block, n * sizeof(float));
  }
}

// Row cursors: decode block i of row n. `prepare` runs before blocks [i, i + count) of a segment.
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

template <typename Row>
struct FloatCursor {
  using Stored = typename Row::Stored;
  const Stored* p;
  FloatCursor(const MatJob& job, int64_t n) : p(static_cast<const Stored*>(job.w) + n * job.K) {}
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
  const MatJob& job;
  int64_t row, first = 0;
  float scale[kSegment + W], min[kSegment + W];
  ScaleCursor(const MatJob& j, int64_t n) : job(j), row(n * (j.K / kBlock >> j.group_shift)) {}
  void prepare(int64_t i, int count) {
    first = i >> job.group_shift;
    int numbers = static_cast<int>(((i + count - 1) >> job.group_shift) - first + 1);
    load_numbers(job.scale_type, job.scale, row + first, numbers, scale);
    if (job.min) load_numbers(job.scale_type, job.min, row + first, numbers, min);
    else for (int j = 0; j < numbers; j += W) store(min + j, mul(load(scale + j), broadcast(-8.0f)));
  }
  void decode_tail(int64_t, int64_t, V*) const {}  // K is a multiple of 32
};

struct CursorQ8 : ScaleCursor {
  const int8_t* p;
  CursorQ8(const MatJob& j, int64_t n) : ScaleCursor(j, n), p(static_cast<const int8_t*>(j.w) + n * j.K) {}
  void decode(int64_t i, V* out) const {
    prefetch(p + i * kBlock + kPrefetch);
    decode_q8(p + i * kBlock, scale[(i >> job.group_shift) - first], out);
  }
};

struct CursorQ4 : ScaleCursor {
  const uint8_t* p;
  CursorQ4(const MatJob& j, int64_t n) : ScaleCursor(j, n), p(static_cast<const uint8_t*>(j.w) + n * (j.K / 2)) {}
  void decode(int64_t i, V* out) const {
    prefetch(p + i * (kBlock / 2) + kPrefetch);
    int64_t g = (i >> job.group_shift) - first;
    decode_q4(p + i * (kBlock / 2), scale[g], min[g], out);
  }
};

constexpr int sums_per_row(int NB) { return kAccumulators / NB >= kVectors ? kVectors : (kAccumulators / NB > 1 ? 2 : 1); }

template <typename Cursor, int NB>
void rows(const MatJob& job, int64_t b0, int64_t n0, int64_t n1) {
  constexpr int A = sums_per_row(NB);
  const int64_t blocks = job.K / kBlock, rest = job.K % kBlock, stride = (blocks + (rest > 0)) * kBlock;
  const float* x = job.x + b0 * stride;
  for (int64_t n = n0; n < n1; ++n) {
    Cursor cursor(job, n);
    V acc[NB][A], w[kVectors];
    for (auto& row : acc) for (V& a : row) a = zero();
    auto accumulate = [&](const float* xb) {
#pragma GCC unroll 8
      for (int j = 0; j < kVectors; ++j)
#pragma GCC unroll 8
        for (int b = 0; b < NB; ++b) acc[b][j % A] = fma(w[j], load(xb + b * stride + W * j), acc[b][j % A]);
    };
    for (int64_t i0 = 0; i0 < blocks; i0 += kSegment) {
      const int64_t i1 = i0 + kSegment < blocks ? i0 + kSegment : blocks;
      cursor.prepare(i0, static_cast<int>(i1 - i0));
      for (int64_t i = i0; i < i1; ++i) {
        cursor.decode(i, w);
        accumulate(x + i * kBlock);
      }
    }
    if (rest) {
      cursor.decode_tail(blocks, rest, w);
      accumulate(x + blocks * kBlock);
    }
    for (int b = 0; b < NB; ++b) {
      for (int a = 1; a < A; ++a) acc[b][0] = add(acc[b][0], acc[b][a]);
      job.y[(b0 + b) * job.N + n] = sum(acc[b][0]);
    }
  }
}

template <typename Cursor>
void batch_rows(const MatJob& job, int64_t b, int64_t count, int64_t n0, int64_t n1) {
  switch (count) {
    case 1: return rows<Cursor, 1>(job, b, n0, n1);
    case 2: return rows<Cursor, 2>(job, b, n0, n1);
    case 3: return rows<Cursor, 3>(job, b, n0, n1);
    case 4: return rows<Cursor, 4>(job, b, n0, n1);
  }
  if constexpr (kMaxBatch > 4) {
    switch (count) {
      case 5: return rows<Cursor, 5>(job, b, n0, n1);
      case 6: return rows<Cursor, 6>(job, b, n0, n1);
      case 7: return rows<Cursor, 7>(job, b, n0, n1);
      case 8: return rows<Cursor, 8>(job, b, n0, n1);
    }
  }
}

// More rows of x than registers hold: passes over a few weight rows, which come from memory once and then from cache.
template <typename Cursor>
void all_rows(const MatJob& job, int64_t n0, int64_t n1) {
  const int64_t passes = (job.B + kMaxBatch - 1) / kMaxBatch, step = passes > 1 ? 4 : n1 - n0;
  for (int64_t n = n0; n < n1; n += step) {
    const int64_t end = n + step < n1 ? n + step : n1;
    for (int64_t pass = 0; pass < passes; ++pass) {
      const int64_t b = job.B * pass / passes;
      batch_rows<Cursor>(job, b, job.B * (pass + 1) / passes - b, n, end);
    }
  }
}

void matvec(const MatJob& job, int64_t n0, int64_t n1) {
  switch (job.format) {
    case Format::kF32: return all_rows<FloatCursor<RowF32>>(job, n0, n1);
    case Format::kBF16: return all_rows<FloatCursor<RowBF16>>(job, n0, n1);
    case Format::kF16: return all_rows<FloatCursor<RowF16>>(job, n0, n1);
    case Format::kQ8: return all_rows<CursorQ8>(job, n0, n1);
    case Format::kQ4: return all_rows<CursorQ4>(job, n0, n1);
  }
}

void pack_x(Format format, Type type, const void* x, int64_t B, int64_t K, float* out) {
  const int64_t stride = (K + kBlock - 1) / kBlock * kBlock, bytes = type == Type::kF32 ? 4 : 2;
  for (int64_t b = 0; b < B; ++b) {
    float* row = out + b * stride;
    to_float(type, static_cast<const char*>(x) + b * K * bytes, K, row);
    for (int64_t k = K; k < stride; ++k) row[k] = 0;
    if (format != Format::kBF16 || !kPairs) continue;
    for (int64_t k = 0; k < stride; k += 2 * W) {
      float pair[2 * W];
      for (int j = 0; j < 2 * W; ++j) pair[j % 2 * W + j / 2] = row[k + j];
      std::memcpy(row + k, pair, sizeof pair);
    }
  }
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

// Attention of many queries over a cache and over the tokens they came with, a block of queries by a block of keys at a
// time under a running softmax (Dao et al. 2022), on the lanes of the simd header included before this file.
// Scores lie as [key, query], so that lanes are queries: no key is transposed and no sum runs across lanes.

constexpr int kScoreRows = W == 16 ? 8 : 4, kScoreVectors = W == 16 ? 3 : kAccumulators / 4;

// A matrix with a step between its rows and one between its columns.
struct Strided {
  const float* data;
  int64_t row, column;
};

// c[R, NV * W] (+)= a[R, K] b[K, NV * W]; rows of b and c lie ldb and ldc apart.
template <int R, int NV>
inline void tile(Strided a, const float* b, int64_t ldb, int64_t K, float* c, int64_t ldc, bool onto) {
  V acc[R][NV];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < NV; ++v) acc[r][v] = onto ? load(c + r * ldc + v * W) : zero();
  for (int64_t k = 0; k < K; ++k, a.data += a.column, b += ldb) {
    V right[NV];
    for (int v = 0; v < NV; ++v) right[v] = load(b + v * W);
    for (int r = 0; r < R; ++r) {
      const V left = broadcast(a.data[r * a.row]);
      for (int v = 0; v < NV; ++v) acc[r][v] = fma(left, right[v], acc[r][v]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < NV; ++v) store(c + r * ldc + v * W, acc[r][v]);
}

// c[M, N] (+)= a[M, K] b[K, N], M a multiple of R and N of W.
template <int R, int NV>
inline void product(Strided a, const float* b, int64_t M, int64_t N, int64_t K, float* c, bool onto) {
  int64_t n = 0;
  auto columns = [&](auto width) {
    for (; n + width * W <= N; n += width * W)
      for (int64_t m = 0; m < M; m += R)
        tile<R, width>({a.data + m * a.row, a.row, a.column}, b + n, N, K, c + m * N + n, N, onto);
  };
  columns(std::integral_constant<int, NV>());
  columns(std::integral_constant<int, 1>());
}

// Where the tokens of one block of keys lie: `count` rows of h values for one key head.
struct KeyBlock {
  Type type;
  const void *k, *v;
  int64_t first, count, slots, row0;  // token i is row row0 + (first + i) mod slots of [., K, h]

  // Where token i's keys and values start in k and v.
  int64_t place(const AttnJob& job, int64_t kv, int64_t i) const {
    return ((row0 + (first + i) % slots) * job.K + kv) * job.h;
  }
};

// The products of one block of queries in float32.
struct FloatUnit {
  const AttnJob& job;
  int64_t kv, padded, width;
  float *q, *keys, *block_values;

  template <typename Take>
  FloatUnit(const AttnJob& job, int64_t kv, int64_t padded, int64_t width, Take&& take)
      : job(job), kv(kv), padded(padded), width(width) {
    q = take(width * padded), keys = take(kSlots * width), block_values = take(kSlots * width);
    std::memset(q, 0, width * padded * sizeof(float));
    std::memset(block_values, 0, kSlots * width * sizeof(float));
  }

  // place(r): where row r lies among the stored queries.
  template <typename Place>
  void queries(int64_t rows, Place&& place) {
    for (int64_t r = 0; r < rows; ++r) {
      fetch(job.q_type, job.q_stored, place(r), job.h, keys);
      for (int64_t d = 0; d < job.h; ++d) q[d * padded + r] = keys[d] * job.scale;
    }
  }

  void copy(const KeyBlock& block, const void* from, float* out) const {
    for (int64_t i = 0; i < block.count; ++i) fetch(block.type, from, block.place(job, kv, i), job.h, out + i * width);
  }

  void load(const KeyBlock& block) {
    copy(block, block.k, keys);
    copy(block, block.v, block_values);
  }

  // [kSlots, padded]: scaled products of keys and queries.
  void scores(float* out) const { product<kScoreRows, kScoreVectors>({keys, width, 1}, q, kSlots, padded, job.h, out, false); }

  // values [padded, width] += weights [kSlots, padded]^T times the block's values.
  void mix(const float* weights, int64_t count, float* values) const {
    product<4, kAccumulators / 4>({weights, 1, padded}, block_values, padded, width, count, values, true);
  }
};

// The state of one block of queries: row r is query t0 + r / G of head kv * G + r % G.
template <typename Unit>
struct QueryBlock {
  const AttnJob& job;
  int64_t b, kv, t0, t1, G, rows, padded, width;  // padded: rows up to a multiple of 16; width: h likewise
  float *scores, *values, *top, *total, *keep, *left;
  Unit unit;

  float* take(int64_t count) {
    float* start = left;
    left += (count + 15) / 16 * 16;
    return start;
  }

  QueryBlock(const AttnJob& job, int64_t b, int64_t kv, int64_t t0, int64_t t1, float* scratch)
      : job(job), b(b), kv(kv), t0(t0), t1(t1), G(job.H / job.K), rows(G * (t1 - t0)),
        padded((rows + 15) / 16 * 16), width((job.h + 15) / 16 * 16), left(scratch),
        unit(job, kv, padded, width, [&](int64_t count) { return take(count); }) {
    scores = take(kSlots * padded), values = take(padded * width);
    top = take(padded), total = take(padded), keep = take(padded);
    std::memset(values, 0, padded * width * sizeof(float));
    for (int64_t r = 0; r < padded; ++r) top[r] = -1e30f, total[r] = 0;
    unit.queries(rows, [&](int64_t r) { return place(r); });
  }

  // Where row r lies in arrays [B, T, H, h].
  int64_t place(int64_t r) const { return ((b * job.T + t0 + r / G) * job.H + kv * G + r % G) * job.h; }

  // What a row may not see of the keys at positions p0 .. p0 + count - 1, and the places up to kSlots, becomes `value`.
  void hide(int64_t p0, int64_t count, float value) {
    const int64_t first = job.lengths[b] + t0;
    for (int64_t i = 0; i < kSlots; ++i) {
      const int64_t from = std::clamp<int64_t>((p0 + i - first) * G, 0, padded);
      const int64_t to = i < count ? std::clamp<int64_t>((job.highest(p0 + i) + 1 - first) * G, from, padded) : from;
      std::fill(scores + i * padded, scores + i * padded + from, value);
      std::fill(scores + i * padded + to, scores + (i + 1) * padded, value);
    }
  }

  // Turns scores into weights and brings the state to them.
  void soften(bool hidden, int64_t p0, int64_t count) {
    const int64_t n = padded;
    if (hidden) hide(p0, count, -1e30f);
    for (int64_t r = 0; r < n; ++r) keep[r] = top[r];
    for (int64_t i = 0; i < kSlots; ++i)
      for (int64_t r = 0; r < n; ++r) top[r] = scores[i * n + r] > top[r] ? scores[i * n + r] : top[r];
    for (int64_t r = 0; r < n; ++r) keep[r] = exp_(keep[r] - top[r]);
    for (int64_t i = 0; i < kSlots; ++i)
      for (int64_t r = 0; r < n; ++r) scores[i * n + r] = exp_(scores[i * n + r] - top[r]);
    if (hidden) hide(p0, count, 0.0f);
    for (int64_t r = 0; r < n; ++r) total[r] *= keep[r];
    for (int64_t i = 0; i < kSlots; ++i)
      for (int64_t r = 0; r < n; ++r) total[r] += scores[i * n + r];
    for (int64_t r = 0; r < rows; ++r)
      if (keep[r] != 1) for (int64_t d = 0; d < width; ++d) values[r * width + d] *= keep[r];
  }

  void look_at(const KeyBlock& block, int64_t p0) {
    const int64_t first = job.lengths[b] + t0, last = job.lengths[b] + t1 - 1;
    unit.load(block);
    unit.scores(scores);
    if (job.softcap > 0) for (int64_t i = 0; i < kSlots * padded; ++i) scores[i] = cap_(scores[i], job.softcap);
    soften(block.count < kSlots || p0 < job.lowest(last) || p0 + block.count - 1 > first, p0, block.count);
    unit.mix(scores, block.count, values);
  }

  void finish() const {
    for (int64_t r = 0; r < rows; ++r) {
      float sum = total[r], factor = 1;
      if (job.sinks) {
        const float sink = job.sinks[kv * G + r % G], highest = sink > top[r] ? sink : top[r];
        factor = exp_(top[r] - highest);
        sum = sum * factor + exp_(sink - highest);
      }
      float* out = job.out + place(r);
      for (int64_t d = 0; d < job.h; ++d) out[d] = values[r * width + d] * (factor / sum);
    }
  }
};

template <typename Unit>
void attend_queries(const AttnJob& job, int64_t b, int64_t kv, int64_t t0, int64_t t1, float* scratch) {
  QueryBlock<Unit> queries(job, b, kv, t0, t1, scratch);
  const int64_t n = job.lengths[b], low = job.lowest(n + t0);
  const int64_t held = n > job.S ? n - job.S : 0;
  for (int64_t p = low > held ? low : held; p < n; p += kSlots)
    queries.look_at({job.cache_type, job.k, job.v, p, n - p < kSlots ? n - p : kSlots, job.S, b * job.S}, p);
  for (int64_t t = low > n ? low - n : 0; t < t1; t += kSlots)
    queries.look_at({job.new_type, job.k_stored, job.v_stored, t, t1 - t < kSlots ? t1 - t : kSlots, job.T, b * job.T}, n + t);
  queries.finish();
}

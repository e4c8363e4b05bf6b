// Decode attention over part of a cache, on the lanes of the simd header included before this file.
// Slots are read in groups of W, in about the order in which they lie; softmax is the running (online) kind.

inline float exp_(float x) {  // about 1e-7 relative; plain arithmetic, so that loops over it become vector code
  x = x < -87.0f ? -87.0f : x;
  const float n = x * 1.44269504f + 12582912.0f - 12582912.0f;  // adding 1.5 * 2^23 rounds to an integer
  const float r = (x - n * 0.693145751953125f) - n * 1.42860677e-6f;
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r * r + r + 1.0f;
  const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, 4);
  return p * power;
}

inline float tanh_(float z) {
  const float s = z * z, a = z < 0 ? -z : z;
  const float near = z * (1 + s * (-1.0f / 3 + s * (2.0f / 15 + s * (-17.0f / 315 + s * (62.0f / 2835)))));
  const float e = exp_(-2 * a), far = (1 - e) / (1 + e);
  return a < 0.25f ? near : (z < 0 ? -far : far);
}

inline float cap_(float score, float softcap) { return softcap > 0 ? softcap * tanh_(score / softcap) : score; }

// [first, first + count) of a stored array as float32.
inline void fetch(Type type, const void* data, int64_t first, int64_t count, float* out) {
  int64_t i = 0;
  if (type == Type::kF32) {
    const float* p = static_cast<const float*>(data) + first;
    for (; i + W <= count; i += W) store(out + i, load(p + i));
    for (; i < count; ++i) out[i] = p[i];
    return;
  }
  const uint16_t* p = static_cast<const uint16_t*>(data) + first;
  auto wide = [&](const uint16_t* from) { return type == Type::kF16 ? load_f16(from) : load_bf16(from); };
  for (; i + W <= count; i += W) store(out + i, wide(p + i));
  if (i == count) return;
  float rest[W];
  store(rest, load_part(type == Type::kF16, p + i, static_cast<int>(count - i)));
  std::memcpy(out + i, rest, (count - i) * 4);
}

// Up to W rows of h numbers.
struct Rows {
  const float* first;
  int64_t step;
  int count;
};

// Products of q with W rows, of which the last may be repeated.
inline V row_scores(const float* q, const Rows& rows, int64_t h) {
  V acc[W];
  const float* row[W];
  for (int j = 0; j < W; ++j) acc[j] = zero(), row[j] = rows.first + (j < rows.count ? j : rows.count - 1) * rows.step;
  int64_t d = 0;
  for (; d + W <= h; d += W) {
    const V a = load(q + d);
    for (int j = 0; j < W; ++j) acc[j] = fma(a, load(row[j] + d), acc[j]);
  }
  if (d == h) return sum_each(acc);
  float sums[W];
  store(sums, sum_each(acc));
  for (; d < h; ++d)
    for (int j = 0; j < W; ++j) sums[j] += q[d] * row[j][d];
  return load(sums);
}

// acc += sum of weights[i] * row i, NV vectors of it at a time from lane d on; -> the next lane.
template <int NV>
inline int64_t mix_lanes(const float* weights, const Rows& rows, int64_t h, int64_t d, float* acc) {
  for (; d + NV * W <= h; d += NV * W) {
    V a[NV];
    for (int v = 0; v < NV; ++v) a[v] = load(acc + d + v * W);
    for (int i = 0; i < rows.count; ++i)
      for (int v = 0; v < NV; ++v) a[v] = fma(broadcast(weights[i]), load(rows.first + i * rows.step + d + v * W), a[v]);
    for (int v = 0; v < NV; ++v) store(acc + d + v * W, a[v]);
  }
  return d;
}

inline void mix_rows(const float* weights, const Rows& rows, int64_t h, float* acc) {
  int64_t d = mix_lanes<8>(weights, rows, h, 0, acc);
  d = mix_lanes<4>(weights, rows, h, d, acc);
  d = mix_lanes<1>(weights, rows, h, d, acc);
  for (; d < h; ++d)
    for (int i = 0; i < rows.count; ++i) acc[d] += weights[i] * rows.first[i * rows.step + d];
}

// Brings one head's state (maximum, sum, values) to the scores of one block and turns those into weights.
inline void softmax_update(float* score, int count, float softcap, float* maximum, float* total, float* acc, int64_t h) {
  float top = *maximum;
  if (softcap > 0) for (int i = 0; i < kSlots; ++i) score[i] = cap_(score[i], softcap);
  for (int i = 0; i < count; ++i) top = score[i] > top ? score[i] : top;
  for (int i = count; i < kSlots; ++i) score[i] = top - 1000;
  for (int i = 0; i < kSlots; ++i) score[i] = exp_(score[i] - top);
  for (int i = count; i < kSlots; ++i) score[i] = 0;
  V s = zero();
  for (int i = 0; i < kSlots; i += W) s = add(s, load(score + i));
  const float keep = exp_(*maximum - top);
  *maximum = top;
  *total = *total * keep + sum(s);
  if (keep != 1) for (int64_t d = 0; d < h; ++d) acc[d] *= keep;
}

// The keys or the values of row b.
struct Stored {
  const AttnJob& job;
  const void* cache;
  int64_t b;

  int64_t place(int64_t p, int64_t kv) const { return ((b * job.S + p % job.S) * job.K + kv) * job.h; }

  // One key head's rows of positions [p, end), at most W, where they lie if that can be; asks for the W after them.
  Rows rows(int64_t p, int64_t end, int64_t kv, float* copy) const {
    const int count = static_cast<int>(end - p < W ? end - p : W);
    const int64_t bytes = job.cache_type == Type::kF32 ? 4 : 2;
    for (int64_t i = p + W; i < p + 2 * W && i < end; ++i)
      for (int64_t line = 0; line < job.h * bytes; line += 64)
        prefetch_far(static_cast<const char*>(cache) + place(i, kv) * bytes + line);
    if (job.cache_type == Type::kF32 && p % job.S + count <= job.S)
      return {static_cast<const float*>(cache) + place(p, kv), job.K * job.h, count};
    for (int i = 0; i < count; ++i) fetch(job.cache_type, cache, place(p + i, kv), job.h, copy + i * job.h);
    return {copy, job.h, count};
  }
};

void attend(const AttnJob& job, int64_t b, int64_t p0, int64_t p1, float* part, float* scratch) {
  const int64_t G = job.H / job.K, h = job.h;
  float *maximum = part, *total = part + job.H, *values = total + job.H;
  float *scores = scratch, *copy = scratch + job.H * kSlots;
  for (int64_t j = 0; j < job.H; ++j) maximum[j] = -1e30f, total[j] = 0;
  for (int64_t j = 0; j < job.H * h; ++j) values[j] = 0;
  const Stored keys{job, job.k, b}, mixed{job, job.v, b};
  auto by_head = [&](const Stored& stored, int64_t p, int64_t end, auto&& work) {
    for (int64_t i = p; i < end; i += W)
      for (int64_t kv = 0; kv < job.K; ++kv) {
        const Rows rows = stored.rows(i, p1, kv, copy);
        for (int64_t j = kv * G; j < (kv + 1) * G; ++j) work(j, rows, scores + j * kSlots + (i - p));
      }
  };
  for (int64_t p = p0; p < p1; p += kSlots) {
    const int64_t end = p1 < p + kSlots ? p1 : p + kSlots;
    by_head(keys, p, end, [&](int64_t j, const Rows& rows, float* out) {
      store(out, row_scores(job.q + (b * job.H + j) * h, rows, h));
    });
    for (int64_t j = 0; j < job.H; ++j)
      softmax_update(scores + j * kSlots, static_cast<int>(end - p), job.softcap, maximum + j, total + j, values + j * h, h);
    by_head(mixed, p, end, [&](int64_t j, const Rows& rows, const float* weights) { mix_rows(weights, rows, h, values + j * h); });
  }
}

void attend_merge(const AttnJob& job, int64_t b, const float* parts, int64_t count) {
  const int64_t G = job.H / job.K, h = job.h, size = part_floats(job);
  for (int64_t j = 0; j < job.H; ++j) {
    const float *q = job.q + (b * job.H + j) * h, *k = job.k_new + (b * job.K + j / G) * h;
    const float* v = job.v_new + (b * job.K + j / G) * h;
    float score = 0;
    for (int64_t d = 0; d < h; ++d) score += q[d] * k[d];
    score = cap_(score, job.softcap);
    float top = job.sinks && job.sinks[j] > score ? job.sinks[j] : score;
    for (int64_t i = 0; i < count; ++i) top = parts[i * size + j] > top ? parts[i * size + j] : top;
    const float own = exp_(score - top);
    float total = own + (job.sinks ? exp_(job.sinks[j] - top) : 0);
    float* out = job.out + (b * job.H + j) * h;
    for (int64_t d = 0; d < h; ++d) out[d] = own * v[d];
    for (int64_t i = 0; i < count; ++i) {
      const float* part = parts + i * size;
      const float weight = exp_(part[j] - top);
      total += weight * part[job.H + j];
      for (int64_t d = 0; d < h; ++d) out[d] += weight * part[2 * job.H + j * h + d];
    }
    for (int64_t d = 0; d < h; ++d) out[d] /= total;
  }
}

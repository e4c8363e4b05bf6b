// Decode attention over part of a cache, on the lanes of the simd header included before this file.
// Slots are read in the order they lie in memory, all key heads of a slot at once; softmax is the running (online) kind.

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

// [first, first + count) of a float32 array, or of a 16-bit one widened into scratch.
inline const float* widen(Type type, const void* data, int64_t first, int64_t count, float* scratch) {
  if (type == Type::kF32) return static_cast<const float*>(data) + first;
  const uint16_t* p = static_cast<const uint16_t*>(data) + first;
  int64_t i = 0;
  auto wide = [&](const uint16_t* from) { return type == Type::kF16 ? load_f16(from) : load_bf16(from); };
  for (; i + W <= count; i += W) store(scratch + i, wide(p + i));
  if (i < count) {
    uint16_t tail[W] = {};
    float numbers[W];
    std::memcpy(tail, p + i, (count - i) * 2);
    store(numbers, wide(tail));
    std::memcpy(scratch + i, numbers, (count - i) * 4);
  }
  return scratch;
}

inline void quad_scores(const float* q, const float* const* k, int64_t h, float* out) {
  V acc[kQuad];
  for (V& a : acc) a = zero();
  int64_t d = 0;
  for (; d + W <= h; d += W) {
    const V a = load(q + d);
    for (int i = 0; i < kQuad; ++i) acc[i] = fma(a, load(k[i] + d), acc[i]);
  }
  for (int i = 0; i < kQuad; ++i) {
    out[i] = sum(acc[i]);
    for (int64_t t = d; t < h; ++t) out[i] += q[t] * k[i][t];
  }
}

inline void quad_values(const float* p, const float* const* v, int64_t h, float* acc) {
  V w[kQuad];
  for (int i = 0; i < kQuad; ++i) w[i] = broadcast(p[i]);
  int64_t d = 0;
  for (; d + W <= h; d += W) {
    V a = load(acc + d);
    for (int i = 0; i < kQuad; ++i) a = fma(w[i], load(v[i] + d), a);
    store(acc + d, a);
  }
  for (; d < h; ++d)
    for (int i = 0; i < kQuad; ++i) acc[d] += p[i] * v[i][d];
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

struct Block {
  const AttnJob& job;
  int64_t b, p0;  // row and first position
  int count;      // positions, at most kSlots

  // Pointers to the rows [K, h] of four positions from p0 + i (the last one repeats past the end).
  void rows(const void* cache, int i, float* scratch, const float** out) const {
    const int64_t width = job.K * job.h;
    for (int j = 0; j < kQuad; ++j) {
      const int64_t slot = (p0 + (i + j < count ? i + j : count - 1)) % job.S;
      out[j] = widen(job.cache_type, cache, (b * job.S + slot) * width, width, scratch + j * width);
    }
  }
};

void attend(const AttnJob& job, int64_t b, int64_t p0, int64_t p1, float* part, float* scratch) {
  const int64_t G = job.H / job.K, h = job.h;
  float *maximum = part, *total = part + job.H, *values = total + job.H;
  float *scores = scratch, *wide = scratch + job.H * kSlots;
  for (int64_t j = 0; j < job.H; ++j) maximum[j] = -1e30f, total[j] = 0;
  for (int64_t j = 0; j < job.H * h; ++j) values[j] = 0;
  for (int64_t p = p0; p < p1; p += kSlots) {
    const Block block{job, b, p, static_cast<int>(p1 - p < kSlots ? p1 - p : kSlots)};
    const float *row[kQuad], *head[kQuad];
    for (int i = 0; i < block.count; i += kQuad) {
      block.rows(job.k, i, wide, row);
      for (int64_t j = 0; j < job.H; ++j) {
        for (int s = 0; s < kQuad; ++s) head[s] = row[s] + j / G * h;
        quad_scores(job.q + (b * job.H + j) * h, head, h, scores + j * kSlots + i);
      }
    }
    for (int64_t j = 0; j < job.H; ++j)
      softmax_update(scores + j * kSlots, block.count, job.softcap, maximum + j, total + j, values + j * h, h);
    for (int i = 0; i < block.count; i += kQuad) {
      block.rows(job.v, i, wide, row);
      for (int64_t j = 0; j < job.H; ++j) {
        for (int s = 0; s < kQuad; ++s) head[s] = row[s] + j / G * h;
        quad_values(scores + j * kSlots + i, head, h, values + j * h);
      }
    }
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
